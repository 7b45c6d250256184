"""Paths on the wire: `file:` URIs, native absolute paths, and the way between the two.

The URI rules are WHATWG's with the habits of the reference's parser, so that a client sees
the same normalised text in answers and errors. Native paths are `str` in which bytes that
are no UTF-8 are lone surrogates, as `os` functions take them.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from functools import partial
from typing import Final, Self
from urllib.parse import unquote_to_bytes

from exec_server.errors import InvalidParams, InvalidRequest, RpcError
from exec_server.protocol.jsontext import describe

# What stands for itself both in a URI and in a file name. `:` and `|` do too, but a first
# segment like `C:` makes a Windows path, so they take the long way.
_SAFE: Final = r"A-Za-z0-9_\-!$&'()*+,;=@~^\[\]"
_plain_uri = re.compile(rf"file://(/[{_SAFE}./]*)").fullmatch
_plain_path = re.compile(rf"/[{_SAFE}./]*").fullmatch
_plain_name = re.compile(rf"[{_SAFE}.:|]*").fullmatch
# `.`, `..`, empty segments and a trailing slash need normalising; hidden names do not.
_needs_normalising = re.compile(r"//|/\.{0,2}(?:/|\Z)").search

# Rarely needed: compiled when they are, because that takes longer than loading this module.
_scheme = partial(re.match, r"([A-Za-z][A-Za-z0-9+.\-]*):")
_drive = partial(re.fullmatch, r"[A-Za-z][:|]")
_drive_at_start = partial(re.match, r"[A-Za-z][:|](?=[/?#]|\Z)")
_windows_path = partial(re.match, r"/([A-Za-z])(:|%3[Aa])(?=/|\Z)")
_native_drive = partial(re.match, rb"/[A-Za-z]:(?=/|\Z)")
_DOT: Final = partial(re.fullmatch, r"(?i)\.|%2e")
_DOT_DOT: Final = partial(re.fullmatch, r"(?i)(?:\.|%2e){2}")
_TRIMMED: Final = "".join(map(chr, range(0x21)))
_REMOVED: Final = str.maketrans("", "", "\t\n\r")
_ENCODED_IN_PATH: Final = re.compile(r"[\x00-\x20\"<>`{}\x7f-\U0010ffff]")
_ENCODED_IN_NAME: Final = re.compile(rb"[^A-Za-z0-9!$&'()*+,\-./:;=@\[\]^_|~]")
_FORBIDDEN_IN_HOST: Final = partial(re.search, r"[\x00-\x20#%/:<>?@\[\\\]^|\x7f]")
_IPV4_PART: Final = partial(re.fullmatch, r"0[xX][0-9a-fA-F]*|[0-9]+")

# Native paths that no plain URI can say are spelled as base64url below this impossible path.
_OPAQUE_PREFIX: Final = "file:///%00/bad/path/"
_opaque_uri = partial(re.fullmatch, rf"{_OPAQUE_PREFIX}([A-Za-z0-9_\-]+)")


class PathUri:
    """A path as the client named it: normalised URI text, and the native path it means."""

    # Final for the type checker only: a guard in __setattr__ would double the cost of parsing.
    __slots__ = ("_native", "uri")

    def __init__(self, uri: str, native: str | None) -> None:
        self.uri: Final = uri
        self._native: Final = native

    @classmethod
    def from_wire(cls, value: object) -> Self:
        """The path a client sent: a `file:` URI or a native absolute path."""
        if not isinstance(value, str):
            raise InvalidParams(f"invalid type: {describe(value)}, expected a string")
        plain = _plain_uri(value)
        if plain is not None:
            native = plain[1]
            if native[-1] != "/" and (
                ("/." not in native and "//" not in native) or not _needs_normalising(native)
            ):
                return cls(value, native)
        elif value[:1] == "/":
            return cls._from_native(value)
        return cls._parse(value)

    @classmethod
    def _from_native(cls, path: str) -> Self:
        uri = path_to_uri(path)
        if uri[7:] == path:
            return cls(uri, path)  # nothing was escaped or normalised
        if "\0" in path:
            raise _foreign(uri, InvalidParams)
        return cls(uri, _normalised(path.encode("utf-8", "surrogateescape")))

    @classmethod
    def _parse(cls, text: str) -> Self:
        host, path = _parse_file_uri(text)
        uri = f"file://{host}{path}"
        if "%00" in uri:
            return cls(uri, _opaque_native(uri))
        drive = None if host else _windows_path(path)
        if drive is not None:
            return cls(f"file:///{drive[1].upper()}{path[2:]}", None)
        if host:
            return cls(uri, None)
        return cls(uri, _normalised(unquote_to_bytes(path)))

    def native(self, error: type[RpcError] = InvalidRequest) -> str:
        """The native path; raises `error` when the URI means a path of another platform."""
        if self._native is None:
            raise _foreign(self.uri, error)
        if "\0" in self._native:
            raise error("file name contained an unexpected NUL byte")
        return self._native

    def __eq__(self, other: object) -> bool:
        return self.uri == other.uri if isinstance(other, PathUri) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.uri)

    def __repr__(self) -> str:
        return f"PathUri({self.uri!r})"

    def __str__(self) -> str:
        return self.uri


def path_to_uri(path: str | bytes) -> str:
    """The URI of a native absolute path, in the spelling the reference answers with."""
    if isinstance(path, str):
        if _plain_path(path) and not _needs_normalising(path):
            return f"file://{path}"
        path = path.encode("utf-8", "surrogateescape")
    absolute = path[:1] == b"/"
    if absolute:
        path = _normalised(path).encode("utf-8", "surrogateescape")
    if not absolute or b"\0" in path or _native_drive(path):
        return _OPAQUE_PREFIX + base64.urlsafe_b64encode(path).decode("ascii").rstrip("=")
    return f"file://{_encode_name(path)}"


def child_uri(directory: str, name: str) -> str:
    """The URI of an entry called `name` in the directory with this URI (no trailing slash)."""
    if _plain_name(name):
        return f"{directory}/{name}"
    return f"{directory}/{_encode_name(name.encode('utf-8', 'surrogateescape'))}"


def _encode_name(name: bytes) -> str:
    return _ENCODED_IN_NAME.sub(lambda match: b"%%%02X" % match[0][0], name).decode("ascii")


def _normalised(path: bytes) -> str:
    """The path without empty, `.` and `..` segments; lexically, no link is looked at."""
    segments: list[bytes] = []
    for segment in path.split(b"/"):
        if segment == b"..":
            if segments:
                segments.pop()
        elif segment not in (b"", b"."):
            segments.append(segment)
    return "/" + b"/".join(segments).decode("utf-8", "surrogateescape")


def _foreign(uri: str, error: type[RpcError]) -> RpcError:
    return error(f"'{uri}' is invalid on 'linux'")


def _opaque_native(uri: str) -> str | None:
    """The native path in an opaque URI, None if that path has a plain URI of its own."""
    match = _opaque_uri(uri)
    if match is None:
        raise _foreign(uri, InvalidParams)
    text = match[1]
    try:
        path = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    except binascii.Error:
        raise _foreign(uri, InvalidParams) from None
    # Python ignores stray bits at the end of the text, the reference does not.
    if base64.urlsafe_b64encode(path).rstrip(b"=").decode("ascii") != text:
        raise _foreign(uri, InvalidParams)
    if path[:1] != b"/" or path_to_uri(path) != uri:
        return None
    return path.decode("utf-8", "surrogateescape")


def _parse_file_uri(text: str) -> tuple[str, str]:
    """Host and normalised path of a `file:` URI."""
    text = text.strip(_TRIMMED).translate(_REMOVED)
    scheme = _scheme(text)
    if scheme is None:
        raise InvalidParams("invalid URI: relative URL without a base")
    if scheme[1].lower() != "file":
        raise InvalidParams(f"unsupported path URI scheme `{scheme[1].lower()}`")
    rest, mark = _split_at_mark(text[scheme.end() :])
    rest = rest.replace("\\", "/")
    host = ""
    # The reference turns `C|` into `C:` only where it did not just skip an empty host.
    pipe_is_drive = True
    if rest[:2] == "//":
        rest = rest[2:]
        if not _drive_at_start(rest):
            slash = rest.find("/") % (len(rest) + 1)
            host, rest = _host(rest[:slash]), rest[slash:]
            pipe_is_drive = host != ""
    path, is_drive = _normalised_path(rest, pipe_is_drive=pipe_is_drive)
    if mark == "?":
        raise InvalidParams("query parameters are not allowed in path URIs")
    if mark == "#":
        raise InvalidParams("fragments are not allowed in path URIs")
    return "" if is_drive else host, path


def _split_at_mark(text: str) -> tuple[str, str]:
    """The text before the first `?` or `#`, and that character."""
    for index, character in enumerate(text):
        if character in "?#":
            return text[:index], character
    return text, ""


def _normalised_path(text: str, *, pipe_is_drive: bool) -> tuple[str, bool]:
    """The path with escapes added and dots resolved, and whether it begins with a drive."""
    segments: list[str] = []
    is_drive = False
    parts = text[text[:1] == "/" :].split("/")
    for number, part in enumerate(parts, 1):
        if _DOT_DOT(part):
            # A drive letter is never removed, wherever it stands.
            if segments and not _drive(segments[-1]):
                segments.pop()
        elif not _DOT(part):
            if not segments and _drive(part) and (part[1] == ":" or pipe_is_drive):
                part, is_drive = f"{part[0]}:", True  # noqa: PLW2901
            segments.append(_ENCODED_IN_PATH.sub(_percent_encode, part))
            continue
        if number == len(parts):
            segments.append("")
    return "/" + "/".join(segments).lstrip("/"), is_drive


def _percent_encode(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogateescape"))


def _host(text: str) -> str:
    """The host as WHATWG serialises it, empty for none and for localhost."""
    if text[:1] == "[":
        try:
            if text[-1] != "]":
                raise ValueError
            return f"[{ipaddress.IPv6Address(text[1:-1])}]"
        except ValueError:
            raise InvalidParams("invalid URI: invalid IPv6 address") from None
    try:
        host = unquote_to_bytes(text).decode("utf-8").lower()
        if not host.isascii():
            # Label by label, because the codec refuses the empty ones that WHATWG allows.
            host = ".".join(label.encode("idna").decode("ascii") for label in host.split("."))
    except UnicodeError:
        host = "%"
    if _FORBIDDEN_IN_HOST(host) or host == "xn--":
        raise InvalidParams("invalid URI: invalid international domain name")
    return "" if host == "localhost" else _ipv4(host)


def _ipv4(host: str) -> str:
    """The dotted form if the host ends in a number, else the host itself."""
    parts = host.removesuffix(".").split(".")
    if not _IPV4_PART(parts[-1]):
        return host
    try:
        if len(parts) > 4:
            raise ValueError
        numbers = [_ipv4_number(part) for part in parts]
        if any(number > 255 for number in numbers[:-1]) or numbers[-1] >= 256 ** (5 - len(parts)):
            raise ValueError
    except ValueError:
        raise InvalidParams("invalid URI: invalid IPv4 address") from None
    address = numbers[-1]
    for index, number in enumerate(numbers[:-1]):
        address += number << (8 * (3 - index))
    return str(ipaddress.IPv4Address(address))


def _ipv4_number(text: str) -> int:
    if not _IPV4_PART(text):
        raise ValueError(text)
    if text[:2].lower() == "0x":
        return int(text[2:] or "0", 16)
    return int(text, 8) if text[0] == "0" and len(text) > 1 else int(text)
