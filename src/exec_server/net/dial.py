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
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from exec_server.errors import CertificateRejected, ConnectFailed
from exec_server.net.client_tls import check_pin, roots_for_websockets, tls_context
from exec_server.net.unix_peer import MAX_UNIX_PATH_BYTES, check_server_user
from exec_server.protocol.url_host import domain_to_ascii

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

# How long one address is tried alone before the next one is tried in parallel (RFC 8305, 5).
ATTEMPT_DELAY_SECONDS = 0.25
# Addresses of a host that are tried; more would delay the error for a host that is down.
MAX_ADDRESSES = 8
# Of a proxy's response head.
PROXY_HEAD_BYTES = 16_384

_DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
_PROXY_SCHEMES = frozenset({"http"})
# The regular expressions are compiled at their first use. Not `urllib.parse`, whose import takes
# longer than the connection to this machine.
_PARTS = r"(?s)(?:([A-Za-z][A-Za-z0-9+.-]*):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#.*)?"
_AUTHORITY = r"(?:\[([^][]*)\]|([^][:]*))(?::([^][]*))?"
_NAME = r"(?:[a-z0-9_~-]{1,63}\.)*+[a-z0-9_~-]{0,63}"
_PROXY_RESPONSE = re.compile(rb"HTTP/1\.[01] (\d{3})(?: [^\r\n]*)?\r\n")

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
    scheme, netloc, path, query = re.fullmatch(_PARTS, text).groups("")  # type: ignore[union-attr]
    scheme = scheme.lower()
    if not scheme:
        raise ValueError("relative URL without a base")
    if scheme not in schemes:
        known = [f"{name}://" if name != "unix" else "unix:" for name in sorted(schemes)]
        raise ValueError(f"URL must begin with {' or '.join(known)}")
    if "@" in netloc:
        raise ValueError("URL must not contain a user name or password")
    authority = re.fullmatch(_AUTHORITY, netloc)
    if authority is None:
        raise ValueError("invalid URL")
    address, name, digits = authority.groups("")
    port = _parse_port(digits) if digits else _DEFAULT_PORTS[scheme]
    host = _checked_host(address or name, bracketed=bool(address))
    target = _quoted(path or "/")
    if query:
        target += "?" + _quoted(query)
    return Url(scheme, host, port, target)


def _parse_port(text: str) -> int:
    match = re.fullmatch("0*([0-9]{1,5})", text)
    if match is None or not 0 < int(match[1]) < 65_536:
        raise ValueError("invalid port number")
    return int(match[1])


def _quoted(text: str) -> str:
    return re.sub(
        r"[^\x21-\x7e]", lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), text
    )


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
            from ipaddress import IPv6Address

            return str(IPv6Address(host))
        host = domain_to_ascii(host)
    except ValueError:
        raise ValueError("invalid host") from None
    # Resolvers raise UnicodeError instead of OSError for empty and for longer labels.
    if not 0 < len(host) <= 253 or not re.fullmatch(_NAME, host):
        raise ValueError("invalid host")
    return host


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# ---- proxies --------------------------------------------------------------------------


class Proxy(NamedTuple):
    """An HTTP proxy; `authorization` is the value of its Proxy-Authorization header."""

    host: str
    port: int
    authorization: str | None = None

    def __repr__(self) -> str:
        return f"Proxy({self.host!r}, {self.port})"  # without the password


def proxy_for(url: Url, environ: Mapping[str, str] = os.environ) -> Proxy | None:
    """The proxy of the environment for this URL; never one for this machine itself.

    An http request is sent to the proxy with the whole URL; all other schemes are tunnelled.
    """
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
    from ipaddress import ip_address

    try:
        return ip_address(text)
    except ValueError:
        return None


def _network(text: str) -> IPv4Network | IPv6Network | None:
    from ipaddress import ip_network

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
    found = await loop.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM)
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
        host, *port = address[4]
        # As bytes: for a text the event loop imports the codec of international names.
        await asyncio.get_running_loop().sock_connect(raw, (host.encode("ascii"), *port))
    except BaseException:
        raw.close()
        raise
    return raw


async def _open_tunnel(raw: socket.socket, url: Url, proxy: Proxy) -> None:
    loop = asyncio.get_running_loop()
    address = f"{_bracketed(url.host)}:{url.port}"
    lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
    if proxy.authorization is not None:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    await loop.sock_sendall(raw, "\r\n".join([*lines, "", ""]).encode())
    response = b""
    while b"\r\n\r\n" not in response:
        data = await loop.sock_recv(raw, 4096)
        if not data or len(response) > PROXY_HEAD_BYTES:
            raise ConnectFailed("the proxy sent no valid response")
        response += data
    status = _PROXY_RESPONSE.match(response)
    # Not the `status` of ConnectFailed, which is that of the destination.
    if status is None or not status[1].startswith(b"2"):
        code = status[1].decode() if status is not None else "no HTTP status"
        raise ConnectFailed(f"the proxy refused to connect: {code}")
    # Destinations wait for the client to send first, so these bytes come from the proxy.
    if not response.endswith(b"\r\n\r\n"):
        raise ConnectFailed("the proxy sent data after its response")
