"""Interceptor: opens TLS connections to hosts of masked secrets, in limited mode to all hosts.

The process gets a certificate of the server's own authority, which only it trusts; the origin needs
one that the system trusts.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import h11

from exec_server.errors import printable
from exec_server.proxy import http_messages as messages
from exec_server.proxy.credentials import CredentialMask, Scheme
from exec_server.proxy.http_exchange import HttpExchange, date
from exec_server.proxy.http_messages import BadRequest, Head
from exec_server.proxy.policy import SAFE_METHODS
from exec_server.proxy.resources import ProxyResources
from exec_server.proxy.stream import BUFFER_BYTES, SocketStream, Stream, TransportStream
from exec_server.proxy.upstream import Upstream

log = logging.getLogger(__name__)

# For the TLS handshake of either side.
HANDSHAKE_SECONDS = 30.0
# The answer to them repeats the headers of the request (RFC 9110, 9.3.8; TRACK is an older name),
# so the process would read the secret. Some servers ignore the case of methods.
_ECHOED_METHODS: Final = frozenset({b"TRACE", b"TRACK"})


class _Origin(NamedTuple):
    """An intercepted host, and the addresses that were checked."""

    host: str
    port: int
    addresses: Sequence[str]


class Interceptor:
    """The interception of one process."""

    def __init__(
        self,
        mask: CredentialMask,
        resources: ProxyResources,
        upstream: Upstream,
        *,
        is_limited: bool = False,
    ) -> None:
        """In limited mode all tunnels are opened, and only safe methods pass."""
        self.mask = mask
        self.is_limited = is_limited
        self._resources = resources
        self._upstream = upstream

    def wants(self, host: str, port: int) -> bool:
        """Whether TLS to a host has to be opened."""
        return self.is_limited or self.mask.is_intercepted(host, port)

    def restored(self, head: Head, target: messages.RequestTarget, scheme: Scheme) -> Head:
        """The head of a request for an origin with secrets for dummies, where they belong."""
        if head.start.partition(b" ")[0].upper() in _ECHOED_METHODS:
            return head
        headers = self.mask.restored(scheme, target[:2], target.path, head.headers)
        return Head(head.start, headers)

    async def serve(
        self,
        stream: Stream,
        target: tuple[str, int],
        addresses: Sequence[str],
        accept: Callable[[], Awaitable[None]],
    ) -> None:
        """Serve the requests in a tunnel to an intercepted host; raises OSError.

        `accept` tells the process that the tunnel is open; its next bytes must be unread.
        """
        threads, authority = self._resources.lookup_threads, self._resources.authority()
        context = await threads.run(authority.context, target[0])
        await accept()
        secure = await _accept_tls(stream, context)
        try:
            await _InterceptedHttp(secure, self, _Origin(*target, addresses)).serve()
        finally:
            secure.close()

    async def open(self, origin: _Origin) -> Stream:
        """A verified TLS connection to an origin; raises OSError."""
        context = self._resources.client_context()
        _check_name(context, origin.host)
        stream = await self._upstream.tunnel(*origin)
        assert isinstance(stream, SocketStream)
        try:
            return TransportStream(
                *await asyncio.open_connection(
                    sock=stream.detach(),
                    ssl=context,
                    server_hostname=origin.host,
                    ssl_handshake_timeout=HANDSHAKE_SECONDS,
                    limit=BUFFER_BYTES,
                )
            )
        except ssl.SSLError as error:
            raise OSError(f"no TLS with the origin: {error}") from error


def _check_name(context: ssl.SSLContext, host: str) -> None:
    """Raise OSError for a host like `a..b`; asyncio would do so in a callback and not close."""
    try:
        context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=host)
    except ValueError as error:
        raise OSError(f"no name of a TLS server: {error}") from error


async def _accept_tls(stream: Stream, context: ssl.SSLContext) -> TransportStream:
    """The connection of a process with TLS; raises OSError."""
    assert isinstance(stream, SocketStream)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=BUFFER_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
        lambda: protocol, stream.detach(), ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS
    )
    return TransportStream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


class _InterceptedHttp(HttpExchange):
    """The requests in one tunnel."""

    def __init__(self, stream: Stream, interceptor: Interceptor, origin: _Origin) -> None:
        super().__init__(stream)
        self._interceptor = interceptor
        self._origin = origin

    async def handle(self, request: h11.Request) -> bool:
        origin = self._origin
        if request.method == b"CONNECT":
            raise BadRequest(400, "CONNECT inside of a tunnel")
        target = messages.find_target(request, default_port=origin.port)
        if target[:2] != origin[:2]:
            raise BadRequest(400, "Host header does not match request target")
        if self._interceptor.is_limited and request.method.decode("ascii") not in SAFE_METHODS:
            log.info("a request to %s is refused: method_not_allowed", printable(origin.host))
            answer = messages.refusal_text("method_not_allowed", date())
            await self.answer(request, answer, last=True)
            return True
        try:
            outer = await self._interceptor.open(origin)
        except OSError as error:
            log.info("no verified connection to %s: %s", printable(origin.host), error)
            answer = messages.text_answer(502, "mitm upstream error", date())
            await self.answer(request, answer, last=True)
            return True
        try:
            forwarded = messages.forwarded_request(request, target, absolute=False)
            restored = self._interceptor.restored(forwarded, target, "https")
            has_response = await self.exchange(request, restored, outer)
        finally:
            outer.abort()
        if not has_response:
            answer = messages.text_answer(502, "upstream failure", date())
            await self.answer(request, answer, last=True)
        return False
