"""Questions: the requests of the server to one client, until they are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from exec_server.protocol.jsonrpc import Response
from exec_server.protocol.network import POLICY_REQUEST, Destination, PolicyParams
from exec_server.server import questions as module
from exec_server.server.questions import Questions

_QUESTION = PolicyParams("p", Destination("http", "a.test", 80))


def _run(scenario: Callable[[Questions, list[Any]], Awaitable[None]]) -> None:
    async def run() -> None:
        sent: list[Any] = []
        await scenario(Questions(lambda text: sent.append(json.loads(text))), sent)

    asyncio.run(run())


def test_answers_in_any_order() -> None:
    async def scenario(questions: Questions, sent: list[Any]) -> None:
        first, second = (questions.ask(POLICY_REQUEST, _QUESTION) for _ in range(2))
        assert [message["id"] for message in sent] == [1, 2]
        assert questions.answer(Response(2, "b"))
        assert questions.answer(Response(1, "a"))
        assert (await first, await second) == ("a", "b")

    _run(scenario)


def test_answers_to_finished_questions_are_ignored() -> None:
    async def scenario(questions: Questions, sent: list[Any]) -> None:
        first = questions.ask(POLICY_REQUEST, _QUESTION)
        assert questions.answer(Response(1, "a"))
        assert questions.answer(Response(1, "b"))
        assert await first == "a"
        assert questions.answer(Response(1, "c"))
        given_up = questions.ask(POLICY_REQUEST, _QUESTION)
        given_up.cancel()
        assert questions.answer(Response(2, "d"))

    _run(scenario)


@pytest.mark.parametrize("number", [0, -1, 2, "1"])
def test_answers_without_a_question(number: int | str) -> None:
    async def scenario(questions: Questions, sent: list[Any]) -> None:
        questions.ask(POLICY_REQUEST, _QUESTION)
        assert not questions.answer(Response(number))

    _run(scenario)


def test_open_questions_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUESTIONS", 2)

    async def scenario(questions: Questions, sent: list[Any]) -> None:
        first, _ = (questions.ask(POLICY_REQUEST, _QUESTION) for _ in range(2))
        assert await questions.ask(POLICY_REQUEST, _QUESTION) is None
        first.cancel()
        await asyncio.sleep(0)  # its callback
        assert not questions.ask(POLICY_REQUEST, _QUESTION).done()
        assert [message["id"] for message in sent] == [1, 2, 3]

    _run(scenario)


def test_a_lost_connection_answers_nothing() -> None:
    async def scenario(questions: Questions, sent: list[Any]) -> None:
        waiting, answered = (questions.ask(POLICY_REQUEST, _QUESTION) for _ in range(2))
        questions.answer(Response(2, "a"))
        questions.close()
        assert (await waiting, await answered) == (None, "a")
        assert await questions.ask(POLICY_REQUEST, _QUESTION) is None
        assert len(sent) == 2

    _run(scenario)
