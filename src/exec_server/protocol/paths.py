"""Paths on the wire: `file:` URIs and native absolute paths, and their conversion.

URI rules are the WHATWG's with the reference's deviations, so that clients get the same texts. In
native paths, bytes that are not UTF-8 are lone surrogates, as in the `os` module.
"""

from __future__ import annotations

import base64
import binascii
import re
from functools import partial
from typing import Any, ClassVar, Final, Self

from exec_server.errors import InvalidParams, InvalidRequest, RpcError
from exec_server.protocol.decoding import invalid_type
from exec_server.protocol.urls import parse_host

# The longest text of a path that is not plain. The kernel takes 4,096 bytes, which may be three
# times as many characters in a URI; a longer text is refused before it is normalised.
PATH_CHARACTERS: Final = 65_536

# Decoded paths that are kept, for a client that works on some files again and again; when so many
# are kept, all are dropped. Longer texts, and those that are not ASCII, are not kept: the table
# takes less than a megabyte whatever clients send.
RECENT_PATHS: Final = 512
RECENT_CHARACTERS: Final = 256

# Characters that are not escaped in URIs and file names. `:` and `|` are not either, but a first
# segment like `C:` makes a Windows path, so they take the slow path.
_SAFE: Final = r"A-Za-z0-9_\-!$&'()*+,;=@~^\[\]"
_plain_uri = re.compile(rf"file://(/[{_SAFE}./]*)").fullmatch
_plain_path = re.compile(rf"/[{_SAFE}./]*").fullmatch
PLAIN_IN_NAME: Final = rf"{_SAFE}.:|"
_plain_name = re.compile(rf"[{PLAIN_IN_NAME}]*").fullmatch
# `.`, `..`, empty segments and a trailing slash need normalising; hidden names do not.
_needs_normalising = re.compile(r"//|/\.{0,2}(?:/|\Z)").search

# Compiled at the first use: they are rarely needed, and compiling is slower than this import.
_scheme = partial(re.match, r"([A-Za-z][A-Za-z0-9+.\-]*):")
_mark = partial(re.search, r"[?#]")
_drive = partial(re.fullmatch, r"[A-Za-z][:|]")
_drive_at_start = partial(re.match, r"[A-Za-z][:|](?=[/?#]|\Z)")
_windows_path = partial(re.match, r"/([A-Za-z])(:|%3[Aa])(?=/|\Z)")
_native_drive = partial(re.match, rb"/[A-Za-z]:(?=/|\Z)")
_DOT: Final = frozenset({".", "%2e"})  # in lower case
_DOT_DOT: Final = frozenset({"..", ".%2e", "%2e.", "%2e%2e"})
_TRIMMED: Final = "".join(map(chr, range(0x21)))
# Runs, not single characters: a path may consist of them.
_ENCODED_IN_PATH: Final = r"[\x00-\x20\"<>`{}\x7f-\U0010ffff]+"
_ENCODED_IN_NAME: Final = rb"[^A-Za-z0-9!$&'()*+,\-./:;=@\[\]^_|~]+"

# Native paths without a plain URI are base64url text below this path, which cannot exist.
_OPAQUE_PREFIX: Final = "file:///%00/bad/path/"
_opaque_uri = partial(re.fullmatch, rf"{_OPAQUE_PREFIX}([A-Za-z0-9_\-]+)")


