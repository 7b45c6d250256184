"""HTTP requests and responses as a proxy passes them on or answers them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import h11
import msgspec

from exec_server.errors import ExecServerError
from exec_server.net.http1 import has_control, reason
from exec_server.protocol.urls import host_port
from exec_server.proxy import hosts
from exec_server.proxy.policy import LOCAL_BLOCKED, Decision, NetworkAccess

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP: Final = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization"),
        *(b"proxy-authenticate", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
# Headers that decide where a message goes, where it ends and how it is read. Every recipient needs
# them, so none of them is an option of one connection (RFC 9110, 7.6.1). `TE` is one.
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding", b"trailer", b"host"})
_FOR_ALL_RECIPIENTS: Final = _FRAMING | {
    *(b"authorization", b"cookie", b"set-cookie", b"expect"),
    *(b"content-type", b"content-encoding", b"content-range", b"location"),
}
_HTTP_PORT: Final = 80
_SERVER_WIDE: Final = b"*"  # the target of OPTIONS for a whole server

# The reason of a decision: the header `x-proxy-error`, and the sentence for people.
_REASONS: Final = {
    "not_allowed": (b"blocked-by-allowlist", "Domain not in allowlist."),
    "not_allowed_local": (b"blocked-by-allowlist", LOCAL_BLOCKED),
    "denied": (b"blocked-by-denylist", "Domain denied by the sandbox policy."),
    "method_not_allowed": (b"blocked-by-method-policy", "Method not allowed in limited mode."),
    "mitm_required": (b"blocked-by-mitm-required", "MITM required for limited HTTPS."),
}
_OTHER_REASON: Final = (b"blocked-by-policy", "Request blocked by network policy.")

# The end of a head, and the first bytes of other protocols, as h11 finds them.
_END: Final = re.compile(rb"\n\r?\n")
_FIRST_PRINTABLE: Final = 0x21
_HOST: Final = re.compile(rb"\nhost:", re.IGNORECASE)
_NOT_ASCII: Final = re.compile(rb"[\x80-\xff]")


class BadRequest(ExecServerError):
    """A request that is answered with this status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class RequestTarget(NamedTuple):
    """Where a request goes: the host in its normal form, and the path for the origin."""

    host: str
    port: int
    path: bytes


class Head(NamedTuple):
    """The head of a message that the proxy writes; all parts come from a parser, or from here."""

    start: bytes
    headers: Headers

    def encode(self) -> bytes:
        lines = [b"%b: %b\r\n" % pair for pair in self.headers]
        return b"%b\r\n%b\r\n" % (self.start, b"".join(lines))


class ProxyAnswer(NamedTuple):
    """An answer of the proxy itself."""

    head: Head
    body: bytes


def find_target(request: h11.Request, default_port: int = _HTTP_PORT) -> RequestTarget:
    """The target of a request; raises BadRequest if it has none, or two."""
    host_header = _host_header(request, default_port)
    if request.method == b"CONNECT":
        authority = hosts.split_authority(request.target.decode("ascii"), None)
        if authority is None:
            raise BadRequest(400, "missing host")
        return RequestTarget(*authority, b"")
    if request.target == _SERVER_WIDE and request.method != b"OPTIONS":
        raise BadRequest(400, "only OPTIONS has the target *")
    if request.target.startswith(b"/") or request.target == _SERVER_WIDE:
        if host_header is None:
            raise BadRequest(400, "missing host")
        return RequestTarget(*host_header, request.target)
    target = _absolute(request.target.decode("ascii"))
    if host_header is not None and host_header != target[:2]:
        raise BadRequest(400, "Host header does not match request target")
    return target


def _host_header(request: h11.Request, default_port: int) -> tuple[str, int] | None:
    values = [value for name, value in request.headers if name == b"host"]
    if len(values) > 1:
        raise BadRequest(400, "multiple Host headers")
    if not values or not values[0]:
        return None
    try:
        authority = hosts.split_authority(values[0].decode("ascii"), default_port)
    except UnicodeDecodeError:
        authority = None
    if authority is None:
        raise BadRequest(400, "missing host" if b"%" in values[0] else "invalid Host header")
    return authority


def _absolute(target: str) -> RequestTarget:
    try:
        parts = urlsplit(target)
    except ValueError:  # brackets without an IPv6 address in them
        raise BadRequest(400, "missing host") from None
    if parts.scheme.lower() != "http":
        raise BadRequest(400, "only http:// URLs and CONNECT are supported")
    authority = hosts.split_authority(parts.netloc.rpartition("@")[2], _HTTP_PORT)
    if authority is None:
        raise BadRequest(400, "missing host")
    path = parts.path or "/"
    if parts.query:
        path += f"?{parts.query}"
    return RequestTarget(*authority, path.encode("ascii"))


