"""Stopped children, against the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from exec_server.sandbox.runtime.messages import is_stopped, resume_if_stopped

_CODE = "import sys; sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A child that ends with its stdin."""
    with subprocess.Popen([sys.executable, "-S", "-c", _CODE], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def test_a_stopped_child_is_found_each_time(child: subprocess.Popen[bytes]) -> None:
    pidfd = os.pidfd_open(child.pid)
    assert not is_stopped(pidfd)
    _stop(child.pid)
    assert [is_stopped(pidfd) for _ in range(2)] == [True, True]
    os.close(pidfd)


def test_a_stopped_child_is_resumed(child: subprocess.Popen[bytes]) -> None:
    resume_if_stopped(child.pid)
    for _ in range(2):
        _stop(child.pid)
        resume_if_stopped(child.pid)
        os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    child.communicate()
    assert child.returncode == 0


def test_other_processes_are_not_stopped(child: subprocess.Popen[bytes]) -> None:
    pidfd = os.pidfd_open(child.pid)
    child.kill()
    assert not is_stopped(pidfd)
    child.wait()
    assert not is_stopped(pidfd)
    os.close(pidfd)
    resume_if_stopped(child.pid)
    resume_if_stopped(os.getpid())
