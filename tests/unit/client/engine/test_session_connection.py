"""A connection of a session: what it reports to its owner, and when it is silent."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from exec_server.client.engine import messages
from exec_server.client.engine.messages import Envelope
from exec_server.client.engine.session import ClientConnection
from exec_server.errors import MalformedMessage


class Owner:
    """Records the reports; content with the method `bad` is malformed."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def message_received(self, connection: ClientConnection, envelope: Envelope) -> None:
        if envelope.method == "bad":
            raise MalformedMessage("bad")
        self.told.append(envelope.method)

    def message_malformed(self, connection: ClientConnection, error: MalformedMessage) -> None:
        self.told.append(str(error))

    def give_up(self, connection: ClientConnection, reason: str) -> None:
        self.told.append(reason)

    def send_queued(self) -> None:
        self.told.append("send")

    def connection_ended(self, connection: ClientConnection, reason: str) -> None:
        connection.end_reason = reason
        self.told.append(reason)


def test_everything_is_reported_until_the_end() -> None:
    owner = Owner()
    connection = ClientConnection(cast(Any, owner), cast(Any, None))
    connection.message_received(b'{"method":"a"}')
    connection.message_received(b'{"method":"bad"}')
    connection.message_received(b"{}")
    connection.pause_writing()
    assert connection.is_writing_paused
    connection.resume_writing()
    assert not connection.is_writing_paused
    connection.connection_lost()
    connection.connection_lost()
    connection.message_received(b'{"method":"late"}')
    assert owner.told == ["a", "bad", "neither a request nor an answer", "send", "connection lost"]


def test_server_that_floods_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "FLOOD_SECONDS", 0.0)

    async def scene() -> list[Any]:
        owner = Owner()
        connection = ClientConnection(cast(Any, owner), cast(Any, None))
        connection.judge(is_useful=True)
        assert owner.told == []
        connection.judge(is_useful=False)
        return owner.told

    assert asyncio.run(scene()) == ["the server has sent nothing but useless messages for 30 s"]
