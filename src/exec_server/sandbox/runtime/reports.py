"""Reports of the init of a running command, on its control socket; both ends of them.

The exit is reported once every process of the command is dead and reaped, and before the init ends:
the kernel then takes some milliseconds to remove the namespaces, which no client has to wait for.
An init that is killed reports nothing; its exit code is then that of the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import Final

_REFUSED: Final = b"r"
_EXITED: Final = b"x"  # followed by one byte, the exit code
_READ_BYTES: Final = 16  # longer than all reports of one command


class Reporter:
    """The end of the init."""

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
