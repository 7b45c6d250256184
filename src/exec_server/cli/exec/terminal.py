"""The user's side of a remote command: terminal modes, typed escapes, forwarded signals.

A second SIGINT within two seconds ends the client, and so does SIGHUP after a grace period, or a
signal that ends programs and whose receipt the server does not confirm in time.
Stopping the client also stops the command, unless the command has a terminal of its own.
"""

from __future__ import annotations

import asyncio
import enum
import os
import re
import signal
import termios
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self

from exec_server.cli.connection import unignored
from exec_server.client.process import Process
from exec_server.errors import ExecServerError, Unsupported

_Modes = list[Any]  # the list that tcgetattr returns

_IFLAG, _OFLAG, _LFLAG, _CC = 0, 1, 3, 6
# Messages to the restorer are far shorter than PIPE_BUF, so each write is atomic.
_READ_BYTES: Final = 4096
# The restorer closes the descriptors below this number, one by one on macOS, where the limit of
# the system may be 2^63.
MAX_DESCRIPTORS: Final = 65_536
# A line-editing shell that was faster than the restorer has switched bracketed paste on itself.
_BRACKETED_PASTE_OFF: Final = b"\x1b[?2004l"
_IGNORED_BY_RESTORER: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Longer input was pasted: typed keys arrive one by one, or a few at once on a busy machine.
MAX_TYPED_BYTES: Final = 8
# Bytes kept of an escape sequence cut in two; all sequences searched for are shorter.
MAX_PARTIAL_BYTES: Final = 64
# DEC private modes that a shell does not reset after a killed program: cursor keys, mouse and
# focus reports, the hidden cursor, alternate screens, bracketed paste.
_RESET_MODES: Final = frozenset(
    {1, 9, 25, 47, 66, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1015, 1016, 1047, 1049, 2004}
)
_CURSOR: Final = 25  # the only one that shells want to be set
_PRIVATE_MODE: Final = re.compile(rb"\x1b\[\?([0-9;]{1,48})([hl])")
# A second Ctrl-C within this time terminates the command.
DOUBLE_INTERRUPT_SECONDS: Final = 2.0
# Time for the command to react to SIGHUP before it is terminated.
HANGUP_GRACE_SECONDS: Final = 5.0
# Time for the server to confirm a signal that ends programs. Without a connection it cannot, and
# whoever has sent the signal does not wait for the hours in which it may come back.
CONFIRMATION_SECONDS: Final = 5.0
# Time for the server to stop the command before the client stops alone.
STOP_TIMEOUT_SECONDS: Final = 1.0
# Signals sent to a server that has not yet answered. Further ones are dropped: more would only
# repeat these.
MAX_PENDING: Final = 64
FORWARDED: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_FATAL: Final = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_ENDING: Final = _FATAL | {signal.SIGINT}


def raw_modes(modes: _Modes) -> _Modes:
    """The raw variant of terminal modes: all bytes pass unchanged in both directions."""
    raw = [*modes[:_CC], list(modes[_CC])]
    raw[_IFLAG] |= termios.IGNPAR
    raw[_IFLAG] &= ~(
        termios.BRKINT
        | termios.PARMRK
        | termios.ISTRIP
        | termios.INLCR
        | termios.IGNCR
        | termios.ICRNL
        | termios.IXON
        | termios.IXANY
        | termios.IXOFF
    )
    raw[_OFLAG] &= ~termios.OPOST
    raw[_LFLAG] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.ISIG | termios.IEXTEN)
    raw[_CC][termios.VMIN] = 1
    raw[_CC][termios.VTIME] = 0
    return raw


def window_size(descriptor: int) -> tuple[int, int] | None:
    """Rows and columns; None if the terminal does not know its size."""
    try:
        columns, rows = os.get_terminal_size(descriptor)
    except OSError:
        return None
    return (rows, columns) if rows and columns else None


class Terminal:
    """A context manager that restores the modes of the terminal at a descriptor.

    `screen` is the descriptor of the terminal that shows the program's output, if any. Enter the
    context before starting threads: it forks.
    """

    def __init__(self, descriptor: int, *, screen: int | None = None) -> None:
        self._descriptor = descriptor
        self._screen = screen
        self._modes: _Modes = []
        self._restorer_pid = 0
        self._pipe = -1
        self.is_raw = False

    def __enter__(self) -> Self:
        self._modes = termios.tcgetattr(self._descriptor)
        reader, self._pipe = os.pipe()
        self._restorer_pid = os.fork()
        if self._restorer_pid == 0:
            _run_restorer(self._descriptor, self._screen, reader, self._modes)
        os.close(reader)
        os.set_blocking(self._pipe, False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore()
        if error is None:
            self.set_reset_sequence(b"")  # after an orderly end the screen modes are intentional
        os.close(self._pipe)
        os.waitpid(self._restorer_pid, 0)

    def make_raw(self) -> None:
        """Switch to raw mode. A background process blocks here (SIGTTOU)."""
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, raw_modes(self._modes))
        self.is_raw = True

    def set_reset_sequence(self, sequence: bytes) -> None:
        """Replace the bytes that the restorer writes to the screen; they contain no newline."""
        try:
            os.write(self._pipe, sequence + b"\n")
        except OSError:
            pass  # the restorer was killed, or stopped until the pipe was full

    def restore(self) -> None:
        """Undo `make_raw`; harmless if the terminal is not raw or is gone."""
        if self.is_raw:
            self.is_raw = False
            _set_modes(self._descriptor, self._modes)


