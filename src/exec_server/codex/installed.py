"""capabilities/discoverV2: the skills and plugins that are installed for the user. Blocking."""

from __future__ import annotations

import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cmp_to_key
from typing import Final
from urllib.parse import unquote

import msgspec

from exec_server.codex.bundle import (
    CodexFiles,
    Manifest,
    ManifestFault,
    ResponseBudget,
    discover_root,
    manifest_directory,
    parse_manifest,
    plugin_name,
)
from exec_server.codex.config import codex_home
from exec_server.codex.skills import SkillFault, front_matter, skill_metadata
from exec_server.errors import RpcError
from exec_server.filesystem.inotify import DirectoryListener, Inotify
from exec_server.filesystem.watch import is_unreliable
from exec_server.host.environment import user_home
from exec_server.protocol import codex
from exec_server.protocol.files import WalkOptions
from exec_server.protocol.paths import PathUri, path_to_uri

log = logging.getLogger(__name__)

# Plugins of one answer: far more than any user has. Further ones are left out with a warning.
MAX_PLUGINS: Final = 256

WARNING: Final = "some capability metadata could not be loaded; discovery may be incomplete"
# Markets, plugins and versions below the cache.
_CACHE: Final = WalkOptions(
    max_depth=2, max_directories=2000, max_entries=20_000, follow_directory_symlinks=True
)
_MARKET: Final = re.compile(r"[\w-]+", re.ASCII)
_NAME: Final = re.compile(r"[\w-][\w.-]*", re.ASCII)
_VERSION: Final = re.compile(r"(?!\.\.?\Z)[\w.+-]+", re.ASCII)
# A semantic version: numbers without leading zeros, and identifiers that are not empty.
_NUMBER: Final = r"0|[1-9]\d*"
_PREVIEW: Final = rf"(?:{_NUMBER}|\d*[A-Za-z-][\dA-Za-z-]*)"
_SEMVER: Final = re.compile(
    rf"({_NUMBER})\.({_NUMBER})\.({_NUMBER})(?:-({_PREVIEW}(?:\.{_PREVIEW})*))?"
    r"(?:\+([\dA-Za-z-]+(?:\.[\dA-Za-z-]+)*))?",
    re.ASCII,
)

# A change that no watch reports shows up after this time; the reference takes as long.
MAX_AGE_SECONDS: Final = 10.0
# Answers for different sandboxes: clients have a few. The one that was not used for the longest
# time is dropped.
MAX_ANSWERS: Final = 8
# A longer answer is not kept.
ANSWER_BYTES: Final = 4 * 1_048_576
# Directories that are watched for one answer. If there are more, it is not kept.
MAX_WATCHED: Final = 2048

_TREE: Final = WalkOptions(
    max_depth=9, max_directories=MAX_WATCHED, max_entries=50_000, follow_directory_symlinks=True
)


def roots(variables: Mapping[str, str]) -> tuple[list[tuple[str, str]], str]:
    """Ids and URIs of skill directories, and the URI of the plugin cache; raises InternalError."""
    home = codex_home(variables)
    skills = [("codex-home-skills", path_to_uri(f"{home}/skills"))]
    user = user_home(variables)
    if user is not None:
        skills.append(("user-agent-skills", path_to_uri(f"{user}/.agents/skills")))
    return skills, path_to_uri(f"{home}/plugins/cache")


def discover(variables: Mapping[str, str], files: CodexFiles) -> codex.DiscoverResult:
    """All skills and plugins that may be read. Raises InternalError."""
    skill_roots, cache = roots(variables)
    return _Installed(files).discover(skill_roots, cache)


