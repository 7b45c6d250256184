"""Short exchanges over HTTP: a request, a whole answer, in time; redirects are not followed."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import NamedTuple

from exec_server.transports.http_client import Client, HttpFailed

__all__ = ["AnswerTooLarge", "HttpClient", "HttpFailed", "Reply"]

# For a whole exchange, from the name of the host to the last byte of the answer.
REQUEST_SECONDS = 10.0
# Of an answer. The longest that makes sense is some kilobytes; more is not read.
BODY_BYTES = 1_048_576


class Reply(NamedTuple):
    """A whole answer, whatever its status."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


class AnswerTooLarge(HttpFailed):
    """The answer was more than BODY_BYTES: asking again would not help."""


class HttpClient:
    """Makes requests, any number at a time; whoever makes it closes it."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._client = Client(tls)

    async def request(
        self, method: str, url: str, headers: Sequence[tuple[str, str]], body: bytes = b""
    ) -> Reply:
        """Ask once; raises HttpFailed unless an answer came whole and in time."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                return await self._ask(method, url, headers, body)
        except TimeoutError:
            raise HttpFailed("route-aware request timed out") from None

    async def close(self) -> None:
        """Close what is idle; requests under way end with their callers."""
        await self._client.close()

    async def _ask(
        self, method: str, url: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> Reply:
        # A registry does the same when it is asked the same again.
        answer = await self._client.open(method, url, headers, body, repeatable=True)
        content = bytearray()
        try:
            while piece := await answer.read():
                content += piece
                if len(content) > BODY_BYTES:
                    raise AnswerTooLarge(f"response body exceeds {BODY_BYTES} bytes")
        finally:
            answer.close()
        return Reply(answer.status, answer.reason, answer.headers, bytes(content))
