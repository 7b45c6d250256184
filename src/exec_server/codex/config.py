"""environmentConfig/read: the layers of Codex's configuration that apply to a directory.

Read anew for each request: of the system, the user, each project directory, managed. Blocking.
"""

from __future__ import annotations

import math
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from exec_server.codex.bundle import Table, merged, select, without
from exec_server.errors import InternalError, RpcError, decode_error_text, os_error_text
from exec_server.filesystem.operations import open_regular
from exec_server.host.environment import user_home
from exec_server.protocol import codex
from exec_server.protocol.paths import path_to_uri

# A configuration file: real ones have a few KiB. The parser holds the interpreter's lock, about
# 0.1 s for the worst text of this size. A larger file is an error.
FILE_BYTES: Final = 262_144
# The segments of one key, and the depth of tables and arrays: the time of the parser grows with
# the square of the first, and each writer of a table recurses. More is an error.
KEY_SEGMENTS: Final = 32
DEPTH: Final = 80

# The headers of a text that is written: those of a text that is read may be nested, so that each
# key is written once for each table below it.
TEXT_CHARACTERS: Final = 4 * 1_048_576

_INTEGERS: Final = range(-(2**63), 2**63)
_SEGMENT: Final = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*')"""
# The parts of a text in which dots do not separate segments, then keys, and strings without an end:
# every part is read once, whatever the text is.
_PART: Final = re.compile(
    rf"""\#[^\n]*+
    |\"{{3}}(?:[^"\\]|\\[\s\S]|"(?!""))*+(?:\"{{3}}|\Z)
    |'{{3}}(?:[^']|'(?!''))*+(?:'{{3}}|\Z)
    |(?P<long>(?:{_SEGMENT}[ \t]*+\.[ \t]*+){{{KEY_SEGMENTS}}}+)
    |{_SEGMENT}(?:[ \t]*+\.[ \t]*+{_SEGMENT})*+
    |"(?:[^"\\\n]|\\.)*+
    |'[^'\n]*+""",
    re.VERBOSE,
)

DEFAULT_MARKERS: Final = (".git",)
# Real configurations have a few. Each is looked for in each directory above a path, of which there
# may be 2000. More are an error.
MARKERS: Final = 64
# The file `.git` of a linked worktree, and git's record of where it is: one path.
_LINK_BYTES: Final = 8192
_LEVELS: Final = ("trusted", "untrusted")

_APPROVAL_POLICIES: Final = ("untrusted", "on-failure", "on-request", "granular", "never")
_REVIEWERS: Final = ("user", "auto_review", "guardian_subagent")
_SANDBOX_MODES: Final = ("read-only", "workspace-write", "danger-full-access")
# The only choice with members of its own, and their values if they are missing.
_GRANULAR: Final = "granular"
_GRANULAR_MEMBERS: Final = {
    "sandbox_approval": None,
    "rules": None,
    "skill_approval": False,
    "request_permissions": False,
    "mcp_elicitations": None,
}

# A client waits 10 s for the answer that has the name; a resolver without a server may take longer.
# Beyond this time the name of the kernel is used.
LOOKUP_SECONDS: Final = 2.0

SYSTEM_DIRECTORY: Final = "/etc/codex"
# All files of one request: a project may have thousands of directories with one, and each is parsed
# under the interpreter's lock. More is an error.
FILES_BYTES: Final = 2 * 1_048_576
# The text of all layers of an answer. A longer one is an error.
ANSWER_CHARACTERS: Final = 16 * 1_048_576

# Keys that decide whom Codex talks to and what it runs, which a project has no say in.
_NOT_OF_PROJECTS: Final = (
    ("openai_base_url",),
    ("chatgpt_base_url",),
    ("apps_mcp_product_sku",),
    ("responses_api_metadata",),
    ("model_provider",),
    ("model_providers",),
    ("notify",),
    ("profile",),
    ("profiles",),
    ("experimental_realtime_webrtc_call_base_url",),
    ("experimental_realtime_ws_base_url",),
    ("otel",),
    ("features", "respect_system_proxy"),
    ("tui", "keymap", "chat", "previous_permission_mode"),
    ("tui", "keymap", "chat", "next_permission_mode"),
)
_HOOKS: Final = (("hooks",),)


