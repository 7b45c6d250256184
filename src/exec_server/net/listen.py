"""Addresses to listen on: `--listen` URLs, bound sockets, and unix socket files.

Imports little, since the server prints its URL before it imports the rest of itself.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from typing import Final, NamedTuple

from exec_server.errors import StartupError, os_error_text
from exec_server.protocol.urls import MAX_UNIX_PATH_BYTES, bracketed

# Connections that the kernel accepts before the server does.
BACKLOG: Final = 1024

# Both are compiled at their first use.
_ADDRESS: Final = r"(?:(\d+\.\d+\.\d+\.\d+)|\[([0-9a-fA-F:.]+)\]|(localhost)):(\d{1,5})"
# With a letter, so that it is no address; `localhost` has its own rule.
_HOST_NAME: Final = (
    r"(?!localhost:)((?=[^:]*[A-Za-z])[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?\.?):(\d{1,5})"
)
_STDIO: Final = frozenset({"stdio", "stdio://"})
_TCP_SCHEMES: Final = ("ws", "wss")


class TcpAddress(NamedTuple):
    """An IP address and a port; with TLS for `wss`, and then perhaps the name to connect to."""

    scheme: str
    host: str
    port: int
    name: str | None = None

    @property
    def is_loopback(self) -> bool:
        from ipaddress import ip_address

        return ip_address(self.host).is_loopback

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name or bracketed(self.host)}:{self.port}"


class UnixAddress(NamedTuple):
    """The path of a unix socket."""

    path: str

    @property
    def url(self) -> str:
        return f"unix:{self.path}"


Address = TcpAddress | UnixAddress


def parse_listen_url(url: str) -> Address | None:
    """The address of a --listen URL, None for stdio; raises StartupError."""
    if url in _STDIO:
        return None
    if url.startswith("unix:"):
        return UnixAddress(_checked_path(url))
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _TCP_SCHEMES:
        raise StartupError(
            f"unsupported --listen URL `{url}`; expected `ws://IP:PORT` or `stdio`, or "
            "`wss://IP:PORT` or `unix:/PATH`"
        )
    if scheme == "wss" and (name := re.fullmatch(_HOST_NAME, rest)) is not None:
        return _resolved(url, name[1], int(name[2]))
    from ipaddress import ip_address

    match = re.fullmatch(_ADDRESS, rest)
    try:
        if match is None:
            raise ValueError(url)
        # One address, so that there is one URL to print. Clients of `localhost` try both families.
        host = "127.0.0.1" if match[3] else str(ip_address(match[1] or match[2]))
        port = int(match[4])
        if port > 65_535:
            raise ValueError(url)
    except ValueError:
        raise StartupError(
            f"invalid websocket --listen URL `{url}`; expected `{scheme}://IP:PORT`"
        ) from None
    return TcpAddress(scheme, host, port)


def _resolved(url: str, name: str, port: int) -> TcpAddress:
    """The first address of a name of this machine. Blocking."""
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError):
        found = []
    if not found or port > 65_535:
        raise StartupError(
            f"invalid websocket --listen URL `{url}`; expected `wss://IP:PORT`, or a name "
            "that has an address"
        )
    return TcpAddress("wss", str(found[0][4][0]), port, name)


def _checked_path(url: str) -> str:
    path = url.removeprefix("unix:").removeprefix("//")
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise StartupError(f"invalid --listen URL `{url}`; expected `unix:/PATH`")
    size = len(os.fsencode(path))
    if size > MAX_UNIX_PATH_BYTES:
        raise StartupError(
            f"invalid --listen URL `{url}`: the path of a unix socket has at most "
            f"{MAX_UNIX_PATH_BYTES} bytes, this one has {size}"
        )
    return path


class BoundSocket:
    """A listening socket; `remove_file` removes the file of a unix socket."""

    def __init__(self, address: Address) -> None:
        """Bind and listen; raises StartupError, which names the address."""
        self.address = address
        self._file: tuple[int, int] | None = None  # device and inode of a unix socket
        try:
            if isinstance(address, UnixAddress):
                self.socket = _bind_unix(address.path)
                self._file = _identity(address.path)
            else:
                self.socket = _bind_tcp(address)
        except OSError as error:
            text = os_error_text(error)
            raise StartupError(f"cannot listen on {address.url}: {text}") from None

    @property
    def is_tls(self) -> bool:
        return isinstance(self.address, TcpAddress) and self.address.scheme == "wss"

    @property
    def name(self) -> str | None:
        """The name in the URL, if it has one; clients send it in their Host header."""
        return self.address.name if isinstance(self.address, TcpAddress) else None

    @property
    def url(self) -> str:
        """The URL for clients, with the port that the kernel has chosen for port 0."""
        if isinstance(self.address, UnixAddress):
            return self.address.url
        port = self.socket.getsockname()[1]
        return self.address._replace(port=port).url

    def close(self) -> None:
        """Close a socket that is not served."""
        self.socket.close()
        self.remove_file()

    def remove_file(self) -> None:
        """Remove the file of a unix socket, unless another server has replaced it."""
        if self._file is None:
            return
        assert isinstance(self.address, UnixAddress)
        try:
            if _identity(self.address.path) == self._file:
                os.unlink(self.address.path)
        except OSError:
            pass  # it is gone, or its directory was closed: the next server replaces the file
        self._file = None


def _bind_tcp(address: TcpAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((address.host, address.port))
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def _bind_unix(path: str) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The creation sets the mode, so other users never have access. No thread shares the umask yet.
    umask = os.umask(0o177)
    try:
        try:
            bound.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _remove_stale(path)
            bound.bind(path)
        bound.listen(BACKLOG)
    except BaseException:
        bound.close()
        raise
    finally:
        os.umask(umask)
    return bound


def _remove_stale(path: str) -> None:
    """Remove the socket of a server that was killed; raises StartupError for any other file."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise StartupError(f"cannot listen on unix:{path}: the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # its backlog is full, so it has a listener
    raise StartupError(f"cannot listen on unix:{path}: another server listens there")


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino
