"""The messages between the server and a confined process, and their framing.

Both directions are MessagePack of the structs below, each after its length. The server treats
messages of a confined process as untrusted data: typed, bounded, never evaluated.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import struct
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, TypeVar

import msgspec

from exec_server.errors import ExecServerError, printable
from exec_server.sandbox.policy.model import Glob, Network, Step, View
from exec_server.sandbox.runtime.view import ProcMount

log = logging.getLogger(__name__)

T = TypeVar("T")

# Reported without waiting, and reported again to the next caller.
_STOPPED: Final = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
_LENGTH: Final = struct.Struct("<I")
_PLAIN: Final = b"p"
_ESCAPED: Final = b"e"
# Longer than any request or response of a file operation: a message on the wire has 64 MiB.
MAX_MESSAGE: Final = 96 * 1_048_576
# Descriptors beside one message: the three standard streams, or sockets that listen for a command.
MAX_DESCRIPTORS: Final = 8
# Characters of a traceback in the log: enough for its last calls, which name the defect.
MAX_DEFECT: Final = 2000
# The server waits this long for a silent process before it looks whether the process is stopped.
CHECK_SECONDS: Final = 0.5
_TIMEVAL: Final = struct.Struct("@ll")
_REFUSED: Final = b"r"
_EXITED: Final = b"x"  # followed by one byte, the exit code
_READ_BYTES: Final = 16  # longer than all reports of one command


# The kernel answers a parent without /proc. A child that a debugger has stopped is not reported.
def is_stopped(pidfd: int) -> bool:
    """Whether the child with this pidfd is stopped; False for other processes."""
    return _is_stopped(os.P_PIDFD, pidfd)


def resume_if_stopped(pid: int) -> None:
    """Resume a child that is stopped. The caller knows that it has not been reaped."""
    if _is_stopped(os.P_PID, pid):
        with contextlib.suppress(OSError):  # ended meanwhile
            os.kill(pid, signal.SIGCONT)


def _is_stopped(kind: int, number: int) -> bool:
    try:
        return os.waitid(kind, number, _STOPPED) is not None
    except ChildProcessError:
        return False  # ended and reaped


class BuildRequest(msgspec.Struct, frozen=True):
    """Build a process: a file worker, the init of a later command, or a command of a user."""

    role: Literal["worker", "init", "user"]
    view: View | None  # None: no limit on files
    network: Network
    proc: ProcMount
    globs: tuple[Glob, ...] = ()  # for a worker
    terminal: str | None = None  # for an init with an empty root: the path on the host


class ExecRequest(msgspec.Struct, frozen=True):
    """Execute a command in a built init, on three descriptors; a fourth is the state of a shell."""

    argv: list[str]
    arg0: str | None
    cwd: str
    env: dict[str, str]
    terminal: str | None  # its path on the host
    placeholders: tuple[Step, ...]  # created after the view was built
    proxy_ports: tuple[int, ...] = ()  # to listen on; the sockets are beside the Status
    certificates: bytes | None = None  # the content of view.CERTIFICATES, if there is a view


class UserRequest(msgspec.Struct, frozen=True):
    """Execute a command as a user, on the three descriptors beside the message."""

    argv: list[str]
    arg0: str | None
    cwd: str
    env: dict[str, str]
    uid: int
    gid: int
    groups: tuple[int, ...]
    has_terminal: bool


class Status(msgspec.Struct, frozen=True):
    """The result of a request: ready, outdated by changes on the disk, or failed."""

    state: Literal["ready", "stale", "failed"]
    reason: str = ""
    defect: str = ""  # see `defect_text`


class Disconnected(ExecServerError):
    """The other end of the socket has closed, or sent an invalid message."""


def defect_text() -> str:
    """The end of the current traceback, for the server, whose log a confined process lacks."""
    return traceback.format_exc()[-MAX_DEFECT:]


def log_defect(text: str) -> None:
    """Log the traceback that a confined process has reported."""
    log.error("sandbox: a confined process has failed: %s", printable(text[-MAX_DEFECT:]))


def has_ended(control: socket.socket) -> bool:
    """Whether an idle process is gone, perhaps killed: it sends nothing without a request."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    return bool(poll.poll(0))


