"""The files of a capability root: a plugin's manifest and declarations, and all skills below it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from exec_server.errors import InvalidRequest, NotFound, RpcError, decode_error_text, os_error_text
from exec_server.protocol import codex
from exec_server.protocol.files import GetMetadataResult, WalkOptions, WalkResult
from exec_server.protocol.paths import PathUri, child_uri

# The reference's limits of one file, and of all files of a root. A file beyond one of them is left
# out with a warning.
FILE_BYTES: Final = 1_048_576
ROOT_BYTES: Final = 16 * 1_048_576
# All roots of a request together, as JSON, with paths and warnings: the message stays below 64 MiB,
# and the memory for it bounded. A file beyond it is left out; the root has one warning for all.
RESPONSE_BYTES: Final = 40 * 1_048_576
# The reference's limits of a scan. Beyond them it ends, with a warning.
WALK: Final = WalkOptions(
    max_depth=6, max_directories=2000, max_entries=20_000, follow_directory_symlinks=True
)

_ENOENT: Final = 2

# The first that a directory has is its manifest.
MANIFESTS: Final = (
    ".codex-plugin/plugin.json",
    ".claude-plugin/plugin.json",
    ".cursor-plugin/plugin.json",
)
# A look into a directory.
_ONE_ENTRY: Final = WalkOptions(
    max_depth=1, max_directories=1, max_entries=1, follow_directory_symlinks=False
)
_SKILL: Final = "/SKILL.md"
_METADATA: Final = "agents/openai.yaml"

Table = dict[str, Any]


class CodexFiles(Protocol):
    """A route to the disk. Every method blocks, and raises OSError or RpcError."""

    def metadata(self, path: PathUri) -> GetMetadataResult: ...

    def walk(self, path: PathUri, options: WalkOptions) -> WalkResult: ...

    def read(self, path: PathUri, limit: int) -> bytes:
        """At most `limit` bytes of a regular file."""
        ...


class ResponseBudget:
    """The bytes of JSON that the files of one response may take, of all its roots."""

    def __init__(self) -> None:
        self._left = RESPONSE_BYTES
        self._lock = threading.Lock()  # threads read roots at the same time

    def spend(self, *texts: str) -> bool:
        """Take texts in, if they fit."""
        size = sum(len(msgspec.json.encode(text)) for text in texts)
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True


class CapabilityFiles:
    """The files of one root, as far as they fit; a look that fails is one of the `warnings`."""

    def __init__(self, files: CodexFiles, budget: ResponseBudget) -> None:
        self.warnings: list[str] = []
        self._files = files
        self._budget = budget
        self._left = ROOT_BYTES
        self._has_overflowed = False

    def warn(self, text: str) -> None:
        """Add a warning, if it fits into the response."""
        if self._budget.spend(text):
            self.warnings.append(text)
        else:
            self._overflow()

    def _overflow(self) -> None:
        if not self._has_overflowed:
            self._has_overflowed = True
            text = f"capability discovery exceeds the {RESPONSE_BYTES}-byte limit of a response"
            self.warnings.append(text)

    def scan(self, root: PathUri) -> list[str]:
        """The URIs of all files below a directory."""
        try:
            result = self._files.walk(root, WALK)
        except (OSError, RpcError) as error:
            self.warn(f"failed to scan capability path {root}: {error_text(error)}")
            return []
        for fault in result.errors:
            self.warn(f"failed to scan capability path {fault.path}: {fault.message}")
        if result.truncated:
            self.warn(f"capability scan reached its traversal limit (root: {root})")
        return [entry.path for entry in result.entries if entry.kind == "file"]

    def read(self, uri: str) -> codex.CapabilityFile | None:
        """A text file; None if there is none, or it is left out."""
        if self._has_overflowed:
            return None
        path = PathUri.from_text(uri)
        try:
            if not self._files.metadata(path).is_file:
                return None
        except (OSError, RpcError) as error:
            if not is_missing(error):
                self.warn(f"failed to inspect capability file {uri}: {error_text(error)}")
            return None
        try:
            data = self._files.read(path, FILE_BYTES + 1)
        except (OSError, RpcError) as error:
            self.warn(f"failed to read capability file {uri}: {error_text(error)}")
            return None
        return self._checked(uri, data)

    def _checked(self, uri: str, data: bytes) -> codex.CapabilityFile | None:
        if len(data) > FILE_BYTES:
            self.warn(f"capability file {uri} exceeds the {FILE_BYTES}-byte limit")
            return None
        if len(data) > self._left:
            self.warn(f"capability root bundle exceeds the {ROOT_BYTES}-byte limit")
            return None
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            self.warn(f"capability file {uri} is not UTF-8: {decode_error_text(error)}")
            return None
        if not self._budget.spend(text, uri):
            self._overflow()
            return None
        self._left -= len(data)
        return codex.CapabilityFile(uri, text)


def is_missing(error: OSError | RpcError) -> bool:
    """Whether an error says that there is no such file."""
    if isinstance(error, OSError):
        return error.errno == _ENOENT
    return error.code == NotFound.code


def is_denied(error: OSError | RpcError) -> bool:
    """Whether an error says that the file may not be read."""
    if isinstance(error, OSError):
        return isinstance(error, PermissionError)
    return error.code == InvalidRequest.code


def error_text(error: OSError | RpcError) -> str:
    return os_error_text(error) if isinstance(error, OSError) else error.message


# The manifest of a plugin: the members that discovery needs.
class ManifestFault(Exception):
    """A manifest is not valid."""


class JsonObject(list[tuple[str, Any]]):
    """A JSON object with its members in order; some may be repeated."""

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a member; raises ManifestFault if it is repeated or is no valid text."""
        values = [value for key, value in self if key == name]
        if len(values) > 1:
            raise ManifestFault(f"duplicate field `{name}`")
        value = values[0] if values else default
        if isinstance(value, str):
            _refuse_surrogates(value)
        return value


