"""URLs, hosts and ports: the one place that reads and writes them. Pure.

`parse_url` is strict, for users; `parse_http_url` and `parse_host` follow the WHATWG with
`ada-url`, imported at the first text that needs it.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:  # a server on pipes needs no address
    from ipaddress import IPv4Address, IPv6Address

# The longest name that DNS can resolve.
HOST_CHARACTERS: Final = 253
MAX_PORT: Final = 65_535
# The kernel's limit for the path of a unix socket, without its final null byte.
MAX_UNIX_PATH_BYTES: Final = 107
# Addresses whose meaning is remembered: each request asks several times. The oldest is forgotten.
REMEMBERED_ADDRESSES: Final = 256

INVALID_NAME: Final = "invalid international domain name"

_DEFAULT_PORTS: Final = {"http": 80, "ws": 80, "https": 443, "wss": 443}
_EDGES: Final = "".join(map(chr, range(0x21)))  # browsers strip them from both ends of a URL
_ACE_PREFIX: Final = "xn--"

# Compiled at the first use, to keep the start of the server short.
_is_name = partial(re.fullmatch, r"(?:[a-z0-9_~-]{1,63}\.)*+[a-z0-9_~-]{0,63}")
# A name that stays as it is, and no number, which might be an IPv4 address.
_is_plain_name = partial(re.fullmatch, r"(?:[a-z0-9_-]+\.)*+[a-z_-][a-z0-9_-]*")
# Characters that end a host, or that browsers remove from a URL.
_has_delimiter = partial(re.search, r"[/?#@\\\t\n\r]|:(?!.*\])|\].")
# The parts of RFC 3986, appendix B. Not `urllib.parse`: its import takes longer than a connection.
_split = partial(
    re.fullmatch,
    r"(?s)(?:([A-Za-z][A-Za-z0-9+.-]*):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#.*)?",
)
_has_scheme = partial(re.match, r"[A-Za-z][A-Za-z0-9+.-]*:")


@lru_cache(REMEMBERED_ADDRESSES)
def parse_address(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is as usually spelt; None for names, `127.1` and `fe80::1%lo`."""
    if "%" in host:
        return None
    from ipaddress import ip_address

    try:
        return ip_address(host)
    except ValueError:
        return None


def parse_port(text: str) -> int:
    """The number of a port; raises ValueError."""
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) <= MAX_PORT):
        raise ValueError("invalid port number")
    return int(text)


def split_authority(text: str) -> tuple[str, int | None]:
    """Host, without brackets and unchecked, and port of `HOST[:PORT]`; raises ValueError."""
    if text.startswith("["):
        from ipaddress import IPv6Address

        host, bracket, port = text[1:].partition("]")
        try:
            if not bracket or port[:1] not in ("", ":"):
                raise ValueError
            host = str(IPv6Address(host))
        except ValueError:
            raise ValueError("invalid host") from None
        return host, parse_port(port[1:]) if port else None
    host, colon, port = text.partition(":")
    return host, parse_port(port) if colon else None


def bracketed(host: str) -> str:
    """A host as URLs have it, with brackets around an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def host_port(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets around an IPv6 address."""
    return f"{bracketed(host)}:{port}"


def domain_to_ascii(name: str) -> str:
    """The name in lower case, its international labels in Punycode; raises ValueError."""
    if name.isascii() and _ACE_PREFIX not in (lower := name.lower()):
        return lower
    import ada_url

    return _checked_punycode(ada_url.idna_to_ascii(name).decode())


def parse_host(text: str) -> str:
    """The host of a URL as it is compared and sent; raises ValueError.

    Names are lower case ASCII, IPv4 addresses dotted decimal, IPv6 addresses in brackets.
    """
    if _is_plain_name(text) and _ACE_PREFIX not in text:
        return text
    import ada_url

    try:
        if _has_delimiter(text):
            raise ValueError
        return _checked_punycode(ada_url.URL(f"http://{text}/").hostname)
    except ValueError:
        raise ValueError(INVALID_NAME) from None


