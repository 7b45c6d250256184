"""process/*: structs, calls and notifications."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal, NewType

import msgspec
import pybase64

from exec_server.protocol.decoding import (
    U64,
    Base64,
    Call,
    EmptyResult,
    NonZeroU16,
    Notice,
    Params,
    Prepare,
    Result,
    Usize,
    Uuid,
    decode_value,
)
from exec_server.protocol.network import ManagedNetwork, NetworkProxy
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Confinable, Denial, Sandbox

# The wire promises clients that no chunk is larger.
CHUNK_BYTES: Final = 8192
# Output of one binary message; the server sends as much as one read of a full pipe returns.
RUN_BYTES: Final = 1_048_576
# The processes whose output is sent at the same time; the text for others is made again.
CACHED_HEADS = 256

ProcessId = NewType("ProcessId", str)
Stream = Literal["stdout", "stderr", "pty"]
SandboxType = Literal["none", "linuxSeccomp"]
# Output is read and sent, or read and only retained, or not read, so that the process waits.
Flow = Literal["send", "retain", "pause"]
# The reference has the first; the others are an extension, with these exact names.
Signal = Literal[
    "interrupt",
    "SIGHUP",
    "SIGINT",
    "SIGQUIT",
    "SIGILL",
    "SIGTRAP",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGKILL",
    "SIGUSR1",
    "SIGSEGV",
    "SIGUSR2",
    "SIGPIPE",
    "SIGALRM",
    "SIGTERM",
    "SIGCHLD",
    "SIGCONT",
    "SIGSTOP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGXCPU",
    "SIGXFSZ",
    "SIGVTALRM",
    "SIGPROF",
    "SIGWINCH",
    "SIGIO",
    "SIGSYS",
]


# The limit that ended a process.
EndedBy = Literal["maxLifetime", "idleTimeout"]


class Metadata(Params, frozen=True):
    wire_name: ClassVar[str] = "ExecMetadata"
    omissible: ClassVar[tuple[str, ...]] = ("thread_id", "tool_call_id")
    thread_id: Uuid | None = None
    tool_call_id: str | None = None


class EnvPolicy(Params, frozen=True):
    wire_name: ClassVar[str] = "ExecEnvPolicy"
    inherit: Literal["core", "all", "none"]
    ignore_default_excludes: bool
    exclude: list[str]
    set: dict[str, str]
    include_only: list[str]


class SnapshotShell(Params, frozen=True):
    wire_name: ClassVar[str] = "ShellInfo"
    name: str
    path: str


class ShellSnapshot(Params, frozen=True):
    wire_name: ClassVar[str] = "ShellSnapshotRequest"
    scope_id: str
    shell: SnapshotShell


class TtySize(Params, frozen=True):
    rows: NonZeroU16
    columns: NonZeroU16


class Detach(Params, frozen=True):
    """Extension: the process outlives the session; see `protocol.detached`."""

    omissible: ClassVar[tuple[str, ...]] = ("name", "max_lifetime_ms", "idle_timeout_ms")
    name: str | None = None  # None: the server chooses one
    max_lifetime_ms: U64 | None = None
    idle_timeout_ms: U64 | None = None


class StartParams(Confinable, frozen=True, kw_only=True):
    wire_name: ClassVar[str] = "WireExecParams"
    named_only: ClassVar[tuple[str, ...]] = (
        *("tty_size", "detach", "report_pid", "merge_stderr", "user"),
    )
    process_id: ProcessId
    metadata: Metadata | None = None
    argv: list[str]
    cwd: PathUri
    env_policy: EnvPolicy | None = None
    shell_snapshot: ShellSnapshot | None = None
    env: dict[str, str]
    tty: bool
    pipe_stdin: bool = False
    arg0: str | None = None
    sandbox: Sandbox | None = None
    enforce_managed_network: bool = False
    managed_network: ManagedNetwork | None = None
    network_proxy: NetworkProxy | None = None
    tty_size: TtySize | None = None
    detach: Detach | None = None
    report_pid: bool = False
    merge_stderr: bool = False  # into stdout, by one pipe


class StartResult(Result, frozen=True, omit_defaults=True):
    process_id: ProcessId
    sandbox_type: SandboxType
    # Extension, encoded only if present: the name of a detached process.
    name: str | None = None
    pid: int | None = None  # an extension, only if it was asked for


class ReadParams(Params, frozen=True):
    process_id: ProcessId
    after_seq: U64 | None = None
    max_bytes: Usize | None = None
    wait_ms: U64 | None = None


class OutputChunk(Result, frozen=True, gc=False):
    seq: int
    stream: Stream
    chunk: bytes


class ReadResult(Result, frozen=True, omit_defaults=True):
    chunks: list[OutputChunk]
    next_seq: int
    exited: bool
    exit_code: int | None
    closed: bool
    failure: str | None
    sandbox_denied: bool
    # Extensions, encoded only if present. The first one is for people.
    sandbox_denial: Denial | None = None
    # If requested output is no longer kept: the first kept chunk, and the number of lost bytes
    # if that is known.
    first_seq: int | None = None
    lost_bytes: int | None = None


class WriteParams(Params, frozen=True):
    process_id: ProcessId
    chunk: Base64
    write_id: str | None = None


class WriteBinaryParams(Params, frozen=True):
    """WriteParams of a binary message; the data of the message is the chunk."""

    process_id: ProcessId
    write_id: str | None = None


class WriteResult(Result, frozen=True):
    status: Literal["accepted", "unknownProcess", "stdinClosed", "starting"]


class CloseStdinParams(Params, frozen=True):
    process_id: ProcessId


class ResizeParams(Params, frozen=True):
    process_id: ProcessId
    rows: NonZeroU16
    columns: NonZeroU16


class _InterruptParams(Params, frozen=True):
    """SignalParams of the reference."""

    wire_name: ClassVar[str] = "SignalParams"
    process_id: ProcessId
    signal: Literal["interrupt"]


def _prepare_signal(value: dict[str, Any], _: str | None) -> dict[str, Any]:
    """Check signals that are not upper case names as the reference does, with its texts."""
    name = value.get("signal")
    if not (isinstance(name, str) and name.isupper()):
        decode_value(_InterruptParams, value)
    return value


class SignalParams(Params, frozen=True):
    prepare: ClassVar[Prepare] = staticmethod(_prepare_signal)
    process_id: ProcessId
    signal: Signal


class TerminateParams(Params, frozen=True):
    process_id: ProcessId


class TerminateResult(Result, frozen=True):
    running: bool


class ProcessInfo(Result, frozen=True):
    """A process of a session, which runs or has ended; `closed` when its output has ended, too."""

    process_id: ProcessId
    argv: list[str]  # truncated if it is long
    tty: bool
    running: bool
    exit_code: int | None
    closed: bool
    next_seq: int
    pid: int | None = None


class ListResult(Result, frozen=True):
    processes: list[ProcessInfo]
    truncated: bool


class SetFlowParams(Params, frozen=True):
    process_id: ProcessId
    flow: Flow


class OutputHead(Result, frozen=True, gc=False):
    """OutputParams of a binary message; the data of the message is the output."""

    process_id: ProcessId
    seq: int
    stream: Stream


class OutputParams(Result, frozen=True, gc=False):
    """One chunk of output."""

    process_id: ProcessId
    seq: int
    stream: Stream
    chunk: bytes

    @property
    def last_seq(self) -> int:
        """The number of the last chunk."""
        return self.seq


class OutputRun(OutputParams, frozen=True, gc=False):
    """Chunks of one stream in a row, joined: all have CHUNK_BYTES except the last."""

    @property
    def last_seq(self) -> int:
        return self.seq + (len(self.chunk) - 1) // CHUNK_BYTES


class ExitedParams(Result, frozen=True, omit_defaults=True):
    process_id: ProcessId
    seq: int
    exit_code: int
    sandbox_denied: bool
    sandbox_denial: Denial | None = None


class ClosedParams(Result, frozen=True):
    process_id: ProcessId
    seq: int


@lru_cache(maxsize=CACHED_HEADS)
def _output_head(process_id: ProcessId, stream: Stream) -> bytes:
    """The text of an output notification without its chunk; its number is missing: a format."""
    name = msgspec.json.encode(process_id).replace(b"%", b"%%")
    head = b'{"method":"process/output","params":{"processId":%b' % name
    return b'%b,"seq":%%d,"stream":"%b"' % (head, stream.encode())


def output(process_id: ProcessId, seq: int, stream: Stream, data: bytes) -> OutputParams:
    """Output of any size but none as an event; `seq` is the number of its first chunk."""
    kind = OutputParams if len(data) <= CHUNK_BYTES else OutputRun
    return kind(process_id, seq, stream, data)


def output_chunks(event: OutputParams) -> Iterator[tuple[int, memoryview]]:
    """The chunks of a run with their numbers, not copied."""
    data = memoryview(event.chunk)
    for number, start in enumerate(range(0, len(data), CHUNK_BYTES), event.seq):
        yield number, data[start : start + CHUNK_BYTES]


def output_pieces(params: OutputParams) -> Iterator[tuple[bytes, bytes, bytes]]:
    """The pieces of each message `OUTPUT`: not joined, because every output byte passes here."""
    head = _output_head(params.process_id, params.stream) + b',"chunk":"'
    for seq, chunk in output_chunks(params):
        yield head % seq, pybase64.b64encode(chunk), b'"}}'


def output_text(params: OutputParams) -> bytes:
    """The JSON text of a binary message `OUTPUT`."""
    return _output_head(params.process_id, params.stream) % params.seq + b"}}"


START = Call("process/start", StartParams, StartResult)
READ = Call("process/read", ReadParams, ReadResult)
WRITE = Call("process/write", WriteParams, WriteResult)
WRITE_BINARY = Call("process/writeBinary", WriteBinaryParams, WriteResult)
CLOSE_STDIN = Call("process/closeStdin", CloseStdinParams, EmptyResult)
RESIZE = Call("process/resize", ResizeParams, EmptyResult)
SIGNAL = Call("process/signal", SignalParams, EmptyResult)
TERMINATE = Call("process/terminate", TerminateParams, TerminateResult)
LIST: Call[None, ListResult] = Call("process/list", None, ListResult)
SET_FLOW = Call("process/setFlow", SetFlowParams, EmptyResult)

OUTPUT = Notice("process/output", OutputParams)
EXITED = Notice("process/exited", ExitedParams)
CLOSED = Notice("process/closed", ClosedParams)


# The extension `processDetach`: a detached process belongs to the server and has a name, and a
# session attaches to it under a process id of its own.
class AttachParams(Params, frozen=True):
    omissible: ClassVar[tuple[str, ...]] = ("after_seq",)
    process_id: ProcessId  # chosen by the client, for this session
    name: str
    after_seq: U64 | None = None  # None: from the oldest retained output on


class AttachResult(Result, frozen=True):
    process_id: ProcessId
    after_seq: int  # the events after this one are sent; not above the last event
    argv: list[str]  # truncated if it is long
    tty: bool
    pipe_stdin: bool
    pid: int


class DetachParams(Params, frozen=True):
    process_id: ProcessId


class DetachedProcessInfo(Result, frozen=True):
    """A process that no session ends; `next_seq` is the number of its next event."""

    name: str
    argv: list[str]  # truncated if it is long
    tty: bool
    running: bool
    exit_code: int | None
    closed: bool
    next_seq: int
    pid: int
    started_at_ms: int
    attached: int  # the number of attachments
    max_lifetime_ms: int | None
    idle_timeout_ms: int | None
    ended_by: EndedBy | None


class ListDetachedResult(Result, frozen=True):
    processes: list[DetachedProcessInfo]


ATTACH = Call("process/attach", AttachParams, AttachResult)
DETACH = Call("process/detach", DetachParams, EmptyResult)
LIST_DETACHED: Call[None, ListDetachedResult] = Call(
    "process/listDetached", None, ListDetachedResult
)