class ControlSocket(socket.socket):
    """The server's control socket of a child, which is resumed if stopped: nothing else would."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM, 0, control.detach())
        self._pid = pid
        # A call that has transferred nothing after this time fails with BlockingIOError. The kernel
        # measures the time, so that no call for a timer is needed.
        timeout = _TIMEVAL.pack(*divmod(round(CHECK_SECONDS * 1_000_000), 1_000_000))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.setsockopt(socket.SOL_SOCKET, option, timeout)

    def resume_child(self) -> None:
        """Resume the child if it is stopped, for instance to let it read the end of the socket."""
        try:
            self.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            # Its end is open, so the child has not ended, and its pid is not reused.
            resume_if_stopped(self._pid)
        except OSError:
            pass


def _persist(control: socket.socket, call: Callable[..., T], *arguments: object) -> T:
    while True:
        try:
            return call(*arguments)
        except BlockingIOError:
            if not isinstance(control, ControlSocket):
                raise
            control.resume_child()


def warm_up(sample: msgspec.Struct) -> None:
    """Encode and decode one message, so that msgspec caches the codecs of its type."""
    msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=type(sample))


def send(control: socket.socket, message: msgspec.Struct, descriptors: list[int]) -> None:
    """Send a message, with descriptors if there are any. Blocks, or raises TimeoutError."""
    try:
        data = _PLAIN + msgspec.msgpack.encode(message, enc_hook=str)
    except UnicodeEncodeError:
        # Names that are not UTF-8 are sent as one character for each byte.
        fields = msgspec.to_builtins(message)
        escaped = _map_strings(fields, lambda text: os.fsencode(text).decode("latin-1"))
        data = _ESCAPED + msgspec.msgpack.encode(escaped)
    send_bytes(control, data, descriptors)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            _map_strings(key, change): _map_strings(item, change) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def send_bytes(control: socket.socket, data: bytes, descriptors: list[int]) -> None:
    head = _LENGTH.pack(len(data))
    if descriptors:
        _persist(control, socket.send_fds, control, [head], descriptors)
    else:
        data = head + data
    # Not socket.send: the filter of confined processes refuses its system call.
    view = memoryview(data)
    while view:
        view = view[_persist(control, os.write, control.fileno(), view) :]


def receive(control: socket.socket, message_type: type[T]) -> tuple[T, list[int]]:
    """The next message and its descriptors, which the caller closes."""
    data, descriptors = receive_bytes(control)
    try:
        if data[:1] == _PLAIN:
            return msgspec.msgpack.decode(memoryview(data)[1:], type=message_type), descriptors
        escaped = msgspec.msgpack.decode(memoryview(data)[1:])
        value = _map_strings(escaped, lambda text: os.fsdecode(text.encode("latin-1")))
        return msgspec.convert(value, message_type), descriptors
    except (msgspec.MsgspecError, UnicodeError) as error:
        close_all(descriptors)
        raise Disconnected(f"invalid message: {error}") from None


def receive_bytes(control: socket.socket) -> tuple[bytes, list[int]]:
    head, descriptors, flags, _ = _persist(
        control, socket.recv_fds, control, _LENGTH.size, MAX_DESCRIPTORS
    )
    try:
        head += _read_exactly(control, _LENGTH.size - len(head)) if head else b""
        if len(head) != _LENGTH.size or flags & socket.MSG_CTRUNC:
            raise Disconnected("the process has ended")
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE:
            raise Disconnected("the message is too long")
        return _read_exactly(control, length), descriptors
    except BaseException:
        close_all(descriptors)
        raise


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read_exactly(control: socket.socket, size: int) -> bytes:
    pieces = []
    while size:
        piece = _persist(control, os.read, control.fileno(), min(size, 1 << 20))
        if not piece:
            raise Disconnected("the process has ended")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


class Reporter:
    """The end of the init.

    The exit is reported once every process of the command is dead and reaped, and before the init
    ends: the kernel then takes some milliseconds to remove the namespaces. A killed init reports
    nothing.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._has_refused = False

    def report_refusal(self) -> None:
        """A call was refused; only the first one is reported."""
        if not self._has_refused:
            self._has_refused = True
            self._write(_REFUSED)

    def report_exit(self, code: int) -> None:
        """The command has ended, with every process that it has started."""
        self._write(_EXITED + bytes([code]))

    def _write(self, report: bytes) -> None:
        with contextlib.suppress(OSError):  # the server has closed its end
            os.write(self._control.fileno(), report)  # socket.send is refused by the filter


def end_namespace() -> bool:
    """Kill and reap all other processes of a pid namespace; False if that is not possible.

    Only for the first process of a namespace: the kernel gives it all orphans, and a process that
    is being killed cannot start another one.
    """
    if os.getpid() != 1:
        return False
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass  # there are none
    except PermissionError:
        return False
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return True


class CommandReports:
    """The end of the server. It does not block."""

    def __init__(self, control: socket.socket) -> None:
        self.is_refused = False  # whether a refused call was reported
        self.is_at_end = False  # the init has ended
        self._control = control

    def fileno(self) -> int:
        return self._control.fileno()

    def read(self) -> int | None:
        """Read the available reports; returns the exit code if it is among them."""
        try:
            data = self._control.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self.is_at_end = not data
        self.is_refused = self.is_refused or data.startswith(_REFUSED)
        _, exited, code = data.partition(_EXITED)
        return code[0] if exited and code else None

    def close(self) -> None:
        self._control.close()
