"""A server that is a program: started here, spoken to on its standard streams, ended with us."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import cast

from exec_server.client.dialers import CALLS_IN_FLIGHT, Receiver
from exec_server.errors import ConnectFailed, StartupError, os_error_text
from exec_server.registry.secrets import SECRET_NAMES
from exec_server.rpc.stream import MessageReceiver, MessageStream

log = logging.getLogger(__name__)

# The limit of the protocol, without the line end. A longer line ends the link.
LINE_BYTES = 64 * 1_048_576
# Unsent bytes at which the session stops producing, and at which it goes on.
SEND_HIGH_BYTES = 524_288
SEND_LOW_BYTES = 131_072
# Of a line on stderr. What is longer is passed on in pieces.
STDERR_BYTES = 8192
# Between SIGTERM and SIGKILL, as the reference; and for the kernel to do its part after that.
TERMINATE_SECONDS = 2.0
KILL_SECONDS = 2.0
# A program that reads no more may still have said something before.
LAST_WORDS_SECONDS = 1.0
# After its end, for what it has said last; longer only if somebody outside its group has its pipes.
PIPES_SECONDS = 0.5

_STDIN, _STDOUT, _STDERR = 0, 1, 2


class StdioDialer:
    """A program that speaks the protocol on stdin and stdout, one message per line.

    It gets a session and process group of its own, and SIGTERM, then SIGKILL, when it is no
    longer needed. Without `env` it inherits ours, except for our own secrets.
    """

    can_reconnect = False
    calls_in_flight = CALLS_IN_FLIGHT

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        *,
        on_stderr: Callable[[str], None] | None = None,
    ) -> None:
        """`on_stderr` gets each line of stderr, which is logged otherwise."""
        if not argv:
            raise StartupError("no program was given")
        self._argv = list(argv)
        self._env = _inherited() if env is None else dict(env)
        self._cwd = cwd
        self._on_stderr = on_stderr or self._log_line
        self._programs: list[ProgramStream] = []

    async def open(self, receiver: Receiver) -> MessageStream:
        stream = ProgramStream(receiver, self._on_stderr)
        starting = asyncio.get_running_loop().subprocess_exec(
            lambda: stream,
            *self._argv,
            env=self._env,
            cwd=self._cwd,
            start_new_session=True,
        )
        try:
            await starting
        except (OSError, ValueError) as error:
            text = os_error_text(error) if isinstance(error, OSError) else str(error)
            raise ConnectFailed(f"cannot start {self._argv[0]}: {text}") from None
        self._programs.append(stream)
        return stream

    def retry_delay(self, attempt: int) -> float:
        return 0.0

    async def close(self) -> None:
        for program in self._programs:
            program.close(0, "no longer needed")
        for program in self._programs:
            await program.wait_gone()

    def _log_line(self, line: str) -> None:
        log.info("%s: %s", self._argv[0], line)


class ProgramStream(asyncio.SubprocessProtocol):
    """The link to a program; a MessageStream."""

    is_strict = False
    origin = "JSON-RPC message from exec-server stdio"

    def __init__(self, receiver: Receiver, on_stderr: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_stderr = on_stderr
        self._transport: asyncio.SubprocessTransport = cast(asyncio.SubprocessTransport, None)
        self._partial = bytearray()
        self._searched = 0
        self._lines: list[bytes] = []  # whole lines that nobody wants yet
        self._stderr = bytearray()
        self._receiving = True
        self._ended = False
        self._timers: list[asyncio.TimerHandle] = []
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._receiver: MessageReceiver = receiver(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)
        if self._can_write():
            self._stdin.set_write_buffer_limits(SEND_HIGH_BYTES, SEND_LOW_BYTES)

    def _can_write(self) -> bool:
        # The program may have closed it, or ended, and we shall be told in a moment.
        return not self._ended and not self._stdin.is_closing()

    @property
    def _stdin(self) -> asyncio.WriteTransport:
        return cast(asyncio.WriteTransport, self._transport.get_pipe_transport(_STDIN))

    @property
    def _stdout(self) -> asyncio.ReadTransport:
        return cast(asyncio.ReadTransport, self._transport.get_pipe_transport(_STDOUT))

    # ---- receiving --------------------------------------------------------------------

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == _STDERR:
            self._take_stderr(data)
        elif not self._ended:
            self._take_stdout(data)

    def _take_stdout(self, data: bytes) -> None:
        self._partial += data
        if self._partial.find(b"\n", self._searched) < 0:
            self._searched = len(self._partial)
            if self._searched > LINE_BYTES + 1:
                self.close(0, "line is too long")
            return
        *lines, rest = bytes(self._partial).split(b"\n")
        self._partial = bytearray(rest)
        self._searched = len(rest)
        self._lines += lines
        self._deliver()

    def _deliver(self) -> None:
        lines, self._lines = self._lines, []
        for number, line in enumerate(lines):
            if self._ended:
                return
            if not self._receiving:
                self._lines = lines[number:]
                return
            if line.strip():
                self._receiver.message_received(line)

    def _take_stderr(self, data: bytes) -> None:
        self._stderr += data
        while (end := self._stderr.find(b"\n", 0, STDERR_BYTES)) >= 0 or (
            len(self._stderr) >= STDERR_BYTES
        ):
            line = self._stderr[: end if end >= 0 else STDERR_BYTES]
            del self._stderr[: len(line) + (end >= 0)]
            self._on_stderr(line.decode(errors="replace"))

    def hold(self, *, receiving: bool) -> None:
        if receiving == self._receiving or self._ended:
            return
        self._receiving = receiving
        if receiving:
            self._loop.call_soon(self._continue)
        elif not self._stdout.is_closing():
            self._stdout.pause_reading()

    def _continue(self) -> None:
        if self._receiving and not self._ended:
            self._deliver()
        # Only when all is handed over: each read brings more than a receiver may take.
        if self._receiving and not self._ended and not self._stdout.is_closing():
            self._stdout.resume_reading()

    # ---- sending ----------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        if self._can_write():
            self._stdin.write(message + b"\n")

    async def send_parts(self, parts: AsyncIterator[bytes], size: int) -> None:
        """As a whole: a client makes no message that is better sent in parts."""
        self.send(b"".join([part async for part in parts]))

    def unsent(self) -> int:
        return self._stdin.get_write_buffer_size() if self._can_write() else 0

    def pause_writing(self) -> None:
        if not self._ended:
            self._receiver.sending_slow()

    def resume_writing(self) -> None:
        if not self._ended:
            self._receiver.sending_ready()

    # ---- the end ----------------------------------------------------------------------

    def probe(self) -> None:
        """Nobody else can want the session of a program that is ours alone."""

    def close(self, code: int, reason: str) -> None:
        """End the link and the program; `wait_gone` waits for the latter."""
        if self._ended:
            return
        log.info("the link to a program ends: %s", reason)
        self._ended = True
        self._lines.clear()
        self._partial.clear()
        self._loop.call_soon(self._receiver.link_lost)
        self._stdin.close()
        if not self._receiving and not self._stdout.is_closing():
            self._stdout.resume_reading()  # to notice its end
        if self._transport.get_returncode() is None:
            self._signal(signal.SIGTERM)
            self._timers.append(self._loop.call_later(TERMINATE_SECONDS, self.kill))
        else:
            self.process_exited()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == _STDOUT:
            self.close(0, "stdout ended")
        elif fd == _STDIN:
            last_words = self._loop.call_later(LAST_WORDS_SECONDS, self.close, 0, "stdin is closed")
            self._timers.append(last_words)
        elif self._stderr:
            self._on_stderr(self._stderr.decode(errors="replace"))

    def process_exited(self) -> None:
        if self._ended:
            self._signal(signal.SIGKILL)  # whatever it has left behind in its group
            self._timers.append(self._loop.call_later(PIPES_SECONDS, self._transport.close))

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()
        self._transport.close()  # it is, but asyncio would complain
        if not self._gone.done():
            self._gone.set_result(None)

    def kill(self) -> None:
        if self._transport.get_returncode() is None:
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._transport.get_pid(), number)
        except (ProcessLookupError, PermissionError):
            pass  # nobody is left

    async def wait_gone(self) -> None:
        """Wait until the program has ended and its pipes are closed; bounded."""
        try:
            await asyncio.wait([self._gone], timeout=TERMINATE_SECONDS + KILL_SECONDS)
        finally:
            self.kill()


def _inherited() -> dict[str, str]:
    """Our environment without what proves to registries who we are. AWS programs need theirs."""
    ours = {name for name in SECRET_NAMES if not name.startswith("AWS_")}
    return {name: value for name, value in os.environ.items() if name not in ours}
