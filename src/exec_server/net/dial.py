"""Outgoing connections: URLs, proxies of the environment, TCP, TLS and unix sockets.

The caller passes the protocol to run on a connection.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from itertools import chain, zip_longest
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit

from exec_server.errors import CertificateRejected, ConnectFailed
from exec_server.net.client_tls import check_pin, roots_for_websockets, tls_context
from exec_server.net.http1 import HEAD_BYTES, connect_request, parse_status
from exec_server.net.unix_peer import MAX_UNIX_PATH_BYTES, check_server_user
from exec_server.protocol.url_host import domain_to_ascii

# How long one address is tried alone before the next one is tried in parallel (RFC 8305, 5).
ATTEMPT_DELAY_SECONDS = 0.25
# Addresses of a host that are tried; more would delay the error for a host that is down.
MAX_ADDRESSES = 8

_DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
_PROXY_SCHEMES = frozenset({"http"})
_NAME = re.compile(r"(?:[a-z0-9_~-]{1,63}\.)*+[a-z0-9_~-]{0,63}")
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))  # of a target, sent unquoted

P = TypeVar("P", bound=asyncio.BaseProtocol)
_AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]  # an item of getaddrinfo()


class Url(NamedTuple):
    """The parts of a URL that a connection needs."""

    scheme: str
    host: str  # a name or an address, without brackets; the path of a unix socket
    port: int
    target: str  # path and query, quoted

    @property
    def secure(self) -> bool:
        return self.scheme in ("https", "wss")

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        if self.scheme == "unix":
            return "localhost"
        if self.port == _DEFAULT_PORTS[self.scheme]:
            return _bracketed(self.host)
        return f"{_bracketed(self.host)}:{self.port}"


def parse_url(text: str, schemes: frozenset[str]) -> Url:
    """Parse a URL; raises ValueError with a text that does not contain the URL."""
    text = text.strip()
    if any(character < " " or character == "\x7f" for character in text):
        raise ValueError("URL contains control characters")
    if "unix" in schemes and text.startswith("unix:"):
        return Url("unix", _checked_socket_path(text.removeprefix("unix:")), 0, "/")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise ValueError("invalid URL") from None
    if not parts.scheme:
        raise ValueError("relative URL without a base")
    if parts.scheme not in schemes:
        known = [f"{name}://" if name != "unix" else "unix:" for name in sorted(schemes)]
        raise ValueError(f"URL must begin with {' or '.join(known)}")
    if "@" in parts.netloc:
        raise ValueError("URL must not contain a user name or password")
    try:
        port = parts.port
        if port == 0:
            raise ValueError
    except ValueError:
        raise ValueError("invalid port number") from None
    host = _checked_host(parts.hostname or "", bracketed=parts.netloc.startswith("["))
    target = quote(parts.path or "/", safe=_PRINTABLE)
    if parts.query:
        target += "?" + quote(parts.query, safe=_PRINTABLE)
    return Url(parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme], target)


def _checked_socket_path(path: str) -> str:
    path = path.removeprefix("//")
    if not path.startswith("/"):
        raise ValueError("the path of a unix socket must begin with /")
    if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
        raise ValueError(f"the path of a unix socket has at most {MAX_UNIX_PATH_BYTES} bytes")
    return path


def _checked_host(host: str, *, bracketed: bool) -> str:
    if not host:
        raise ValueError("empty host")
    try:
        if bracketed:
            return str(IPv6Address(host))
        host = domain_to_ascii(host)
    except ValueError:
        raise ValueError("invalid host") from None
    # Resolvers raise UnicodeError instead of OSError for empty and for longer labels.
    if not 0 < len(host) <= 253 or not _NAME.fullmatch(host):
        raise ValueError("invalid host")
    return host


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# ---- proxies --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy; `authorization` is the value of its Proxy-Authorization header."""

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)


def proxy_for(url: Url, environ: Mapping[str, str] = os.environ) -> Proxy | None:
    """The proxy of the environment for this URL; never one for this machine itself.

    An http request is sent to the proxy with the whole URL; all other schemes are tunnelled.
    """
    if _is_local(url.host) or _is_exempt(url, _variable(environ, "NO_PROXY")[1]):
        return None
    name, value = _variable(environ, "HTTPS_PROXY" if url.secure else "HTTP_PROXY")
    if not value:
        name, value = _variable(environ, "ALL_PROXY")
    return _parse_proxy(name, value) if value else None


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
    user, _, password = user_info.partition(":")
    credentials = f"{unquote(user)}:{unquote(password)}".encode()
    return Proxy(url.host, url.port, "Basic " + b64encode(credentials).decode())


def _is_local(host: str) -> bool:
    address = _address(host)
    if address is None:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback


def _is_exempt(url: Url, exempt: str) -> bool:
    return any(_matches(url, entry.strip().lower()) for entry in exempt.split(","))


def _matches(url: Url, entry: str) -> bool:
    """Whether an entry of NO_PROXY matches: a name with its subdomains, or a network."""
    if entry == "*":
        return True
    address = _address(url.host)
    if address is not None and (network := _network(entry)) is not None:
        return address in network
    name, _, port = entry.partition(":")
    name = name.removeprefix("*").removeprefix(".")
    if not name or (port and port != str(url.port)):
        return False
    return url.host == name or url.host.endswith("." + name)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text.removeprefix("[").removesuffix("]"), strict=False)
    except ValueError:
        return None


# ---- connections ----------------------------------------------------------------------


async def open_connection(
    url: Url, factory: Callable[[], P], *, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.Transport, P]:
    """Connect, through the proxy of the environment if any; raises OSError or ConnectFailed.

    CertificateRejected, and ConnectFailed for a unix socket of another user, are raised before
    anything is sent to the server. Cancelling closes the socket.
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
    """Connect to the first address that accepts (RFC 8305).

    The event loop would try one address after the other, each for minutes.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    winners: list[socket.socket] = []
    failures: list[OSError] = []
    attempts: list[asyncio.Task[None]] = []

    async def attempt(address: _AddressInfo) -> None:
        try:
            winners.append(await _connect_to(address))
        except OSError as error:
            failures.append(error)
            return
        for other in attempts:
            if other is not asyncio.current_task():
                other.cancel()

    try:
        async with asyncio.TaskGroup() as group:
            for address in _interleaved(found)[:MAX_ADDRESSES]:
                attempts.append(group.create_task(attempt(address)))
                await asyncio.wait(attempts[-1:], timeout=ATTEMPT_DELAY_SECONDS)
                if winners:
                    break
    except BaseException:
        for winner in winners:
            winner.close()
        raise
    if not winners:
        raise failures[0] if failures else OSError(f"{host} has no address")
    return winners[0]


def _interleaved(found: Sequence[_AddressInfo]) -> list[_AddressInfo]:
    """Addresses of both families in alternation, the preferred family of the system first."""
    first = [entry for entry in found if entry[0] == found[0][0]]
    second = [entry for entry in found if entry[0] != found[0][0]]
    pairs = chain.from_iterable(zip_longest(first, second))
    return [entry for entry in pairs if entry is not None]


async def _connect_to(address: _AddressInfo) -> socket.socket:
    raw = socket.socket(address[0], address[1], address[2])
    try:
        raw.setblocking(False)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(raw, address[4])
    except BaseException:
        raw.close()
        raise
    return raw


async def _open_tunnel(raw: socket.socket, url: Url, proxy: Proxy) -> None:
    loop = asyncio.get_running_loop()
    address = f"{_bracketed(url.host)}:{url.port}"
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
