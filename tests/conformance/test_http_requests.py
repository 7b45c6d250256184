"""http/request against a web server whose every byte is known."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from origin import HANG_UP, WAIT, WATCH, Flood, Origin, reply, running

from wire import PATIENCE, Client, RpcFailure, Server, b64, scaled, start_server, start_stdio

_INVALID_PARAMS = -32602
_INTERNAL = -32603
_MIB = 1024 * 1024
_BROKEN = "error decoding response body"
Message = dict[str, Any]


@pytest.fixture
def origin() -> Iterator[Origin]:
    with running() as server:
        yield server


def _only_ours(kind: str, reason: str) -> None:
    if kind != "ours":
        pytest.skip(f"by choice only ours does this: {reason}")


def _params(url: str, **params: Any) -> Message:
    return {"method": "GET", "url": url, "requestId": "r"} | params


def _ask(client: Client, url: str, **params: Any) -> Message:
    result: Message = client.call("http/request", _params(url, **params))
    return result


def _failure(client: Client, url: str, **params: Any) -> tuple[int, str]:
    return client.failure("http/request", _params(url, **params))


def _headers(*lines: tuple[str, str]) -> list[Message]:
    return [{"name": name, "value": value} for name, value in lines]


def _stream(client: Client, url: str, **params: Any) -> tuple[Message, list[Message]]:
    """The head of a streamed answer, and its deltas up to the last."""
    wanted = _params(url, streamResponse=True, **params)
    head: Message = client.call("http/request", wanted)
    return head, _deltas(client, wanted["requestId"])


def _deltas(client: Client, request_id: str) -> list[Message]:
    def is_last(notice: Message) -> bool:
        return notice["params"]["requestId"] == request_id and notice["params"]["done"]

    client.wait_for(is_last)
    mine = [n for n in client.notifications if n["params"]["requestId"] == request_id]
    client.notifications[:] = [n for n in client.notifications if n not in mine]
    assert {notice["method"] for notice in mine} == {"http/request/bodyDelta"}
    return [notice["params"] for notice in mine]


def _body(deltas: list[Message]) -> bytes:
    """The body in some deltas, after a look at what every stream has to keep to."""
    assert [delta["seq"] for delta in deltas] == list(range(1, len(deltas) + 1))
    assert [delta["done"] for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    pieces = [base64.b64decode(delta["deltaBase64"], validate=True) for delta in deltas]
    assert pieces[-1] == b""
    assert all(0 < len(piece) <= _MIB for piece in pieces[:-1])
    assert not any(delta["error"] for delta in deltas[:-1])
    return b"".join(pieces)


# ---- answers --------------------------------------------------------------------------


def test_headers_are_grouped_by_name_and_what_is_no_text_is_left_out(
    client: Client, origin: Origin
) -> None:
    head = b"HTTP/1.1 404 Not Here\r\nX-Multi: a\r\nOther: o\r\nx-multi: b\r\nutf: \xc3\xbc\r\n"
    url = origin.on("/x", head + b"tab: a\tb\r\nempty:\r\ncontent-length: 2\r\n\r\nok")
    headers = _headers(
        ("x-multi", "a"),
        ("x-multi", "b"),
        ("other", "o"),
        ("tab", "a\tb"),
        ("empty", ""),
        ("content-length", "2"),
    )
    assert _ask(client, url) == {"status": 404, "headers": headers, "bodyBase64": b64("ok")}
    assert list(client.messages[-1]["result"]) == ["status", "headers", "bodyBase64"]


def test_bodies_are_not_decompressed(client: Client, origin: Origin) -> None:
    url = origin.on("/x", reply(200, b"\x1f\x8b\x08", "content-encoding: gzip"))
    assert base64.b64decode(_ask(client, url)["bodyBase64"]) == b"\x1f\x8b\x08"


_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _OK + b"transfer-encoding: chunked\r\n\r\n"
_ANSWERS = {
    "chunked": ((_CHUNKED + b"2\r\nab\r\n1\r\nc\r\n0\r\nTrailer: x\r\n\r\n",), 200, b"abc"),
    "until-closed": ((_OK + b"\r\nall of it", HANG_UP), 200, b"all of it"),
    "version-1.0": ((b"HTTP/1.0 200 OK\r\n\r\nall of it", HANG_UP), 200, b"all of it"),
    "empty": ((reply(200),), 200, b""),
    "no-content": ((b"HTTP/1.1 204 No\r\n\r\n",), 204, b""),
    "odd-status": ((reply(999),), 999, b""),
    "no-reason": ((b"HTTP/1.1 200\r\ncontent-length: 0\r\n\r\n",), 200, b""),
    "interim": ((b"HTTP/1.1 103 Early\r\n\r\n" + reply(200, b"ok"),), 200, b"ok"),
    "line-feeds": ((b"HTTP/1.1 200 OK\ncontent-length: 2\n\nok",), 200, b"ok"),
    "server-error": ((reply(500, b"no"),), 500, b"no"),
}


@pytest.mark.parametrize("name", _ANSWERS)
def test_answer(client: Client, origin: Origin, name: str) -> None:
    answer, status, body = _ANSWERS[name]
    url = origin.on("/x", *answer)
    result = _ask(client, url)
    assert (result["status"], base64.b64decode(result["bodyBase64"])) == (status, body)
    head, deltas = _stream(client, url)
    assert (head["status"], head["bodyBase64"], head["headers"]) == (status, "", result["headers"])
    assert (_body(deltas), deltas[-1]["error"]) == (body, None)


_NO_ANSWERS = {
    "silence": (HANG_UP,),
    "no-http": (b"SSH-2.0-something\r\n\r\n", HANG_UP),
    "half-a-head": (b"HTTP/1.1 200 OK\r\nx:", HANG_UP),
    "two-lengths": (_OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nok", HANG_UP),
}


@pytest.mark.parametrize("name", _NO_ANSWERS)
def test_no_answer(client: Client, origin: Origin, name: str) -> None:
    url = origin.on("/x?q", *_NO_ANSWERS[name])
    expected = (_INTERNAL, f"http/request failed: error sending request for url ({url}#f)")
    assert _failure(client, url + "#f") == expected
    assert _failure(client, url + "#f", streamResponse=True) == expected


_BROKEN_BODIES = {
    "short": ((_OK + b"content-length: 5\r\n\r\nab", HANG_UP), b"ab"),
    "cut-between-chunks": ((_CHUNKED + b"2\r\nab\r\n", HANG_UP), b"ab"),
    "no-chunk": ((_CHUNKED + b"zz\r\nab\r\n", HANG_UP), b""),
}


@pytest.mark.parametrize("name", _BROKEN_BODIES)
def test_broken_body(client: Client, origin: Origin, name: str) -> None:
    answer, body = _BROKEN_BODIES[name]
    url = origin.on("/x", *answer)
    text = f"failed to read http/request response body: {_BROKEN}"
    assert _failure(client, url) == (_INTERNAL, text)
    _, deltas = _stream(client, url)
    assert (_body(deltas), deltas[-1]["error"]) == (body, _BROKEN)


def test_nobody_listens(client: Client, kind: str) -> None:
    url = "http://us:pa@127.0.0.1:9/x?y#z"
    text = "http/request failed: error sending request for url (http://127.0.0.1:9/x?y#z)"
    assert _failure(client, url) == (_INTERNAL, text)
    if kind == "ours":  # the reference does not say what has happened
        causes = client.messages[-1]["error"]["data"]["causes"]
        assert causes[-1] == "Connection refused (os error 111)"


def test_byte_format_of_deltas(client: Client, origin: Origin) -> None:
    _stream(client, origin.url, requestId="é")
    first, last = client.raw[-2:]
    start = '{"method":"http/request/bodyDelta","params":{"requestId":"é",'.encode()
    assert first == start + b'"seq":1,"deltaBase64":"b2s=","done":false,"error":null}}'
    assert last == start + b'"seq":2,"deltaBase64":"","done":true,"error":null}}'


# ---- time -----------------------------------------------------------------------------


def test_time_until_the_head_is_limited(client: Client, origin: Origin) -> None:
    slow = origin.on("/slow", WAIT)
    url = origin.on("/x", reply(302, b"", "location: /slow"))
    text = f"http/request failed: error sending request for url ({slow})"
    assert _failure(client, url, timeoutMs=100) == (_INTERNAL, text)
    assert _failure(client, url, timeoutMs=100, streamResponse=True) == (_INTERNAL, text)


def test_time_of_the_body_is_limited(client: Client, origin: Origin) -> None:
    url = origin.on("/x", _OK + b"content-length: 4\r\n\r\nab", WAIT)
    text = f"failed to read http/request response body: {_BROKEN}"
    assert _failure(client, url, timeoutMs=200) == (_INTERNAL, text)
    _, deltas = _stream(client, url, timeoutMs=200)
    assert (_body(deltas), deltas[-1]["error"]) == (b"ab", _BROKEN)


def test_no_time_and_all_the_time(client: Client, origin: Origin) -> None:
    text = "http/request failed: route-aware request timed out"
    assert _failure(client, origin.url, timeoutMs=0) == (_INTERNAL, text)
    assert _ask(client, origin.url, timeoutMs=2**64 - 1)["status"] == 200


# ---- requests -------------------------------------------------------------------------


def test_request_as_it_is_sent(client: Client, origin: Origin) -> None:
    headers = _headers(("X-A", "1"), ("Accept", "text/x"), ("X-A", "2"), ("x-u", "ü"), ("X-E", ""))
    url = f"HTTP://us:p%40@127.0.0.1:{origin.port}/a/../b c?d#e"
    _ask(client, url, method="put", headers=headers, bodyBase64=b64("hello"))
    [request] = origin.taken()
    assert (request.line, request.body) == ("put /b%20c?d HTTP/1.1", b"hello")
    assert sorted(request.headers) == [
        ("accept", "text/x"),
        ("authorization", "Basic dXM6cEA="),
        ("content-length", "5"),
        ("host", f"127.0.0.1:{origin.port}"),
        ("x-a", "1"),
        ("x-a", "2"),
        ("x-e", ""),
        ("x-u", "Ã¼"),
    ]


def test_accept_is_all_that_is_added(client: Client, origin: Origin) -> None:
    _ask(client, origin.url)
    [request] = origin.taken()
    assert sorted(request.headers) == [
        ("accept", "*/*"),
        ("host", f"127.0.0.1:{origin.port}"),
    ]


def test_a_post_without_a_body_says_so(client: Client, origin: Origin, kind: str) -> None:
    _only_ours(kind, "some servers answer 411 to the reference")
    _ask(client, origin.url, method="POST")
    assert origin.taken()[0].values("content-length") == ["0"]


def test_host_and_framing_of_the_clients_choice(client: Client, origin: Origin) -> None:
    chosen = _headers(("Host", "other.example"), ("Transfer-Encoding", "chunked"))
    _ask(client, origin.url, method="POST", headers=chosen, bodyBase64=b64("hello"))
    [request] = origin.taken()
    assert (request.values("host"), request.body) == (["other.example"], b"hello")
    assert request.values("content-length") == []


def test_head_has_no_body(client: Client, origin: Origin) -> None:
    url = origin.on("/x", _OK + b"content-length: 99\r\n\r\n")
    result = _ask(client, url, method="HEAD")
    assert result["headers"] == _headers(("content-length", "99"))
    assert result["bodyBase64"] == ""


_BAD_NAME = "header name is invalid: invalid HTTP header name"
_BAD_VALUE = "header value is invalid for X-y: failed to parse header value"
_WRONG: list[tuple[Message, str]] = [
    ({"method": "bad method", "url": "nope"}, "method is invalid: invalid HTTP method"),
    ({"method": ""}, "method is invalid: invalid HTTP method"),
    ({"url": "nope", "headers": [["a b", ""]]}, "url is invalid: relative URL without a base"),
    ({"url": ""}, "url is invalid: relative URL without a base"),
    ({"url": "http://"}, "url is invalid: empty host"),
    ({"url": "http://a:b/"}, "url is invalid: invalid port number"),
    ({"url": "http://[::1"}, "url is invalid: invalid IPv6 address"),
    ({"url": "http://256.0.0.1/"}, "url is invalid: invalid IPv4 address"),
    ({"url": "http://a b/"}, "url is invalid: invalid international domain name"),
    ({"url": "FTP://x/"}, "only supports http and https URLs, got ftp"),
    ({"url": "ws://x/"}, "only supports http and https URLs, got ws"),
    ({"headers": [["a b", "x\n", "NOPE"]]}, _BAD_NAME),
    ({"headers": [["", "x"]]}, _BAD_NAME),
    ({"headers": [["ü", "x"]]}, _BAD_NAME),
    ({"headers": [["X-y", "a\nb"]]}, _BAD_VALUE),
    ({"headers": [["X-y", "a\x7fb"]]}, _BAD_VALUE),
]


@pytest.mark.parametrize(("wrong", "text"), _WRONG)
def test_invalid_request(client: Client, wrong: Message, text: str) -> None:
    params = _params("http://127.0.0.1:9/") | wrong
    assert client.failure("http/request", params) == (_INVALID_PARAMS, f"http/request {text}")


_SHAPES: list[tuple[Any, str]] = [
    ({"headers": None}, "invalid type: null, expected a sequence"),
    ({"headers": ["x"]}, 'invalid type: string "x", expected struct HttpHeader'),
    ({"headers": [{"name": "A"}]}, "missing field `value`"),
    ({"bodyBase64": "!!"}, "Invalid symbol 33, offset 0."),
    ({"timeoutMs": -1}, "invalid number"),
    ({"redirectPolicy": "zz"}, "unknown variant `zz`, expected `follow` or `stop`"),
    ({"redirectPolicy": None}, "invalid type: null, expected string or map"),
    ({"streamResponse": None}, "invalid type: null, expected a boolean"),
    ({"requestId": None}, "invalid type: null, expected a string"),
]


@pytest.mark.parametrize(("wrong", "text"), _SHAPES)
def test_member_of_the_wrong_type(client: Client, wrong: Message, text: str) -> None:
    assert _failure(client, "http://127.0.0.1:9/", **wrong) == (_INVALID_PARAMS, text)


def test_members_in_an_array(client: Client, origin: Origin) -> None:
    whole = ["POST", origin.url, [["X-A", "1"]], None, None, "follow", "r"]
    assert client.call("http/request", whole)["status"] == 200
    assert origin.taken()[0].values("x-a") == ["1"]
    for count, missing in ((0, 0), (1, 1), (2, 6), (6, 6)):
        text = f"invalid length {missing}, expected struct HttpRequestParams with 8 elements"
        assert client.failure("http/request", whole[:count]) == (_INVALID_PARAMS, text)


def test_not_before_the_handshake(server: Server) -> None:
    with server.connect(initialize=False) as client:
        text = "client must call initialize before using http methods"
        assert _failure(client, "http://127.0.0.1:9/") == (-32600, text)


def test_url_that_is_too_long(client: Client) -> None:
    url = "http://127.0.0.1:9/" + "a" * 65_530
    text = f"http/request failed: builder error for url ({url})"
    assert _failure(client, url) == (_INTERNAL, text)


# ---- values from the environment ------------------------------------------------------

_VARIABLES = {"DEMO": "token", "EMPTY": "", "LINES": "a\nb"}
_FROM_ENVIRONMENT = [
    ("EMPTY", "requires a non-empty executor environment variable EMPTY"),
    ("NOPE", "requires executor environment variable NOPE"),
    ("", "requires executor environment variable "),
    ("openai_api_key", "cannot use executor environment variable openai_api_key"),
    *[
        (name, f"cannot use executor environment variable {name}")
        for name in (
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "AZURE_CLIENT_SECRET",
            "AZURE_FEDERATED_TOKEN_FILE",
            "CODEX_ACCESS_TOKEN",
            "CODEX_API_KEY",
            "CODEX_CONNECTORS_TOKEN",
            "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "OPENAI_API_KEY",
            "OPENAI_FEDERATION_RULE_ID",
            "OPENAI_IDENTITY_TOKEN_FILE",
            "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
        )
    ],
]


def test_values_from_the_environment(kind: str, origin: Origin) -> None:
    def header(variable: str | None) -> Message:
        return {"name": "X-Key", "value": "Bearer ", "valueEnvVar": variable}

    with start_server(kind, env=_VARIABLES) as server, server.connect() as client:
        _ask(client, origin.url, headers=[header("DEMO")])
        _ask(client, origin.url, headers=[header(None)])
        sent = [request.values("x-key")[0].rstrip() for request in origin.taken()]
        assert sent == ["Bearer token", "Bearer"]
        for variable, text in _FROM_ENVIRONMENT:
            expected = (_INVALID_PARAMS, f"http/request header X-Key {text}")
            assert _failure(client, origin.url, headers=[header(variable)]) == expected
        text = "http/request header value is invalid for X-Key: failed to parse header value"
        failure = _failure(client, origin.url, headers=[header("LINES")])
        assert failure == (_INVALID_PARAMS, text)
        assert origin.taken() == []


def test_values_from_the_environment_stay_with_their_server(kind: str, origin: Origin) -> None:
    _only_ours(kind, "the reference sends them to whoever it is redirected to")
    key = {"name": "X-Key", "value": "", "valueEnvVar": "DEMO"}
    with (
        running() as other,
        start_server(kind, env=_VARIABLES) as server,
        server.connect() as client,
    ):
        url = origin.on("/x", reply(307, b"", f"location: {other.url}/y"))
        _ask(client, url, headers=[key, *_headers(("X-Own", "1"), ("host", "one.example"))])
        assert origin.taken()[0].values("x-key") == ["token"]
        [request] = other.taken()
        assert (request.values("x-key"), request.values("x-own")) == ([], ["1"])
        assert request.values("host") == [f"127.0.0.1:{other.port}"]


# ---- redirects ------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT"])
def test_redirected_method_and_body(
    client: Client, origin: Origin, status: int, method: str
) -> None:
    url = origin.on("/x", reply(status, b"", "location: /y"))
    types = _headers(("Content-Type", "a/b"), ("X-Own", "1"))
    _ask(client, url, method=method, bodyBase64=b64("hello"), headers=types)
    _, request = origin.taken()
    changed = status == 303 or (status in (301, 302) and method == "POST")
    expected = "GET" if changed and method != "HEAD" else method
    assert request.line == f"{expected} /y HTTP/1.1"
    assert request.body == (b"" if changed else b"hello")
    assert request.values("content-type") == ([] if changed else ["a/b"])
    assert request.values("x-own") == ["1"]


@pytest.mark.parametrize("status", [300, 304, 305])
def test_other_statuses_are_no_redirects(client: Client, origin: Origin, status: int) -> None:
    url = origin.on("/x", reply(status, b"", "location: /y"))
    assert _ask(client, url)["status"] == status
    assert len(origin.taken()) == 1


_FOR_ONE_SERVER = ("authorization", "cookie", "cookie2", "proxy-authorization", "www-authenticate")


def test_headers_on_the_way_to_the_same_server(client: Client, origin: Origin) -> None:
    headers = _headers(("Referer", "other"), *((name, "1") for name in _FOR_ONE_SERVER))
    url = origin.on("/x?q", reply(302, b"", "location: /y"))
    _ask(client, url + "#fragment", headers=headers)
    _, request = origin.taken()
    assert [request.values(name) for name in _FOR_ONE_SERVER] == [["1"]] * 5
    assert request.values("referer") == [url]


def test_headers_on_the_way_to_another_server(client: Client, origin: Origin) -> None:
    headers = _headers(("X-Own", "1"), *((name, "1") for name in _FOR_ONE_SERVER))
    with running() as other:
        url = origin.on("/x", reply(302, b"", f"location: {other.url}/y"))
        _ask(client, url, headers=headers)
        [request] = other.taken()
    assert [request.values(name) for name in _FOR_ONE_SERVER] == [[]] * 5
    assert request.values("x-own") == ["1"]
    assert request.values("referer") == [origin.url + "/"]


def test_ten_redirects_are_followed(client: Client, origin: Origin) -> None:
    for number in range(1, 12):
        origin.on(f"/{number}", reply(302, b"", f"location: /{number - 1}"))
    assert _ask(client, origin.url + "/10")["status"] == 200
    assert len(origin.taken()) == 11
    text = "http/request failed: too many redirects"
    assert _failure(client, origin.url + "/11") == (_INTERNAL, text)
    assert len(origin.taken()) == 11


def test_redirects_are_not_followed_on_demand(client: Client, origin: Origin) -> None:
    url = origin.on("/x", reply(302, b"see there", "location: /y"))
    result = _ask(client, url, redirectPolicy="stop")
    assert (result["status"], base64.b64decode(result["bodyBase64"])) == (302, b"see there")
    assert len(origin.taken()) == 1


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("y", "/a/y"),
        ("../y", "/y"),
        ("?z", "/a/b?z"),
        (" /sp ce ", "/sp%20ce"),
        ("/c\\d", "/c/d"),
        ("http:y", "/a/y"),
    ],
)
def test_relative_locations(client: Client, origin: Origin, location: str, target: str) -> None:
    _ask(client, origin.on("/a/b", reply(302, b"", f"location: {location}")))
    assert origin.taken()[1].line == f"GET {target} HTTP/1.1"


@pytest.mark.parametrize(
    "line", ["x: y", "location: http://", "location: http://[", "location: /ü"]
)
def test_location_that_leads_nowhere(client: Client, origin: Origin, line: str) -> None:
    assert _ask(client, origin.on("/x", reply(302, b"", line)))["status"] == 302


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://x/", "data:,x"])
def test_location_of_another_scheme(client: Client, origin: Origin, location: str) -> None:
    url = origin.on("/x", reply(302, b"", f"location: {location}"))
    text = f"redirect target uses unsupported URL scheme: {location.partition(':')[0]}"
    assert _failure(client, url) == (_INTERNAL, f"http/request failed: {text}")


# ---- streams --------------------------------------------------------------------------


def test_parts_are_passed_on_as_they_come(client: Client, origin: Origin) -> None:
    url = origin.on("/x", _CHUNKED + b"3\r\none\r\n", WAIT, b"3\r\ntwo\r\n0\r\n\r\n")
    _ask(client, url, streamResponse=True)
    assert "result" in client.messages[-1], "a delta came before the answer"
    first = client.wait_for(lambda n: n["params"]["requestId"] == "r")["params"]
    assert first == {
        "requestId": "r",
        "seq": 1,
        "deltaBase64": b64("one"),
        "done": False,
        "error": None,
    }
    origin.go()
    assert _body(_deltas(client, "r")) == b"onetwo"


def test_large_body(client: Client, origin: Origin) -> None:
    body = bytes(range(256)) * 20_000
    _, deltas = _stream(client, origin.on("/x", reply(200, body)))
    assert _body(deltas) == body
    assert base64.b64decode(_ask(client, origin.url + "/x")["bodyBase64"]) == body


def test_stream_id_is_taken_until_the_end(client: Client, origin: Origin) -> None:
    url = origin.on("/x", _CHUNKED, WAIT, b"0\r\n\r\n")
    _ask(client, url, streamResponse=True)
    text = "http/request streamResponse requestId `r` is already active"
    assert _failure(client, url, streamResponse=True) == (_INVALID_PARAMS, text)
    failure = _failure(client, "nope", method="", streamResponse=True)
    assert failure == (_INVALID_PARAMS, text)
    assert _ask(client, origin.url)["status"] == 200
    origin.go()
    assert _body(_deltas(client, "r")) == b""
    assert _failure(client, "nope", streamResponse=True)[1] != text
    assert _body(_stream(client, origin.url)[1]) == b"ok"


def test_streams_end_with_their_connection(server: Server, origin: Origin) -> None:
    url = origin.on("/x", _CHUNKED, WATCH)
    with server.connect() as client:
        _ask(client, url, streamResponse=True)
    assert origin.hung_up.wait(scaled(PATIENCE))


def test_requests_end_with_their_connection(server: Server, origin: Origin) -> None:
    url = origin.on("/x", WATCH)
    with server.connect() as client:
        client.request("http/request", _params(url))
        client.request("http/request", _params(url, streamResponse=True))
        origin.wait_for_request()
    assert origin.hung_up.wait(scaled(PATIENCE))


def test_unread_body_is_not_taken_in(server: Server, origin: Origin, kind: str) -> None:
    _only_ours(kind, "in the reference 256 deltas wait, whatever their size")
    flood = Flood(64 * _MIB)
    head = _OK + b"content-length: %d\r\n\r\n" % flood.size
    with server.connect() as stalled, server.connect() as other:
        _ask(stalled, origin.on("/x", head, flood), streamResponse=True)
        assert flood.stalled.wait(scaled(20)), "the server took in what nobody read"
        assert flood.sent < flood.size
        assert _ask(other, origin.url)["status"] == 200
        assert len(_body(_deltas(stalled, "r"))) == flood.size


# ---- connections ----------------------------------------------------------------------


def test_slow_request_does_not_hold_up_others(client: Client, origin: Origin, kind: str) -> None:
    _only_ours(kind, "in the reference it blocks every later request")
    slow = client.request("http/request", _params(origin.on("/x", WAIT, reply(200, b"late"))))
    assert _ask(client, origin.url)["status"] == 200
    client.failure("process/read", {"processId": "never"})
    origin.go()
    assert client.result(slow)["bodyBase64"] == b64("late")


def test_server_ends_though_a_request_is_under_way(kind: str, origin: Origin) -> None:
    _only_ours(kind, "the reference waits for the answer")
    url = origin.on("/x", WATCH)
    with start_stdio(kind) as (server, client):
        client.initialize()
        client.request("http/request", _params(url))
        origin.wait_for_request()
        server.process.terminate()
        assert server.process.wait(scaled(PATIENCE)) == 0


def test_proxy_of_the_environment(kind: str, origin: Origin) -> None:
    proxy = {"HTTP_PROXY": origin.url.replace("//", "//us:pa@")}
    with start_server(kind, env=proxy) as server, server.connect() as client:
        url = "http://some.invalid/y?z"
        origin.on(url, reply(200, b"from the proxy"))
        assert _ask(client, url)["bodyBase64"] == b64("from the proxy")
    [request] = origin.taken()
    assert request.values("proxy-authorization") == ["Basic dXM6cGE="]
    assert request.values("host") == ["some.invalid"]


def test_no_proxy_for_this_machine_itself(kind: str, origin: Origin) -> None:
    _only_ours(kind, "the reference asks the proxy for its own machine too")
    proxy = {"HTTP_PROXY": "http://127.0.0.1:9"}
    with start_server(kind, env=proxy) as server, server.connect() as client:
        assert _ask(client, origin.url)["status"] == 200


def _authority(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A root of trust for this test alone, and a server's side that it vouches for."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in ("ca", "site")]
    now = datetime.now(UTC)

    def issue(index: int, extension: x509.ExtensionType) -> x509.Certificate:
        builder = x509.CertificateBuilder(
            names[0], names[index], keys[index].public_key(), x509.random_serial_number()
        )
        builder = builder.not_valid_before(now - timedelta(days=1))
        builder = builder.not_valid_after(now + timedelta(days=1))
        return builder.add_extension(extension, critical=True).sign(keys[0], hashes.SHA256())

    root = issue(0, x509.BasicConstraints(ca=True, path_length=None))
    site = issue(1, x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]))
    (folder / "ca.pem").write_bytes(root.public_bytes(Encoding.PEM))
    private = keys[1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "site.pem").write_bytes(site.public_bytes(Encoding.PEM) + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "site.pem")
    return folder / "ca.pem", context


def test_tls(kind: str, folder: Path, server: Server, origin: Origin) -> None:
    roots, context = _authority(folder)
    with running(context) as secure:
        url = secure.on("/x", reply(302, b"", f"location: {origin.url}/y"))
        with server.connect() as client:
            text = f"http/request failed: error sending request for url ({url})"
            assert _failure(client, url) == (_INTERNAL, text)
        for name in ("SSL_CERT_FILE", "CODEX_CA_CERTIFICATE"):
            trust = {name: str(roots)}
            with start_server(kind, env=trust) as trusting, trusting.connect() as client:
                assert _ask(client, secure.url)["bodyBase64"] == b64("ok")
                assert _body(_stream(client, secure.url)[1]) == b"ok"
                assert _ask(client, url)["status"] == 200
            assert origin.taken()[-1].values("referer") == []


# ---- limits ---------------------------------------------------------------------------


def test_streams_are_limited(client: Client, origin: Origin, kind: str) -> None:
    _only_ours(kind, "the reference has no limit")
    url = origin.on("/x", _CHUNKED, WAIT, b"0\r\n\r\n")
    for number in range(128):
        _ask(client, url, streamResponse=True, requestId=str(number))
    text = "at most 128 http/request bodies may be streamed per connection"
    assert _failure(client, url, streamResponse=True) == (-32600, text)
    assert _ask(client, origin.url)["status"] == 200
    origin.go()
    for number in range(128):
        assert _body(_deltas(client, str(number))) == b""
    assert _body(_stream(client, origin.url)[1]) == b"ok"


def test_whole_bodies_are_limited(client: Client, origin: Origin, kind: str) -> None:
    _only_ours(kind, "the reference sends messages of any size")
    fits, size = 47 * _MIB, 47 * _MIB + 1
    head = _OK + b"content-length: %d\r\n\r\n"
    result = _ask(client, origin.on("/x", head % fits, Flood(fits)))
    assert len(base64.b64decode(result["bodyBase64"])) == fits
    assert len(client.raw[-1]) < 64 * _MIB
    with pytest.raises(RpcFailure) as failed:
        _ask(client, origin.on("/y", head % size, Flood(size)))
    assert "exceeds 49283072 bytes, ask for it with streamResponse" in failed.value.message
    assert len(_body(_stream(client, origin.on("/y", head % size, Flood(size)))[1])) == size


def test_request_ids_are_limited(client: Client, origin: Origin, kind: str) -> None:
    _only_ours(kind, "the reference takes any length")
    assert _ask(client, origin.url, requestId="é" * 2048)["status"] == 200
    text = "requestId must not exceed 4096 bytes"
    failure = _failure(client, origin.url, requestId="é" * 2048 + "x")
    assert failure == (_INVALID_PARAMS, text)