def _checked_punycode(name: str) -> str:
    """The name; raises ValueError if it is empty or has a label that means nothing."""
    import ada_url

    # Labels that cannot be decoded stay as they are.
    labels = ada_url.idna_to_unicode(name).split(".") if _ACE_PREFIX in name else [name]
    if not name or any(label.startswith(_ACE_PREFIX) for label in labels):
        raise ValueError(INVALID_NAME)
    return name


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
            return bracketed(self.host)
        return host_port(self.host, self.port)


def parse_url(text: str, schemes: frozenset[str]) -> Url:
    """Parse a URL; raises ValueError with a text that does not contain the URL."""
    text = text.strip()
    if any(character < " " or character == "\x7f" for character in text):
        raise ValueError("URL contains control characters")
    if "unix" in schemes and text.startswith("unix:"):
        return Url("unix", _checked_socket_path(text.removeprefix("unix:")), 0, "/")
    parts = _split(text)
    assert parts is not None  # it matches every text
    scheme, authority, path, query = parts.groups("")
    scheme = scheme.lower()
    if not scheme:
        raise ValueError("relative URL without a base")
    if scheme not in schemes:
        known = [f"{name}://" if name != "unix" else "unix:" for name in sorted(schemes)]
        raise ValueError(f"URL must begin with {' or '.join(known)}")
    if "@" in authority:
        raise ValueError("URL must not contain a user name or password")
    if authority.count("[") != authority.count("]"):
        raise ValueError("invalid URL")
    host, port = split_authority(authority.removesuffix(":"))
    target = _quoted(path or "/") + (f"?{_quoted(query)}" if query else "")
    return Url(scheme, _checked_host(host), port or _DEFAULT_PORTS[scheme], target)


def _quoted(text: str) -> str:
    return re.sub(
        r"[^!-~]+", lambda part: "".join(f"%{byte:02X}" for byte in part[0].encode()), text
    )


def _checked_socket_path(path: str) -> str:
    path = path.removeprefix("//")
    if not path.startswith("/"):
        raise ValueError("the path of a unix socket must begin with /")
    if len(path.encode("utf-8", "surrogateescape")) > MAX_UNIX_PATH_BYTES:
        raise ValueError(f"the path of a unix socket has at most {MAX_UNIX_PATH_BYTES} bytes")
    return path


def _checked_host(host: str) -> str:
    if not host:
        raise ValueError("empty host")
    if ":" in host:
        return host
    try:
        host = domain_to_ascii(host)
    except ValueError:
        raise ValueError("invalid host") from None
    # Resolvers raise UnicodeError instead of OSError for empty and for longer labels.
    if not 0 < len(host) <= HOST_CHARACTERS or not _is_name(host):
        raise ValueError("invalid host")
    return host


class InvalidUrl(ValueError):
    """A text is not a valid URL."""


class OtherScheme(InvalidUrl):
    """The scheme of a URL is neither http nor https."""

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self.scheme = scheme


class HttpUrl(NamedTuple):
    """A URL in its normal form: it can be compared, shown and sent without further changes."""

    href: str
    shown: str  # without user and password
    user: bytes = b""
    password: bytes = b""

    @property
    def scheme(self) -> str:
        return self.shown.partition(":")[0]

    @property
    def root(self) -> str:
        """The URL of the root path, equal for URLs of the same server."""
        return "/".join(self.shown.split("/", 3)[:3]) + "/"

    @property
    def resource(self) -> str:
        """The URL without user, password and fragment, which are not sent."""
        return self.shown.partition("#")[0]

    def __str__(self) -> str:
        return self.shown


def parse_http_url(text: str, base: HttpUrl | None = None) -> HttpUrl:
    """Parse a URL, relative to `base` if given; raises InvalidUrl."""
    from urllib.parse import unquote_to_bytes

    import ada_url

    try:
        url = ada_url.URL(text, None if base is None else base.href)
    except ValueError:
        is_relative = base is None and not _has_scheme(text.strip(_EDGES))
        raise InvalidUrl("relative URL without a base" if is_relative else "invalid URL") from None
    scheme = url.protocol.removesuffix(":")
    if scheme not in ("http", "https"):
        raise OtherScheme(scheme)
    try:
        _checked_punycode(url.hostname)
    except ValueError as error:
        raise InvalidUrl(str(error)) from None
    href, user, password = url.href, url.username, url.password
    url.username = url.password = ""
    return HttpUrl(href, url.href, unquote_to_bytes(user), unquote_to_bytes(password))