def _set_modes(descriptor: int, modes: _Modes) -> None:
    # SIGTTOU would stop a background process in tcsetattr, when it only wants to exit.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, modes)
    except termios.error:
        pass  # the terminal has been closed
    finally:
        signal.signal(signal.SIGTTOU, before)


def _run_restorer(descriptor: int, screen: int | None, pipe: int, modes: _Modes) -> None:
    """Main function of the restorer process; does not return."""
    try:
        # A session of its own: signals to the client's group and a hangup do not reach it.
        os.setsid()
        for number in _IGNORED_BY_RESTORER:
            signal.signal(number, signal.SIG_IGN)
        os.dup2(pipe, 3)
        os.dup2(descriptor, 0)
        if screen is not None:
            os.dup2(screen, 1)
        os.closerange(4, min(os.sysconf("SC_OPEN_MAX"), MAX_DESCRIPTORS))
        os.closerange(1 if screen is None else 2, 3)
        raw = raw_modes(modes)
        sequence = _read_last_line(3)
        # No delay from here on: a shell is about to print its prompt.
        if termios.tcgetattr(0) == raw:
            termios.tcsetattr(0, termios.TCSANOW, modes)
        else:
            sequence = sequence.replace(_BRACKETED_PASTE_OFF, b"")
        if screen is not None:
            os.write(1, sequence)
    finally:
        os._exit(0)


def _read_last_line(pipe: int) -> bytes:
    last = partial = b""
    while data := os.read(pipe, _READ_BYTES):
        *lines, partial = (partial + data).split(b"\n")
        if lines:
            last = lines[-1]
    return last


HELP_TEXT: Final = """\
 {0}.   {1}
 {0}^Z  suspend exec-server
 {0}?   show this help
 {0}{0}   send {0}
(only at the beginning of a line)
"""


class Escape(enum.Enum):
    TERMINATE = "."
    SUSPEND = "\x1a"
    HELP = "?"


class EscapeParser:
    """Finds escapes at the beginning of a line, as ssh does, but never in pasted text."""

    def __init__(self, character: str | None = "~") -> None:
        self._character = None if character is None else character.encode()
        self._is_line_start = True
        self._is_escape_pending = False

    def feed(self, data: bytes) -> list[bytes | Escape]:
        """Split input into bytes for the program and escapes, in order."""
        if self._character is None or (len(data) > MAX_TYPED_BYTES and not self._is_escape_pending):
            self._is_line_start = data.endswith((b"\r", b"\n"))
            return [data]
        items: list[bytes | Escape] = []
        for key in (data[at : at + 1] for at in range(len(data))):
            item = self._feed_key(key)
            if isinstance(item, bytes) and items and isinstance(items[-1], bytes):
                items[-1] += item
            elif item:
                items.append(item)
        return items

    def _feed_key(self, key: bytes) -> bytes | Escape:
        assert self._character is not None
        if self._is_escape_pending:
            self._is_escape_pending = False
            for escape in Escape:
                if key == escape.value.encode():
                    self._is_line_start = True
                    return escape
            self._is_line_start = key in b"\r\n"
            return key if key == self._character else self._character + key
        if self._is_line_start and key == self._character:
            self._is_escape_pending = True
            return b""
        self._is_line_start = key in b"\r\n"
        return key


