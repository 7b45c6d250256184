"""URLs of http and https as browsers read them (the WHATWG's rules), which the reference follows.

Pure. What is normalised here can be compared, shown and sent as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import quote_from_bytes, unquote_to_bytes

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_EDGES = "".join(map(chr, range(0x21)))  # not part of a URL at its ends
_DROPPED = str.maketrans("", "", "\t\n\r")  # and these nowhere
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_FORBIDDEN_IN_HOST = re.compile(r"[\x00-\x20\x7f#/:<>?@\[\\\]^|%]")
_ONE_DOT = frozenset({".", "%2e"})
_TWO_DOTS = frozenset({"..", ".%2e", "%2e.", "%2e%2e"})
_PRINTABLE = frozenset(map(chr, range(0x21, 0x7F)))


def _encoder(encoded: str) -> Callable[[str], str]:
    """Writes all but printable ASCII as %XX, and of that what is named here."""
    safe = "".join(_PRINTABLE - set(encoded)).encode()
    return lambda text: quote_from_bytes(text.encode(), safe=safe)


_encode_path = _encoder('"#<>?`{}')
_encode_query = _encoder("\"#<>'")
_encode_fragment = _encoder('"<>`')


class InvalidUrl(ValueError):
    """A text is no URL; says why in the reference's words."""


class OtherScheme(InvalidUrl):
    """A URL of something else than http and https."""

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self.scheme = scheme


@dataclass(frozen=True, slots=True)
class HttpUrl:
    """A URL in its parts; `query` and `fragment` are None if there is none."""

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
        """What two URLs of the same server have in common."""
        return self.scheme, self.host, self.port

    @property
    def root(self) -> str:
        """The first page of the server."""
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}/"

    @property
    def resource(self) -> str:
        """The URL without what is not sent: user, password and fragment."""
        query = "" if self.query is None else f"?{self.query}"
        return f"{self.root[:-1]}{self.path}{query}"

    def __str__(self) -> str:
        """The URL as it is shown: without user and password."""
        return self.resource if self.fragment is None else f"{self.resource}#{self.fragment}"


def parse(text: str, base: HttpUrl | None = None) -> HttpUrl:
    """The URL of a text, relative to `base` if there is one; raises InvalidUrl."""
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
    """A path relative to the one of `base`."""
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
    """Host and port; no port is the scheme's own."""
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        address = _ipv6(host) if closed else None
        if address is None or (rest and not rest.startswith(":")):
            raise InvalidUrl("invalid IPv6 address")
        return address, _port(rest[1:])
    host, _, port = text.partition(":")
    if not host:
        raise InvalidUrl("empty host")
    return _host(host), _port(port)


def _port(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or int(text) > 65_535:
        raise InvalidUrl("invalid port number")
    return int(text)


def _ipv6(text: str) -> str | None:
    try:
        # A zone is the business of the machine, not of a URL.
        return None if "%" in text else f"[{IPv6Address(text)}]"
    except ValueError:
        return None


def _host(text: str) -> str:
    try:
        name = unquote_to_bytes(text).decode()
        if not name.isascii():
            name = name.encode("idna").decode()
        name = name.lower()
        for label in name.split("."):
            if label.startswith("xn--"):
                label.encode().decode("idna")
    except UnicodeError:
        raise InvalidUrl("invalid international domain name") from None
    if not name or _FORBIDDEN_IN_HOST.search(name):
        raise InvalidUrl("invalid international domain name")
    if _NUMBER.fullmatch(name.removesuffix(".").rpartition(".")[2]):
        return _ipv4(name)
    return name


def _ipv4(text: str) -> str:
    """An IPv4 address in any of its old spellings, such as 0x7f.1."""
    numbers = text.removesuffix(".").split(".")
    try:
        if len(numbers) > 4 or any(len(number) > 64 for number in numbers):
            raise ValueError
        *high, low = map(_ipv4_number, numbers)
        if any(number > 255 for number in high) or low >= 256 ** (5 - len(numbers)):
            raise ValueError
    except ValueError:
        raise InvalidUrl("invalid IPv4 address") from None
    value = low + sum(number << 8 * (3 - index) for index, number in enumerate(high))
    return str(IPv4Address(value))


def _ipv4_number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError
    if text[:2] in ("0x", "0X"):
        return int(text[2:] or "0", 16)
    return int(text, 8 if text.startswith("0") and text != "0" else 10)