# TOML files: read and parsed with limits, and written.
class UnreadableFile(Exception):
    """A file exists and cannot be read; the text says why."""


class DocumentTooLarge(Exception):
    """A document would become a text that is too long."""


class TomlFault(Exception):
    """A text is not TOML; the text of the fault names its line and column if they are known."""


def read_text(path: str) -> str | None:
    """The text of a regular file, None if there is none. Blocking; raises UnreadableFile."""
    try:
        data = _read_head(path, FILE_BYTES + 1)
        if len(data) > FILE_BYTES:
            raise UnreadableFile(f"the file exceeds {FILE_BYTES} bytes")
        return data.decode().removeprefix("\ufeff")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UnreadableFile(os_error_text(error)) from None
    except RpcError as error:
        raise UnreadableFile(error.message) from None
    except UnicodeDecodeError as error:
        raise UnreadableFile(decode_error_text(error)) from None


def _read_head(path: str, limit: int) -> bytes:
    """At most `limit` bytes of a regular file; raises OSError or RpcError."""
    descriptor, _ = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(limit)


def parse(text: str) -> Table:
    """The document in a text; raises TomlFault."""
    import tomli

    # Looking for long keys takes some time; most texts have too few dots for one.
    has_dots = text.count(".") >= KEY_SEGMENTS
    if has_dots and any(part["long"] is not None for part in _PART.finditer(text)):
        raise TomlFault(f"a key has more than {KEY_SEGMENTS} segments")
    try:
        document: Table = tomli.loads(text, parse_float=_parse_float)
    except (RecursionError, ValueError) as error:  # also an integer of many digits
        raise TomlFault(str(error)) from None
    _check(document)
    return document


def _parse_float(digits: str) -> float:
    """A number; raises TomlFault where other parsers refuse it instead of infinity."""
    number = float(digits)
    if math.isinf(number) and "inf" not in digits:
        raise TomlFault("floating-point number overflowed")
    return number


def dump(document: Table) -> str:
    """A document as text; raises DocumentTooLarge."""
    import tomli_w

    if _header_characters(document) > TEXT_CHARACTERS:
        raise DocumentTooLarge
    # Indentation of nested arrays would make the text a hundred times as long.
    text: str = tomli_w.dumps(document, indent=0)
    return text


def _header_characters(document: Table) -> int:
    """At least the characters of all headers of tables: each has the keys of all tables around."""
    total = 0
    pending: list[tuple[int, Any]] = [(0, document)]
    while pending:
        length, value = pending.pop()
        if isinstance(value, dict):
            total += length
            pending += ((length + len(key) + 1, each) for key, each in value.items())
        elif isinstance(value, list):
            pending += ((length, each) for each in value)
    return total


def _check(document: Table) -> None:
    """Refuse what other parsers do not read: integers of more than 64 bits, deep documents."""
    pending: list[tuple[int, Any]] = [(0, document)]
    while pending:
        depth, value = pending.pop()
        if depth > DEPTH:
            raise TomlFault(f"the document is more than {DEPTH} levels deep")
        if isinstance(value, dict):
            pending += ((depth + 1, each) for each in value.values())
        elif isinstance(value, list):
            pending += ((depth + 1, each) for each in value)
        elif isinstance(value, int) and value not in _INTEGERS:
            raise TomlFault("integer number overflowed")


# The project that a directory belongs to: its root, its git repository, and the user's trust.
@dataclass(frozen=True, slots=True)
class Checkout:
    """A working directory of git; `main` is that of its repository, which may be another one."""

    root: str
    main: str

    @property
    def is_linked(self) -> bool:
        return self.main != self.root


def project_root(cwd: str, markers: Sequence[str]) -> str:
    """The nearest directory with a marker, else the directory itself. Blocking."""
    for directory in _upwards(cwd):
        if any(_has_marker(directory, marker) for marker in markers):
            return directory
    return cwd


def chain(root: str, cwd: str) -> list[str]:
    """The directories from the root down to the working directory."""
    directories = []
    for directory in _upwards(cwd):
        directories.append(directory)
        if directory == root:
            break
    return directories[::-1]


def _upwards(directory: str) -> Iterator[str]:
    yield directory
    while directory != "/":
        directory = os.path.dirname(directory)
        yield directory


