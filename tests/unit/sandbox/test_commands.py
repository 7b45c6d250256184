"""Commands of other users: the exchange with the process that executes one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exec_server.errors import InternalError
from exec_server.host.libc import User
from exec_server.process import tags
from exec_server.process.command import Command
from exec_server.process.orphans import Owner
from exec_server.sandbox import commands
from exec_server.sandbox.commands import UserCommands
from exec_server.sandbox.runtime import messages
from exec_server.sandbox.runtime.messages import ControlSocket, Status, UserRequest

USER = User("name", 7, 8, (8, 9), "/home", "/bin/sh")
Answer = Callable[[socket.socket], None]


def _spawn(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> UserRequest:
    """Start a command whose process is a thread of the test; returns the request it got."""
    requests: list[UserRequest] = []

    def child(control: socket.socket) -> None:
        with control:
            request, descriptors = messages.receive(control, UserRequest)
            requests.append(request)
            for descriptor in descriptors:
                os.close(descriptor)
            answer(control)

    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=child, args=(theirs,), daemon=True)
    thread.start()
    control = ControlSocket(os.getpid(), ours)
    monkeypatch.setattr(commands, "launch", lambda *_: (1234, control))
    monkeypatch.setattr(tags, "tag_running", lambda *_: None)
    command = Command(["a", "b"], "/", {"X": "y"}, pipe_stdin=True)
    try:
        made = UserCommands(cast(Any, SimpleNamespace(launcher=None)))
        started = made.spawn(USER, command, Owner(None))
        assert started.pid == 1234
        for descriptor in (started.stdin, *(number for _, number in started.outputs)):
            assert descriptor is not None
            os.close(descriptor)
    finally:
        control.close()
        thread.join(60)
    return requests[0]


def _say(*states: Status) -> Answer:
    def answer(control: socket.socket) -> None:
        for status in states:
            messages.send(control, status, [])

    return answer


def test_a_command_runs_when_the_socket_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    request = _spawn(monkeypatch, _say(Status("ready")))
    assert request == UserRequest(["a", "b"], None, "/", {"X": "y"}, 7, 8, (8, 9), False)


@pytest.mark.parametrize("before", [(), (Status("ready"),)])
def test_the_error_of_the_kernel_is_raised(
    monkeypatch: pytest.MonkeyPatch, before: tuple[Status, ...]
) -> None:
    with pytest.raises(FileNotFoundError):
        _spawn(monkeypatch, _say(*before, Status("failed", "2")))


def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InternalError, match="could not be started"):
        _spawn(monkeypatch, _say())