class ScreenModes:
    """Tracks the DEC private modes that a program's output has changed.

    What output changes back may still be changed until it was written: until `settle`.
    """

    def __init__(self) -> None:
        self._changed: set[int] = set()
        self._leaving: set[int] = set()
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Inspect output on its way to the terminal."""
        if not self._partial and b"\x1b" not in data:
            return
        data = self._partial + data
        end = 0
        for match in _PRIVATE_MODE.finditer(data):
            end = match.end()
            self._set(match[1], is_on=match[2] == b"h")
        last = data.rfind(b"\x1b", max(end, len(data) - MAX_PARTIAL_BYTES))
        self._partial = data[last:] if last >= 0 else b""

    def _set(self, numbers: bytes, *, is_on: bool) -> None:
        for number in (int(text) for text in numbers.split(b";") if text):
            if number in _RESET_MODES and is_on != (number == _CURSOR):
                self._changed.add(number)
            elif number in self._changed:
                self._changed.remove(number)
                self._leaving.add(number)

    def settle(self) -> None:
        """Take what was inspected for written."""
        self._leaving.clear()

    def reset_sequence(self) -> bytes:
        """Bytes that reset the tracked modes, for a program that can no longer do so itself.

        They begin with the string terminator: a terminal takes all that follows the beginning of a
        cut-off device control string, such as a query of vim, for a part of it.
        """
        parts = [
            b"\x1b[?%d%c" % (number, b"h" if number == _CURSOR else b"l")
            for number in sorted(self._changed | self._leaving, reverse=True)
        ]
        if parts:
            parts.insert(0, b"\x1b\\")
            parts.append(b"\x1b>\x1b[0m")  # numeric keypad, default colours
        return b"".join(parts)


class SignalForwarder:
    """Forwards signals while it is installed; `abort` gets an exit code and a reason, or none."""

    def __init__(
        self,
        process: Process,
        terminal: Terminal | None,
        tasks: asyncio.TaskGroup,
        abort: Callable[[int, str], None],
    ) -> None:
        self._process = process
        self._terminal = terminal
        self._tasks = tasks
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._pending: set[asyncio.Task[None]] = set()
        self._hangup_timer: asyncio.TimerHandle | None = None
        self._last_interrupt = float("-inf")  # monotonic
        self._has_new_size = False
        self._is_resizing = False
        self._is_continued = False  # since the command is being stopped

    def install(self) -> None:
        for number in unignored(FORWARDED):
            self._loop.add_signal_handler(number, self._forward, number)
        for number in unignored((signal.SIGTSTP,)):
            self._loop.add_signal_handler(number, self._on_stop)
        self._loop.add_signal_handler(signal.SIGCONT, self._on_continue)
        if self._terminal is not None:
            self._loop.add_signal_handler(signal.SIGWINCH, self.resize)

    def remove(self) -> None:
        """Restore the default handlers and cancel everything pending."""
        for number in (*FORWARDED, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
            self._loop.remove_signal_handler(number)
        if self._hangup_timer is not None:
            self._hangup_timer.cancel()
        for task in self._pending:
            task.cancel()

    def _start_task(self, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                await work()
            except ExecServerError:
                pass  # process or session has ended, which the output reader reports

        if len(self._pending) >= MAX_PENDING:
            return
        task = self._tasks.create_task(run())
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    def _forward(self, number: signal.Signals) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            elapsed, self._last_interrupt = now - self._last_interrupt, now
            if elapsed < DOUBLE_INTERRUPT_SECONDS:
                self._abort(128 + number, "")
                return
        if number == signal.SIGHUP and self._hangup_timer is None:
            self._hangup_timer = self._loop.call_later(
                HANGUP_GRACE_SECONDS, self._abort, 128 + number, ""
            )
        send = self._send_ending if number in _ENDING else self._send
        self._start_task(lambda: send(number))

    async def _send_ending(self, number: signal.Signals) -> None:
        try:
            async with asyncio.timeout(CONFIRMATION_SECONDS):
                await self._send(number)
        except TimeoutError:
            self._abort(128 + number, f"the server has not confirmed {number.name}")

    async def _send(self, number: signal.Signals) -> None:
        try:
            await self._process.signal(number.name.removeprefix("SIG"))
        except Unsupported:
            if number == signal.SIGINT:
                await self._process.interrupt()
            elif number in _FATAL:
                await self._process.kill()

    def resize(self) -> None:
        """Send the size of the local terminal to the command, if the server supports it."""
        self._has_new_size = True
        if not self._is_resizing:
            self._start_task(self._resize)

    async def _resize(self) -> None:
        """Send one size at a time; only the latest size matters."""
        self._is_resizing = True
        try:
            while self._has_new_size:
                self._has_new_size = False
                if (size := window_size(0)) is not None:
                    await self._process.resize(*size)
        except Unsupported:
            pass  # the remote terminal keeps its size
        finally:
            self._is_resizing = False

    def _on_stop(self) -> None:
        if self._terminal is not None:
            self.suspend()
        else:
            self._start_task(self._stop_both)

    async def _stop_both(self) -> None:
        self._is_continued = False
        try:
            async with asyncio.timeout(STOP_TIMEOUT_SECONDS):
                # Not TSTP: the kernel discards it for an orphaned process group.
                await self._process.signal("STOP")
        except (TimeoutError, ExecServerError):
            pass  # only the client stops
        if not self._is_continued:  # SIGCONT may be faster than the server
            self.suspend()
        try:
            await self._process.signal("CONT")
        except Unsupported:
            pass

    def suspend(self) -> None:
        """Stop this process, as Ctrl-Z would; returns when it is continued."""
        if self._terminal is not None:
            self._terminal.restore()
        for number in unignored((signal.SIGTSTP,)):
            self._loop.remove_signal_handler(number)
            os.kill(os.getpid(), number)
            self._loop.add_signal_handler(number, self._on_stop)
        self._on_continue()

    def _on_continue(self) -> None:
        self._is_continued = True
        if self._terminal is not None:
            self._terminal.make_raw()
            self.resize()