@dataclass(frozen=True, slots=True)
class Manifest:
    """The name of a plugin, the name for people, and the servers in the manifest as JSON."""

    name: str
    display_name: str
    servers: str | None
    # Whether it names files of servers and of apps.
    has_servers_file: bool = False
    has_apps_file: bool = False


class _Servers(msgspec.Struct):
    mcp_servers: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="mcpServers")


def parse_members(contents: str) -> JsonObject:
    """The members of the JSON object in a text; raises ManifestFault."""
    try:
        members = json.loads(contents, object_pairs_hook=JsonObject, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ManifestFault(str(error)) from None
    if not isinstance(members, JsonObject):
        raise ManifestFault("not an object")
    for key, _ in members:
        _refuse_surrogates(key)
    return members


def parse_manifest(contents: str, directory: str) -> Manifest:
    """The manifest in a text, by default named like its directory; raises ManifestFault."""
    members = parse_members(contents)
    name = _name(members, directory)
    return Manifest(
        name,
        _display_name(members) or name,
        _servers(contents, members),
        isinstance(declared_servers(members), str),
        _text(members, "apps") is not None,
    )


def plugin_name(contents: str, directory: str) -> str:
    """The name of a plugin, whatever the other members are; raises ManifestFault."""
    return _name(parse_members(contents), directory)


def _name(members: JsonObject, directory: str) -> str:
    name = _text(members, "name", "") or ""
    return name if name.strip() else directory


def _text(members: JsonObject, name: str, default: str | None = None) -> str | None:
    value = members.get(name, default)
    if not isinstance(value, str | None) or (value is None and default is not None):
        raise ManifestFault("a member has the wrong type")
    return value


def declared_servers(members: JsonObject) -> Any:
    """The member `mcpServers`: a file name, a JsonObject, or something else; raises ManifestFault.

    The servers of an object become a file, so all their texts have to be valid.
    """
    servers = members.get("mcpServers")
    if isinstance(servers, JsonObject):
        _refuse_surrogates(json.dumps(servers, ensure_ascii=False))
    return servers


def _refuse_surrogates(text: str) -> None:
    """Refuse half of a pair such as `\\ud800`, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ManifestFault("lone surrogate") from None


def _refuse(constant: str) -> None:
    raise ManifestFault(f"`{constant}` is not JSON")


def _display_name(members: JsonObject) -> str:
    interface = members.get("interface")
    if interface is None:
        return ""
    if not isinstance(interface, JsonObject):
        raise ManifestFault("a member has the wrong type")
    return (_text(interface, "displayName") or "").strip()


def _servers(contents: str, members: JsonObject) -> str | None:
    """The servers that are written in the manifest, with the numbers as they are written."""
    if not isinstance(declared_servers(members), JsonObject):
        return None
    try:
        raw = msgspec.json.decode(contents.encode(), type=_Servers).mcp_servers
    except (msgspec.DecodeError, RecursionError) as error:
        raise ManifestFault(str(error)) from None
    return msgspec.json.format(bytes(raw), indent=-1).decode()


def discover_root(
    root: codex.RootParams, files: CodexFiles, budget: ResponseBudget
) -> codex.DiscoveredRoot:
    """The files of one root; what cannot be read is a warning. Blocking."""

    def failed(error: str) -> codex.DiscoveredRoot:
        return codex.DiscoveredRoot(root.id, root.path.uri, None, [], [], [], error)

    try:
        root.path.native()
    except RpcError as error:
        return failed(f"failed to inspect capability root {root.path}: {error.message}")
    try:
        is_directory = files.metadata(root.path).is_directory
    except (OSError, RpcError) as error:
        if not is_denied(error) or not _may_look_around(root, files):
            return failed(f"failed to inspect capability root {root.path}: {error_text(error)}")
        is_directory = True  # the root itself is denied: the scan finds nothing and says why
    if not is_directory:
        return failed(f"capability root {root.path} is not a directory")
    return _Bundle(root, CapabilityFiles(files, budget)).read()


def _may_look_around(root: codex.RootParams, files: CodexFiles) -> bool:
    """Whether the directory of a root may be read, so that only the root itself is denied."""
    parent = PathUri.from_text(root.path.uri.rstrip("/").rpartition("/")[0] + "/")
    try:
        return not files.walk(parent, _ONE_ENTRY).errors
    except (OSError, RpcError):
        return False


def manifest_directory(uri: str) -> str:
    """The URI of the directory that a manifest is about."""
    return uri.rsplit("/", 2)[0]


class _Bundle:
    """Files are read in the order of the reference, which decides what is left out."""

    def __init__(self, root: codex.RootParams, files: CapabilityFiles) -> None:
        self._root = root
        self._uri = root.path.uri.rstrip("/")
        self._files = files

    def read(self) -> codex.DiscoveredRoot:
        uris = self._files.scan(self._root.path)
        manifest = self._first_manifest(self._uri)
        namespaces = [manifest or self._manifest_above()]
        namespaces += self._nested_manifests(uris, manifest is not None)
        plugin = None if manifest is None else self._plugin(manifest)
        skills = self._skills(uris)
        return codex.DiscoveredRoot(
            self._root.id,
            self._root.path.uri,
            plugin,
            skills,
            [each for each in namespaces if each is not None],
            self._files.warnings,
            None,
        )

    def _first_manifest(self, directory: str) -> codex.CapabilityFile | None:
        for name in MANIFESTS:
            manifest = self._files.read(f"{directory}/{name}")
            if manifest is not None:
                return manifest
        return None

    def _manifest_above(self) -> codex.CapabilityFile | None:
        directory = self._uri
        while directory != "file://":
            directory = directory.rsplit("/", 1)[0]
            manifest = self._first_manifest(directory)
            if manifest is not None:
                return manifest
        return None

    def _nested_manifests(
        self, uris: list[str], has_own: bool
    ) -> list[codex.CapabilityFile | None]:
        best: dict[str, int] = {}
        for rank, name in enumerate(MANIFESTS):
            for uri in uris:
                if uri.endswith(f"/{name}"):
                    best.setdefault(manifest_directory(uri), rank)
        if has_own:
            best.pop(self._uri, None)
        return [
            self._files.read(f"{directory}/{MANIFESTS[rank]}")
            for directory, rank in sorted(best.items())
        ]

    def _skills(self, uris: list[str]) -> list[codex.SkillFiles]:
        skills = []
        for uri in sorted(uri for uri in uris if uri.endswith(_SKILL)):
            instructions = self._files.read(uri)
            metadata = self._files.read(f"{uri.removesuffix(_SKILL)}/{_METADATA}")
            if instructions is not None:
                skills.append(codex.SkillFiles(instructions, metadata))
        return skills

    def _plugin(self, manifest: codex.CapabilityFile) -> codex.PluginFiles:
        servers, apps = _declarations(manifest.contents)
        mcp_config = None
        if not isinstance(servers, JsonObject):  # the servers are in the manifest itself
            mcp_config = self._declared(manifest, "mcpServers", servers, ".mcp.json")
        apps_config = self._declared(manifest, "apps", apps, ".app.json")
        return codex.PluginFiles(manifest, mcp_config, apps_config)

    def _declared(
        self, manifest: codex.CapabilityFile, field: str, name: object, default: str
    ) -> codex.CapabilityFile | None:
        if not isinstance(name, str):
            return self._files.read(f"{self._uri}/{default}")
        segments = name.removeprefix("./").rstrip("/").split("/")
        if not name.startswith("./"):
            fault = "path must start with `./`"
        elif name[2:3] in ("", "/") or ".." in segments or "\0" in name:
            fault = "path must remain below the capability root"
        else:
            plain = [segment for segment in segments if segment not in ("", ".")]
            return self._files.read(child_uri(self._uri, "/".join(plain)))
        self._files.warn(f"ignoring {field} in {manifest.path}: {fault}")
        return self._files.read(f"{self._uri}/{default}")


def _declarations(manifest: str) -> tuple[Any, Any]:
    """The servers and the apps that a manifest declares; nothing if it is not valid."""
    try:
        members = parse_members(manifest)
        return declared_servers(members), members.get("apps")
    except ManifestFault:
        return None, None


# Parts of TOML documents: the keys that a client asks for, and keys that a layer may not set.
class _KeyTree(dict[str, "_KeyTree | None"]):
    """The keys below a table; None for a key whose whole value is meant."""


def select(document: Table, paths: Iterable[Sequence[str]]) -> Table:
    """The values at these paths, in the order of the document.

    A table on the way to a missing key stays, empty. A value that is no table where the path goes
    on stays whole.
    """
    tree = _KeyTree()
    for path in paths:
        _add(tree, path)
    return _selected(document, tree)


def _add(tree: _KeyTree, path: Sequence[str]) -> None:
    for key in path[:-1]:
        below = tree.setdefault(key, _KeyTree())
        if below is None:
            return  # a shorter path includes this one
        tree = below
    tree[path[-1]] = None


def _selected(table: Table, tree: _KeyTree) -> Table:
    part: Table = {}
    for key, value in table.items():
        if key in tree:
            below = tree[key]
            is_whole = below is None or not isinstance(value, dict)
            part[key] = value if is_whole else _selected(value, below or _KeyTree())
    return part


def without(document: Table, paths: Iterable[Sequence[str]]) -> Table:
    """A copy without the values at these paths."""
    for path in paths:
        document = _without(document, path)
    return document


def _without(table: Table, path: Sequence[str]) -> Table:
    key, *below = path
    if key not in table:
        return table
    copy = dict(table)
    if not below:
        del copy[key]
    elif isinstance(copy[key], dict):
        copy[key] = _without(copy[key], below)
    return copy


def merged(documents: Iterable[Table]) -> Table:
    """All documents in one: the later wins, tables are merged key by key."""
    result: Table = {}
    for document in documents:
        for key, value in document.items():
            below = result.get(key)
            if isinstance(below, dict) and isinstance(value, dict):
                result[key] = merged((below, value))
            else:
                result[key] = value
    return result
