"""Refused calls of a confined command: reported by the kernel and answered by its init.

The filter of a command without network passes calls that would open a socket of the internet
to a listener. The caller waits in the kernel until the init has answered with EPERM, the error of
all refused calls. So it is known that the network was denied, whatever the command prints. Other
calls do not reach the listener, neither allowed nor refused ones: a refused `connect` to a unix
socket, for instance, is part of every look-up of a user name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
from typing import Final

from exec_server.host import libc
from exec_server.sandbox.runtime.reports import Reporter

# ioctls of the listener, equal on all architectures of the filter.
_RECEIVE: Final = 0xC050_2100
_SEND: Final = 0xC018_2101
_NOTIFICATION_BYTES: Final = 80
_ID: Final = struct.Struct("=Q")
_RESPONSE: Final = struct.Struct("=QqiI")  # id, value, negated error number, flags
_SIGNAL_BYTES: Final = 128


class RefusalListener:
    """Answers refused calls, and reports them.

    Only the first one is reported: a command gains nothing by repeating them.
    """

    def __init__(self, descriptor: int, reporter: Reporter) -> None:
        self._descriptor = descriptor
        self._reporter = reporter

    def wait_for(self, leader: int) -> int:
        """Answer calls and reap children until the leader has ended; returns its wait status."""
        children = libc.child_signal_descriptor()
        poll = select.poll()
        poll.register(children, select.POLLIN)
        poll.register(self._descriptor, select.POLLIN)
        while True:
            # Also before the first wait: the leader may have ended before SIGCHLD was blocked.
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == leader:
                    return ended[1]
            for descriptor, _ in poll.poll():
                if descriptor == self._descriptor:
                    self._answer()
                else:
                    os.read(children, _SIGNAL_BYTES)

    def _answer(self) -> None:
        """Refuse the call that has waited longest."""
        notification = bytearray(_NOTIFICATION_BYTES)
        try:
            fcntl.ioctl(self._descriptor, _RECEIVE, notification)
            # Before the answer, so that the server knows it before the command can end.
            self._reporter.report_refusal()
            (number,) = _ID.unpack_from(notification)
            fcntl.ioctl(self._descriptor, _SEND, _RESPONSE.pack(number, 0, -errno.EPERM, 0))
        except OSError:
            pass  # the caller was killed, or a signal has interrupted its call
