"""The HTTP side: heads in, answers out."""

from __future__ import annotations

import time

import pytest

from exec_server.net.http1 import HEAD_BYTES
from exec_server.net.websocket.handshake import (
    HttpRefusal,
    RequestHead,
    check_browser,
    check_upgrade,
    parse_head,
    refusal_answer,
    upgrade_answer,
)

_UPGRADE = {
    "host": "127.0.0.1:7700",
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def _head(method: str = "GET", path: str = "/", **changes: str | None) -> RequestHead:
    headers = _UPGRADE | {name.replace("_", "-"): value for name, value in changes.items()}
    return RequestHead(method, path, {n: v for n, v in headers.items() if v is not None})


def _refusal(head: RequestHead) -> tuple[int, str]:
    with pytest.raises(HttpRefusal) as refused:
        check_upgrade(head)
    return refused.value.status, refused.value.text


def test_parse() -> None:
    data = b"GET /path?query=1 HTTP/1.1\r\nHost:  a b \t\r\nX-Empty:\r\nX-EMPTY: second"
    assert parse_head(data) == RequestHead("GET", "/path", {"host": "a b", "x-empty": ""})


@pytest.mark.parametrize("name", ["Host", "host", "Origin", "Sec-WebSocket-Key"])
def test_a_header_that_decides_about_access_may_not_be_repeated(name: str) -> None:
    with pytest.raises(HttpRefusal) as refused:
        parse_head(f"GET / HTTP/1.1\r\n{name}: a\r\nx: y\r\n{name.upper()}: a".encode())
    assert refused.value.status == 400


@pytest.mark.parametrize("control", [*range(9), *range(0x0A, 0x20), 0x7F])
@pytest.mark.parametrize("head", [b"GET /%c HTTP/1.1", b"GET / HTTP/1.1\r\na: b%cc"])
def test_control_characters_are_refused(head: bytes, control: int) -> None:
    with pytest.raises(HttpRefusal) as refused:
        parse_head(head % control)
    assert refused.value.status == 400


def test_bytes_of_values_are_kept() -> None:
    assert parse_head(b"GET / HTTP/1.1\r\nA: \xff\xc3\xa9").headers == {"a": "\xff\xc3\xa9"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET /",
        b"GET / HTTP/2.0",
        b"GET  / HTTP/1.1",
        b"GET / HTTP/1.1 ",
        b"G\xc3T / HTTP/1.1",
        b"GET / HTTP/1.1\r\nno colon",
        b"GET / HTTP/1.1\r\n folded: x",
        b"GET / HTTP/1.1\r\nname : x",
        b"GET / HTTP/1.1\r\n: x",
        b"GET / HTTP/1.1\r\na: b\nc: d",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\r\nGET / HTTP/1.1",
    ],
)
def test_malformed_heads_are_refused(data: bytes) -> None:
    with pytest.raises(HttpRefusal) as refused:
        parse_head(data)
    assert refused.value.status == 400


def test_long_heads_are_refused() -> None:
    fits = b"GET / HTTP/1.1\r\na: ".ljust(HEAD_BYTES, b"x")
    assert len(parse_head(fits).headers["a"]) > 16_000
    with pytest.raises(HttpRefusal) as refused:
        parse_head(fits + b"x")
    assert refused.value.status == 431


def test_spaces_cost_no_more_than_other_bytes() -> None:
    """Trimming once took quadratic time: a second for one request of 16 KB."""
    began = time.process_time()
    parse_head(b"GET / HTTP/1.1\r\na: x".ljust(HEAD_BYTES - 1) + b"y")
    assert time.process_time() - began < 0.1


@pytest.mark.parametrize("origin", ["http://evil.example", "null", ""])
def test_any_origin_is_refused(origin: str) -> None:
    for allowed in (None, frozenset({"x"})):
        with pytest.raises(HttpRefusal) as refused:
            check_browser(_head(origin=origin), allowed)
        assert (refused.value.status, refused.value.text) == (403, "")


