"""ServerFeatures: what a server can do, found out once at the handshake; no I/O of its own.

A server that describes itself has every method of the protocol; others get probes that change
nothing. A method is known unless the answer is "method not found", a member if a wrong type is
refused: servers ignore unknown members. Nothing depends on a version.
"""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import pybase64
from msgspec import Raw
from msgspec.structs import replace

from exec_server.client.arguments import (
    AnyNetworkProxy,
    AnyPath,
    AnySandbox,
    PathResolver,
    environment_dict,
    network_proxy_object,
    sandbox_object,
    tty_size,
    user_text,
)
from exec_server.client.engine.messages import decode_as, decode_environment
from exec_server.errors import InvalidParams, MalformedAnswer, MethodNotFound, RpcError, Unsupported
from exec_server.protocol import process
from exec_server.protocol.paths import PathUri
from exec_server.protocol.process import (
    READ,
    START,
    TERMINATE,
    EnvPolicy,
    ProcessId,
    ReadParams,
    ReadResult,
    StartParams,
    TerminateParams,
)
from exec_server.protocol.session import INFO, STATUS, Capabilities, EnvironmentInfo

# The answer to a probe: a result, or the error instead of it.
Answer = Raw | RpcError

_NO_CONFINED_COMMANDS: Final = "it would run the command without the sandbox"
_NO_CONFINED_FILES: Final = "it would use the file without the sandbox, or knows another form of it"

# Inherit the whole environment of the server.
INHERIT_ALL: Final = EnvPolicy(
    inherit="all", ignore_default_excludes=True, exclude=[], set={}, include_only=[]
)
# The default TERM. Servers set none, and many programs refuse to run in a terminal without one.
DEFAULT_TERM: Final = "xterm-256color"
# The default PATH on servers that pass on no environment: that of most systems.
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The beginning of a script that the client runs for itself: the directories that only root can
# write come first, because those of a project may hold a program of any name. The others follow,
# for machines that have their programs elsewhere. Not /usr/local/bin: some systems give it to a
# user.
SYSTEM_FIRST: Final = "PATH=/usr/sbin:/usr/bin:/sbin:/bin${PATH:+:$PATH}; export PATH; "
# Input in arguments. Linux limits one to 128 KiB and all to 2 MiB by default, with the environment;
# base64 makes four bytes of three.
ARGUMENT_CHARACTERS: Final = 96_000
ARGUMENT_INPUT_BYTES: Final = 1_048_576

_NO_PIPE: Final = "use run(input=...), or a terminal"
_WITH_INPUT: Final = f'n=$1; shift; ({SYSTEM_FIRST}exec head -c "$n") | exec "$@"'
_MERGED: Final = 'exec "$@" 2>&1'
_WITH_ARGUMENTS: Final = f"""
n=$1; shift
{{ for piece; do [ "$n" -gt 0 ] || break; printf %s "$piece"; n=$((n - 1)); done; }} |
    ({SYSTEM_FIRST}exec base64 -d) | {{ shift "$n"; exec "$@"; }}
"""
_WITH_SIZE: Final = f'({SYSTEM_FIRST}exec stty rows "$1" columns "$2"); shift 2; exec "$@"'

# Sends a request at once; awaiting gives its result or raises RpcError.
Ask = Callable[[str, object], Awaitable[Raw]]

# Output of the command below: some paths of at most 4096 bytes.
DESCRIPTION_BYTES: Final = 65_536
# Reads until the command is over; each returns with output or after READ_MS.
MAX_READS: Final = 20
READ_MS: Final = 1_000

# The parent of the shell is the server, and its directory is that of commands without one.
_DESCRIBE: Final = SYSTEM_FIRST + (
    'printf "%s\\0" "$(readlink "/proc/$PPID/cwd")" "$HOME" "${TMPDIR:-/tmp}" "${SHELL:-/bin/sh}" '
    '"$(uname -s | tr "[:upper:]" "[:lower:]")"'
)
_PROCESS: Final = ProcessId("exec-server-client-description")
_SHELL: Final = {"name": "sh", "path": "/bin/sh"}
_INHERIT_ALL: Final = {
    "inherit": "all",
    "ignoreDefaultExcludes": True,
    "exclude": [],
    "set": {},
    "includeOnly": [],
}


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


