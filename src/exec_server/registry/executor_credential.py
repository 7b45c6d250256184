"""The rotating credential that a supervisor writes to our stdin, one JSON object per line."""

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
from exec_server.registry.destination import Reach

# With the line end. A credential is some hundred bytes; more is a mistake and ends us.
LINE_BYTES = 16_384
# For the first line: a supervisor that takes longer has forgotten us.
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
    """The newest token of the pipe; of use only after `ready`.

    `follow` belongs in a task of the owner: it ends with the pipe, and raises what ends us.
    """

    hides_answers = True
    reach = Reach.ENCRYPTED

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
        self._taken = threading.Event()
        self._failed = False
        self._first: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        """The newest token; raises RegistryError when it has expired."""
        if self._now() >= self._expires:
            raise RegistryError(_UNSIGNED + _EXPIRED)
        return [("authorization", f"Bearer {self._token}")]

    async def ready(self) -> None:
        """Begin to read and wait for a credential; raises StartupError."""
        loop = asyncio.get_running_loop()
        self._first, self._ended = loop.create_future(), loop.create_future()
        # A thread, since stdin may be anything, and is shared with whoever started us: setting
        # it to non-blocking would be felt there. It ends with the pipe or with the process.
        self._thread = threading.Thread(target=self._read, args=(loop,), daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(FIRST_SECONDS):
                await self._first
        except TimeoutError:
            raise StartupError(_SILENT) from None

    async def follow(self) -> None:
        """Take what else comes until the pipe closes; raises StartupError for what is invalid."""
        assert self._ended is not None, "nobody has waited for it to be ready"
        await self._ended

    # ---- the pipe ---------------------------------------------------------------------

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        data = b"begin"
        while data and not self._failed:
            try:
                data = os.read(self._descriptor, LINE_BYTES)
            except OSError:
                data = b""  # a stdin that cannot be read has ended
            try:
                loop.call_soon_threadsafe(self._received, data)
            except RuntimeError:
                return  # the loop has ended before the pipe
            self._taken.wait()  # so that never more than one piece is on its way
            self._taken.clear()

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
                    waiting.exception()  # nobody may be waiting: that is no reason to complain
            return
        finally:
            self._taken.set()
        if self._token and not self._first.done():
            self._first.set_result(None)
        if not data:
            self._ended.set_result(None)

    def _feed(self, data: bytes) -> None:
        self._partial += data
        while (end := self._partial.find(b"\n")) >= 0:
            line = bytes(self._partial[: end + 1])
            del self._partial[: end + 1]
            self._take(line)
        if len(self._partial) > LINE_BYTES:
            raise StartupError(_TOO_LONG)
        if not data and self._partial:
            raise StartupError(_INVALID)
        if not data and not self._token:
            raise StartupError(_CLOSED)

    def _take(self, line: bytes) -> None:
        if len(line) > LINE_BYTES:
            raise StartupError(_TOO_LONG)
        frame = _parse(line)
        if frame["environment_id"] != self._environment_id:
            raise StartupError(_OTHER)
        if self._now() >= frame["expires_at"]:
            raise StartupError(_EXPIRED)
        self._token, self._expires = frame["token"], frame["expires_at"]


def _parse(line: bytes) -> dict[str, Any]:
    """The members of a line, of the right types; raises StartupError, which never shows them."""
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
        raise ValueError("a member occurs twice")
    return dict(pairs)
