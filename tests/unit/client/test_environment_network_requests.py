"""Answers of a program to network/policyRequest."""

from __future__ import annotations

import asyncio

import pytest

from exec_server.client.environment import (
    Decision,
    NetworkRequest,
    NetworkRequests,
    OnNetworkRequest,
)
from exec_server.protocol.network import Answer, Destination, PolicyParams, PolicyResult

_PARAMS = PolicyParams("p", Destination("https_connect", "a.test", 443))


def _answer(decide: OnNetworkRequest | None) -> Answer:
    result = asyncio.run(NetworkRequests(decide).answer(_PARAMS))
    assert isinstance(result, PolicyResult)
    return result.decision


def test_without_a_function_everything_is_denied() -> None:
    assert _answer(None) == Answer("deny", "the client allows no further hosts")


@pytest.mark.parametrize(
    ("decision", "answer"),
    [
        (True, Answer("allow")),
        (False, Answer("deny", "denied by the client")),
        ("not today\n", Answer("deny", "not today ")),
        ("x" * 500, Answer("deny", "x" * 200)),
    ],
)
def test_decisions(decision: Decision, answer: Answer) -> None:
    asked: list[NetworkRequest] = []

    def decide(request: NetworkRequest) -> Decision:
        asked.append(request)
        return decision

    async def decide_later(request: NetworkRequest) -> Decision:
        await asyncio.sleep(0)
        return decide(request)

    assert _answer(decide) == _answer(decide_later) == answer
    assert asked == [NetworkRequest("p", "https_connect", "a.test", 443)] * 2


def test_only_true_allows() -> None:
    assert _answer(lambda request: 1).type == "deny"  # type: ignore[return-value, arg-type]
