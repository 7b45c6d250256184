"""StdioDialer: starts a server as a program and speaks the protocol on its standard streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from exec_server.client.engine.session import CALLS_IN_FLIGHT, Closing
from exec_server.errors import ConnectFailed, StartupError, os_error_text, printable
from exec_server.host.interpreter import SECRET_NAMES
from exec_server.net.lines import SEND_HIGH_BYTES, SEND_LOW_BYTES, LineStream
from exec_server.net.stream import MessageStream, ReceiverFactory

log = logging.getLogger(__name__)

# Of a line on stderr. A longer line is passed on in pieces.
STDERR_BYTES = 8192
# Of the end of stderr that explains a program which does not serve: enough for a usage message or
# the end of a traceback. Longer lines are cut.
KEPT_LINES = 10
KEPT_CHARACTERS = 300
# Between SIGTERM and SIGKILL, as the reference; and for the kernel to end the program after that.
TERMINATE_SECONDS = 2.0
# The same for a program that has not answered the request to end its session.
SILENT_SECONDS = 0.1
KILL_SECONDS = 2.0
# A program that has closed its stdin may have written messages before, which are read first.
STDOUT_DRAIN_SECONDS = 1.0
# After the program's exit, for its last output. A pipe stays open longer only if a process outside
# the program's group has it.
PIPES_SECONDS = 0.5

_STDIN, _STDOUT, _STDERR = 0, 1, 2


class StdioDialer:
    """A program that speaks the protocol on stdin and stdout, one message per line.

    The program gets a session and process group of its own, and SIGTERM, then SIGKILL, when it is
    no longer needed. Windows has neither: there the program is ended at once, without its children.
    Without `env` it inherits our environment, except for our secrets.
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
        """`on_stderr` gets each line of stderr; without it the lines are logged."""
        if not argv:
            raise StartupError("no program was given")
        self._argv = list(argv)
        self._env = inherited_variables() if env is None else dict(env)
        self._cwd = cwd
        self._on_stderr = on_stderr or self._log_line
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        """The last lines of stderr that were logged."""
        self._programs: list[ProgramStream] = []

    async def open(self, make_receiver: ReceiverFactory) -> MessageStream:
        stream = ProgramStream(make_receiver, self._on_stderr)
        starting = asyncio.get_running_loop().subprocess_exec(
            lambda: stream, *self._argv, env=self._env, cwd=self._cwd, start_new_session=True
        )
        try:
            await starting
        except NotImplementedError:
            raise ConnectFailed(
                f"cannot start {self._argv[0]}: this event loop starts no programs; "
                "on Windows use asyncio.ProactorEventLoop, the default"
            ) from None
        except (OSError, ValueError) as error:
            text = os_error_text(error) if isinstance(error, OSError) else str(error)
            raise ConnectFailed(f"cannot start {self._argv[0]}: {text}") from None
        self._programs.append(stream)
        return stream

    def retry_delay(self, attempt: int) -> float:
        return 0.0

    async def close(self, closing: Closing) -> None:
        for program in self._programs:
            program.close(0, "no longer needed")
            if closing is Closing.SILENT:
                program.kill_after(SILENT_SECONDS)
        for program in self._programs:
            await program.wait_closed()

    def _log_line(self, line: str) -> None:
        if line.strip():
            self.last_lines.append(line[:KEPT_CHARACTERS])
        log.info("%s: %s", self._argv[0], printable(line))


