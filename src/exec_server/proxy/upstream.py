"""Upstream: connections from a proxy to origins, directly or through the server's own proxy."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from exec_server.net.http1 import connect_request, parse_status
from exec_server.protocol.urls import host_port
from exec_server.proxy import hosts
from exec_server.proxy.policy import NetworkAccess, is_local
from exec_server.proxy.stream import SocketStream, Stream

# The time for a connection to one host, all its addresses together.
CONNECT_SECONDS = 30.0
# The head of the answer to CONNECT of the server's own proxy.
_ANSWER_BYTES: Final = 8192
_HTTP_PORT: Final = 80


class Route(NamedTuple):
    """The next hop of a request: addresses and a port, and whether it is another proxy."""

    addresses: Sequence[str]
    port: int
    is_proxy: bool = False
    authorization: bytes | None = None  # for another proxy


class Upstream:
    """Finds the next hop of a process's requests, and connects to it."""

    def __init__(self, variables: Mapping[str, str] | None, *, private: bool = False) -> None:
        """`variables` are the server's own; None if its proxies must not be used.

        With `private` they also lead to private addresses, as far as the rules allow these.
        """
        self._is_direct = hosts.is_loopback if private else is_local
        variables = variables or {}
        self._http_proxy = _proxy(variables, "HTTP_PROXY", "ALL_PROXY")
        self._tunnel_proxy = _proxy(variables, "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")

    def route(self, host: str, port: int, addresses: Sequence[str], *, tunnel: bool) -> Route:
        """The next hop for an allowed host; those of this machine are always dialled."""
        return self._next_proxy(host, tunnel=tunnel) or Route(addresses, port)

    def forwards(self, request: NetworkAccess) -> bool:
        """Whether another proxy gets the name of an allowed host, and looks it up itself."""
        if request.protocol == "socks5_udp":
            return False
        return self._next_proxy(request.host, tunnel=request.protocol != "http") is not None

    def _next_proxy(self, host: str, *, tunnel: bool) -> Route | None:
        if self._is_direct(host):
            return None
        return self._tunnel_proxy if tunnel else self._http_proxy

    async def connect(self, route: Route) -> Stream:
        """Connect to the first address that accepts; raises OSError."""
        failure: OSError = OSError("no address")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                for address in route.addresses:
                    try:
                        return await SocketStream.connect(address, route.port)
                    except OSError as error:
                        failure = error
        except TimeoutError as error:
            raise OSError("connecting took too long") from error
        raise failure

    async def tunnel(self, host: str, port: int, addresses: Sequence[str]) -> Stream:
        """A connection to an allowed host, perhaps through the server's own proxy."""
        route = self.route(host, port, addresses, tunnel=True)
        stream = await self.connect(route)
        if route.is_proxy:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await _ask_for_tunnel(stream, host_port(host, port), route)
            except BaseException:
                stream.abort()
                raise
        return stream


async def _ask_for_tunnel(stream: Stream, authority: str, proxy: Route) -> None:
    authorization = None if proxy.authorization is None else proxy.authorization.decode()
    await stream.send(connect_request(authority, authorization))
    head = b""
    while not head.endswith((b"\r\n\r\n", b"\n\n")):
        # One byte at a time: the next ones may be from the other end of the tunnel.
        byte = await stream.receive(1)
        if not byte or len(head) >= _ANSWER_BYTES:
            raise OSError("the upstream proxy sent no valid answer")
        head += byte
    if parse_status(head.splitlines()[0]) != 200:
        raise OSError("the upstream proxy refused the connection")


def _proxy(variables: Mapping[str, str], *names: str) -> Route | None:
    for name in names:
        value = variables.get(name, "").strip() or variables.get(name.lower(), "").strip()
        proxy = _parse_proxy(value)
        if proxy is not None:
            return proxy
    return None


def _parse_proxy(value: str) -> Route | None:
    """The proxy of a URL, or of `HOST:PORT`; None for other schemes, and for no URL."""
    try:
        parts = urlsplit(value if "://" in value else f"http://{value}")
    except ValueError:
        return None
    userinfo, _, place = parts.netloc.rpartition("@")
    authority = hosts.split_authority(place, _HTTP_PORT)
    if parts.scheme != "http" or authority is None:
        return None
    return Route((authority[0],), authority[1], True, _basic(userinfo) if userinfo else None)


def _basic(userinfo: str) -> bytes:
    """The user and password of a URL as a header value (RFC 7617)."""
    user, _, password = userinfo.encode(errors="surrogateescape").partition(b":")
    pair = unquote_to_bytes(user) + b":" + unquote_to_bytes(password)
    return b"Basic " + base64.b64encode(pair)