def _has_marker(directory: str, marker: str) -> bool:
    path = os.path.join(directory, marker)
    if marker == ".git" and os.path.isdir(path):
        return os.path.exists(os.path.join(path, "HEAD"))
    return os.path.exists(path)


def find_checkout(directory: str) -> Checkout | None:
    """The checkout that holds a directory. Blocking."""
    for root in _upwards(directory):
        if _has_marker(root, ".git"):
            return Checkout(root, _main_checkout(root))
    return None


def _main_checkout(root: str) -> str:
    """The checkout that a linked worktree belongs to; a checkout that is none belongs to itself.

    The file `.git` names a directory of the main checkout, and that directory must name the
    worktree in turn: a file alone, which any archive may hold, gains no trust.
    """
    link = os.path.join(root, ".git")
    text = _read_line(link)
    if text is None or not text.startswith("gitdir:"):
        return root
    record = os.path.normpath(os.path.join(root, text.removeprefix("gitdir:").strip()))
    repository, worktrees = os.path.split(os.path.dirname(record))
    if worktrees != "worktrees" or os.path.basename(repository) != ".git":
        return root
    back = _read_line(os.path.join(record, "gitdir"))
    if back is None or os.path.realpath(os.path.join(record, back)) != os.path.realpath(link):
        return root
    return os.path.dirname(repository)


def _read_line(path: str) -> str | None:
    """The text of a file with one line; None if it is no small regular file."""
    try:
        data = _read_head(path, _LINK_BYTES + 1)
    except (OSError, RpcError):
        return None
    return os.fsdecode(data).strip() if len(data) <= _LINK_BYTES else None


class Trust:
    """The `projects` table of a configuration; raises InternalError if it is invalid."""

    def __init__(self, projects: Any) -> None:
        if not isinstance(projects, dict):
            raise InternalError(f"{_invalid(projects)}, expected a map\nin `projects`\n")
        self._levels = {path: _level(path, entry) for path, entry in projects.items()}

    def is_trusted(self, directory: str, root: str, checkout: Checkout | None) -> bool:
        """Whether layers of a directory count; the first entry that is found decides. Blocking."""
        places = [directory, root]
        if checkout is not None:
            places.append(checkout.main)
        for place in places:
            for spelling in (os.path.realpath(place), place):
                level = self._levels.get(spelling)
                if level is not None:
                    return level == "trusted"
        return False


def _level(path: str, entry: Table) -> str | None:
    if not isinstance(entry, dict):
        expected = f"expected struct ProjectConfig\nin `projects.{path}`\n"
        raise InternalError(f"{_invalid(entry)}, {expected}")
    level = entry.get("trust_level")
    if level is None or (isinstance(level, str) and level in _LEVELS):
        return level
    where = f"in `projects.{path}.trust_level`\n"
    if isinstance(level, str):
        expected = "expected `trusted` or `untrusted`"
        raise InternalError(f"unknown variant `{level}`, {expected}\n{where}")
    raise InternalError(f"invalid type: unit variant, expected string only\n{where}")


def _invalid(value: object) -> str:
    kind = type(value).__name__
    names = {"bool": "boolean", "int": "integer", "float": "floating point", "str": "string"}
    text = f'"{value}"' if kind == "str" else f"`{value}`"
    return f"invalid type: {names[kind]} {text}" if kind in names else "invalid type: sequence"


def root_markers(document: Table) -> Sequence[str]:
    """The markers of project roots in a configuration; raises InternalError."""
    markers = document.get("project_root_markers", DEFAULT_MARKERS)
    if not isinstance(markers, list | tuple) or not all(isinstance(m, str) for m in markers):
        raise InternalError("project_root_markers must be an array of strings")
    if len(markers) > MARKERS:
        raise InternalError(f"project_root_markers must be at most {MARKERS} strings")
    return markers