@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "127.0.0.1",
        "127.0.0.1:7700",
        "192.168.1.2:1",
        "[::1]:7700",
        "[fe80::1]",
        "localhost",
        "LocalHost:80",
        "app.localhost:7700",
        "allowed.example:9",
        "Allowed.Example",
    ],
)
def test_addresses_localhost_and_allowed_names_are_hosts_of_ours(host: str | None) -> None:
    check_browser(_head(host=host), frozenset({"allowed.example"}))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:7700",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "notlocalhost",
        "allowed.example.evil.example",
        "127.0.0.1:7700:7700",
        "127.0.0.1@evil.example",
    ],
)
def test_foreign_hosts_are_refused_unless_clients_authenticate(host: str) -> None:
    check_browser(_head(host=host), None)
    with pytest.raises(HttpRefusal) as refused:
        check_browser(_head(host=host), frozenset({"allowed.example"}))
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("head", "status", "text"),
    [
        (_head(path="/readyz"), 200, ""),
        (_head("HEAD", "/readyz"), 200, ""),
        (_head("POST", "/readyz"), 405, ""),
        (_head(path="/healthz"), 404, ""),
        (_head("POST", "/x"), 404, ""),
        (_head("POST"), 405, "Request method must be `GET`"),
        (_head(connection=None), 400, "Connection header did not include 'upgrade'"),
        (_head(connection="keep-alive"), 400, "Connection header did not include 'upgrade'"),
        (_head(upgrade="h2c"), 400, "`Upgrade` header did not include 'websocket'"),
        (
            _head(sec_websocket_version="8"),
            400,
            "`Sec-WebSocket-Version` header did not include '13'",
        ),
        (_head(sec_websocket_key=None), 400, "`Sec-WebSocket-Key` header missing"),
    ],
)
def test_what_is_not_an_upgrade(head: RequestHead, status: int, text: str) -> None:
    assert _refusal(head) == (status, text)


def test_upgrade_is_a_list_in_any_case() -> None:
    check_upgrade(_head(connection="keep-alive, UPGRADE", upgrade="h2c, WebSocket"))


def _parsed(answer: bytes) -> tuple[str, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert headers.pop("date").endswith(" GMT")
    return status, headers, body


def test_upgrade_answer() -> None:
    status, headers, body = _parsed(upgrade_answer(_head().headers))
    assert (status, body) == ("HTTP/1.1 101 Switching Protocols", b"")
    # The example of RFC 6455, section 1.3.
    assert headers == {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-accept": "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=",
    }


def test_request_id_is_echoed_if_it_is_printable() -> None:
    assert b"\r\nx-request-id: abc\r\n" in upgrade_answer(_head(x_request_id="abc").headers)
    for bad in ("", "a b", "x" * 129, "\xff", "a\rb"):
        assert b"x-request-id" not in upgrade_answer(_head(x_request_id=bad).headers)


def test_refusal_answer_with_text() -> None:
    status, headers, body = _parsed(refusal_answer(HttpRefusal(400, "why"), _head()))
    assert (status, body) == ("HTTP/1.1 400 Bad Request", b"why")
    assert headers == {"content-type": "text/plain; charset=utf-8", "content-length": "3"}


def test_refusal_answer_without_text() -> None:
    refusal = HttpRefusal(405, allow="GET,HEAD")
    status, headers, body = _parsed(refusal_answer(refusal, _head("POST", "/readyz")))
    assert (status, body) == ("HTTP/1.1 405 Method Not Allowed", b"")
    assert headers == {"allow": "GET,HEAD", "content-length": "0"}


def test_head_requests_get_no_body() -> None:
    _status, headers, body = _parsed(refusal_answer(HttpRefusal(400, "why"), _head("HEAD")))
    assert (headers["content-length"], body) == ("3", b"")


@pytest.mark.parametrize(
    "head",
    [
        None,
        _head(connection="close"),
        _head("POST", content_length="5"),
        _head("POST", transfer_encoding="chunked"),
    ],
)
def test_connection_ends_when_nobody_can_tell_what_follows(head: RequestHead | None) -> None:
    _, headers, _ = _parsed(refusal_answer(HttpRefusal(404), head))
    assert headers["connection"] == "close"
    assert head is None or not head.keeps_alive()
