"""Requests and traffic of the service, kept within bounds for tests, and waiting for more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from exec_server.relay.frames import Kind

# Far more than a test causes; the oldest are forgotten.
REQUESTS_KEPT = 10_000
# Of a test that moves more, the newest traffic is kept; `Traffic.forgotten` counts the rest.
TRAFFIC_BYTES = 64 * 1024 * 1024
# The cost of a recorded message beside its bytes, so that empty ones have a bound too.
_MESSAGE_OVERHEAD = 256


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP request as it came, upgrades included; header names are lower case."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes = b""
    time: float = 0.0

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


@dataclass(frozen=True, slots=True)
class Message:
    """A message to forward, before any fault; `kind` is None without a relay frame."""

    direction: str
    environment_id: str
    data: bytes
    stream_id: str = ""
    kind: Kind | None = None


@dataclass(slots=True)
class Traffic:
    """The newest forwarded messages."""

    messages: deque[Message] = field(default_factory=deque)
    forgotten: int = 0
    _bytes: int = 0

    def add(self, message: Message) -> None:
        self.messages.append(message)
        self._bytes += len(message.data) + _MESSAGE_OVERHEAD
        while self._bytes > TRAFFIC_BYTES:
            self._bytes -= len(self.messages.popleft().data) + _MESSAGE_OVERHEAD
            self.forgotten += 1


class Journal:
    """Requests, traffic, and the tasks that wait for more of them."""

    def __init__(self, *, record: bool) -> None:
        self.requests: deque[Request] = deque(maxlen=REQUESTS_KEPT)
        self.traffic = Traffic()
        self.recording = record
        self._waiters: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []

    @property
    def is_watched(self) -> bool:
        """Whether a task waits for single messages."""
        return self.recording or bool(self._waiters)

    def changed(self) -> None:
        """Wake the tasks whose condition is now true."""
        if not self._waiters:
            return
        for waiter in list(self._waiters):
            predicate, future = waiter
            if not future.done() and (value := predicate()):
                future.set_result(value)

    async def until(self, predicate: Callable[[], Any], seconds: float) -> Any:
        """Wait for the predicate to become true and give its value; raises TimeoutError."""
        if value := predicate():
            return value
        waiter = (predicate, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(seconds):
                return await waiter[1]
        finally:
            self._waiters.remove(waiter)