# A setting is a text, or a table with one key: `never` and `{never = {}}` are the same.
def implied_requirements(managed: Table) -> Table:
    """The requirements of managed settings; raises InternalError for settings that are unknown."""
    implied: Table = {}
    approval = _choice(managed, "approval_policy", _APPROVAL_POLICIES)
    if approval == _GRANULAR:
        implied["allowed_approval_policies"] = [_granular(managed["approval_policy"])]
    elif approval is not None:
        # The older name of the reference for the same policy.
        policy = "on-request" if approval == "on-failure" else approval
        implied["allowed_approval_policies"] = [policy]
    reviewer = _choice(managed, "approvals_reviewer", _REVIEWERS)
    if reviewer is not None:
        allowed = ["user"] if reviewer == "user" else ["auto_review", "user"]
        implied["allowed_approvals_reviewers"] = allowed
    mode = _choice(managed, "sandbox_mode", _SANDBOX_MODES)
    if mode is not None:
        implied["allowed_sandbox_modes"] = list(dict.fromkeys(["read-only", mode]))
    return implied


def _choice(table: Table, key: str, choices: Sequence[str]) -> str | None:
    value = table.get(key)
    if value is None:
        return None
    chosen: object = value
    members: object = {}
    if isinstance(value, dict) and len(value) == 1:
        ((chosen, members),) = value.items()
    if not isinstance(chosen, str) or chosen not in choices:
        raise _fault(f"expected one of {', '.join(choices)}", key)
    if chosen == _GRANULAR:
        if not isinstance(value, dict) or not isinstance(members, dict):
            raise _fault("expected a table with members", f"{key}.{_GRANULAR}")
    elif members != {}:
        raise _fault("expected a table without members", f"{key}.{chosen}")
    return chosen


def _granular(value: Table) -> Table:
    table = value[_GRANULAR]
    members = {name: table.get(name, default) for name, default in _GRANULAR_MEMBERS.items()}
    for name, member in members.items():
        if not isinstance(member, bool):
            raise _fault("expected a boolean", f"approval_policy.{_GRANULAR}.{name}")
    return {_GRANULAR: members}


def _fault(text: str, place: str) -> InternalError:
    return InternalError(f"Failed to parse config requirements as TOML: {place}: {text}")


def codex_home(variables: Mapping[str, str]) -> str:
    """CODEX_HOME without links, or `.codex` of the user. Blocking; raises InternalError."""
    named = variables.get("CODEX_HOME")
    if not named:
        home = user_home(variables)
        if home is None:
            raise InternalError("Could not find home directory")
        return os.path.join(home, ".codex")
    refusal = f'CODEX_HOME points to "{named}", but that path'
    try:
        path = os.path.realpath(named, strict=True)
    except OSError:
        raise InternalError(f"{refusal} does not exist") from None
    if not os.path.isdir(path):
        raise InternalError(f"{refusal} is not a directory")
    return path


@cache
def hostname() -> str | None:
    """The canonical name of the host, or that of the kernel; None without any. Blocking."""
    own = socket.gethostname()
    names: list[str] = []

    def look_up() -> None:
        with suppress(OSError, UnicodeError):  # the host has no canonical name
            for *_, canonical, _ in socket.getaddrinfo(own, None, flags=socket.AI_CANONNAME):
                names.append(canonical)

    thread = threading.Thread(target=look_up, name="host name", daemon=True)
    thread.start()
    thread.join(LOOKUP_SECONDS)
    name = next((each for each in list(names) if "." in each.strip(".")), own)
    return name.rstrip(".").lower() or None


@dataclass(frozen=True, slots=True)
class _Layer:
    kind: str  # the first word of its source; empty: the source is the bare path
    path: str
    document: Table

    def selected(self, paths: Sequence[Sequence[str]]) -> codex.ConfigLayer | None:
        """The layer with the values at these paths alone, None without any."""
        part = select(self.document, paths)
        if not part:
            return None
        source = f"{self.kind} ({self.path})" if self.kind else self.path
        try:
            text = dump(part)
        except DocumentTooLarge:
            raise InternalError(f"the tables of {self.path} are nested too often") from None
        return codex.ConfigLayer(source, path_to_uri(os.path.dirname(self.path)), text)


class _Files:
    """Reads the files of one request."""

    def __init__(self) -> None:
        self._left = FILES_BYTES

    def layer(
        self, kind: str, path: str, what: str = "config file", failure: str = ""
    ) -> _Layer | None:
        """The layer in a file, None if there is no file; raises InternalError."""
        try:
            text = read_text(path)
            if text is None:
                return None
            self._left -= len(text)
            if self._left < 0:
                raise UnreadableFile(f"all files together exceed {FILES_BYTES} bytes")
            return _Layer(kind, path, parse(text))
        except UnreadableFile as error:
            raise InternalError(f"Failed to read {what} {path}: {error}") from None
        except TomlFault as fault:
            raise InternalError(f"{failure}{path}: {fault}") from None


def read(
    params: codex.ReadConfigParams,
    variables: Mapping[str, str],
    system_directory: str = SYSTEM_DIRECTORY,
) -> codex.ReadConfigResult:
    """The layers for a directory, reduced to the requested keys. Raises InternalError."""
    try:
        home = codex_home(variables)
    except InternalError as error:
        raise error.explained(f"failed to find Codex home: {error.message}") from None
    try:
        config, requirements = _read_layers(params, home, system_directory)
    except InternalError as error:
        text = f"failed to load executor-local config: {error.message}"
        raise error.explained(text) from None
    user = user_home(variables)
    return codex.ReadConfigResult(
        None if user is None else path_to_uri(user),
        path_to_uri(home),
        hostname(),
        config,
        requirements,
    )


def _read_layers(
    params: codex.ReadConfigParams, home: str, system: str
) -> tuple[codex.LayerStack, codex.LayerStack]:
    files = _Files()
    first = files.layer("system", os.path.join(system, "config.toml"))
    user = files.layer("user", os.path.join(home, "config.toml"))
    managed_path = os.path.join(system, "managed_config.toml")
    managed = files.layer("legacy managed_config.toml", managed_path)
    general = merged(layer.document for layer in (first, user, managed) if layer is not None)
    layers = [first, user, *_projects(files, params.cwd.native(), home, general), managed]
    required_path = os.path.join(system, "requirements.toml")
    failure = "failed to parse requirements layer "
    required = [files.layer("", required_path, "requirements file", failure)]
    if managed is not None:
        required.append(_Layer("", managed.path, implied_requirements(managed.document)))
    return _stack(layers, params.config_paths), _stack(required, params.requirements_paths)


def _stack(layers: Sequence[_Layer | None], paths: Sequence[Sequence[str]]) -> codex.LayerStack:
    """The layers that have one of the keys; the first is the one before those of a service."""
    present: list[codex.ConfigLayer] = []
    has_first, size = False, 0
    for index, layer in enumerate(layers):
        reduced = None if layer is None else layer.selected(paths)
        if reduced is not None:
            size += len(reduced.toml)
            if size > ANSWER_CHARACTERS:
                raise InternalError(f"the layers exceed {ANSWER_CHARACTERS} characters")
            present.append(reduced)
            has_first = has_first or index == 0
    return codex.LayerStack(present, int(has_first))


def _projects(files: _Files, cwd: str, home: str, general: Table) -> Iterator[_Layer]:
    """The layers of the trusted directories from the root of the project to the cwd."""
    root = project_root(cwd, root_markers(general))
    trust = Trust(general.get("projects", {}))
    checkout = find_checkout(cwd)
    for directory in chain(root, cwd):
        folder = os.path.join(directory, ".codex")
        if not os.path.isdir(folder) or os.path.realpath(folder) == os.path.realpath(home):
            continue
        if trust.is_trusted(directory, root, checkout):
            yield from _of_directory(files, directory, checkout)


def _of_directory(files: _Files, directory: str, checkout: Checkout | None) -> Iterator[_Layer]:
    """The layer of a directory; in a linked worktree the hooks are those of the main checkout."""
    layer = _of_project(files, directory)
    if checkout is None or not checkout.is_linked:
        if layer is not None:
            yield layer
        return
    if layer is not None:
        yield replace(layer, document=without(layer.document, _HOOKS))
    relative = os.path.relpath(directory, checkout.root)
    main = _of_project(files, os.path.normpath(os.path.join(checkout.main, relative)))
    if main is not None:
        yield replace(main, document=select(main.document, _HOOKS))


def _of_project(files: _Files, directory: str) -> _Layer | None:
    path = os.path.join(directory, ".codex", "config.toml")
    what = "project config file"
    layer = files.layer("project", path, what, f"Error parsing {what} ")
    return layer and replace(layer, document=without(layer.document, _NOT_OF_PROJECTS))
