"""Credentials that come through stdin, so that no argument and no variable contains them.

`FORMS` has one row for each flag. Two forms are one line; the executor credential is a JSON object
per line, and each line replaces the one before. Error texts never show what was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from exec_server.errors import RegistryError, StartupError, os_error_text
from exec_server.host.event_loop import GuardedTasks
from exec_server.registry.chatgpt_token import account_claims, is_visible, token_headers
from exec_server.registry.destination import Credential, Destinations

# Maximum line length including the newline; a credential is a few hundred bytes.
LINE_BYTES = 16_384
# The same for a ChatGPT token, whose claims may be long.
CHATGPT_LINE_BYTES = 65_536
# Time limit for the first line. Without one the server does not start.
FIRST_SECONDS = 30.0

_MEMBERS = {"version", "environment_id", "token", "expires_at"}
_LARGEST_TIME = 2**64 - 1

_INVALID = "invalid exec-server executor credential frame"
_OTHER = "exec-server executor credential is for a different environment"
_EXPIRED = "exec-server executor credential is expired"
_SILENT = "timed out waiting for the initial exec-server executor credential"
_UNSIGNED = (
    "environment registry authentication error: failed to resolve environment registry "
    "authentication: request auth build error: "
)
_NO_BEARER = "expected a newline-terminated registration bearer of at most 16 KiB"
_INVALID_BEARER = "invalid registration bearer"
_NO_CHATGPT_TOKEN = "expected a bounded, newline-terminated ChatGPT access token"
_INVALID_CHATGPT_TOKEN = "invalid ChatGPT access token"
_NO_PIPE = "ChatGPT token stdin must be a pipe or socket"


class Expected(NamedTuple):
    """Values of the command line that a line must match."""

    environment_id: str
    account_id: str | None = None
    now: Callable[[], float] = time.time


class _Line(NamedTuple):
    headers: tuple[tuple[str, str], ...]
    expires_at: float = math.inf


@dataclass(frozen=True)
class StdinForm:
    """What a flag reads from stdin."""

    destinations: Destinations
    line_bytes: int  # including the end of the line
    parse: Callable[[bytes, Expected], _Line]  # raises StartupError
    # Error texts: stdin ends before the first line or inside of a line, a line is too long.
    closed: str
    unfinished: str
    too_long: str
    unreadable: str = ""  # empty: the text of the system
    # Each line replaces the one before, and the end of stdin ends the server.
    repeats: bool = False
    is_urgent: bool = False  # the first line has a time limit
    needs_pipe: bool = False


class StdinCredential(Credential):
    """The newest line of stdin; usable after `ready`."""

    hides_responses = True

    def __init__(
        self,
        form: StdinForm,
        expected: Expected,
        descriptor: int = 0,
        *,
        until_closed: bool = False,
    ) -> None:
        """With `until_closed` the end of stdin ends the server also after a form of one line."""
        self.destinations = form.destinations
        self._form = form
        self._expected = expected
        self._descriptor = descriptor
        self._until_closed = until_closed or form.repeats
        self._newest: _Line | None = None
        self._thread: threading.Thread | None = None
        self._first = asyncio.Event()
        self._ended = asyncio.Event()
        self._error: StartupError | None = None

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        """Return the newest token; raises RegistryError if it has expired."""
        assert self._newest is not None, "headers() before ready()"
        if self._expected.now() >= self._newest.expires_at:
            raise RegistryError(_UNSIGNED + _EXPIRED)
        return list(self._newest.headers)

    async def ready(self, tasks: GuardedTasks) -> None:
        """Start reading, and wait for the first line; raises StartupError."""
        if self._form.needs_pipe and not _is_pipe(self._descriptor):
            raise StartupError(_NO_PIPE)
        # A thread, because stdin may be any kind of file and is shared with the parent process,
        # which O_NONBLOCK would affect. The thread ends with the pipe or with the process.
        arguments = (asyncio.get_running_loop(),)
        self._thread = threading.Thread(target=self._read, args=arguments, daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(FIRST_SECONDS if self._form.is_urgent else None):
                await self._first.wait()
        except TimeoutError:
            raise StartupError(_SILENT) from None
        if self._newest is None and self._error is not None:
            raise self._error

    async def wait_ended(self) -> None:
        """Wait until stdin is closed, if that matters; raises StartupError for an invalid line."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            for line in self._lines():
                self._newest = self._form.parse(line, self._expected)
                _call_in_loop(loop, self._first.set)
            if not self._until_closed:
                return
        except StartupError as error:
            self._error = error
        for event in (self._first, self._ended):
            _call_in_loop(loop, event.set)

    def _lines(self) -> Iterator[bytes]:
        """The lines up to the end of stdin or, without `until_closed`, of the only line.

        What follows an only line belongs to other readers: such a line is read byte by byte.
        """
        form, partial, is_read = self._form, bytearray(), False
        while data := self._read_bytes(form.line_bytes if form.repeats or is_read else 1):
            if is_read and not form.repeats:
                continue  # only the end matters
            partial += data
            while (end := partial.find(b"\n")) >= 0:
                line = bytes(partial[: end + 1])
                del partial[: end + 1]
                if len(line) > form.line_bytes:
                    raise StartupError(form.too_long)
                yield line
                is_read = True
                if not self._until_closed:
                    return
            if len(partial) > form.line_bytes:
                raise StartupError(form.too_long)
        if partial:
            raise StartupError(form.unfinished)
        if not is_read:
            raise StartupError(form.closed)

    def _read_bytes(self, size: int) -> bytes:
        try:
            return os.read(self._descriptor, size)
        except OSError as error:
            if self._newest is not None:
                return b""  # counts as closed
            raise StartupError(self._form.unreadable or os_error_text(error)) from None


