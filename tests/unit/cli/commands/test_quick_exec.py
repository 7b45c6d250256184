"""Commands without an event loop, with a server of prepared messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest

from exec_server.cli.commands import quick_exec
from exec_server.cli.commands.errors import LostConnection
from exec_server.cli.commands.handover import Handover
from exec_server.cli.commands.quick_exec import CLIENT_NAME, start_params
from exec_server.client.arguments import PathResolver
from exec_server.client.engine import session
from exec_server.client.engine.messages import encode
from exec_server.client.engine.server_features import ServerFeatures, StartParamsBuilder
from exec_server.errors import ConnectionLost
from exec_server.protocol.decoding import decode_value
from exec_server.protocol.process import StartParams
from exec_server.protocol.session import Capabilities, EnvironmentInfo, Shell

STARTED = {"id": 2, "result": {"processId": "p", "sandboxType": "none"}}


class _Link:
    """A BlockingSocket whose server has sent everything already."""

    def __init__(self, *messages: dict[str, Any] | Exception) -> None:
        self.messages = list(messages)
        self.sent: list[dict[str, Any]] = []
        self.is_closed = False
        self._reader, self._writer = os.pipe()
        os.write(self._writer, b"x")  # always readable

    def fileno(self) -> int:
        return self._reader

    def send(self, message: bytes) -> None:
        self.sent.append(json.loads(message))
        if self.sent[-1].get("method") == "process/setFlow":
            self.messages.append({"id": self.sent[-1]["id"], "result": {}})

    def receive(self) -> list[bytes]:
        message = self.messages.pop(0) if self.messages else ConnectionLost("over")
        if isinstance(message, Exception):
            raise message
        return [json.dumps(message).encode()]

    def take_useless(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in quick_exec._SIGNALS}
    yield
    descriptor = signal.set_wakeup_fd(-1)
    if descriptor != -1:
        os.close(descriptor)
    for number, handler in before.items():
        signal.signal(number, handler)


def _output(seq: int, data: bytes, stream: str = "stdout", **more: object) -> dict[str, Any]:
    params = {"processId": "p", "seq": seq, "stream": stream, "chunk": b64encode(data).decode()}
    return {"method": "process/output", "params": params | more}


def _exited(seq: int, code: int, **more: object) -> dict[str, Any]:
    params = {"processId": "p", "seq": seq, "exitCode": code, "sandboxDenied": False}
    return {"method": "process/exited", "params": params | more}


def _closed(seq: int) -> dict[str, Any]:
    return {"method": "process/closed", "params": {"processId": "p", "seq": seq}}


def _command(*messages: dict[str, Any] | Exception) -> tuple[quick_exec._RunningCommand, _Link]:
    link = _Link(*messages)
    handover = Handover("s", "p", has_input=False)
    start = quick_exec._request(2, "process/start", {})
    return quick_exec._RunningCommand(link, handover, start), link  # type: ignore[arg-type]


def test_output_is_written_and_the_exit_code_returned(capfd: pytest.CaptureFixture[str]) -> None:
    running, link = _command(
        STARTED,
        _output(1, b"out"),
        _output(2, b"err", "stderr"),
        {"method": "other/notice", "params": {}},
        _output(9, b"of another process", processId="q"),
        _exited(3, 259),
        _closed(4),
    )
    assert running.to_end() == 3
    assert capfd.readouterr() == ("out", "err")
    assert link.is_closed
    assert [message["method"] for message in link.sent] == ["process/start", "process/terminate"]
    assert link.sent[1]["params"] == {"processId": "p"}


@pytest.mark.parametrize(
    "message",
    [
        _output(3, b"early"),
        _exited(2, 1, sandboxDenied=True),
        _closed(2),
        {"id": "x", "method": "port/opened", "params": {}},
        {"id": 2, "method": "process/output", "params": {}},
    ],
)
def test_unusual_messages_are_handed_over(
    message: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    running, link = _command(STARTED, _output(1, b"a"), message, _output(2, b"b"))
    assert running.to_end() is None
    assert capfd.readouterr().out == "a"
    handover = running.handover
    assert (handover.is_started, handover.is_paused, handover.last_seq) == (True, True, 2)
    assert handover.pending_output == [(1, b"b")]  # came before the answer to the pause
    assert link.sent[-1]["params"] == {"processId": "p", "flow": "pause"}


@pytest.mark.parametrize(
    "failure", [ConnectionLost("gone"), {"method": "process/output", "params": {}}, {}]
)
def test_broken_connections_are_handed_over(failure: Any) -> None:
    running, link = _command(STARTED, _output(1, b""), failure)
    assert running.to_end() is None
    assert link.is_closed
    assert (running.handover.is_paused, running.handover.last_seq) == (False, 1)


def test_a_refused_pause_ends_the_wait() -> None:
    running, link = _command(STARTED, _closed(1), {"id": 3, "error": {"code": -1}})
    assert running.to_end() is None
    assert not running.handover.is_paused
    assert link.is_closed


def test_a_refused_start_is_left_to_the_whole_command() -> None:
    received: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    running, link = _command({"id": 2, "error": {"code": -32603, "message": "no"}})
    with pytest.raises(quick_exec._NotPlainError):
        running.to_end()
    running.handover.hold_signal(signal.SIGUSR1)
    running.leave()
    assert link.is_closed
    assert received == [signal.SIGUSR1]


def test_a_signal_is_handed_over() -> None:
    running, link = _command(STARTED)
    receive = link.receive

    def receive_and_signal() -> list[bytes]:
        link.receive = receive  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGUSR2)
        return receive()

    link.receive = receive_and_signal  # type: ignore[method-assign]
    assert running.to_end() is None
    assert [number for number, _ in running.handover.signals] == [signal.SIGUSR2]
    assert running.handover.is_paused


def test_the_start_is_that_of_the_client() -> None:
    info = EnvironmentInfo(
        Shell("sh", "/bin/sh"), "", "", "file:///src", None, "linux", [], [], "/tmp", Capabilities()
    )
    for words in ({"cwd": "/a b/../c", "stdin": True}, {"cwd": None, "stdin": False}):
        built = StartParamsBuilder(PathResolver(info), ServerFeatures()).build(
            ["printf", "ż"],
            cwd=words["cwd"],  # type: ignore[arg-type]
            env={"A": "1"},
            clean_env=False,
            tty=False,
            sandbox=None,
            stdin=bool(words["stdin"]),
        )
        params = start_params(
            ["printf", "ż"],
            str(words["cwd"] or info.cwd),
            {"A": "1"},
            has_input=bool(words["stdin"]),
        )
        expected = json.loads(encode(built)) | {"processId": params["processId"]}
        assert decode_value(StartParams, params) == decode_value(StartParams, expected)


def test_slow_modules_are_not_imported() -> None:
    code = (
        "import sys, exec_server.cli.main, exec_server.cli.commands.dispatch\n"
        "import exec_server.cli.commands.quick_exec\n"
        "slow = {'argparse', 'asyncio', 'ctypes', 'hashlib', 'logging', 'msgspec', 'ssl',\n"
        "        'threading', 'urllib', 'exec_server.client', 'exec_server.protocol'}\n"
        "print(*sorted(slow & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert ended.stdout == "\n"


def test_the_name_is_that_of_the_client() -> None:
    assert CLIENT_NAME == session.CLIENT_NAME


@pytest.mark.parametrize("chunk", ["!!!!", "abc", 5, None, "YQ", "YQ==\n"])
def test_an_undecodable_chunk_ends_the_command(chunk: object) -> None:
    message = {
        "method": "process/output",
        "params": {"processId": "p", "seq": 1, "stream": "stdout", "chunk": chunk},
    }
    running, _ = _command(STARTED, message)
    with pytest.raises(LostConnection, match="malformed message from the server: process/output"):
        running.to_end()
