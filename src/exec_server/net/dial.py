"""Outgoing connections: proxies of the environment, TCP, TLS and unix sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from exec_server.errors import CertificateRejected, ConnectFailed
from exec_server.net.client_tls import check_pin, roots_for_websockets, tls_context
from exec_server.net.http1 import HEAD_BYTES, connect_request, parse_status
from exec_server.net.socket_options import check_server_user
from exec_server.protocol.urls import Url, host_port, parse_address, parse_url

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

# How long one address is tried alone before the next one is tried in parallel (RFC 8305, 5).
ATTEMPT_DELAY_SECONDS = 0.25
# Addresses of a host that are tried; more would delay the error for a host that is down.
MAX_ADDRESSES = 8

_PROXY_SCHEMES = frozenset({"http"})

P = TypeVar("P", bound=asyncio.BaseProtocol)
_AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]  # an item of getaddrinfo()


class Proxy(NamedTuple):
    """An HTTP proxy; `authorization` is the value of its Proxy-Authorization header."""

    host: str
    port: int
    authorization: str | None = None

    def __repr__(self) -> str:
        return f"Proxy({self.host!r}, {self.port})"  # without the password


def proxy_for(url: Url, environ: Mapping[str, str] = os.environ) -> Proxy | None:
    """The environment's proxy for this URL; never one for this machine itself."""
    name, value = _variable(environ, "HTTPS_PROXY" if url.secure else "HTTP_PROXY")
    if not value:
        name, value = _variable(environ, "ALL_PROXY")
    if not value or _is_local(url.host) or _is_exempt(url, _variable(environ, "NO_PROXY")[1]):
        return None
    return _parse_proxy(name, value)


def _variable(environ: Mapping[str, str], name: str) -> tuple[str, str]:
    for spelling in (name, name.lower()):
        if value := environ.get(spelling, "").strip():
            return spelling, value
    return name, ""


def _parse_proxy(variable: str, value: str) -> Proxy:
    """Parse a proxy variable; error texts omit the value, which may contain a password."""
    if "://" not in value:
        value = "http://" + value
    scheme, _, rest = value.partition("://")
    user_info, _, authority = rest.rpartition("@")
    try:
        url = parse_url(f"{scheme}://{authority}", _PROXY_SCHEMES)
    except ValueError as error:
        raise ConnectFailed(f"{variable} does not name a usable proxy: {error}") from None
    if not user_info:
        return Proxy(url.host, url.port)
    from urllib.parse import unquote

    user, _, password = user_info.partition(":")
    credentials = f"{unquote(user)}:{unquote(password)}".encode()
    return Proxy(url.host, url.port, "Basic " + b64encode(credentials).decode())


def _is_local(host: str) -> bool:
    address = parse_address(host)
    if address is None:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback


def _is_exempt(url: Url, exempt: str) -> bool:
    return any(_matches(url, entry.strip().lower()) for entry in exempt.split(","))


def _matches(url: Url, entry: str) -> bool:
    if entry == "*":
        return True
    address = parse_address(url.host)
    if address is not None and (network := _network(entry)) is not None:
        return address in network
    name, _, port = entry.partition(":")
    name = name.removeprefix("*").removeprefix(".")
    if not name or (port and port != str(url.port)):
        return False
    return url.host == name or url.host.endswith("." + name)


def _network(text: str) -> IPv4Network | IPv6Network | None:
    from ipaddress import ip_network

    try:
        return ip_network(text.removeprefix("[").removesuffix("]"), strict=False)
    except ValueError:
        return None


async def open_connection(
    url: Url, factory: Callable[[], P], *, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.Transport, P]:
    """Connect, through the environment's proxy if any; raises OSError or ConnectFailed.

    Server checks (certificate, unix socket user) precede all sending. Cancelling closes the socket.
    """
    loop = asyncio.get_running_loop()
    if url.scheme == "unix":
        if not hasattr(socket, "AF_UNIX"):
            raise ConnectFailed("this system has no unix sockets")
        return await _open_unix(url.host, factory)
    context = None
    if url.secure:
        context = tls or tls_context(roots_for_websockets(os.environ))
    proxy = proxy_for(url)
    raw = await _connect(proxy.host if proxy else url.host, proxy.port if proxy else url.port)
    try:
        if proxy is not None and url.scheme != "http":
            await _open_tunnel(raw, url, proxy)
        name = url.host if context is not None else None
        transport, protocol = await loop.create_connection(
            factory, sock=raw, ssl=context, server_hostname=name
        )
    except BaseException:
        raw.close()
        raise
    try:
        if context is not None:
            check_pin(transport, context)
    except CertificateRejected:
        transport.abort()
        raise
    return transport, protocol


async def _open_unix(path: str, factory: Callable[[], P]) -> tuple[asyncio.Transport, P]:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        raw.setblocking(False)
        raw.connect(path)  # succeeds or fails at once, also if the queue of the server is full
        check_server_user(raw, path)
        loop = asyncio.get_running_loop()
        return await loop.create_unix_connection(factory, sock=raw)
    except BaseException:
        raw.close()
        raise


async def _connect(host: str, port: int) -> socket.socket:
    """Connect to the first address that accepts (RFC 8305); uvloop would wait minutes for each."""
    from aiohappyeyeballs import start_connection  # a unix socket does without it

    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM)
    if not addresses:
        raise OSError(f"{host} has no address")
    raw = await start_connection(
        _limited(addresses), happy_eyeballs_delay=ATTEMPT_DELAY_SECONDS, loop=loop
    )
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return raw


def _limited(addresses: Sequence[_AddressInfo]) -> list[_AddressInfo]:
    """The addresses that are tried, as many of each family.

    Hosts are bytes: for a text the event loop imports the codec of international names.
    """
    families = Counter(family for family, *_ in addresses)
    limit = MAX_ADDRESSES // len(families)
    return [
        (*entry[:4], (entry[4][0].encode("ascii"), *entry[4][1:]))
        for family in families
        for entry in [e for e in addresses if e[0] == family][:limit]
    ]


async def _open_tunnel(raw: socket.socket, url: Url, proxy: Proxy) -> None:
    loop = asyncio.get_running_loop()
    address = host_port(url.host, url.port)
    await loop.sock_sendall(raw, connect_request(address, proxy.authorization))
    response = b""
    while b"\r\n\r\n" not in response:
        data = await loop.sock_recv(raw, 4096)
        if not data or len(response) > HEAD_BYTES:
            raise ConnectFailed("the proxy sent no valid response")
        response += data
    status = parse_status(response)
    # Not the `status` of ConnectFailed, which is that of the destination.
    if status is None or not 200 <= status < 300:
        raise ConnectFailed(f"the proxy refused to connect: {status or 'no HTTP status'}")
    # Destinations wait for the client to send first, so these bytes come from the proxy.
    if not response.endswith(b"\r\n\r\n"):
        raise ConnectFailed("the proxy sent data after its response")
