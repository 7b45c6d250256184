"""Upstream: connections from a proxy to origins, directly or through the server's own proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from exec_server.proxy import hosts
from exec_server.proxy.policy import is_local
from exec_server.proxy.stream import SocketStream, Stream

# The time for a connection to one host, all its addresses together.
CONNECT_SECONDS = 30.0
# The head of the answer to CONNECT of the server's own proxy.
_ANSWER_BYTES: Final = 8192


class Route(NamedTuple):
    """The next hop of a request: addresses and a port, and whether it is another proxy."""

    addresses: Sequence[str]
    port: int
    is_proxy: bool = False


class Upstream:
    """Finds the next hop of a process's requests, and connects to it."""

    def __init__(self, variables: Mapping[str, str] | None) -> None:
        """`variables` are the server's own; None if its proxies must not be used."""
        variables = variables or {}
        self._http_proxy = _proxy(variables, "HTTP_PROXY")
        self._tunnel_proxy = _proxy(variables, "HTTPS_PROXY")

    def route(self, host: str, port: int, addresses: Sequence[str], *, tunnel: bool) -> Route:
        """The next hop for an allowed host; local ones are always dialled."""
        proxy = self._tunnel_proxy if tunnel else self._http_proxy
        if proxy is None or is_local(host):
            return Route(addresses, port)
        return Route((proxy[0],), proxy[1], is_proxy=True)

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
                    await _ask_for_tunnel(stream, hosts.authority(host, port))
            except BaseException:
                stream.abort()
                raise
        return stream


async def _ask_for_tunnel(stream: Stream, authority: str) -> None:
    await stream.send(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
    head = b""
    while not head.endswith((b"\r\n\r\n", b"\n\n")):
        # One byte at a time: the next ones may be from the other end of the tunnel.
        byte = await stream.receive(1)
        if not byte or len(head) >= _ANSWER_BYTES:
            raise OSError("the upstream proxy sent no valid answer")
        head += byte
    status = head.split(maxsplit=2)
    if len(status) < 2 or status[1] != b"200":
        raise OSError("the upstream proxy refused the connection")


def _proxy(variables: Mapping[str, str], name: str) -> tuple[str, int] | None:
    """The HTTP proxy that a variable names, or else ALL_PROXY."""
    for each in (name, name.lower(), "ALL_PROXY", "all_proxy"):
        if variables.get(each):
            parts = urlsplit(variables[each])
            if parts.scheme == "http":
                return hosts.split_authority(parts.netloc.rpartition("@")[2], 80)
            return None
    return None
