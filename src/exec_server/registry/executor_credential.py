"""The rotating credential that a supervisor writes to stdin, one JSON object per line."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from exec_server.errors import RegistryError, StartupError
from exec_server.registry.destination import Destinations

# Maximum line length including the newline; a credential is a few hundred bytes.
LINE_BYTES = 16_384
# Time limit for the first line. Without one the server does not start.
FIRST_SECONDS = 30.0

_MEMBERS = {"version", "environment_id", "token", "expires_at"}
_TOKEN = re.compile(r"[\x21-\x7e]+")
_LARGEST_TIME = 2**64 - 1

_INVALID = "invalid exec-server executor credential frame"
_TOO_LONG = "exec-server executor credential frame exceeds the size limit"
_OTHER = "exec-server executor credential is for a different environment"
_EXPIRED = "exec-server executor credential is expired"
_CLOSED = "exec-server executor credential pipe closed"
_SILENT = "timed out waiting for the initial exec-server executor credential"
_UNSIGNED = (
    "environment registry authentication error: failed to resolve environment registry "
    "authentication: request auth build error: "
)


class ExecutorCredential:
    """The newest token of the pipe; usable after `ready`.

    The owner runs `wait_closed` in a task, which raises StartupError for an invalid line.
    """

    hides_responses = True
    destinations = Destinations.ENCRYPTED

    def __init__(
        self, environment_id: str, descriptor: int = 0, now: Callable[[], float] = time.time
    ) -> None:
        self._environment_id = environment_id
        self._descriptor = descriptor
        self._now = now
        self._token = ""
        self._expires = 0
        self._partial = bytearray()
        self._thread: threading.Thread | None = None
        self._consumed = threading.Event()
        self._failed = False
        self._first: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        """Return the newest token; raises RegistryError if it has expired."""
        if self._now() >= self._expires:
            raise RegistryError(_UNSIGNED + _EXPIRED)
        return [("authorization", f"Bearer {self._token}")]

    async def ready(self) -> None:
        """Start reading, and wait for the first credential; raises StartupError."""
        loop = asyncio.get_running_loop()
        self._first, self._ended = loop.create_future(), loop.create_future()
        # A thread, because stdin may be any kind of file and is shared with the parent process,
        # which O_NONBLOCK would affect. The thread ends with the pipe or with the process.
        self._thread = threading.Thread(target=self._read, args=(loop,), daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(FIRST_SECONDS):
                await self._first
        except TimeoutError:
            raise StartupError(_SILENT) from None

    async def wait_closed(self) -> None:
        """Wait until the pipe is closed; raises StartupError for an invalid line."""
        assert self._ended is not None, "wait_closed() before ready()"
        await self._ended

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        data = b"begin"
        while data and not self._failed:
            try:
                data = os.read(self._descriptor, LINE_BYTES)
            except OSError:
                data = b""  # an unreadable stdin counts as closed
            try:
                loop.call_soon_threadsafe(self._received, data)
            except RuntimeError:
                return  # the loop is closed
            self._consumed.wait()  # at most one chunk is in flight
            self._consumed.clear()

    def _received(self, data: bytes) -> None:
        assert self._first is not None
        assert self._ended is not None
        try:
            self._feed(data)
        except StartupError as error:
            self._failed = True
            for waiting in (self._first, self._ended):
                if not waiting.done():
                    waiting.set_exception(error)
                    waiting.exception()  # no warning if the future is never awaited
            return
        finally:
            self._consumed.set()
        if self._token and not self._first.done():
            self._first.set_result(None)
        if not data:
            self._ended.set_result(None)

    def _feed(self, data: bytes) -> None:
        self._partial += data
        while (end := self._partial.find(b"\n")) >= 0:
            line = bytes(self._partial[: end + 1])
            del self._partial[: end + 1]
            self._set_credential(line)
        if len(self._partial) > LINE_BYTES:
            raise StartupError(_TOO_LONG)
        if not data and self._partial:
            raise StartupError(_INVALID)
        if not data and not self._token:
            raise StartupError(_CLOSED)

    def _set_credential(self, line: bytes) -> None:
        if len(line) > LINE_BYTES:
            raise StartupError(_TOO_LONG)
        frame = _parse(line)
        if frame["environment_id"] != self._environment_id:
            raise StartupError(_OTHER)
        if self._now() >= frame["expires_at"]:
            raise StartupError(_EXPIRED)
        self._token, self._expires = frame["token"], frame["expires_at"]


def _parse(line: bytes) -> dict[str, Any]:
    """The checked members of a line; raises StartupError, which never shows them."""
    try:
        frame = json.loads(line.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError):
        raise StartupError(_INVALID) from None
    if (
        not isinstance(frame, dict)
        or set(frame) != _MEMBERS
        or type(frame["version"]) is not int
        or frame["version"] != 1
        or not isinstance(frame["environment_id"], str)
        or not isinstance(frame["token"], str)
        or not _TOKEN.fullmatch(frame["token"])
        or type(frame["expires_at"]) is not int
        or not 0 <= frame["expires_at"] <= _LARGEST_TIME
    ):
        raise StartupError(_INVALID)
    return frame


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("duplicate member")
    return dict(pairs)
