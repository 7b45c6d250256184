"""The terminal in front of the user: raw mode, its size, and that it is sane afterwards.

Whoever makes a terminal raw may be killed with SIGKILL. Therefore a small process is forked
beforehand, the *keeper*: it waits for the end of a pipe that only we hold, and puts the modes
back if they are still ours by then. A shell that was faster is left alone. Through the pipe it is
told how to undo what a program has done to the screen, which no shell does.
"""

from __future__ import annotations

import os
import signal
import termios
from types import TracebackType
from typing import Any, Final, Self

_Modes = list[Any]  # as tcgetattr has it

_IFLAG, _OFLAG, _LFLAG, _CC = 0, 1, 3, 6
# Of what the keeper is told at a time; that is far less, so each piece is written as a whole.
_READ_BYTES: Final = 4096
# A shell that edits lines has switched this on for itself when it was faster.
_OWN_PASTES: Final = b"\x1b[?2004l"
_SPARED_BY_NOBODY: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def raw_modes(modes: _Modes) -> _Modes:
    """The modes in which every byte passes as it is, both ways."""
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
    """Rows and columns; None if the terminal does not know."""
    try:
        columns, rows = os.get_terminal_size(descriptor)
    except OSError:
        return None
    return (rows, columns) if rows and columns else None


class Terminal:
    """The terminal at a descriptor, for `with`: it leaves with the modes it came with.

    `screen` is the descriptor on which its programs are shown, if they are shown on it. Enter it
    before there is a thread: it forks.
    """

    def __init__(self, descriptor: int, *, screen: int | None = None) -> None:
        self._descriptor = descriptor
        self._screen = screen
        self._modes: _Modes = []
        self._keeper = 0
        self._pipe = -1
        self.is_raw = False

    def __enter__(self) -> Self:
        self._modes = termios.tcgetattr(self._descriptor)
        theirs, self._pipe = os.pipe()
        self._keeper = os.fork()
        if self._keeper == 0:
            _keep(self._descriptor, self._screen, theirs, self._modes)
        os.close(theirs)
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
            self.note_undo(b"")  # whoever ends in order has seen to the screen, or left it so
        os.close(self._pipe)
        os.waitpid(self._keeper, 0)

    def make_raw(self) -> None:
        """Let every key through; blocks in the background, as the kernel has it."""
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, raw_modes(self._modes))
        self.is_raw = True

    def note_undo(self, undo: bytes) -> None:
        """From now on this makes the screen what it was, should we be unable to; one line."""
        try:
            os.write(self._pipe, undo + b"\n")
        except OSError:
            pass  # somebody has stopped the keeper, or killed it

    def restore(self) -> None:
        """Undo `make_raw`; does no harm if there is nothing to undo, or no terminal any more."""
        if self.is_raw:
            self.is_raw = False
            _set_quietly(self._descriptor, self._modes)


def _set_quietly(descriptor: int, modes: _Modes) -> None:
    # From the background this would stop us, when all we want is to leave.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, modes)
    except termios.error:
        pass  # it has been closed
    finally:
        signal.signal(signal.SIGTTOU, before)


def _keep(descriptor: int, screen: int | None, pipe: int, modes: _Modes) -> None:
    """The life of the keeper; does not return."""
    try:
        # Out of the reach of what is sent to our group, and of the terminal's hanging up.
        os.setsid()
        for number in _SPARED_BY_NOBODY:
            signal.signal(number, signal.SIG_IGN)
        os.dup2(pipe, 3)
        os.dup2(descriptor, 0)
        if screen is not None:
            os.dup2(screen, 1)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        os.closerange(1 if screen is None else 2, 3)
        raw = raw_modes(modes)
        undo = _last_line(3)
        # From here on without delay: a shell is about to print its prompt.
        if termios.tcgetattr(0) == raw:
            termios.tcsetattr(0, termios.TCSANOW, modes)
        else:
            undo = undo.replace(_OWN_PASTES, b"")
        if screen is not None:
            os.write(1, undo)
    finally:
        os._exit(0)


def _last_line(pipe: int) -> bytes:
    """Wait for the end of what comes, and return the last line of it."""
    last = partial = b""
    while data := os.read(pipe, _READ_BYTES):
        *lines, partial = (partial + data).split(b"\n")
        if lines:
            last = lines[-1]
    return last
