"""ClientRequests: the requests of the server to one client, until they are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from exec_server.protocol.jsonrpc import RpcResponse
from exec_server.protocol.network import POLICY_REQUEST, Destination, PolicyParams
from exec_server.server import connection as module
from exec_server.server.connection import ClientRequests

_PARAMS = PolicyParams("p", Destination("http", "a.test", 80))


def _run(scenario: Callable[[ClientRequests, list[Any]], Awaitable[None]]) -> None:
    async def run() -> None:
        sent: list[Any] = []
        await scenario(ClientRequests(lambda text: sent.append(json.loads(text))), sent)

    asyncio.run(run())


def test_answers_in_any_order() -> None:
    async def scenario(requests: ClientRequests, sent: list[Any]) -> None:
        first, second = (requests.ask(POLICY_REQUEST, _PARAMS) for _ in range(2))
        assert [message["id"] for message in sent] == [1, 2]
        assert requests.answer(RpcResponse(2, "b"))
        assert requests.answer(RpcResponse(1, "a"))
        assert (await first, await second) == ("a", "b")

    _run(scenario)


def test_answers_to_finished_requests_are_ignored() -> None:
    async def scenario(requests: ClientRequests, sent: list[Any]) -> None:
        first = requests.ask(POLICY_REQUEST, _PARAMS)
        assert requests.answer(RpcResponse(1, "a"))
        assert requests.answer(RpcResponse(1, "b"))
        assert await first == "a"
        assert requests.answer(RpcResponse(1, "c"))
        given_up = requests.ask(POLICY_REQUEST, _PARAMS)
        given_up.cancel()
        assert requests.answer(RpcResponse(2, "d"))

    _run(scenario)


@pytest.mark.parametrize("number", [0, -1, 2, "1"])
def test_answers_without_a_request(number: int | str) -> None:
    async def scenario(requests: ClientRequests, sent: list[Any]) -> None:
        requests.ask(POLICY_REQUEST, _PARAMS)
        assert not requests.answer(RpcResponse(number))

    _run(scenario)


def test_open_requests_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLIENT_REQUESTS", 2)

    async def scenario(requests: ClientRequests, sent: list[Any]) -> None:
        first, _ = (requests.ask(POLICY_REQUEST, _PARAMS) for _ in range(2))
        assert await requests.ask(POLICY_REQUEST, _PARAMS) is None
        first.cancel()
        await asyncio.sleep(0)  # its callback
        assert not requests.ask(POLICY_REQUEST, _PARAMS).done()
        assert [message["id"] for message in sent] == [1, 2, 3]

    _run(scenario)


def test_a_lost_connection_answers_nothing() -> None:
    async def scenario(requests: ClientRequests, sent: list[Any]) -> None:
        waiting, answered = (requests.ask(POLICY_REQUEST, _PARAMS) for _ in range(2))
        requests.answer(RpcResponse(2, "a"))
        requests.close()
        assert (await waiting, await answered) == (None, "a")
        assert await requests.ask(POLICY_REQUEST, _PARAMS) is None
        assert len(sent) == 2

    _run(scenario)
