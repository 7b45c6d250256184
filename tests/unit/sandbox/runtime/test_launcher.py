"""Launcher, against the kernel: forks, replacement of a broken launcher, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.client import scaled

from exec_server.errors import InternalError
from exec_server.process.descendants import children_of
from exec_server.sandbox.runtime import launcher as launcher_module
from exec_server.sandbox.runtime import messages
from exec_server.sandbox.runtime.launcher import Launcher
from exec_server.sandbox.runtime.messages import BuildRequest, Status

_BUILD = BuildRequest("init", None, "restricted", "inherited")
_CLONE_THREAD = 0x0001_0000  # the kernel refuses it without CLONE_SIGHAND
# A launcher that is killed between the fork and the response.
_DYING = """
import os, socket
from exec_server.sandbox.runtime import child, kernel
server = socket.socket(fileno=DESCRIPTOR)
_, (control,), _, _ = socket.recv_fds(server, 8, 1)
if kernel.fork_as_sibling(0) == 0:
    server.close()
    child.main(control, 0)
os._exit(1)
"""
_SILENT = "import signal; signal.pause()"


@pytest.fixture(autouse=True)
def no_children() -> Iterator[None]:
    """Ends and reaps the children of a test, which are those of a server otherwise."""
    before = set(children_of(os.getpid()))
    yield
    for pid in set(children_of(os.getpid())) - before:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    running = Launcher(os.environ)
    yield running
    running.close()


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + scaled(20)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _launcher_pid() -> int:
    """The launcher, once it forks on request."""
    named = launcher_module._NAME + b"\n"

    def find() -> list[int]:
        found = []
        for pid in children_of(os.getpid()):
            with open(f"/proc/{pid}/comm", "rb") as file:
                if file.read() == named:
                    found.append(pid)
        return found

    _until(find)
    (pid,) = find()
    return pid


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def _is_served(control: socket.socket) -> bool:
    """Whether a process is built at the other end of the socket."""
    messages.send(control, _BUILD, [])
    return messages.receive(control, Status) == (Status("ready"), [])


def test_a_forked_process_serves_its_socket_and_ends_with_it(launcher: Launcher) -> None:
    pid, control = launcher.launch(0)
    with control:
        assert pid in children_of(os.getpid())
        assert _is_served(control)
    assert os.waitpid(pid, 0) == (pid, 0)


def test_the_error_of_a_fork_is_raised_and_the_launcher_stays(launcher: Launcher) -> None:
    before = _launcher_pid()
    with pytest.raises(OSError, match="Invalid argument"):
        launcher.launch(_CLONE_THREAD)
    launcher.launch(0)[1].close()
    assert before in children_of(os.getpid())


def test_a_stopped_launcher_is_killed_and_replaced(launcher: Launcher) -> None:
    old = _launcher_pid()
    _stop(old)
    pid, control = launcher.launch(0)
    # Had the old launcher forked as well, both processes would read requests from the socket.
    assert os.waitpid(old, 0) == (old, signal.SIGKILL)
    children = children_of(os.getpid())
    with control:
        assert (len(children), pid in children) == (2, True)
        assert _is_served(control)


def test_a_killed_launcher_is_replaced(launcher: Launcher) -> None:
    os.kill(_launcher_pid(), signal.SIGKILL)
    with launcher.launch(0)[1] as control:
        assert _is_served(control)


def test_waiting_requests_share_the_replacement(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    start = launcher._start

    def count() -> socket.socket:
        started.append(1)
        return start()

    monkeypatch.setattr(launcher, "_start", count)
    _stop(_launcher_pid())
    with ThreadPoolExecutor(8) as threads:
        # The threads live until the end of the block: a launcher ends with the one that started it.
        for _, control in threads.map(launcher.launch, [0] * 8):
            with control:
                assert _is_served(control)
    assert started == [1]


def test_a_process_that_was_forked_before_the_launcher_died_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(launcher_module, "_CODE", _DYING)
        launcher = Launcher(os.environ)
    before = set(children_of(os.getpid()))  # the dying launcher among them
    pid, control = launcher.launch(0)
    with control:
        assert _is_served(control)
        others = set(children_of(os.getpid())) - before - {pid, _launcher_pid()}
        assert [os.waitpid(other, 0) for other in others] == [(other, 0) for other in others]
        assert len(others) == 1
    launcher.close()


def test_a_silent_launcher_is_replaced_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "CHECK_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(launcher_module, "_CODE", _SILENT)
        launcher = Launcher(os.environ)
        patch.setattr(launcher_module, "RESPONSE_SECONDS", 0.05)
        with pytest.raises(InternalError, match="the launcher does not respond"):
            launcher.launch(0)
    with launcher.launch(0)[1] as control:
        assert _is_served(control)
    launcher.close()


def test_an_interpreter_that_cannot_be_executed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        launcher = Launcher(os.environ)
        with pytest.raises(InternalError, match=r"^/nowhere/python cannot be executed: No such"):
            launcher.launch(0)
    with launcher.launch(0)[1] as control:
        assert _is_served(control)
    launcher.close()


def test_a_closed_launcher_ends_and_refuses(launcher: Launcher) -> None:
    pid = _launcher_pid()
    _stop(pid)
    launcher.close()
    assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)
    with pytest.raises(InternalError, match="the server is shutting down"):
        launcher.launch(0)
    assert pid not in children_of(os.getpid())


def test_closing_ends_the_wait_for_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(launcher_module, "_CODE", _SILENT)
    launcher = Launcher(os.environ)
    with ThreadPoolExecutor(1) as threads:
        launch = threads.submit(launcher.launch, 0)
        _until(launcher._lock.locked)
        launcher.close()
        with pytest.raises(InternalError, match="the server is shutting down"):
            launch.result(20)


def test_few_variables_reach_the_launcher() -> None:
    variables = {"PATH": "/bin", "TMPDIR": "/x", "HOME": "/root", "SECRET": "1"}
    launcher = Launcher(variables)
    with open(f"/proc/{_launcher_pid()}/environ", "rb") as file:
        found = dict(item.split(b"=", 1) for item in file.read().split(b"\0") if item)
    launcher.close()
    assert found == {b"PATH": b"/bin", b"TMPDIR": b"/x", b"PWD": b"/"}