def _is_pipe(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)


def _parse_executor_credential(line: bytes, expected: Expected) -> _Line:
    frame = _parse_frame(line)
    if frame["environment_id"] != expected.environment_id:
        raise StartupError(_OTHER)
    if expected.now() >= frame["expires_at"]:
        raise StartupError(_EXPIRED)
    return _Line((("authorization", f"Bearer {frame['token']}"),), frame["expires_at"])


def _parse_frame(line: bytes) -> dict[str, Any]:
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
        or not is_visible(frame["token"])
        or type(frame["expires_at"]) is not int
        or not 0 <= frame["expires_at"] <= _LARGEST_TIME
    ):
        raise StartupError(_INVALID)
    return frame


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("duplicate member")
    return dict(pairs)


def _parse_bearer(line: bytes, expected: Expected) -> _Line:
    return _Line((("authorization", f"Bearer {_visible_text(line, _INVALID_BEARER)}"),))


def _parse_chatgpt_token(line: bytes, expected: Expected) -> _Line:
    """The headers of an access token, which is sent even if it has expired."""
    token = _visible_text(line, _INVALID_CHATGPT_TOKEN)
    try:
        claims = account_claims(token)
    except ValueError:
        raise StartupError(_INVALID_CHATGPT_TOKEN) from None
    claimed, given = claims.chatgpt_account_id, expected.account_id
    if claimed is not None and given is not None and claimed != given:
        raise StartupError("--chatgpt-account-id does not match the token")
    account_id = given if claimed is None else claimed
    if account_id is None:
        raise StartupError("token has no ChatGPT account ID; supply --chatgpt-account-id")
    if not is_visible(account_id):
        raise StartupError("invalid ChatGPT account ID")
    return _Line(tuple(token_headers(token, account_id, claims)))


def _visible_text(line: bytes, error: str) -> str:
    """The line without its end; raises StartupError with this text unless all is visible ASCII."""
    text = line.decode("latin-1").removesuffix("\n").removesuffix("\r")
    if not is_visible(text):
        raise StartupError(error)
    return text


FORMS: Final = {
    "--executor-credential-stdin": StdinForm(
        Destinations.ENCRYPTED,
        LINE_BYTES,
        _parse_executor_credential,
        closed="exec-server executor credential pipe closed",
        unfinished=_INVALID,
        too_long="exec-server executor credential frame exceeds the size limit",
        unreadable="could not read exec-server executor credential pipe",
        repeats=True,
        is_urgent=True,
    ),
    "--registration-bearer-stdin": StdinForm(
        Destinations.ENCRYPTED,
        LINE_BYTES,
        _parse_bearer,
        closed=_NO_BEARER,
        unfinished=_NO_BEARER,
        too_long=_NO_BEARER,
    ),
    "--chatgpt-token-stdin": StdinForm(
        Destinations.HTTPS,
        CHATGPT_LINE_BYTES,
        _parse_chatgpt_token,
        closed=_NO_CHATGPT_TOKEN,
        unfinished=_NO_CHATGPT_TOKEN,
        too_long=_NO_CHATGPT_TOKEN,
        needs_pipe=True,
    ),
}