class ProgramStream(LineStream, asyncio.SubprocessProtocol):
    """The link to a program; a MessageStream."""

    def __init__(self, make_receiver: ReceiverFactory, on_stderr: Callable[[str], None]) -> None:
        super().__init__()
        self._on_stderr = on_stderr
        self._transport: asyncio.SubprocessTransport = cast(asyncio.SubprocessTransport, None)
        self._stderr = bytearray()
        self._timers: list[asyncio.TimerHandle] = []
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._deliver_to(make_receiver(self))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)
        if self._can_write():
            self._stdin.set_write_buffer_limits(SEND_HIGH_BYTES, SEND_LOW_BYTES)

    def _can_write(self) -> bool:
        # The program may have closed its stdin or exited, which is reported in a moment.
        return not self._is_closed and not self._stdin.is_closing()

    @property
    def _stdin(self) -> asyncio.WriteTransport:
        return cast(asyncio.WriteTransport, self._transport.get_pipe_transport(_STDIN))

    @property
    def _stdout(self) -> asyncio.ReadTransport:
        return cast(asyncio.ReadTransport, self._transport.get_pipe_transport(_STDOUT))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == _STDERR:
            self._stderr_received(data)
        else:
            self._bytes_received(data)

    def _stderr_received(self, data: bytes) -> None:
        self._stderr += data
        while (end := self._stderr.find(b"\n", 0, STDERR_BYTES)) >= 0 or (
            len(self._stderr) >= STDERR_BYTES
        ):
            line = self._stderr[: end if end >= 0 else STDERR_BYTES]
            del self._stderr[: len(line) + (end >= 0)]
            self._on_stderr(line.decode(errors="replace").removesuffix("\r"))

    def _update_reading(self) -> None:
        if self._stdout.is_closing():
            return
        if self._inbox.is_flowing or self._is_closed:  # if closed, to notice the end of stdout
            self._stdout.resume_reading()
        else:
            self._stdout.pause_reading()

    def _write(self, data: bytes) -> None:
        if self._can_write():
            self._stdin.write(data)

    def unsent(self) -> int:
        unsent = self._stdin.get_write_buffer_size() if self._can_write() else 0
        return unsent + self._outbox.queued_bytes

    def probe(self) -> None:
        """No other connection can ask for the session of this program."""

    def close(self, code: int, reason: str) -> None:
        """End the link and the program; `wait_closed` waits for the latter."""
        if self._is_closed:
            return
        log.info("the link to a program ends: %s", reason)
        self._end()
        self._stdin.close()
        self._update_reading()
        if self._transport.get_returncode() is None:
            self._terminate()
            self.kill_after(TERMINATE_SECONDS)
        else:
            self.process_exited()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == _STDOUT:
            self.close(0, "stdout ended")
        elif fd == _STDIN:
            timer = self._loop.call_later(STDOUT_DRAIN_SECONDS, self.close, 0, "stdin is closed")
            self._timers.append(timer)
        elif self._stderr:
            self._on_stderr(self._stderr.decode(errors="replace"))

    def process_exited(self) -> None:
        if self._is_closed:
            self._kill_group()  # the processes left in it
            self._timers.append(self._loop.call_later(PIPES_SECONDS, self._transport.close))

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()
        self._transport.close()  # without this call asyncio warns that it was not closed
        if not self._exited.done():
            self._exited.set_result(None)

    def kill_after(self, seconds: float) -> None:
        """Kill the program unless it has ended by then."""
        self._timers.append(self._loop.call_later(seconds, self.kill))

    def kill(self) -> None:
        if self._transport.get_returncode() is None:
            self._kill_group()

    def _terminate(self) -> None:
        if sys.platform == "win32":
            self._transport.terminate()
        else:
            self._signal(signal.SIGTERM)

    def _kill_group(self) -> None:
        if sys.platform == "win32":
            with contextlib.suppress(ProcessLookupError):  # it has ended
                self._transport.kill()
        else:
            self._signal(signal.SIGKILL)

    if sys.platform != "win32":

        def _signal(self, number: int) -> None:
            try:
                os.killpg(self._transport.get_pid(), number)
            except (ProcessLookupError, PermissionError):
                pass  # the group is empty

    async def wait_closed(self) -> None:
        """Wait until the program has ended and its pipes are closed; bounded."""
        try:
            await asyncio.wait([self._exited], timeout=TERMINATE_SECONDS + KILL_SECONDS)
        finally:
            self.kill()


def inherited_variables() -> dict[str, str]:
    """Our environment without the secrets for registries; AWS programs need the AWS variables."""
    ours = {name for name in SECRET_NAMES if not name.startswith("AWS_")}
    return {name: value for name, value in os.environ.items() if name not in ours}