def check_framing(request: h11.Request) -> None:
    """Raise BadRequest for a request that two parsers might end at different places."""
    named = _misnamed_option(request)
    if named is not None:
        raise BadRequest(400, f"Connection names {named.decode('latin-1')}")
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise BadRequest(400, "both Content-Length and Transfer-Encoding")
    if b"transfer-encoding" in names and request.http_version < b"1.1":
        raise BadRequest(400, "Transfer-Encoding in HTTP/1.0")
    # Gateways to CGI and WSGI do not tell them from those with hyphens.
    if any(name not in _FRAMING and name.replace(b"_", b"-") in _FRAMING for name in names):
        raise BadRequest(400, "underscore in the name of a framing header")
    if any(has_control(value) for _, value in request.headers):
        raise BadRequest(400, "control character in a header")


def check_response(response: h11.Response) -> None:
    """Raise RemoteProtocolError for a response whose headers contradict each other."""
    named = _misnamed_option(response)
    if named is not None:
        raise h11.RemoteProtocolError(f"Connection names {named.decode('latin-1')}")


def _misnamed_option(message: h11.Request | h11.Response) -> bytes | None:
    """An end-to-end header that `Connection` names: others would read a different message."""
    return min(_connection_options(message) & _FOR_ALL_RECIPIENTS, default=None)


def is_chunked(request: h11.Request) -> bool:
    """Whether the body of a request comes in chunks."""
    return any(name == b"transfer-encoding" for name, _ in request.headers)


def is_empty(request: h11.Request) -> bool:
    """Whether a request has no body."""
    framing = dict(request.headers)
    return b"transfer-encoding" not in framing and framing.get(b"content-length", b"0") == b"0"


def keeps_alive(request: h11.Request) -> bool:
    """Whether another request may follow on the connection."""
    return request.http_version >= b"1.1" and b"close" not in _connection_options(request)


def body_length(request: h11.Request, response: h11.Response) -> int | None:
    """The bytes of a response's body; None if its head does not tell (RFC 9112, 6.3)."""
    if request.method == b"HEAD" or response.status_code in (204, 304):
        return 0
    framing = dict(response.headers)
    if b"transfer-encoding" in framing or b"content-length" not in framing:
        return None
    return int(framing[b"content-length"])