class FeatureProbe(msgspec.Struct, frozen=True):
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
    FeatureProbe("has_uri_paths", "fs/getMetadata", _ROOT_URI, _is_result),
    FeatureProbe(
        "has_uri_directories", process.START.name, _START | {"argv": ["/"]}, _is_directory
    ),
    FeatureProbe("has_file_sizes", "fs/getMetadata", _ROOT_URI, _has_size),
    FeatureProbe("has_file_sizes", "fs/getMetadata", _ROOT, _has_size),
    FeatureProbe(
        "refuses_symlinks", "fs/getMetadata", _ROOT_URI | {"followSymlinks": "?"}, _is_member
    ),
    FeatureProbe("confines_files", "fs/getMetadata", _ROOT_URI | _NO_POLICY, _is_sandbox),
    FeatureProbe("confines_files", "fs/getMetadata", _ROOT | _NO_POLICY, _is_sandbox),
    FeatureProbe("has_canonicalize", "fs/canonicalize", {}, _is_method),
    FeatureProbe("has_walk", "fs/walk", {}, _is_method),
    FeatureProbe("has_open_files", "fs/open", {}, _is_method),
    FeatureProbe("has_interrupt", process.SIGNAL.name, {}, _is_method),
    FeatureProbe("has_status", STATUS.name, None, _is_method),
    FeatureProbe("has_stdin_pipes", process.START.name, _START | {"pipeStdin": "?"}, _is_member),
    FeatureProbe(
        "has_environment_policies", process.START.name, _START | {"envPolicy": "?"}, _is_member
    ),
    FeatureProbe("confines_commands", process.START.name, _START | {"sandbox": "?"}, _is_member),
    FeatureProbe("repeats_writes_safely", process.WRITE.name, _WRITE, _is_member),
)


def judge(
    answers: Sequence[Answer], capabilities: Capabilities, *, has_sessions: bool
) -> ServerFeatures:
    """The features that the answers to PROBES show, in their order."""
    features: dict[str, bool] = {}
    for probe, answer in zip(PROBES, answers, strict=True):
        features[probe.feature] = features.get(probe.feature, False) or probe.shows(answer)
    return ServerFeatures(capabilities=capabilities, has_sessions=has_sessions, **features)


class StartParamsBuilder:
    """Builds the params of starts for one server.

    Where a server lacks a feature, a shell replaces it: `head` ends the input of a pipe, base64
    arguments replace a pipe, `stty` sets the size of a terminal, and a redirection merges stderr.
    Then a missing program is the exit code 127 and not an error of the start.
    """

    def __init__(self, paths: PathResolver, features: ServerFeatures) -> None:
        self._paths = paths
        self._features = features

    def build(
        self,
        argv: list[str],
        *,
        cwd: AnyPath | None,
        env: Mapping[str, AnyPath] | None,
        clean_env: bool,
        tty: bool,
        sandbox: AnySandbox | None,
        size: tuple[int, int] | None = None,
        stdin: bool = False,
        data: bytes | None = None,
        merge_stderr: bool = False,
        user: str | int | None = None,
        network_proxy: AnyNetworkProxy | None = None,
    ) -> StartParams:
        """The params of a start with an empty id, and with `data` in them if they open no pipe."""
        if not isinstance(stdin, bool):
            kind = type(stdin).__name__
            raise TypeError(f"stdin must be a bool, not {kind}: send data with write()")
        if size is not None and not tty:
            raise TypeError("size is the size of a terminal: it needs tty=True")
        capabilities = self._features.capabilities
        variables = self._defaults(tty=tty, clean_env=clean_env) | environment_dict(env)
        params = StartParams(
            process_id=ProcessId(""),
            argv=argv,
            cwd=self._paths.uri(self._paths.cwd if cwd is None else cwd, "cwd"),
            env_policy=None if clean_env else INHERIT_ALL,
            env=variables,
            tty=tty,
            pipe_stdin=data is not None or (stdin and not tty),
            sandbox=self._features.command_sandbox(sandbox_object(sandbox, self._paths, cwd)),
            enforce_managed_network=network_proxy is not None and sandbox is not None,
            network_proxy=network_proxy_object(network_proxy, capabilities, variables),
            tty_size=None if size is None else tty_size(size),
            report_pid=capabilities.process_pid,
            merge_stderr=merge_stderr and not tty,
            user=user_text(capabilities, user),
        )
        return _adapted(params, data, self._features)

    def _defaults(self, *, tty: bool, clean_env: bool) -> dict[str, str]:
        """Variables that the server does not set."""
        variables = {"TERM": DEFAULT_TERM} if tty else {}
        if not (clean_env or self._features.has_environment_policies):
            variables |= {"PATH": DEFAULT_PATH, "HOME": self._paths.home or "/"}
        return variables


