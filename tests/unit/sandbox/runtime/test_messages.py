"""Framing of messages between the server and a confined process."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from exec_server.sandbox.policy.model import Step, View
from exec_server.sandbox.runtime import messages
from exec_server.sandbox.runtime.messages import (
    BuildRequest,
    ControlSocket,
    Disconnected,
    ExecRequest,
    Status,
    receive,
    send,
)

Pair = tuple[socket.socket, socket.socket]

_STEP = Step("write", "/ws", True, 1, 2)
_VIEW = View(False, (_STEP,), (), (), ())


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.parametrize(
    "message",
    [
        BuildRequest("init", _VIEW, "restricted", "private", terminal="/dev/pts/1"),
        BuildRequest("worker", None, "enabled", "none"),
        ExecRequest(["ls", "-l"], "arg0", "/ws", {"A": "b"}, None, (_STEP,)),
        Status("failed", "reason"),
    ],
)
def test_a_message_arrives_as_it_was_sent(pair: Pair, message: msgspec.Struct) -> None:
    messages.warm_up(message)
    send(pair[0], message, [])
    assert receive(pair[1], type(message)) == (message, [])


def test_names_that_are_not_utf8_arrive_unchanged(pair: Pair) -> None:
    name = os.fsdecode(b"/ws/\xff\xc3\xa9")
    message = ExecRequest([name], None, name, {name: "é"}, None, ())
    send(pair[0], message, [])
    assert receive(pair[1], ExecRequest) == (message, [])


def test_descriptors_arrive_with_their_message(pair: Pair) -> None:
    reader, writer = os.pipe()
    send(pair[0], Status("ready"), [writer])
    send(pair[0], Status("stale"), [])
    os.close(writer)
    status, (received,) = receive(pair[1], Status)
    os.write(received, b"x")
    os.close(received)
    assert (status, os.read(reader, 9)) == (Status("ready"), b"x")
    os.close(reader)
    assert receive(pair[1], Status) == (Status("stale"), [])


def test_an_end_between_messages_and_inside_one_is_reported(pair: Pair) -> None:
    pair[0].send(struct.pack("<I", 100) + b"p")
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(Disconnected, match="ended"):
        receive(pair[1], Status)
    with pytest.raises(Disconnected, match="ended"):
        receive(pair[1], Status)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<I", messages.MAX_MESSAGE + 1), "too long"),
        (struct.pack("<I", 3) + b"p\xc1\xc1", "invalid message"),
        (struct.pack("<I", 6) + b"p\xa4text", "invalid message"),
        (struct.pack("<I", 5) + b"e\xa3\xe2\x82\xac", "invalid message"),
    ],
    ids=["too long", "not MessagePack", "another type", "not escaped"],
)
def test_an_invalid_message_is_refused(pair: Pair, data: bytes, reason: str) -> None:
    pair[0].send(data)
    with pytest.raises(Disconnected, match=reason):
        receive(pair[1], Status)


def test_descriptors_of_an_invalid_message_are_closed(pair: Pair) -> None:
    reader, writer = os.pipe()
    for data in (struct.pack("<I", 2) + b"p\xc1", struct.pack("<I", messages.MAX_MESSAGE + 1)):
        socket.send_fds(pair[0], [data], [writer])
        with pytest.raises(Disconnected):
            receive(pair[1], Status)
    os.close(writer)
    assert os.read(reader, 1) == b""  # no other descriptor of the writing end is open
    os.close(reader)


def test_more_descriptors_than_allowed_end_the_connection(pair: Pair) -> None:
    with open(os.devnull, "rb") as null:
        send(pair[0], Status("ready"), [null.fileno()] * (messages.MAX_DESCRIPTORS + 1))
    with pytest.raises(Disconnected):
        receive(pair[1], Status)


def test_the_end_of_an_idle_process_is_noticed(pair: Pair) -> None:
    assert not messages.has_ended(pair[0])
    pair[1].close()
    assert messages.has_ended(pair[0])


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A stopped child."""
    monkeypatch.setattr(messages, "CHECK_SECONDS", 0.01)
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        yield child.pid
        child.kill()


def _wait_until_resumed(child: int) -> None:
    os.waitid(os.P_PID, child, os.WCONTINUED)


def test_a_stopped_child_that_does_not_respond_is_resumed(pair: Pair, stopped: int) -> None:
    control = ControlSocket(stopped, pair[0])
    with control, ThreadPoolExecutor(1) as threads:
        received = threads.submit(receive, control, Status)
        _wait_until_resumed(stopped)
        os.kill(stopped, signal.SIGSTOP)
        pair[1].send(struct.pack("<I", 8))  # half of a message
        _wait_until_resumed(stopped)
        pair[1].close()
        with pytest.raises(Disconnected):
            received.result(20)


def test_a_stopped_child_that_does_not_read_is_resumed(pair: Pair, stopped: int) -> None:
    control = ControlSocket(stopped, pair[0])
    message = Status("failed", "x" * 4_000_000)
    with control, open(os.devnull, "rb") as null, ThreadPoolExecutor(1) as threads:
        sent = threads.submit(send, control, message, [null.fileno()])
        _wait_until_resumed(stopped)
        received, descriptors = receive(pair[1], Status)
        sent.result(20)
    assert received == message
    os.close(*descriptors)


def test_a_stopped_child_is_resumed_on_request(pair: Pair, stopped: int) -> None:
    with ControlSocket(stopped, pair[0]) as control:
        control.resume_child()
        _wait_until_resumed(stopped)


def test_a_process_with_the_pid_of_an_ended_child_is_left_alone(pair: Pair, stopped: int) -> None:
    pair[1].close()
    with ControlSocket(stopped, pair[0]) as control:
        control.resume_child()
        assert os.waitid(os.P_PID, stopped, os.WCONTINUED | os.WNOHANG) is None