def chunk(data: bytes) -> bytes:
    """A chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK: Final = b"0\r\n\r\n"


def _connection_options(message: h11.Request | h11.Response) -> set[bytes]:
    return {
        token.strip().lower()
        for name, value in message.headers
        if name == b"connection"
        for token in value.split(b",")
    }


def end_to_end(message: h11.Request | h11.Response) -> Headers:
    """The headers that go further, as they are spelled; those of the framing are written anew."""
    dropped = _HOP_BY_HOP | {b"content-length"} | _connection_options(message)
    return [pair for pair in message.headers.raw_items() if pair[0].lower() not in dropped]


def forwarded_request(request: h11.Request, target: RequestTarget, *, absolute: bool) -> Head:
    """The head for the origin, or in absolute form for another proxy."""
    spelled = [value for name, value in request.headers if name == b"host" and value]
    host = spelled[0] if spelled else _default_host(target)
    headers = [(b"Host", host)]
    headers += (pair for pair in end_to_end(request) if pair[0].lower() not in (b"host", b"expect"))
    if is_chunked(request):
        headers.append((b"Transfer-Encoding", b"chunked"))
    else:
        headers += _length(request)
    # An origin that does not read a request body must not take it for the next request.
    headers.append((b"Connection", b"close"))
    path = target.path
    if absolute:
        path = b"http://" + host + (b"" if path == _SERVER_WIDE else path)
    return Head(b"%b %b HTTP/1.1" % (request.method, path), headers)


def _length(message: h11.Request | h11.Response) -> Headers:
    """The stated length of a body, as decimal digits; h11 has made sure that there is one only."""
    stated = dict(message.headers).get(b"content-length")
    return [] if stated is None else [(b"Content-Length", b"%d" % int(stated))]


def _default_host(target: RequestTarget) -> bytes:
    authority = host_port(target.host, target.port)
    return authority.removesuffix(f":{_HTTP_PORT}").encode("ascii")


def forwarded_response(
    request: h11.Request, response: h11.Response, length: int | None, date: bytes
) -> Head:
    """The head for the process, with a date if the origin has sent none.

    Without a length the body is sent in chunks, or ends with the connection.
    """
    headers = end_to_end(response)
    if length is None:
        if request.http_version >= b"1.1":
            headers.append((b"transfer-encoding", b"chunked"))
    elif response.status_code != 204 and b"transfer-encoding" not in dict(response.headers):
        # With HEAD and 304 the length is that of another response; 204 never has one.
        headers += _length(response)
    if not any(name == b"date" for name, _ in response.headers):
        headers.append((b"date", date))
    if not keeps_alive(request):
        headers.append((b"connection", b"close"))
    return Head(b"HTTP/1.1 %d %b" % (response.status_code, bytes(response.reason)), headers)


def text_answer(
    status: int, text: str, date: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> ProxyAnswer:
    """An answer of the proxy itself."""
    return _answer(status, b"text/plain", text.encode(), date, headers)


def block_answer(request: NetworkAccess, decision: Decision, date: bytes) -> ProxyAnswer:
    """The refusal of a request."""
    if request.protocol == "https_connect":
        return refusal_text(decision.reason, date, decision.message)
    error, message = _REASONS.get(decision.reason, _OTHER_REASON)
    block = {
        "status": "blocked",
        "host": request.host,
        "reason": decision.reason,
        "decision": decision.outcome,
        "source": decision.source,
        "protocol": request.protocol,
        "port": request.port,
        "message": decision.message or message,
    }
    body = msgspec.json.encode(block)
    return _answer(403, b"application/json", body, date, [(b"x-proxy-error", error)])


def refusal_text(reason: str, date: bytes, text: str = "") -> ProxyAnswer:
    """The refusal of a tunnel, or of a request in one, for people; by `text` if there is one."""
    error, message = _REASONS.get(reason, _OTHER_REASON)
    return text_answer(403, text or message, date, [(b"x-proxy-error", error)])


def _answer(
    status: int, kind: bytes, body: bytes, date: bytes, headers: Iterable[tuple[bytes, bytes]]
) -> ProxyAnswer:
    fields = [
        (b"content-type", kind),
        *headers,
        (b"content-length", b"%d" % len(body)),
        (b"date", date),
    ]
    return ProxyAnswer(Head(b"HTTP/1.1 %d %b" % (status, reason(status).encode()), fields), body)


def encode_answer(request: h11.Request | None, answer: ProxyAnswer, *, last: bool) -> bytes:
    """An answer to a request, of which `last` says that the connection ends."""
    head = answer.head
    if last or (request is not None and not keeps_alive(request)):
        head = Head(head.start, [*head.headers, (b"connection", b"close")])
    has_body = request is None or request.method != b"HEAD"
    return head.encode() + (answer.body if has_body else b"")


class HeadBuffer:
    """The head of a request before it is parsed, amended where h11 is stricter than others.

    h11 remains the only parser: amendments can make a request invalid, but never another one.
    A `Host` that was overlooked here makes two, which h11 refuses.
    """

    def __init__(self, data: bytes = b"", is_closed: bool = False) -> None:
        """`data` are bytes that were read with the request before."""
        self.data = bytearray(data)
        self.is_closed = is_closed  # the process sends nothing more
        self._end = _END.search(self.data)

    def receive(self, data: bytes) -> None:
        """Add bytes; none at the end of the connection."""
        if not data:
            self.is_closed = True
            return
        start = max(0, len(self.data) - 2)  # a process may send a byte at a time
        self.data += data
        self._end = _END.search(self.data, start)

    @property
    def is_complete(self) -> bool:
        """Whether nothing has to be read before the head is parsed, or refused."""
        is_other = bool(self.data) and self.data[0] < _FIRST_PRINTABLE
        return self.is_closed or self._end is not None or is_other

    def amended(self) -> bytes:
        """The bytes for the parser: with a `Host`, and with a request line of ASCII."""
        if self._end is None:
            return bytes(self.data)
        head, rest = bytes(self.data[: self._end.start() + 1]), self.data[self._end.start() + 1 :]
        if not _HOST.search(head):
            # h11 refuses a request without Host before its target can be decided about. At the end
            # nothing can continue this line.
            head += b"Host:\r\n"
        first, newline, fields = head.partition(b"\n")
        return _ascii_line(first) + newline + fields + rest


def _ascii_line(line: bytes) -> bytes:
    """A request line whose target is percent-encoded (RFC 3986, 2.5), if that is UTF-8."""
    parts = line.split(b" ")
    try:
        parts[1].decode()
    except (IndexError, UnicodeDecodeError):
        return line
    parts[1] = _NOT_ASCII.sub(lambda match: b"%%%02X" % match[0][0], parts[1])
    return b" ".join(parts)
