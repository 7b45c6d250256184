"""Requests on a control socket: each status becomes a return or an exception."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from exec_server.errors import InternalError
from exec_server.sandbox.runtime import messages
from exec_server.sandbox.runtime.launcher import Launcher, launch, request
from exec_server.sandbox.runtime.messages import BuildRequest, Status
from exec_server.sandbox.runtime.view import StaleView

_BUILD = BuildRequest("init", None, "restricted", "inherited")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_a_ready_process_returns(pair: tuple[socket.socket, socket.socket]) -> None:
    messages.send(pair[1], Status("ready"), [])
    request(pair[0], _BUILD, [])
    assert messages.receive(pair[1], BuildRequest) == (_BUILD, [])


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (Status("stale", "/ws was replaced"), StaleView, "keeps changing: /ws was replaced"),
        (Status("failed", "cannot x"), InternalError, "the sandbox could not be built: cannot x"),
    ],
)
def test_other_states_raise_their_reason(
    pair: tuple[socket.socket, socket.socket], status: Status, error: type[InternalError], text: str
) -> None:
    messages.send(pair[1], status, [])
    with pytest.raises(error, match=text) as raised:
        request(pair[0], _BUILD, [])
    assert type(raised.value) is error


def test_a_defect_of_a_process_is_logged_on_one_line(
    pair: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    messages.send(pair[1], Status("failed", "internal error", "Traceback\nKeyError: 'x'"), [])
    with pytest.raises(InternalError, match="could not be built: internal error"):
        request(pair[0], _BUILD, [])
    (record,) = caplog.records
    assert record.getMessage().startswith("sandbox: a confined process has failed: Traceback")
    assert "\n" not in record.getMessage()


def test_an_ended_process_is_a_failed_build(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    with pytest.raises(InternalError, match="the sandbox could not be built"):
        request(pair[0], _BUILD, [])


def test_descriptors_of_a_status_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    reader, writer = os.pipe()
    messages.send(pair[1], Status("ready"), [writer])
    os.close(writer)
    request(pair[0], _BUILD, [])
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_expected_descriptors_are_returned(pair: tuple[socket.socket, socket.socket]) -> None:
    reader, writer = os.pipe()
    messages.send(pair[1], Status("ready"), [writer])
    os.close(writer)
    (received,) = request(pair[0], _BUILD, [], expected=1)
    os.write(received, b"x")
    os.close(received)
    assert os.read(reader, 2) == b"x"
    messages.send(pair[1], Status("ready"), [reader])
    os.close(reader)
    with pytest.raises(InternalError, match="1 of 2 sockets"):
        request(pair[0], _BUILD, [], expected=2)


class _FakeLauncher(Launcher):
    """Responds on the control socket at once, like a process that it has forked."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def launch(self, namespaces: int) -> tuple[int, socket.socket]:
        control, self.kept = socket.socketpair()
        messages.send(self.kept, self._status, [])
        return 42, control


def test_a_launched_process_is_built() -> None:
    launcher = _FakeLauncher(Status("ready"))
    pid, control = launch(launcher, 0, _BUILD)
    with control, launcher.kept:
        assert pid == 42
        assert messages.receive(launcher.kept, BuildRequest) == (_BUILD, [])


def test_a_failed_launch_closes_its_socket() -> None:
    launcher = _FakeLauncher(Status("failed", "no"))
    with pytest.raises(InternalError, match="no"):
        launch(launcher, 0, _BUILD)
    with launcher.kept:
        messages.receive(launcher.kept, BuildRequest)
        with pytest.raises(messages.Disconnected):
            messages.receive(launcher.kept, BuildRequest)
