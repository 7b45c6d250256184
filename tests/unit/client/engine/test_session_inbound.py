"""Notifications of the server, and events of the session, for subscribers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import Raw
from tests.support.memory_session import Listener

from exec_server.client.engine.session import deliver_notification, report_event
from exec_server.errors import MalformedMessage, SessionLost
from exec_server.protocol.decoding import Notice

CLOSED = Raw(b'{"processId":"p","seq":3}')


class Broken(Listener):
    def on_notice(self, notice: Notice[Any], params: Any) -> None:
        raise ValueError("a bug")

    def on_resumed(self) -> None:
        raise ValueError("a bug")


def test_a_failing_subscriber_does_not_affect_the_others() -> None:
    async def scene() -> None:
        listener = Listener()
        subscribers = [Broken(), listener]
        deliver_notification(subscribers, "process/closed", CLOSED)
        deliver_notification(subscribers, "unknown/notice", CLOSED)
        report_event(subscribers, lambda subscriber: subscriber.on_resumed())
        report_event(subscribers, lambda subscriber: subscriber.on_lost(SessionLost("over")))
        assert listener.heard == [("process/closed", 3), "resumed", "lost"]
        with pytest.raises(MalformedMessage, match=r"^process/closed: "):
            deliver_notification(subscribers, "process/closed", Raw(b"{}"))

    asyncio.run(scene())
