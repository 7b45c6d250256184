"""Reports of an init, from one end of a socket to the other; and the end of a pid namespace."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest
from tests.support.forked import in_own_process

from exec_server.host import libc
from exec_server.sandbox.runtime import kernel
from exec_server.sandbox.runtime.messages import CommandReports, Reporter, end_namespace

Ends = tuple[Reporter, CommandReports, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends, and the socket of the init."""
    control, init = socket.socketpair()
    reports = CommandReports(control)
    yield Reporter(init), reports, init
    reports.close()
    init.close()


@pytest.mark.parametrize("code", [0, 1, 137, 255])
def test_the_exit_code_arrives(ends: Ends, code: int) -> None:
    reporter, reports, _ = ends
    assert reports.read() is None
    reporter.report_exit(code)
    assert reports.read() == code
    assert not reports.is_refused
    assert not reports.is_at_end


@pytest.mark.parametrize("reads_between", [False, True])
def test_a_refusal_is_reported_once_and_does_not_hide_the_exit(
    ends: Ends, reads_between: bool
) -> None:
    reporter, reports, init = ends
    for _ in range(100):
        reporter.report_refusal()
    if reads_between:
        assert reports.read() is None
        assert reports.is_refused
    reporter.report_exit(ord("r"))
    init.close()
    assert reports.read() == ord("r")
    assert reports.is_refused
    assert reports.read() is None
    assert reports.is_at_end


def test_an_init_that_ends_reports_nothing(ends: Ends) -> None:
    _, reports, init = ends
    init.close()
    assert reports.read() is None
    assert reports.is_at_end
    assert not reports.is_refused


@pytest.mark.parametrize("report", [b"x", b"?", b"xx"])
def test_only_a_whole_report_counts(ends: Ends, report: bytes) -> None:
    _, reports, init = ends
    init.send(report)
    assert reports.read() == (ord("x") if report == b"xx" else None)
    assert not reports.is_refused


def test_a_server_that_has_ended_is_no_error(ends: Ends) -> None:
    reporter, reports, _ = ends
    reports.close()
    reporter.report_refusal()
    reporter.report_exit(0)
    assert reports.read() is None


@in_own_process
def test_only_the_first_process_of_a_namespace_ends_it() -> None:
    other = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    assert not end_namespace()
    os.kill(other, 0)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace needs root")
@in_own_process
def test_the_end_of_a_namespace_is_the_end_of_all_its_processes() -> None:
    assert libc.LIBC.unshare(kernel.CLONE_NEWPID) == 0
    init = os.fork()
    if init == 0:
        # The second sleep is a grandchild, whose parent ends with it.
        shell = "trap '' TERM HUP INT; setsid sleep 60 & sleep 60"
        for _ in range(3):
            os.posix_spawn("/bin/sh", ["sh", "-c", shell], {"PATH": "/usr/bin:/bin"})
        ended = end_namespace()
        try:
            os.kill(-1, 0)
        except ProcessLookupError:
            os._exit(0 if ended and end_namespace() else 2)
        os._exit(1)
    assert os.waitpid(init, 0)[1] == 0
