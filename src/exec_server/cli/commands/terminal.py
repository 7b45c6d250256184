"""The user's terminal: raw mode, window size, and restoring its modes.

A client in raw mode may be killed with SIGKILL. So it first forks a small process, the
*restorer*, which waits for the end of a pipe that only the client holds, and then restores the
modes, unless they have changed: a shell may have restored them first. Through the pipe the
client sends the bytes that reset the screen modes of the running program, which no shell does.
"""

from __future__ import annotations

import os
import signal
import termios
from types import TracebackType
from typing import Any, Final, Self

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
    """Read to the end of the pipe and return the last complete line."""
    last = partial = b""
    while data := os.read(pipe, _READ_BYTES):
        *lines, partial = (partial + data).split(b"\n")
        if lines:
            last = lines[-1]
    return last
