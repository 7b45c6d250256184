"""Calls that wait to be sent, and those of them that a new session can make."""

from __future__ import annotations

import asyncio

from msgspec import Raw

from exec_server.client.engine.messages import CallQueue, InitializeCall, PendingCall
from exec_server.errors import ConnectFailed, SessionLost


def test_the_order_of_calls() -> None:
    async def scene() -> None:
        queue = CallQueue()
        first, second, sent, resent, urgent = (
            PendingCall(b"", is_retryable=True, is_urgent=number == 4) for number in range(5)
        )
        queue.add(first)
        queue.add(second)
        assert not queue.is_urgent
        queue.put_back(iter([sent, resent]))
        queue.add(urgent)
        assert queue.is_urgent
        queue.discard(first)
        queue.discard(first)
        assert [queue.pop() for _ in range(len(queue))] == [urgent, sent, resent, second]
        assert len(queue) == 0

    asyncio.run(scene())


def test_calls_that_a_new_session_can_make_are_kept() -> None:
    async def scene() -> None:
        queue = CallQueue()
        new = PendingCall(b"", is_retryable=False)
        sent = PendingCall(b"", is_retryable=True)
        sent.times_sent = 1
        bound = PendingCall(b"", is_retryable=True, is_bound=True)
        for call in (new, sent, bound):
            queue.add(call)
        queue.fail(SessionLost("lost"), keep_movable=True)
        assert [call.future.done() for call in (new, sent, bound)] == [False, True, True]
        queue.fail(SessionLost("closed"))
        assert str(new.future.exception()) == "closed"
        new.fail(SessionLost("again"))
        new.resolve(Raw(b"1"))
        assert str(new.future.exception()) == "closed"

    asyncio.run(scene())


def test_an_answer_to_initialize_is_processed_at_once() -> None:
    async def scene() -> None:
        accepted: list[Raw] = []
        call = InitializeCall(b"", accepted.append)
        call.resolve(Raw(b"1"))
        assert accepted == [call.future.result()]

        def refuse(_: Raw) -> None:
            raise ConnectFailed("no")

        call = InitializeCall(b"", refuse)
        call.resolve(Raw(b"1"))
        assert isinstance(call.future.exception(), ConnectFailed)

    asyncio.run(scene())
