"""The HTTP side of the listener without a socket: a request head in, an answer out."""

from __future__ import annotations

import hashlib
import re
import time
from base64 import b64encode
from ipaddress import ip_address

import msgspec

from exec_server.errors import ExecServerError

# More than any client or proxy sends; a longer head is refused.
HEAD_BYTES = 16_384
_WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
# RFC 9110, 5.5: a recipient rejects CR, LF and NUL in a field, or replaces them. Other control
# characters except a tab have no use either.
_find_control = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]").search
_REQUEST_LINE = re.compile(r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) (\S+) HTTP/1\.[01]")
_HEADER_LINE = re.compile(r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):(.*)")
# Headers of which a proxy may have checked the other one. Of two Authorization headers the first
# counts, as in the reference.
_SINGLE = frozenset({"host", "origin", "sec-websocket-key"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_REASONS = {
    101: "Switching Protocols",
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class HttpRefusal(ExecServerError):
    """The request gets this answer and the connection ends."""

    def __init__(self, status: int, text: str = "", **headers: str) -> None:
        super().__init__(f"{status} {text}")
        self.status = status
        self.text = text
        self.headers = headers


class RequestHead(msgspec.Struct, frozen=True):
    """A request line and its headers; of a header that may be repeated the first one counts."""

    method: str
    path: str
    headers: dict[str, str]

    def keeps_alive(self) -> bool:
        """Whether another request may follow; not after a body, which is not read here."""
        return (
            "close" not in tokens(self, "connection")
            and self.headers.get("content-length", "0") == "0"
            and "transfer-encoding" not in self.headers
        )


def parse_head(data: bytes) -> RequestHead:
    """Parse everything before the empty line; raises HttpRefusal."""
    if len(data) > HEAD_BYTES:
        raise HttpRefusal(431)
    if _find_control(data.replace(b"\r\n", b"")):
        raise HttpRefusal(400)
    first, *lines = data.decode("latin-1").split("\r\n")
    request = _REQUEST_LINE.fullmatch(first)
    if request is None:
        raise HttpRefusal(400)
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER_LINE.fullmatch(line)
        if header is None:
            raise HttpRefusal(400)
        name = header[1].lower()
        if name in _SINGLE and name in headers:
            raise HttpRefusal(400)
        # Stripped here: an expression that strips takes quadratic time for many spaces.
        headers.setdefault(name, header[2].strip(" \t"))
    return RequestHead(request[1], request[2].partition("?")[0], headers)


def check_browser(head: RequestHead, allowed_hosts: frozenset[str] | None) -> None:
    """Refuse requests of web pages: with an Origin, or (DNS rebinding) with a foreign Host.

    `allowed_hosts` are names accepted beside addresses and localhost; None accepts all.
    """
    if "origin" in head.headers:
        raise HttpRefusal(403)
    host = head.headers.get("host", "")
    if allowed_hosts is None or not host:
        return
    name = re.sub(r":\d*$", "", host).lower()
    if name == "localhost" or name.endswith(".localhost") or name in allowed_hosts:
        return
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise HttpRefusal(403, "host header names another host") from None


def check_upgrade(head: RequestHead) -> None:
    """Raise HttpRefusal unless the request is an upgrade; the answer of /readyz is one too."""
    if head.path == "/readyz":
        if head.method not in ("GET", "HEAD"):
            raise HttpRefusal(405, allow="GET,HEAD")
        raise HttpRefusal(200)
    if head.path != "/":
        raise HttpRefusal(404)
    if head.method != "GET":
        raise HttpRefusal(405, "Request method must be `GET`")
    if "upgrade" not in tokens(head, "connection"):
        raise HttpRefusal(400, "Connection header did not include 'upgrade'")
    if "websocket" not in tokens(head, "upgrade"):
        raise HttpRefusal(400, "`Upgrade` header did not include 'websocket'")
    if head.headers.get("sec-websocket-version") != "13":
        raise HttpRefusal(400, "`Sec-WebSocket-Version` header did not include '13'")
    if "sec-websocket-key" not in head.headers:
        raise HttpRefusal(400, "`Sec-WebSocket-Key` header missing")


def tokens(head: RequestHead, name: str) -> list[str]:
    """The items of a header that is a list, in lower case."""
    return [token.strip().lower() for token in head.headers.get(name, "").split(",")]


def upgrade_answer(head: RequestHead) -> bytes:
    """The 101 answer to a request that passed `check_upgrade`."""
    key = head.headers["sec-websocket-key"].encode("latin-1")
    accept = b64encode(hashlib.sha1(key + _WEBSOCKET_GUID, usedforsecurity=False).digest())
    headers = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-accept": accept.decode(),
    }
    request_id = head.headers.get("x-request-id", "")
    if _REQUEST_ID.fullmatch(request_id):
        headers["x-request-id"] = request_id
    return _answer(101, headers, b"")


def refusal_answer(refusal: HttpRefusal, request: RequestHead | None) -> bytes:
    """The answer that carries a refusal; without a parsed request the connection has to end."""
    body = refusal.text.encode()
    headers = dict(refusal.headers)
    if body:
        headers["content-type"] = "text/plain; charset=utf-8"
    headers["content-length"] = str(len(body))
    if request is None or not request.keeps_alive():
        headers["connection"] = "close"
    without_body = request is not None and request.method == "HEAD"
    return _answer(refusal.status, headers, b"" if without_body else body)


def _answer(status: int, headers: dict[str, str], body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"date: {time.strftime('%a, %d %b %Y %H:%M:%S GMT', time.gmtime())}", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body