class _Installed:
    def __init__(self, files: CodexFiles) -> None:
        self._files = files
        self._budget = ResponseBudget()
        self._result = codex.DiscoverResult([], [], [])

    def discover(self, skill_roots: list[tuple[str, str]], cache: str) -> codex.DiscoverResult:
        for root_id, uri in skill_roots:
            self._skills(codex.DiscoveryRoot(root_id, uri))
        plugins = sorted(self._plugin_directories(cache))
        if len(plugins) > MAX_PLUGINS:
            self._result.warnings.append(WARNING)
        for plugin_id, version, uri in plugins[:MAX_PLUGINS]:
            self._plugin(plugin_id, version, uri)
        return self._result

    def _read(self, uri: str) -> codex.DiscoveredRoot:
        return discover_root(
            codex.RootParams("", PathUri.from_text(uri)), self._files, self._budget
        )

    def _skills(self, root: codex.DiscoveryRoot) -> None:
        bundle = self._read(root.path)
        is_complete = not bundle.warnings
        for skill in _parsed_skills(bundle):
            if skill is None:
                is_complete = False
            else:
                self._result.skills.append(
                    codex.Skill(
                        skill.name,
                        skill.description,
                        skill.short_description,
                        skill.path,
                        root,
                        skill.dependencies,
                        skill.policy,
                    )
                )
        if not is_complete:
            self._result.warnings.append(WARNING)

    def _plugin(self, plugin_id: str, version: str, uri: str) -> None:
        bundle = self._read(uri)
        skills = list(_parsed_skills(bundle))
        manifest = None if bundle.plugin is None else _parsed(bundle.plugin.manifest)
        if bundle.warnings or manifest is None or None in skills or _lacks_files(bundle, manifest):
            self._result.warnings.append(WARNING)
        if manifest is None or bundle.plugin is None:
            return
        files = bundle.plugin
        if manifest.servers is not None:
            declared = codex.CapabilityFile(files.manifest.path, manifest.servers)
            files = codex.PluginFiles(files.manifest, declared, files.apps_config)
        known = [skill for skill in skills if skill is not None]
        plugin = codex.Plugin(plugin_id, manifest.display_name, None, version, uri, files, known)
        self._result.plugins.append(plugin)

    def _plugin_directories(self, cache: str) -> Iterator[tuple[str, str, str]]:
        try:
            entries = self._files.walk(PathUri.from_text(cache), _CACHE).entries
        except (OSError, RpcError):
            return  # there is no cache
        versions: dict[tuple[str, str], list[str]] = {}
        for entry in entries:
            names = unquote(entry.path.removeprefix(f"{cache}/")).split("/")
            if entry.kind == "directory" and len(names) == 3:
                market, name, version = names
                if _MARKET.fullmatch(market) and _NAME.fullmatch(name):
                    versions.setdefault((name, market), []).append(version)
        for (name, market), names in versions.items():
            plugin = f"{PathUri.from_text(cache).native()}/{market}/{name}"
            valid = [version for version in names if _VERSION.fullmatch(version)]
            while valid:
                version = newest(valid)
                uri = path_to_uri(f"{plugin}/{version}")
                if not self._is_link(uri):
                    yield f"{name}@{market}", version, uri
                    break
                valid.remove(version)

    def _is_link(self, uri: str) -> bool:
        """Whether a directory is a link; links to versions count not, as in the reference."""
        try:
            return self._files.metadata(PathUri.from_text(uri)).is_symlink
        except (OSError, RpcError):
            return False  # reading it says why


def newest(versions: list[str]) -> str:
    """The version to use: a local one, else the highest."""
    return "local" if "local" in versions else max(versions, key=cmp_to_key(_compare))


def _compare(left: str, right: str) -> int:
    """As semantic versions if both are some, else as texts."""
    one, other = _SEMVER.fullmatch(left), _SEMVER.fullmatch(right)
    if one is None or other is None:
        return (left > right) - (left < right)
    low, high = ([int(match[i]) for i in (1, 2, 3)] for match in (one, other))
    if low != high:
        return 1 if low > high else -1
    if (one[4] is None) != (other[4] is None):
        return 1 if one[4] is None else -1  # a release is above its previews
    return _compare_parts(one[4], other[4]) or _compare_parts(one[5], other[5])


def _compare_parts(left: str | None, right: str | None) -> int:
    """Identifiers between dots: numbers by value, below words; fewer are lower."""
    one, other = ([_part_key(part) for part in (text or "").split(".")] for text in (left, right))
    return (one > other) - (one < other)


def _part_key(part: str) -> tuple[int, int, str]:
    if not part:
        return 0, 0, ""
    return (1, int(part), "") if part.isdigit() else (2, 0, part)


def _parsed(manifest: codex.CapabilityFile) -> Manifest | None:
    directory = unquote(manifest_directory(manifest.path).rpartition("/")[2])
    try:
        return parse_manifest(manifest.contents, directory)
    except ManifestFault:
        _log_invalid(manifest)
        return None


def _lacks_files(bundle: codex.DiscoveredRoot, manifest: Manifest) -> bool:
    files = bundle.plugin
    return files is not None and (
        (manifest.has_servers_file and files.mcp_config is None)
        or (manifest.has_apps_file and files.apps_config is None)
    )


def _log_invalid(file: codex.CapabilityFile) -> None:
    """Name a file to the operator: the warning of the answer, the reference's text, names none."""
    log.info("a discovery leaves out %s: it is not valid", file.path)  # a URI is printable