class PathUri:
    """A path from a client: normalised URI text, and its native path."""

    # Final for the type checker only: a check in __setattr__ would double the time of parsing.
    __slots__ = ("_native", "uri")
    # By their text. Each subclass has a table of its own, because it may refuse more texts.
    _recent: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        cls._recent = {}

    def __init__(self, uri: str, native: str | None) -> None:
        self.uri: Final = uri
        self._native: Final = native

    @classmethod
    def from_wire(cls, value: object) -> Self:
        """Parse the JSON value of a path from a client."""
        if not isinstance(value, str):
            raise invalid_type(value, "a string")
        path: Self | None = cls._recent.get(value)
        if path is None:
            path = cls.from_text(value)
            if len(value) <= RECENT_CHARACTERS and value.isascii():
                if len(cls._recent) >= RECENT_PATHS:
                    cls._recent.clear()
                cls._recent[value] = path
        return path

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse a `file:` URI or a native absolute path."""
        plain = _plain_uri(text)
        if plain is not None:
            native = plain[1]
            if native[-1] != "/" and (
                ("/." not in native and "//" not in native) or not _needs_normalising(native)
            ):
                return cls(text, native)
        elif text[:1] == "/":
            return cls._from_native(text)
        return cls._parse(text)

    @classmethod
    def _from_native(cls, path: str) -> Self:
        _check_length(path)
        if _plain_path(path) and not _needs_normalising(path):
            return cls(f"file://{path}", path)
        if path[2:3] != ":" and "\0" not in path and not _needs_normalising(path):
            encoded = _encode_name(path.encode("utf-8", "surrogateescape"))
            return cls(f"file://{encoded}", path)
        uri = path_to_uri(path)
        if uri[7:] == path:
            return cls(uri, path)  # nothing was escaped or normalised
        if "\0" in path:
            raise _foreign(uri, InvalidParams)
        return cls(uri, _normalised(path.encode("utf-8", "surrogateescape")))

    @classmethod
    def _parse(cls, text: str) -> Self:
        _check_length(text)
        host, path = _parse_file_uri(text)
        uri = f"file://{host}{path}"
        if "%00" in uri:
            return cls(uri, _opaque_native(uri))
        drive = None if host else _windows_path(path)
        if drive is not None:
            return cls(f"file:///{drive[1].upper()}{path[2:]}", None)
        if host:
            return cls(uri, None)
        from urllib.parse import unquote_to_bytes

        return cls(uri, _normalised(unquote_to_bytes(path)))

    def native(self, error: type[RpcError] = InvalidRequest) -> str:
        """The native path; raises `error` if the URI is a path of another platform."""
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


def _check_length(text: str) -> None:
    if len(text) > PATH_CHARACTERS:
        raise InvalidParams(f"path exceeds {PATH_CHARACTERS} characters")


def path_to_uri(path: str | bytes) -> str:
    """The URI of a native absolute path, as the reference writes it."""
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
    return re.sub(_ENCODED_IN_NAME, lambda match: _percent_encode(match[0]), name).decode("ascii")


def _percent_encode(data: bytes) -> bytes:
    return b"%" + data.hex("%").upper().encode()


def _normalised(path: bytes) -> str:
    """The path without empty, `.` and `..` segments; symbolic links are not resolved."""
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
    """The native path in an opaque URI, None if that path has a plain URI."""
    match = _opaque_uri(uri)
    if match is None:
        raise _foreign(uri, InvalidParams)
    text = match[1]
    try:
        path = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
    except binascii.Error:
        raise _foreign(uri, InvalidParams) from None
    # Unlike the reference, Python ignores unused bits at the end of the text.
    if base64.urlsafe_b64encode(path).rstrip(b"=").decode("ascii") != text:
        raise _foreign(uri, InvalidParams)
    if path[:1] != b"/" or path_to_uri(path) != uri:
        return None
    return path.decode("utf-8", "surrogateescape")


def _parse_file_uri(text: str) -> tuple[str, str]:
    text = text.strip(_TRIMMED)
    for removed in "\t\n\r":
        text = text.replace(removed, "")
    scheme = _scheme(text)
    if scheme is None:
        raise InvalidParams("invalid URI: relative URL without a base")
    if scheme[1].lower() != "file":
        raise InvalidParams(f"unsupported path URI scheme `{scheme[1].lower()}`")
    remaining, mark = _split_at_mark(text[scheme.end() :])
    remaining = remaining.replace("\\", "/")
    host = ""
    # The reference turns `C|` into `C:`, but not after an empty host.
    pipe_is_drive = True
    if remaining[:2] == "//":
        remaining = remaining[2:]
        if not _drive_at_start(remaining):
            slash = remaining.find("/") % (len(remaining) + 1)
            host, remaining = _host(remaining[:slash]), remaining[slash:]
            pipe_is_drive = host != ""
    path, is_drive = _normalised_path(remaining, pipe_is_drive=pipe_is_drive)
    if mark == "?":
        raise InvalidParams("query parameters are not allowed in path URIs")
    if mark == "#":
        raise InvalidParams("fragments are not allowed in path URIs")
    return "" if is_drive else host, path


def _split_at_mark(text: str) -> tuple[str, str]:
    mark = _mark(text)
    return (text[: mark.start()], mark[0]) if mark else (text, "")


def _normalised_path(text: str, *, pipe_is_drive: bool) -> tuple[str, bool]:
    """The path with escapes added and dots resolved, and whether it begins with a drive."""
    segments: list[str] = []
    is_drive = False
    encoded = re.sub(_ENCODED_IN_PATH, _percent_encode_text, text[text[:1] == "/" :])
    parts = encoded.split("/")
    for part in parts:
        name = part.lower() if part[:1] in (".", "%") else ""
        if name in _DOT_DOT:
            # A drive letter is never removed.
            if segments and not _drive(segments[-1]):
                segments.pop()
        elif name not in _DOT:
            if not segments and _drive(part) and (part[1] == ":" or pipe_is_drive):
                part, is_drive = f"{part[0]}:", True  # noqa: PLW2901
            segments.append(part)
    if name in _DOT_DOT or name in _DOT:
        segments.append("")
    return "/" + "/".join(segments).lstrip("/"), is_drive


def _percent_encode_text(match: re.Match[str]) -> str:
    return _percent_encode(match[0].encode("utf-8", "surrogateescape")).decode("ascii")


def _host(text: str) -> str:
    """The normalised host; empty if there is none, or if it is localhost."""
    if not text:
        return ""
    try:
        host = parse_host(text)
    except ValueError as error:
        raise InvalidParams(f"invalid URI: {error}") from None
    return "" if host == "localhost" else host
