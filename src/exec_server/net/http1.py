"""HTTP/1 heads without a socket: their syntax, limits and encoding. Pure.

Not on h11: it would delay every server's first answer, because its import takes 30 times as long as
this module's (`python -m bench.alternatives`), and it refuses requests without a Host header, which
the reference accepts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache

# The head of a message without a body: more than any client, server or proxy sends.
HEAD_BYTES = 16_384
# The head of a message that h11 parses. The longest in use have some kilobytes.
PARSED_HEAD_BYTES = 65_536
# The first bytes of a client that begins a TLS handshake.
TLS_HANDSHAKE = b"\x16\x03"

# The expressions are compiled at their first use: short commands need few of them.
# RFC 9110, 5.5: a recipient rejects CR, LF and NUL in a field, or replaces them. Other control
# characters except a tab have no use either: some parsers end a line there, or drop them.
_CONTROL = rb"[\x00-\x08\x0a-\x1f\x7f]"
_FIELD_LINE = r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):(.*)"
_FIELD_VALUE = r"[\t\x20-\x7e\x80-\xff]*"
_STATUS_LINE = rb"HTTP/1\.[01] (\d{3})(?: [^\r\n]*)?(?:\r\n|\Z)"
# Those of the first answers of a server; `http` has all, but takes a millisecond to import.
_REASONS = {101: "Switching Protocols", 200: "OK", 401: "Unauthorized", 503: "Service Unavailable"}


def parse_fields(lines: Iterable[str]) -> list[tuple[str, str]] | None:
    """Header names in lower case and their values; None if a line is no header."""
    fields = []
    for line in lines:
        match = re.fullmatch(_FIELD_LINE, line)
        if match is None:
            return None
        # Stripped here: an expression that strips takes quadratic time for many spaces.
        fields.append((match[1].lower(), match[2].strip(" \t")))
    return fields


def can_send(name: str, value: str) -> bool:
    """Whether a header has the syntax of one, so that it cannot become two."""
    is_field = re.fullmatch(_FIELD_LINE, f"{name}:{value}") is not None
    return is_field and re.fullmatch(_FIELD_VALUE, value) is not None


def has_control(data: bytes) -> bool:
    """Whether there is a control character other than a tab."""
    return re.search(_CONTROL, data) is not None


def parse_status(response: bytes) -> int | None:
    """The status code of a response; None if it does not begin with a status line."""
    match = re.match(_STATUS_LINE, response)
    return None if match is None else int(match[1])


def list_items(value: str) -> list[str]:
    """The items of a header value that is a list, in lower case."""
    return [item.strip().lower() for item in value.split(",")]


def upgrade_flaw(headers: Mapping[str, str]) -> str | None:
    """The first header that an upgrade request lacks (RFC 6455, 4.2.1); None if it has all."""
    if "upgrade" not in list_items(headers.get("connection", "")):
        return "Connection header did not include 'upgrade'"
    if "websocket" not in list_items(headers.get("upgrade", "")):
        return "`Upgrade` header did not include 'websocket'"
    if headers.get("sec-websocket-version") != "13":
        return "`Sec-WebSocket-Version` header did not include '13'"
    return None if "sec-websocket-key" in headers else "`Sec-WebSocket-Key` header missing"


def reason(status: int) -> str:
    """The reason phrase of a status code; raises ValueError if it is unknown."""
    if status in _REASONS:
        return _REASONS[status]
    from http import HTTPStatus

    return HTTPStatus(status).phrase


def encode_head(start: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """A start line and headers, with the empty line."""
    lines = [start, *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")


def encode_response(status: int, headers: Iterable[tuple[str, str]], body: bytes = b"") -> bytes:
    return encode_head(f"HTTP/1.1 {status} {reason(status)}", headers) + body


def connect_request(authority: str, authorization: str | None) -> bytes:
    """The request that asks a proxy for a tunnel."""
    headers = [("Host", authority)]
    if authorization is not None:
        headers.append(("Proxy-Authorization", authorization))
    return encode_head(f"CONNECT {authority} HTTP/1.1", headers)


@lru_cache(1)
def date(seconds: int) -> str:
    """A time as the value of a Date header."""
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(seconds))
