"""http and https URLs by the WHATWG's rules, as browsers and the reference read them. Pure.

A parsed URL is normalised: it can be compared, shown and sent without further changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import quote_from_bytes, unquote_to_bytes

import msgspec
from msgspec.structs import replace

from exec_server.protocol.url_host import parse_host

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_EDGES = "".join(map(chr, range(0x21)))  # stripped from both ends
_DROPPED = str.maketrans("", "", "\t\n\r")  # removed everywhere
_ONE_DOT = frozenset({".", "%2e"})
_TWO_DOTS = frozenset({"..", ".%2e", "%2e.", "%2e%2e"})
_PRINTABLE = frozenset(map(chr, range(0x21, 0x7F)))


def _encoder(encoded: str) -> Callable[[str], str]:
    """A function that percent-encodes these characters and all but printable ASCII."""
    safe = "".join(_PRINTABLE - set(encoded)).encode()
    return lambda text: quote_from_bytes(text.encode(), safe=safe)


_encode_path = _encoder('"#<>?`{}')
_encode_query = _encoder("\"#<>'")
_encode_fragment = _encoder('"<>`')


class InvalidUrl(ValueError):
    """A text is not a valid URL; the message is the reference's."""


class OtherScheme(InvalidUrl):
    """The scheme of a URL is neither http nor https."""

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self.scheme = scheme


class HttpUrl(msgspec.Struct, frozen=True):
    """The parts of a URL; `query` and `fragment` are None if absent."""

    scheme: str
    host: str  # in lower case; an IPv6 address in brackets
    port: int
    path: str
    query: str | None = None
    fragment: str | None = None
    user: bytes = b""
    password: bytes = b""

    @property
    def origin(self) -> tuple[str, str, int]:
        """Scheme, host and port: equal for URLs of the same server."""
        return self.scheme, self.host, self.port

    @property
    def root(self) -> str:
        """The URL of the server's root path."""
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}/"

    @property
    def resource(self) -> str:
        """The URL without user, password and fragment, which are not sent."""
        query = "" if self.query is None else f"?{self.query}"
        return f"{self.root[:-1]}{self.path}{query}"

    def __str__(self) -> str:
        """The URL without user and password, for error texts."""
        return self.resource if self.fragment is None else f"{self.resource}#{self.fragment}"


def parse(text: str, base: HttpUrl | None = None) -> HttpUrl:
    """Parse a URL, relative to `base` if given; raises InvalidUrl."""
    text = text.strip(_EDGES).translate(_DROPPED)
    match = _SCHEME.match(text)
    if match is not None:
        scheme = match[1].lower()
    elif base is not None:
        scheme = base.scheme
    else:
        raise InvalidUrl("relative URL without a base")
    if scheme not in _DEFAULT_PORTS:
        raise OtherScheme(scheme)
    rest, fragment = _cut(text[match.end() :] if match is not None else text, "#")
    rest, query = _cut(rest, "?")
    rest = rest.replace("\\", "/")
    encoded_query = None if query is None else _encode_query(query)
    if base is not None and scheme == base.scheme and not rest.startswith("//"):
        url = _resolve(base, rest, encoded_query)
    else:
        url = _absolute(scheme, rest.lstrip("/"), encoded_query)
    return replace(url, fragment=None if fragment is None else _encode_fragment(fragment))


def _cut(text: str, mark: str) -> tuple[str, str | None]:
    before, found, after = text.partition(mark)
    return before, after if found else None


def _resolve(base: HttpUrl, path: str, query: str | None) -> HttpUrl:
    """Resolve a path and query against `base`."""
    if not path:
        return replace(base, query=base.query if query is None else query)
    if not path.startswith("/"):
        path = base.path.rpartition("/")[0] + "/" + path
    return replace(base, path=_normal_path(path), query=query)


def _absolute(scheme: str, rest: str, query: str | None) -> HttpUrl:
    authority, slash, path = rest.partition("/")
    user_info, _, address = authority.rpartition("@")
    user, _, password = user_info.partition(":")
    host, port = _address(address)
    return HttpUrl(
        scheme,
        host,
        _DEFAULT_PORTS[scheme] if port is None else port,
        _normal_path(slash + path),
        query,
        user=unquote_to_bytes(user),
        password=unquote_to_bytes(password),
    )


def _normal_path(path: str) -> str:
    segments: list[str] = []
    names = path.split("/")[1:]
    for number, name in enumerate(names, 1):
        dots = name.lower()
        if dots in _TWO_DOTS:
            del segments[-1:]
        elif dots not in _ONE_DOT:
            segments.append(_encode_path(name))
            continue
        if number == len(names):
            segments.append("")  # a directory
    return "/" + "/".join(segments)


# ---- host and port --------------------------------------------------------------------


def _address(text: str) -> tuple[str, int | None]:
    """Host and port; None for the default port."""
    if text.startswith("["):
        address, bracket, rest = text.partition("]")
        # Text between the bracket and the port makes the address invalid.
        end, _, port = rest.partition(":")
        host = address + bracket + end
    else:
        host, _, port = text.partition(":")
    try:
        return parse_host(host), _port(port)
    except ValueError as error:
        raise InvalidUrl(str(error)) from None


def _port(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) > 65_535:
        raise InvalidUrl("invalid port number")
    return int(text)
