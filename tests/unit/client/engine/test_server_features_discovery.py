"""Discovery with recorded servers: the environment, the features, and the shell that is asked."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from tests.support.older_servers import answers, recorded

from exec_server.client.engine import server_features as module
from exec_server.client.engine.messages import Failure, encode
from exec_server.client.engine.server_features import PROBES, discover, judge, parse_description
from exec_server.errors import InvalidRequest, MalformedAnswer
from exec_server.protocol.session import EnvironmentInfo, Shell

DESCRIPTION = b"/w x\0/home/u\0/var/tmp\0/usr/bin/zsh\0linux\0"
MODERN = recorded()["0.169.0"]


class RecordedServer:
    """Answers as a recorded version did; its shell prints `output` in pieces."""

    def __init__(self, recording: dict[str, Any], *output: bytes) -> None:
        self._recording = recording
        self._output = output
        self._reads = 0
        self.asked: list[str] = []
        self.started: Any = None

    def ask(self, method: str, params: object) -> asyncio.Future[Raw]:
        self.asked.append(method)
        future: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()
        answer = self._answer(method, json.loads(encode(params)))
        if "error" in answer:
            future.set_exception(msgspec.convert(answer["error"], Failure).exception())
            future.exception()
        else:
            future.set_result(Raw(json.dumps(answer["result"]).encode()))
        return future

    def _answer(self, method: str, params: Any) -> Any:
        if method == "environment/info":
            return self._recording[method]
        for probe, answer in zip(PROBES, self._recording["probes"], strict=True):
            if (probe.method, probe.params) == (method, params):
                return answer
        if method == "process/start":
            self.started = params
            return {"result": {"processId": params["processId"]}}
        if method == "process/terminate":
            return {"result": {"running": True}}
        assert method == "process/read"
        self._reads += 1
        return {"result": self._read(params["afterSeq"])}

    def _read(self, after: int) -> Any:
        chunks = [
            {"seq": after + 1, "stream": "stdout", "chunk": base64.b64encode(piece).decode()}
            for piece in self._output[after : after + 1]
        ]
        end = {"nextSeq": after + 1, "exited": not chunks, "exitCode": None, "closed": not chunks}
        return {"chunks": chunks, "failure": None} | end


def found(server: RecordedServer) -> Any:
    async def ask() -> Any:
        return await discover(server.ask, has_sessions=True)

    return asyncio.run(ask())


@pytest.mark.parametrize("version", recorded())
def test_the_environment_of_every_generation(version: str) -> None:
    recording = recorded()[version]
    server = RecordedServer(recording, DESCRIPTION[:9], DESCRIPTION[9:])
    info, features = found(server)
    assert isinstance(info, EnvironmentInfo)
    assert features == judge(answers(recording), info.capabilities, has_sessions=True)
    told = recording["environment/info"].get("result", {})
    assert info.cwd == told.get("cwd", "file:///w%20x")
    assert info.user_home_dir == told.get("userHomeDir", "file:///home/u")
    assert info.temp_dir == told.get("tempDir", "file:///var/tmp")
    assert info.platform_os == "linux"
    shell = told.get("shell", {"name": "zsh", "path": "/usr/bin/zsh"})
    assert info.shell == Shell(**shell)


def test_all_questions_are_sent_before_the_first_answer_is_awaited() -> None:
    server = RecordedServer(recorded()["0.121.0"], DESCRIPTION)
    found(server)
    asked = ["environment/info", *(probe.method for probe in PROBES), "process/start"]
    assert server.asked[: len(asked)] == asked


def test_the_shell_is_started_where_the_server_can_start_it() -> None:
    for version, root in (("0.121.0", "/"), ("0.141.0", "file:///")):
        server = RecordedServer(recorded()[version], DESCRIPTION)
        found(server)
        assert server.started["cwd"] == root
    server = RecordedServer(MODERN)
    found(server)
    assert server.started is None  # the server knows its directories


@pytest.mark.parametrize("output", [b"", b"x", DESCRIPTION + b"\0", b"x" * 70_000])
def test_without_a_description_the_directories_are_unknown(output: bytes) -> None:
    info, _ = found(RecordedServer(recorded()["0.121.0"], output))
    assert (info.cwd, info.user_home_dir, info.temp_dir) == (None, None, "/tmp")
    assert info.shell == Shell("sh", "/bin/sh")


def test_a_shell_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READS", 2)
    server = RecordedServer(recorded()["0.121.0"], *[b"a"] * 5)
    info, _ = found(server)
    assert server.asked[-1] == "process/terminate"
    assert info.cwd is None


def test_a_server_without_a_shell() -> None:
    server = RecordedServer(recorded()["0.121.0"])
    refusal = {"error": {"code": -32603, "message": "No such file or directory (os error 2)"}}
    answer = server._answer

    def refuse(method: str, params: Any) -> Any:
        is_start = method == "process/start" and params["argv"]
        return refusal if is_start else answer(method, params)

    server._answer = refuse  # type: ignore[method-assign]
    info, _ = found(server)
    assert info.cwd is None


def test_a_wrong_description_is_an_error() -> None:
    with pytest.raises(MalformedAnswer, match="environment: Expected `object`"):
        found(RecordedServer(MODERN | {"environment/info": {"result": []}}))
    with pytest.raises(MalformedAnswer, match="environment: Object missing required field `shell`"):
        found(RecordedServer(MODERN | {"environment/info": {"result": {}}}))
    refused = {"error": {"code": -32600, "message": "not now"}}
    with pytest.raises(InvalidRequest, match="not now"):
        found(RecordedServer(MODERN | {"environment/info": refused}))


def test_fields_that_are_no_paths_are_left_out() -> None:
    assert parse_description(b"\0\0\0sh\0linux\0") == {"platformOs": "linux"}
    described = parse_description(b"/\xff\0/\0/t\0/bin/sh\0linux\0")
    assert described["cwd"] == "file:///%FF"
    assert described["shell"] == {"name": "sh", "path": "/bin/sh"}
