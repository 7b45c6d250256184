"""The terminal in front of the user: raw mode, its size, and that it is sane afterwards.

Whoever makes a terminal raw may be killed with SIGKILL. Therefore a small process is forked
beforehand, the *keeper*: it waits for the end of a pipe that only we hold, and puts the modes
back if they are still ours by then. A shell that was faster is left alone.
"""

from __future__ import annotations

import os
import signal
import termios
from types import TracebackType
from typing import Any, Final, Self

_Modes = list[Any]  # as tcgetattr has it

_IFLAG, _OFLAG, _LFLAG, _CC = 0, 1, 3, 6
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

    Enter it before there is a thread: it forks.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._modes: _Modes = []
        self._keeper = 0
        self._pipe = -1
        self.is_raw = False

    def __enter__(self) -> Self:
        self._modes = termios.tcgetattr(self._descriptor)
        theirs, self._pipe = os.pipe()
        self._keeper = os.fork()
        if self._keeper == 0:
            _keep(self._descriptor, theirs, self._modes)
        os.close(theirs)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore()
        os.close(self._pipe)
        os.waitpid(self._keeper, 0)

    def make_raw(self) -> None:
        """Let every key through; blocks in the background, as the kernel has it."""
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, raw_modes(self._modes))
        self.is_raw = True

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


def _keep(descriptor: int, pipe: int, modes: _Modes) -> None:
    """The life of the keeper; does not return."""
    try:
        # Out of the reach of what is sent to our group, and of the terminal's hanging up.
        os.setsid()
        for number in _SPARED_BY_NOBODY:
            signal.signal(number, signal.SIG_IGN)
        os.dup2(pipe, 3)
        os.dup2(descriptor, 0)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        os.closerange(1, 3)
        while os.read(3, 1):
            pass
        if termios.tcgetattr(0) == raw_modes(modes):
            termios.tcsetattr(0, termios.TCSANOW, modes)
    finally:
        os._exit(0)
