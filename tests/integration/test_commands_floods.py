"""Servers that flood the client with useless messages: it ends by itself, and by Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from tests.support.cli import run_client, start_client, stderr_text
from tests.support.raw_servers import Flood, Frame, Message, hostile_server, notice
from tests.support.relay import prepared
from tests.support.server_internals import eventually

from exec_server.net.websocket.frames import Opcode

ENDLESS = 10**9
SHORT = {"client.engine.messages.FLOOD_SECONDS": 0.5}
TEXT = "the server has sent nothing but useless messages for 0.5 s"


def _stranger(number: int) -> Message:
    params = {"seq": number + 1, "stream": "stdout", "chunk": "eA=="}
    return notice("process/output", processId="stranger", **params)


def _answer(number: int) -> Message:
    return {"id": 1_000_000 + number, "result": {}}


def _request(number: int) -> Message:
    return {"id": f"server-{number}", "method": "no/such", "params": {}}


def _control(number: int) -> Frame:
    """A pong is in between, since the client gives up a server that does not answer its pings."""
    return Frame(Opcode.PING if number % 2 else Opcode.PONG)


def _empty_fragment(number: int) -> Frame:
    if number % 1000 == 999:
        return Frame(Opcode.PONG)
    return Frame(Opcode.CONTINUATION if number else Opcode.TEXT, fin=False)


def _unknown(number: int) -> Message:
    return notice("no/such", number=number)


def _in_a_call(make: Callable[[int], object]) -> Callable[[Message], Flood]:
    return lambda request: Flood(_unknown(0), make, ENDLESS)


def _of_a_command(seq: Callable[[int], int], chunk: str) -> Callable[[Message], Flood]:
    """A start that succeeds, and output of the process."""

    def answer(request: Message) -> Flood:
        of = request["params"]["processId"]
        started = {"id": request["id"], "result": {"processId": of, "sandboxType": "none"}}

        def make(number: int) -> Message:
            params = {"seq": seq(number), "stream": "stdout", "chunk": chunk}
            return notice("process/output", processId=of, **params)

        return Flood(started, make, ENDLESS)

    return answer


def _after_the_start(make: Callable[[int], object]) -> Callable[[Message], Flood]:
    """A start that succeeds, and then these messages."""

    def answer(request: Message) -> Flood:
        of = request["params"]["processId"]
        started = {"id": request["id"], "result": {"processId": of, "sandboxType": "none"}}
        return Flood(started, make, ENDLESS)

    return answer


FLOODS = {
    "events of strangers in a call": ("ls {}:/x", "fs_getMetadata", _in_a_call(_stranger)),
    "answers without requests": ("ls {}:/x", "fs_getMetadata", _in_a_call(_answer)),
    "unknown notifications": ("ls {}:/x", "fs_getMetadata", _in_a_call(_unknown)),
    "requests": ("ls {}:/x", "fs_getMetadata", _in_a_call(_request)),
    "control frames in a call": ("ls {}:/x", "fs_getMetadata", _in_a_call(_control)),
    "empty fragments in a call": ("ls {}:/x", "fs_getMetadata", _in_a_call(_empty_fragment)),
    "control frames": ("exec {} -- x", "process_start", _after_the_start(_control)),
    "empty fragments": ("exec {} -- x", "process_start", _after_the_start(_empty_fragment)),
    "events of strangers": ("exec {} -- x", "process_start", _after_the_start(_stranger)),
    "empty output": ("exec {} -- x", "process_start", _of_a_command(lambda n: n + 1, "")),
    "events of strangers, a terminal": (
        "exec -t {} -- x",
        "process_start",
        _after_the_start(_stranger),
    ),
    "empty output, a terminal": (
        "exec -t {} -- x",
        "process_start",
        _of_a_command(lambda n: n + 1, ""),
    ),
    "old output, a terminal": ("exec -t {} -- x", "process_start", _of_a_command(lambda n: 1, "")),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_the_command(name: str) -> None:
    words, method, answer = FLOODS[name]
    with hostile_server(**{method: answer}) as server, prepared("", SHORT):
        ended = run_client(*words.replace("{}", server.url).split())
    assert ended.returncode in (1, 255)
    assert TEXT in stderr_text(ended)


@pytest.mark.parametrize("name", [each for each in FLOODS if "strangers" in each])
def test_a_flood_can_be_interrupted(name: str) -> None:
    """A second Ctrl-C ends `exec`; the first one is the command's."""
    words, method, answer = FLOODS[name]
    called = method.replace("_", "/")
    with (
        hostile_server(**{method: answer}) as server,
        start_client(*words.replace("{}", server.url).split()) as process,
    ):
        eventually("the call", lambda: called in [each["method"] for each in server.requests])

        def has_ended() -> bool:
            process.send_signal(signal.SIGINT)
            return process.poll() is not None

        eventually("the end", has_ended)
        assert process.returncode != 0
