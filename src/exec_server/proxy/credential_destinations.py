"""Destination: the URLs below a prefix, to which a secret may be sent. Pure."""

from __future__ import annotations

import re
import unicodedata
from typing import Final, Literal, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from exec_server.protocol.urls import parse_address
from exec_server.proxy import hosts

Scheme = Literal["http", "https"]

_DEFAULT_PORTS: Final[dict[str, int]] = {"http": 80, "https": 443}
# A path that is still escaped after so many decodings is refused.
_DECODINGS: Final = 4
# A segment with these beginnings may lead upwards: servers remove blanks, control characters and
# the parameters after a semicolon (`..;x=y`) before they look for `..`, or cut the path at a null.
_UPWARDS: Final = re.compile(r"(?:^|[/\\])[^!-~]*\.(?![A-Za-z0-9_~-])")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Escapes that one server leaves as they are and another one reads (`%u002e`).
_MALFORMED: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_WIDE: Final = re.compile(rb"%u[0-9A-Fa-f]{4}", re.IGNORECASE)


class Destination(NamedTuple):
    """The URLs below a prefix; a host `*.a.b` stands for all names below `a.b`."""

    scheme: Scheme
    host: str
    port: int
    path: str = "/"

    def has_host(self, scheme: Scheme, host: str, port: int) -> bool:
        if (scheme, port) != (self.scheme, self.port):
            return False
        if self.host.startswith("*"):
            return host.endswith(self.host[1:]) and parse_address(host) is None
        return host == self.host

    def has_path(self, target: bytes | None) -> bool:
        """Whether the target of a request is below the path, however an origin reads it.

        None: another header may name the target, so it is known to be below `/` only.
        """
        if target is None:
            return self.path == "/"
        raw = target.partition(b"?")[0]
        path = raw.decode("latin-1")
        if not path.startswith(self.path):
            return False
        if not self.path.endswith("/") and path[len(self.path) :][:1] not in ("", "/"):
            return False
        return self.path == "/" or _is_straight(raw)


def _is_straight(path: bytes) -> bool:
    """Whether no segment of a path leads upwards, also after it is decoded.

    A path that is not UTF-8 may be an overlong form of one that does (`%c0%ae` for a dot), and
    compatible characters may be replaced by those of ASCII, as by a file system.
    """
    if _MALFORMED.search(path):
        return False
    for _ in range(_DECODINGS):
        try:
            text = path.decode()
        except UnicodeDecodeError:
            return False
        if _WIDE.search(path) or _CONTROL.search(text):
            return False
        if any(map(_UPWARDS.search, (text, unicodedata.normalize("NFKC", text)))):
            return False
        decoded = unquote_to_bytes(path)
        if decoded == path:
            return True
        path = decoded
    return False


def parse_destination(prefix: str) -> Destination:
    """The destination of a URL prefix; raises ValueError with the reference's texts."""
    parts = urlsplit(prefix)
    host, port = hosts.normalize(parts.hostname or ""), parts.port
    if not host:
        raise ValueError("credential destination has no hostname")
    if parts.username is not None or "?" in prefix or "#" in prefix:
        raise ValueError(
            "credential destination cannot include user information, a query, or a fragment"
        )
    if (parts.scheme == "http" and not _is_loopback(host)) or parts.scheme not in _DEFAULT_PORTS:
        raise ValueError(
            "credential destination must use HTTPS unless it targets loopback over HTTP"
        )
    if "*" in host:
        rest = host.removeprefix("*.")
        if rest == host or "*" in rest or "." not in rest:
            raise ValueError("credential destination has an invalid wildcard")
    path = parts.path.encode(errors="surrogatepass")
    if not hosts.is_usable(host.removeprefix("*.")) or not _is_straight(path):
        raise ValueError("credential destination must have an exact hostname or scoped wildcard")
    scheme: Scheme = "https" if parts.scheme == "https" else "http"
    return Destination(scheme, host, port or _DEFAULT_PORTS[scheme], parts.path or "/")


def _is_loopback(host: str) -> bool:
    address = parse_address(host)
    return host == "localhost" if address is None else address.is_loopback
