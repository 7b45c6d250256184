"""ServerFeatures: what a server can do, found out once at the handshake. No I/O.

Theory of operation. A server that describes itself in the answer to `initialize` has every method
of the protocol, and its capabilities are flags in that description. Older servers show nothing, so
they are asked: each probe is a request that changes nothing. A method is known if the answer is
anything but "method not found". A member is known if a value of a wrong type is refused: servers
ignore unknown members. The rest of the client asks this value and never for a version.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from exec_server.errors import InvalidParams, MethodNotFound, RpcError, Unsupported
from exec_server.protocol import files, process
from exec_server.protocol.paths import PathUri
from exec_server.protocol.session import STATUS, Capabilities

# The answer to a probe: a result, or the error instead of it.
Answer = Raw | RpcError

_NO_CONFINED_COMMANDS: Final = "it would run the command without the sandbox"
_NO_CONFINED_FILES: Final = "it would use the file without the sandbox, or knows another form of it"


class ServerFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """What one server can do. The defaults are those of a server that describes itself."""

    capabilities: Capabilities = Capabilities()
    # `initialize` names a session, which outlives a lost connection.
    has_sessions: bool = True
    # Paths of file methods, and the directory of a command, may be `file:` URIs.
    has_uri_paths: bool = True
    has_uri_directories: bool = True
    # `fs/getMetadata` tells the size of a file.
    has_file_sizes: bool = True
    # `followSymlinks` of file methods.
    refuses_symlinks: bool = True
    has_canonicalize: bool = True
    has_walk: bool = True
    # `fs/open` for reading; for writing it is the capability fileWriteStreaming.
    has_open_files: bool = True
    has_interrupt: bool = True
    has_status: bool = True
    # Members of `process/start`, and `writeId` of `process/write`.
    has_stdin_pipes: bool = True
    has_environment_policies: bool = True
    confines_commands: bool = True
    confines_files: bool = True
    repeats_writes_safely: bool = True

    @property
    def missing_methods(self) -> frozenset[str]:
        """The methods that the client replaces, because the server lacks them or a part of them."""
        has = operator.attrgetter
        return frozenset(name for name, feature in METHODS.items() if not has(feature)(self))

    @property
    def has_metadata(self) -> bool:
        """Whether `fs/getMetadata` has all its members."""
        return self.has_file_sizes and self.refuses_symlinks

    @property
    def has_streams(self) -> bool:
        """Whether files can be opened for reading and writing, confined or not."""
        can_read = self.opens_for_reading(is_confined=True)
        return can_read and self.capabilities.file_write_streaming

    @property
    def sends_uris(self) -> bool:
        """Whether paths on the wire are `file:` URIs; otherwise they are native ones."""
        return self.has_uri_paths and self.has_uri_directories

    def runs(self, *, is_confined: bool) -> bool:
        """Whether a command can be run with the sandbox, if there is one."""
        return self.confines_commands or not is_confined

    def opens_for_reading(self, *, is_confined: bool) -> bool:
        """Whether `fs/open` opens a file that is read in blocks."""
        if is_confined and not self.capabilities.sandboxed_file_streaming:
            return False
        return self.has_open_files

    def writes_blocks(self, *, is_confined: bool) -> bool:
        """Whether a file can be written in blocks: by the server, or by commands instead."""
        return self.capabilities.file_write_streaming or self.runs(is_confined=is_confined)

    def command_sandbox(self, sandbox: Any) -> Any:
        """The `sandbox` of a command in the form of this server; raises Unsupported."""
        if sandbox is not None and not self.confines_commands:
            raise Unsupported("sandbox in process/start", _NO_CONFINED_COMMANDS)
        return self._in_form(sandbox)

    def file_sandbox(self, sandbox: Any) -> Any:
        """The `sandbox` of a file method in the form of this server; raises Unsupported."""
        if sandbox is not None and not self.confines_files:
            raise Unsupported("sandbox with permissions in fs methods", _NO_CONFINED_FILES)
        return self._in_form(sandbox)

    def _in_form(self, sandbox: Any) -> Any:
        if sandbox is None or self.sends_uris:
            return sandbox
        return _with_native_paths(msgspec.to_builtins(sandbox))


def _with_native_paths(value: Any) -> Any:
    """A `sandbox` object whose paths are native: all its texts that are `file:` URIs."""
    if isinstance(value, dict):
        return {name: _with_native_paths(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_native_paths(each) for each in value]
    if isinstance(value, str) and value.startswith("file:"):
        return PathUri.from_text(value).native()
    return value


# The methods that `client.polyfills` replaces, by their names, and the features that make this
# unnecessary. Names, because the structs of most of these methods are imported on demand.
METHODS: Final = {
    "environment/status": "has_status",
    "fs/getMetadata": "has_metadata",
    "fs/canonicalize": "has_canonicalize",
    "fs/walk": "has_walk",
    "fs/open": "has_streams",
    "fs/readBlock": "has_streams",
    "fs/writeBlock": "has_streams",
    "fs/close": "has_streams",
    "fs/list": "capabilities.fs_list",
    "fs/create": "capabilities.fs_create",
    "fs/resolve": "capabilities.fs_resolve",
    "fs/append": "capabilities.fs_append",
    "fs/rename": "capabilities.fs_rename",
    "fs/chmod": "capabilities.fs_chmod",
    "fs/symlink": "capabilities.fs_symlink",
    "fs/setTimes": "capabilities.fs_set_times",
    "fs/edit": "capabilities.fs_edit",
    "fs/applyPatch": "capabilities.fs_apply_patch",
    "fs/glob": "capabilities.fs_glob",
    "fs/grep": "capabilities.fs_grep",
    "fs/diskUsage": "capabilities.fs_disk_usage",
}

# ---- probes ---------------------------------------------------------------------------


class Probe(msgspec.Struct, frozen=True):
    """A request that changes nothing, and whether its answer shows a feature."""

    feature: str
    method: str
    params: Any
    shows: Callable[[Answer], bool]


def _is_method(answer: Answer) -> bool:
    return not isinstance(answer, MethodNotFound)


def _is_member(answer: Answer) -> bool:
    """Whether a member is known: its type was checked. In doubt it is not."""
    return isinstance(answer, InvalidParams) and answer.message.startswith("invalid type")


def _is_sandbox(answer: Answer) -> bool:
    """Whether `permissions` of a `sandbox` object are read, and have a type. In doubt not."""
    return isinstance(answer, InvalidParams) and answer.message.startswith(_UNKNOWN_TYPE)


_UNKNOWN_TYPE: Final = (
    "unknown variant `?`",
    "data did not match any variant of untagged enum PermissionProfile",
)


def _is_result(answer: Answer) -> bool:
    return not isinstance(answer, RpcError)


def _is_directory(answer: Answer) -> bool:
    """Whether a command that is no program was refused for that, and not for its directory."""
    return _is_method(answer) and not str(answer).endswith("(os error 2)")


def _has_size(answer: Answer) -> bool:
    return not isinstance(answer, RpcError) and "size" in msgspec.json.decode(answer, type=dict)


_ROOT: Final = {"path": "/"}
_ROOT_URI: Final = {"path": "file:///"}
_NO_POLICY: Final = {"sandbox": {"permissions": {"type": "?"}}}
# Not startable: without arguments there is no program, and a directory is none. Every server
# decodes this `cwd`.
_START: Final = {
    "processId": "exec-server-client-probe",
    "argv": [],
    "cwd": "file:///",
    "env": {},
    "tty": False,
    "arg0": None,
}
_WRITE: Final = {"processId": "", "chunk": "", "writeId": 0}

# A feature is there if one of its probes shows it.
PROBES: Final = (
    Probe("has_uri_paths", files.GET_METADATA.name, _ROOT_URI, _is_result),
    Probe("has_uri_directories", process.START.name, _START | {"argv": ["/"]}, _is_directory),
    Probe("has_file_sizes", files.GET_METADATA.name, _ROOT_URI, _has_size),
    Probe("has_file_sizes", files.GET_METADATA.name, _ROOT, _has_size),
    Probe(
        "refuses_symlinks",
        files.GET_METADATA.name,
        _ROOT_URI | {"followSymlinks": "?"},
        _is_member,
    ),
    Probe("confines_files", files.GET_METADATA.name, _ROOT_URI | _NO_POLICY, _is_sandbox),
    Probe("confines_files", files.GET_METADATA.name, _ROOT | _NO_POLICY, _is_sandbox),
    Probe("has_canonicalize", files.CANONICALIZE.name, {}, _is_method),
    Probe("has_walk", files.WALK.name, {}, _is_method),
    Probe("has_open_files", files.OPEN.name, {}, _is_method),
    Probe("has_interrupt", process.SIGNAL.name, {}, _is_method),
    Probe("has_status", STATUS.name, None, _is_method),
    Probe("has_stdin_pipes", process.START.name, _START | {"pipeStdin": "?"}, _is_member),
    Probe("has_environment_policies", process.START.name, _START | {"envPolicy": "?"}, _is_member),
    Probe("confines_commands", process.START.name, _START | {"sandbox": "?"}, _is_member),
    Probe("repeats_writes_safely", process.WRITE.name, _WRITE, _is_member),
)


def judge(
    answers: Sequence[Answer], capabilities: Capabilities, *, has_sessions: bool
) -> ServerFeatures:
    """The features that the answers to PROBES show, in their order."""
    shown: dict[str, bool] = {}
    for probe, answer in zip(PROBES, answers, strict=True):
        shown[probe.feature] = shown.get(probe.feature, False) or probe.shows(answer)
    return ServerFeatures(capabilities=capabilities, has_sessions=has_sessions, **shown)
