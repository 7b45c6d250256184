"""Requests of the server: answers, refusals, limits, cancellation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec import Raw
from tests.support.memory_session import MEASURE, Name, Size

from exec_server.client.engine import server_requests as module
from exec_server.client.engine.server_requests import ServerRequests
from exec_server.errors import MalformedMessage, NotFound

Handler = Callable[[Name], Awaitable[Size]]


async def answers(handler: Handler, *names: str, method: str = MEASURE.name) -> list[Any]:
    """What is sent for requests with these names, in the order of their ids."""
    sent: list[bytes] = []
    async with asyncio.TaskGroup() as tasks:
        requests = ServerRequests(tasks)
        requests.handlers[MEASURE.name] = (MEASURE, handler)
        for number, name in enumerate(names):
            params = Raw(json.dumps({"name": name}).encode())
            requests.received(number, method, params, sent.append)
    return sorted(map(json.loads, sent), key=lambda answer: int(answer["id"]))


async def measure(params: Name) -> Size:
    if params.name == "missing":
        raise NotFound("not here")
    if params.name == "bug":
        raise ValueError("a bug")
    return Size(len(params.name))


def test_results_and_errors_are_answers() -> None:
    assert asyncio.run(answers(measure, "four", "missing", "bug")) == [
        {"id": 0, "result": {"size": 4}},
        {"id": 1, "error": {"code": -32004, "message": "not here"}},
        {"id": 2, "error": {"code": -32603, "message": "the client failed"}},
    ]


def test_unknown_methods_are_refused() -> None:
    text = "exec-server client does not implement `other/method` yet"
    assert asyncio.run(answers(measure, "x", method="other/method")) == [
        {"id": 0, "error": {"code": -32601, "message": text}}
    ]


def test_requests_at_a_time_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", 2)
    refused = {"id": 2, "error": {"code": -32603, "message": "too many requests at a time"}}
    assert asyncio.run(answers(measure, "a", "b", "c"))[2] == refused


def test_params_that_do_not_fit_are_malformed() -> None:
    async def scene() -> None:
        async with asyncio.TaskGroup() as tasks:
            requests = ServerRequests(tasks)
            requests.handlers[MEASURE.name] = (MEASURE, measure)
            with pytest.raises(MalformedMessage, match=r"^test/measure: "):
                requests.received(1, MEASURE.name, Raw(b'{"name":1}'), lambda message: None)

    asyncio.run(scene())


def test_handlers_can_be_cancelled() -> None:
    async def scene() -> None:
        sent: list[bytes] = []

        async def forever(params: Name) -> Size:
            await asyncio.Event().wait()
            raise AssertionError

        async with asyncio.TaskGroup() as tasks:
            requests = ServerRequests(tasks)
            requests.handlers[MEASURE.name] = (MEASURE, forever)
            requests.received(1, MEASURE.name, Raw(b'{"name":""}'), sent.append)
            await asyncio.sleep(0)
            requests.cancel()
        assert sent == []

    asyncio.run(scene())