def _adapted(params: StartParams, data: bytes | None, features: ServerFeatures) -> StartParams:
    """The params with a shell around the command for each feature that the server lacks."""
    capabilities = features.capabilities
    if params.merge_stderr and not capabilities.process_merge_stderr:
        params = _in_shell(params, _MERGED)
    if params.pipe_stdin and not features.has_stdin_pipes:
        if data is None:
            raise Unsupported("pipeStdin in process/start", _NO_PIPE)
        pieces = _pieces(data)
        params = _in_shell(params, _WITH_ARGUMENTS, str(len(pieces)), *pieces)
        params = replace(params, pipe_stdin=False)
    elif data is not None and not capabilities.process_close_stdin:
        params = _in_shell(params, _WITH_INPUT, str(len(data)))
    if (size := params.tty_size) is not None and not capabilities.process_resize:
        params = _in_shell(params, _WITH_SIZE, str(size.rows), str(size.columns))
        params = replace(params, tty_size=None)
    return params


def _in_shell(params: StartParams, script: str, *words: str) -> StartParams:
    """The command as the last arguments of a script, after `words`."""
    return replace(params, argv=["/bin/sh", "-c", script, "sh", *words, *params.argv])


def _pieces(data: bytes) -> list[str]:
    """Input as arguments; raises Unsupported if it is too large."""
    if len(data) > ARGUMENT_INPUT_BYTES:
        limit = f"input may have {ARGUMENT_INPUT_BYTES} bytes; write a file and redirect it instead"
        raise Unsupported("pipeStdin in process/start", limit)
    text = pybase64.b64encode_as_string(data)
    starts = range(0, len(text), ARGUMENT_CHARACTERS)
    return [text[start : start + ARGUMENT_CHARACTERS] for start in starts]


# All probes are sent at once, so they take one round trip.
async def discover(ask: Ask, *, has_sessions: bool) -> tuple[EnvironmentInfo, ServerFeatures]:
    """Ask for the environment and the features; raises RpcError or MalformedAnswer."""
    describing = ask(INFO.name, None)
    probing = [ask(probe.method, probe.params) for probe in PROBES]
    answers = [await _outcome(waiting) for waiting in probing]
    try:
        known = msgspec.json.decode(await describing, type=dict[str, Any])
        defaults: dict[str, Any] = {}
    except MethodNotFound:
        known, defaults = {}, {"shell": _SHELL}
    except msgspec.DecodeError as error:
        raise MalformedAnswer(f"environment: {error}") from None
    info = _environment(defaults, known)
    features = judge(answers, info.capabilities, has_sessions=has_sessions)
    if info.cwd is None or info.user_home_dir is None:
        info = _environment(defaults | await _describe(ask, features), known)
    return info, features


def _environment(defaults: dict[str, Any], known: dict[str, Any]) -> EnvironmentInfo:
    members = {name: value for name, value in known.items() if value is not None}
    return decode_environment(Raw(msgspec.json.encode(defaults | members)))


async def _outcome(waiting: Awaitable[Raw]) -> Answer:
    try:
        return await waiting
    except RpcError as error:
        return error


async def _describe(ask: Ask, features: ServerFeatures) -> dict[str, Any]:
    """The members of an environment that a shell knows; none if there is no shell."""
    params = {
        "processId": _PROCESS,
        "argv": ["/bin/sh", "-c", _DESCRIBE],
        "cwd": "file:///" if features.sends_uris else "/",
        "envPolicy": _INHERIT_ALL,
        "env": {},
        "tty": False,
        "arg0": None,
    }
    try:
        await ask(START.name, params)
        output = await _output(ask)
    except RpcError:
        return {}
    return parse_description(output)


async def _output(ask: Ask) -> bytes:
    """The output of the command, until it is over or takes too long."""
    output = bytearray()
    after = 0
    for _ in range(MAX_READS):
        params = ReadParams(_PROCESS, after, DESCRIPTION_BYTES, READ_MS)
        answer = decode_as(ReadResult, await ask(READ.name, params), f"answer to {READ.name}")
        for chunk in answer.chunks:
            output += chunk.chunk
            after = chunk.seq
        if len(output) > DESCRIPTION_BYTES:
            break
        if answer.closed and not answer.chunks:
            return bytes(output)
    await ask(TERMINATE.name, TerminateParams(_PROCESS))
    return b""


def parse_description(output: bytes) -> dict[str, Any]:
    """The members of an environment in the output of the command; none if it is incomplete."""
    fields = [field.decode(errors="surrogateescape") for field in output.split(b"\0")]
    if len(fields) != 6:
        return {}
    cwd, home, temporary, shell, system, _ = fields
    info: dict[str, Any] = {"platformOs": system}
    paths = {"cwd": cwd, "userHomeDir": home, "tempDir": temporary}
    info |= {name: PathUri.from_text(path).uri for name, path in paths.items() if path[:1] == "/"}
    if shell[:1] == "/":
        info["shell"] = {"name": shell.rpartition("/")[2], "path": shell}
    return info
