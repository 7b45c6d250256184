"""Shared by the tests of the WebSocket server: a clock, a server and an open connection."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.clock import Clock
from tests.support.websocket_server import Connection, Server


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


@pytest.fixture
def listener(clock: Clock) -> Server:
    return Server()


@pytest.fixture
def opened(listener: Server) -> Connection:
    return listener.open()
