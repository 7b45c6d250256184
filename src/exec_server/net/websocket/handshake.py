"""The HTTP side of the listener without a socket: a request head in, an answer out."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from ipaddress import ip_address

import msgspec

from exec_server.errors import ExecServerError
from exec_server.net.http1 import (
    HEAD_BYTES,
    date,
    encode_response,
    has_control,
    list_items,
    parse_fields,
    upgrade_flaw,
)
from exec_server.net.websocket.upgrade import accept_value

_REQUEST_LINE = re.compile(r"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) (\S+) HTTP/1\.[01]")
# Headers of which a proxy may have checked the other one. Of two Authorization headers the first
# counts, as in the reference.
_SINGLE = frozenset({"host", "origin", "sec-websocket-key"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


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
            "close" not in list_items(self.headers.get("connection", ""))
            and self.headers.get("content-length", "0") == "0"
            and "transfer-encoding" not in self.headers
        )


def parse_head(data: bytes) -> RequestHead:
    """Parse everything before the empty line; raises HttpRefusal."""
    if len(data) > HEAD_BYTES:
        raise HttpRefusal(431)
    if has_control(data.replace(b"\r\n", b"")):
        raise HttpRefusal(400)
    first, *lines = data.decode("latin-1").split("\r\n")
    request = _REQUEST_LINE.fullmatch(first)
    fields = parse_fields(lines)
    if request is None or fields is None:
        raise HttpRefusal(400)
    headers: dict[str, str] = {}
    for name, value in fields:
        if name in _SINGLE and name in headers:
            raise HttpRefusal(400)
        headers.setdefault(name, value)
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
    flaw = upgrade_flaw(head.headers)
    if flaw is not None:
        raise HttpRefusal(400, flaw)


def upgrade_answer(request: Mapping[str, str]) -> bytes:
    """The 101 answer to a request with these headers, which has no `upgrade_flaw`."""
    headers = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-accept": accept_value(request["sec-websocket-key"].encode("latin-1")),
    }
    request_id = request.get("x-request-id", "")
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
    headers["date"] = date(int(time.time()))
    return encode_response(status, headers.items(), body)
