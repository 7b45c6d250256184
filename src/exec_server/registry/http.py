"""Short HTTP exchanges with a time limit and whole responses; redirects are not followed."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Sequence
from typing import NamedTuple

from exec_server.net.http_client import CertificateFailed, Client, HttpFailed

__all__ = ["CertificateFailed", "CompleteResponse", "HttpClient", "HttpFailed", "ResponseTooLarge"]

# For a whole exchange, from the name lookup to the last byte of the response.
REQUEST_SECONDS = 10.0
# Of a response. Valid ones have at most some kilobytes; more is not read.
BODY_BYTES = 1_048_576


class CompleteResponse(NamedTuple):
    """A whole response, of any status."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


class ResponseTooLarge(HttpFailed):
    """The response has more than BODY_BYTES; a retry would not help."""


class HttpClient:
    """Makes requests, any number at a time; must be closed."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._client = Client(tls)

    async def request(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[str, str]],
        body: bytes = b"",
        *,
        repeatable: bool = True,
    ) -> CompleteResponse:
        """Send a request; raises HttpFailed unless the whole response arrives in time.

        `repeatable`: it is sent again if a kept connection turns out to be closed.
        """
        content = bytearray()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                answer = await self._client.open(method, url, headers, body, repeatable=repeatable)
                with contextlib.closing(answer):
                    while piece := await answer.read():
                        content += piece
                        if len(content) > BODY_BYTES:
                            raise ResponseTooLarge(f"response body exceeds {BODY_BYTES} bytes")
        except TimeoutError:
            raise HttpFailed("route-aware request timed out") from None
        return CompleteResponse(answer.status, answer.reason, answer.headers, bytes(content))

    async def close(self) -> None:
        """Close idle connections; pending requests end with their callers."""
        await self._client.close()