def _parsed_skills(bundle: codex.DiscoveredRoot) -> Iterator[codex.PluginSkill | None]:
    """The skills of a root; None for one that is invalid."""
    namespaces = {}
    for file in bundle.namespace_manifests:
        directory = manifest_directory(file.path)
        try:
            name = plugin_name(file.contents, unquote(directory.rpartition("/")[2]))
        except ManifestFault:
            _log_invalid(file)
            continue
        namespaces[directory] = name
    for skill in bundle.skills:
        path = skill.instructions.path
        directory = path.rpartition("/")[0]
        try:
            header = front_matter(skill.instructions.contents)
        except SkillFault:
            _log_invalid(skill.instructions)
            yield None
            continue
        metadata = skill_metadata("" if skill.metadata is None else skill.metadata.contents)
        name = header.name or unquote(directory.rpartition("/")[2])
        yield codex.PluginSkill(
            f"{_namespace(directory, namespaces)}{name}",
            header.description,
            header.short_description,
            path,
            metadata.dependencies,
            metadata.policy,
        )


def _namespace(directory: str, namespaces: dict[str, str]) -> str:
    """The name of the nearest plugin around a skill, with a colon."""
    while directory:
        if directory in namespaces:
            return f"{namespaces[directory]}:"
        directory = directory.rpartition("/")[0]
    return ""


class TreeListener(DirectoryListener):
    """Notices any change of some directories, in the event loop.

    Answers are kept while their directories do not change. A thread first watches every directory
    below the roots, then reads the files, so no change is missed; of a missing root, the nearest
    directory above. Links and network file systems are not reported: an answer is some seconds old
    at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_changed = False
        self._trees: set[int] = set()  # descriptors of directories in which every name matters
        self._names: dict[int, set[bytes]] = {}  # in others these do

    def watch(self, uris: list[str], files: CodexFiles, inotify: Inotify) -> bool:
        """Watch the directories at and below some paths; False if not all can be. Blocking."""
        try:
            return all(self._watch_tree(PathUri.from_text(uri), files, inotify) for uri in uris)
        except (OSError, RpcError):
            return False

    def _watch_tree(self, root: PathUri, files: CodexFiles, inotify: Inotify) -> bool:
        path = root.native()
        above = path
        while not os.path.isdir(above):
            above, name = os.path.split(above)
            if os.path.isdir(above):
                descriptor = inotify.listen(self, above, "")
                self._names.setdefault(descriptor, set()).add(os.fsencode(name))
        if above != path:
            return not os.path.isdir(path)  # it may have been created before it was watched
        self._trees.add(inotify.listen(self, path, ""))
        tree = files.walk(root, _TREE)
        for entry in tree.entries:
            if entry.kind == "directory":
                directory = PathUri.from_text(entry.path).native()
                self._trees.add(inotify.listen(self, directory, ""))
        return not tree.truncated and not is_unreliable(path)

    def on_event(self, descriptor: int, mask: int, name: bytes) -> None:
        is_known = name and descriptor not in self._trees
        if not is_known or name in self._names.get(descriptor, ()):
            self.is_changed = True

    def on_overflow(self) -> None:
        self.is_changed = True


class CapabilityCache:
    """For the event loop, except `discover`."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, tuple[float, bytes, TreeListener]] = OrderedDict()

    def get(self, key: bytes, inotify: Inotify) -> bytes | None:
        """The JSON text of an answer that is still right."""
        if key not in self._answers:
            return None
        inotify.read_events()  # of a change that the client has made before its request
        created, text, listener = self._answers[key]
        if listener.is_changed or time.monotonic() - created > MAX_AGE_SECONDS:
            self._drop(key, inotify)
            return None
        self._answers.move_to_end(key)
        return text

    def put(self, key: bytes, text: bytes, listener: TreeListener, inotify: Inotify) -> None:
        """Keep an answer while its listener notices no change."""
        if key in self._answers:
            self._drop(key, inotify)
        if len(text) > ANSWER_BYTES:
            inotify.remove_listener_later(listener)
            return
        self._answers[key] = time.monotonic(), text, listener
        if len(self._answers) > MAX_ANSWERS:
            self._drop(next(iter(self._answers)), inotify)

    def _drop(self, key: bytes, inotify: Inotify) -> None:
        _, _, listener = self._answers.pop(key)
        inotify.remove_listener_later(listener)


def discover_cached(
    variables: Mapping[str, str], files: CodexFiles, inotify: Inotify, listener: TreeListener
) -> tuple[bytes, bool]:
    """The JSON text of an answer, and whether the listener notices all changes. Blocking."""
    skill_roots, cache = roots(variables)
    is_watched = listener.watch([*(uri for _, uri in skill_roots), cache], files, inotify)
    return msgspec.json.encode(discover(variables, files)), is_watched
