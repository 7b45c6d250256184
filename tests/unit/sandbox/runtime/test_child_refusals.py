"""RefusalListener, against the kernel."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable

import pytest
from tests.support.forked import in_own_process

from exec_server.sandbox.policy.seccomp import build_filter
from exec_server.sandbox.runtime import kernel
from exec_server.sandbox.runtime.child import RefusalListener
from exec_server.sandbox.runtime.messages import Reporter

pytestmark = pytest.mark.skipif(not kernel.is_supported_machine(), reason="there is no filter")


def _confine() -> tuple[RefusalListener, socket.socket]:
    """A listener for the rest of this process, and the end of the socket that gets its report."""
    control, server = socket.socketpair()
    server.setblocking(False)
    kernel.set_no_new_privileges()
    program = build_filter("restricted", machine=kernel.MACHINE, with_listener=True)
    descriptor = kernel.install_filter(program, with_listener=True)
    assert descriptor is not None
    return RefusalListener(descriptor, Reporter(control)), server


def _fork(action: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return child


def _report(server: socket.socket) -> bytes:
    try:
        return os.read(server.fileno(), 100)
    except BlockingIOError:
        return b""


def _refused(*arguments: int) -> None:
    with pytest.raises(PermissionError) as refused:
        socket.socket(*arguments)
    assert refused.value.errno == 1


@in_own_process
def test_sockets_of_the_internet_are_refused_and_reported_once() -> None:
    listener, server = _confine()

    def connect() -> None:
        for _ in range(500):
            _refused(socket.AF_INET)
            _refused(socket.AF_INET6, socket.SOCK_DGRAM)

    assert listener.wait_for(_fork(connect)) == 0
    assert _report(server) == b"r"


@in_own_process
def test_other_calls_are_not_reported() -> None:
    listener, server = _confine()

    def look_up() -> None:
        with socket.socket(socket.AF_UNIX) as unix, pytest.raises(PermissionError):
            unix.connect("/var/run/nscd/socket")
        _refused(socket.AF_NETLINK, socket.SOCK_RAW)
        for end in socket.socketpair():
            end.close()

    assert listener.wait_for(_fork(look_up)) == 0
    assert _report(server) == b""


@in_own_process
def test_the_report_precedes_the_answer() -> None:
    listener, server = _confine()

    def connect() -> None:
        _refused()
        assert _report(server) == b"r"

    assert listener.wait_for(_fork(connect)) == 0


@in_own_process
def test_a_caller_that_is_killed_does_not_stop_the_others() -> None:
    listener, server = _confine()
    waiting = _fork(_refused)
    assert select.select([listener._descriptor], [], [], 20)[0]
    os.kill(waiting, signal.SIGKILL)
    os.waitid(os.P_PID, waiting, os.WEXITED | os.WNOWAIT)
    assert listener.wait_for(_fork(_refused)) == 0
    assert _report(server) == b"r"


@in_own_process
def test_orphans_are_reaped_and_the_status_is_that_of_the_leader() -> None:
    listener, _ = _confine()
    for _ in range(50):
        os.posix_spawn("/bin/true", ["true"], {})
    # Not SIGTERM: an earlier test of this process may have left it blocked.
    assert listener.wait_for(_fork(lambda: os.kill(os.getpid(), signal.SIGKILL))) == signal.SIGKILL


@in_own_process
def test_a_leader_that_has_ended_is_not_waited_for() -> None:
    listener, _ = _confine()
    leader = _fork(lambda: None)
    os.waitid(os.P_PID, leader, os.WEXITED | os.WNOWAIT)
    assert listener.wait_for(leader) == 0


@in_own_process
def test_without_a_server_calls_are_refused_all_the_same() -> None:
    listener, server = _confine()
    server.close()
    assert listener.wait_for(_fork(_refused)) == 0
