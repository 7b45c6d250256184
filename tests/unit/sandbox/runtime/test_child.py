"""The main function of a confined process, as far as it needs no namespaces."""

from __future__ import annotations

import os
import socket

from exec_server.sandbox.runtime import child, messages
from exec_server.sandbox.runtime.messages import BuildRequest


def test_a_killed_server_is_no_error() -> None:
    """The server is gone when the process reports that it is built."""
    ours, theirs = socket.socketpair()
    messages.send(ours, BuildRequest("init", None, "restricted", "inherited"), [])
    ours.close()
    pid = os.fork()
    if pid == 0:
        child.main(theirs.detach(), 0)
    theirs.close()
    assert os.waitpid(pid, 0)[1] == 0
