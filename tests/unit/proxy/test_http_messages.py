"""HTTP requests and responses as a proxy passes them on or answers them."""

from __future__ import annotations

import json

import h11
import pytest

from exec_server.proxy import http_messages as messages
from exec_server.proxy.http_messages import BadRequest, Head, RequestTarget
from exec_server.proxy.policy import Decision, NetworkAccess

_DATE = b"Mon, 16 Nov 2026 12:54:40 GMT"


def _parse(text: str) -> h11.Request:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(text.replace("\n", "\r\n").encode())
    event = connection.next_event()
    assert isinstance(event, h11.Request)
    return event


def _request(target: str, host: str, method: str = "GET", more: str = "") -> h11.Request:
    return _parse(f"{method} {target} HTTP/1.1\nHost: {host}\n{more}\n")


@pytest.mark.parametrize(
    ("target", "host", "expected"),
    [
        ("http://A.test/p?q=1", "a.TEST", RequestTarget("a.test", 80, b"/p?q=1")),
        ("http://a.test:81", "a.test:81", RequestTarget("a.test", 81, b"/")),
        ("http://a.test:80/", "a.test", RequestTarget("a.test", 80, b"/")),
        ("http://u:p@a.test/", "a.test", RequestTarget("a.test", 80, b"/")),
        ("HTTP://a.test./x", "a.test", RequestTarget("a.test", 80, b"/x")),
        ("http://[::1]:8/", "[0::1]:8", RequestTarget("::1", 8, b"/")),
        ("http://a.test/?", "", RequestTarget("a.test", 80, b"/")),
        ("/origin/form", "a.test:9", RequestTarget("a.test", 9, b"/origin/form")),
    ],
)
def test_targets(target: str, host: str, expected: RequestTarget) -> None:
    assert messages.find_target(_request(target, host)) == expected


def test_target_of_a_whole_server() -> None:
    request = _request("*", "a.test:81", "OPTIONS")
    target = messages.find_target(request)
    assert target == RequestTarget("a.test", 81, b"*")
    assert messages.forwarded_request(request, target, absolute=False).start == (
        b"OPTIONS * HTTP/1.1"
    )
    # The form for another proxy has no path (RFC 9112, 3.2.4).
    assert messages.forwarded_request(request, target, absolute=True).start == (
        b"OPTIONS http://a.test:81 HTTP/1.1"
    )
    with pytest.raises(BadRequest, match="only OPTIONS has the target"):
        messages.find_target(_request("*", "a.test"))


def test_target_of_connect() -> None:
    request = _request("a.test:443", "anything", "CONNECT")
    assert messages.find_target(request) == RequestTarget("a.test", 443, b"")


@pytest.mark.parametrize(
    ("target", "host", "method", "text"),
    [
        ("http://a.test/", "b.test", "GET", "Host header does not match request target"),
        ("http://a.test:81/", "a.test", "GET", "Host header does not match request target"),
        ("http://a.test/", "a.test:81", "GET", "Host header does not match request target"),
        ("http://a.test/", "a b", "GET", "invalid Host header"),
        ("http://a.test/", "a:x", "GET", "invalid Host header"),
        ("http://a.test/", "[fe80::1%25lo]", "GET", "missing host"),
        ("http:///", "a.test", "GET", "missing host"),
        ("http://[::1/", "a.test", "GET", "missing host"),
        ("http://[a]/", "a.test", "GET", "missing host"),
        ("http://a.test:0/", "a.test", "GET", "missing host"),
        ("https://a.test/", "a.test", "GET", "only http:// URLs and CONNECT are supported"),
        ("ftp://a.test/", "a.test", "GET", "only http:// URLs and CONNECT are supported"),
        ("a.test/x", "a.test", "GET", "only http:// URLs and CONNECT are supported"),
        ("/", "", "GET", "missing host"),
        ("a.test", "a.test", "CONNECT", "missing host"),
        ("a.test:0", "a.test", "CONNECT", "missing host"),
        ("a.test:99999", "a.test", "CONNECT", "missing host"),
        ("u@a.test:443", "a.test", "CONNECT", "missing host"),
        ("/x", "a.test", "CONNECT", "missing host"),
    ],
)
def test_refused_targets(target: str, host: str, method: str, text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        messages.find_target(_request(target, host, method))
    assert (caught.value.status, caught.value.text) == (400, text)


def test_host_that_is_not_ascii() -> None:
    request = h11.Request(method=b"GET", target=b"/", headers=[(b"Host", b"\xe9")])
    with pytest.raises(BadRequest, match="invalid Host header"):
        messages.find_target(request)


def test_second_host() -> None:
    headers = [(b"Host", b"a"), (b"x", b"y")]
    request = h11.Request(method=b"GET", target=b"/", headers=headers)
    object.__setattr__(request, "headers", [(b"host", b"a"), (b"host", b"b")])
    with pytest.raises(BadRequest, match="multiple Host headers"):
        messages.find_target(request)


def test_framing_that_two_parsers_could_read_differently() -> None:
    messages.check_framing(_request("/", "a", "POST", "Content-Length: 3\n"))
    messages.check_framing(_request("/", "a", "POST", "Transfer-Encoding: chunked\n"))
    both = _request("/", "a", "POST", "Content-Length: 3\nTransfer-Encoding: chunked\n")
    with pytest.raises(BadRequest, match="both Content-Length and Transfer-Encoding"):
        messages.check_framing(both)
    old = _parse("POST / HTTP/1.0\nHost: a\nTransfer-Encoding: chunked\n\n")
    with pytest.raises(BadRequest, match=r"Transfer-Encoding in HTTP/1\.0"):
        messages.check_framing(old)


@pytest.mark.parametrize(
    "name",
    [
        *("Content-Length", "transfer-encoding", "Trailer", "HOST", "Authorization", "Cookie"),
        *("Content-Type", "Content-Encoding", "Content-Range", "Expect"),
    ],
)
def test_headers_for_all_recipients_are_no_options_of_a_connection(name: str) -> None:
    for option in (name, f"close , {name},x", f"x\nConnection:\t{name}"):
        with pytest.raises(BadRequest, match=f"Connection names {name.lower()}"):
            messages.check_framing(_request("/", "a", "POST", f"Connection: {option}\n"))
    with pytest.raises(h11.RemoteProtocolError, match=f"Connection names {name.lower()}"):
        messages.check_response(_response(("Connection", f"close, {name}")))


def test_options_of_a_connection() -> None:
    for option in ("close", "keep-alive", "TE, close", "Upgrade, HTTP2-Settings", "X-Other", ""):
        messages.check_framing(_request("/", "a", "POST", f"Connection: {option}\n"))
        messages.check_response(_response(("Connection", option)))


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("Content_Length: 3", "underscore in the name of a framing header"),
        ("transfer_ENCODING: chunked", "underscore in the name of a framing header"),
        ("X: a\x01b", "control character in a header"),
        ("X: a\x1eContent-Length: 3", "control character in a header"),
    ],
)
def test_headers_that_other_parsers_read_differently(header: str, text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        messages.check_framing(_request("/", "a", "POST", f"{header}\n"))


def test_the_length_of_a_body_is_written_anew() -> None:
    request = _request("/p", "a.test", "POST", "content-length: 007, 007\nContent-Length: 007\n")
    forwarded = messages.forwarded_request(request, messages.find_target(request), absolute=False)
    lengths = [pair for pair in forwarded.headers if pair[0].lower() == b"content-length"]
    assert lengths == [(b"Content-Length", b"7")]
    response = _response(("content-length", "007"), ("Date", "x"))
    answered = messages.forwarded_response(_request("/", "a"), response, 7, _DATE)
    assert answered.headers == [(b"Date", b"x"), (b"Content-Length", b"7")]
    # The length of a response to HEAD whose body would come in chunks says nothing.
    both = _response(("Content-Length", "7"), ("Transfer-Encoding", "chunked"), ("Date", "x"))
    answered = messages.forwarded_response(_request("/", "a", "HEAD"), both, 0, _DATE)
    assert answered.headers == [(b"Date", b"x")]


def test_hop_by_hop_headers_go_no_further() -> None:
    request = _request(
        "http://a.test:81/p",
        "A.test:81",
        "POST",
        "X-Keep: 1\nConnection: X-Drop, close\nX-Drop: 2\nKeep-Alive: 3\nProxy-Connection: 4\n"
        "Proxy-Authorization: 5\nTE: trailers\nTrailer: x\nUpgrade: h2c\nExpect: 100-continue\n"
        "Content-Length: 5\n",
    )
    forwarded = messages.forwarded_request(request, messages.find_target(request), absolute=False)
    assert forwarded == Head(
        b"POST /p HTTP/1.1",
        [
            (b"Host", b"A.test:81"),
            (b"X-Keep", b"1"),
            (b"Content-Length", b"5"),
            (b"Connection", b"close"),
        ],
    )
    assert forwarded.encode() == (
        b"POST /p HTTP/1.1\r\nHost: A.test:81\r\nX-Keep: 1\r\nContent-Length: 5\r\n"
        b"Connection: close\r\n\r\n"
    )


def test_body_of_unknown_length_is_chunked_again() -> None:
    request = _request("/p", "a.test", "POST", "Transfer-Encoding: chunked\n")
    forwarded = messages.forwarded_request(request, messages.find_target(request), absolute=False)
    assert (b"Transfer-Encoding", b"chunked") in forwarded.headers
    assert messages.is_chunked(request)
    assert messages.chunk(b"x" * 17) == b"11\r\n" + b"x" * 17 + b"\r\n"


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("http://a.test/p", b"a.test"),
        ("http://a.test:81/p", b"a.test:81"),
        ("http://[::1]/p", b"[::1]"),
        ("http://[::1]:81/p", b"[::1]:81"),
    ],
)
def test_requests_without_host_and_for_another_proxy(target: str, host: bytes) -> None:
    request = _parse(f"GET {target} HTTP/1.0\n\n")
    forwarded = messages.forwarded_request(request, messages.find_target(request), absolute=True)
    assert forwarded == Head(
        b"GET http://" + host + b"/p HTTP/1.1", [(b"Host", host), (b"Connection", b"close")]
    )


def _response(*headers: tuple[str, str], status: int = 200) -> h11.Response:
    return h11.Response(status_code=status, reason=b"Fine", headers=list(headers))


def test_responses_get_a_date() -> None:
    request = _request("/", "a")
    response = _response(("X-A", "1"), ("Connection", "x-b"), ("X-B", "2"), ("Upgrade", "x"))
    forwarded = messages.forwarded_response(request, response, 0, _DATE)
    assert forwarded == Head(b"HTTP/1.1 200 Fine", [(b"X-A", b"1"), (b"date", _DATE)])
    dated = messages.forwarded_response(request, _response(("Date", "x")), 0, _DATE)
    assert dated.headers == [(b"Date", b"x")]


@pytest.mark.parametrize(
    ("method", "status", "headers", "length"),
    [
        ("GET", 200, [("Content-Length", "7")], 7),
        ("GET", 200, [], None),
        ("GET", 200, [("Transfer-Encoding", "chunked")], None),
        ("GET", 200, [("Transfer-Encoding", "chunked"), ("Content-Length", "7")], None),
        ("HEAD", 200, [("Content-Length", "7")], 0),
        ("GET", 204, [], 0),
        ("GET", 304, [("Content-Length", "7")], 0),
    ],
)
def test_lengths_of_bodies(
    method: str, status: int, headers: list[tuple[str, str]], length: int | None
) -> None:
    request = _request("/", "a", method)
    assert messages.body_length(request, _response(*headers, status=status)) == length


def test_bodies_of_unknown_length_end_in_a_way_that_the_process_knows() -> None:
    response = _response(("Content-Length", "7"), ("Transfer-Encoding", "chunked"), ("Date", "x"))
    forwarded = messages.forwarded_response(_request("/", "a"), response, None, _DATE)
    assert forwarded.headers == [(b"Date", b"x"), (b"transfer-encoding", b"chunked")]
    old = messages.forwarded_response(_parse("GET / HTTP/1.0\n\n"), response, None, _DATE)
    assert old.headers == [(b"Date", b"x"), (b"connection", b"close")]


def test_an_answer_without_content_has_no_length() -> None:
    response = _response(("Content-Length", "7"), ("Date", "x"), status=204)
    forwarded = messages.forwarded_response(_request("/", "a"), response, 0, _DATE)
    assert forwarded.headers == [(b"Date", b"x")]


def test_requests_after_this_one() -> None:
    assert messages.keeps_alive(_request("/", "a"))
    assert not messages.keeps_alive(_request("/", "a", "GET", "Connection: X, Close\n"))
    assert not messages.keeps_alive(_parse("GET / HTTP/1.0\nConnection: keep-alive\n\n"))


def test_empty_requests() -> None:
    assert messages.is_empty(_request("/", "a", "GET", "Content-Length: 0\n"))
    assert not messages.is_empty(_request("/", "a", "GET", "Content-Length: 1\n"))
    assert not messages.is_empty(_request("/", "a", "GET", "Transfer-Encoding: chunked\n"))


def test_encoded_answers() -> None:
    answer = messages.text_answer(502, "upstream failure", b"now")
    head = b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/plain\r\ncontent-length: 16\r\n"
    request = _request("/", "a")
    assert messages.encode_answer(request, answer, last=False) == (
        head + b"date: now\r\n\r\nupstream failure"
    )
    for ends in (
        messages.encode_answer(request, answer, last=True),
        messages.encode_answer(None, answer, last=True),
        messages.encode_answer(_parse("GET / HTTP/1.0\n\n"), answer, last=False),
    ):
        assert ends == head + b"date: now\r\nconnection: close\r\n\r\nupstream failure"
    # An answer to HEAD has the length of the body that it does not have.
    only_head = messages.encode_answer(_request("/", "a", "HEAD"), answer, last=False)
    assert only_head == head + b"date: now\r\n\r\n"


@pytest.mark.parametrize(
    ("reason", "error", "message"),
    [
        ("not_allowed", "blocked-by-allowlist", "Domain not in allowlist."),
        (
            "not_allowed_local",
            "blocked-by-allowlist",
            "Sandbox policy blocks local/private network addresses.",
        ),
        ("denied", "blocked-by-denylist", "Domain denied by the sandbox policy."),
        ("method_not_allowed", "blocked-by-method-policy", "Method not allowed in limited mode."),
        ("mitm_required", "blocked-by-mitm-required", "MITM required for limited HTTPS."),
        ("not today", "blocked-by-policy", "Request blocked by network policy."),
    ],
)
def test_refusals(reason: str, error: str, message: str) -> None:
    decision = Decision("deny", "decider", reason)
    request = NetworkAccess("http", "a.test", 80, "127.0.0.1:1", "GET")
    head, body = messages.block_answer(request, decision, _DATE)
    assert head == Head(
        b"HTTP/1.1 403 Forbidden",
        [
            (b"content-type", b"application/json"),
            (b"x-proxy-error", error.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"date", _DATE),
        ],
    )
    assert json.loads(body) == {
        "status": "blocked",
        "host": "a.test",
        "reason": reason,
        "decision": "deny",
        "source": "decider",
        "protocol": "http",
        "port": 80,
        "message": message,
    }
    tunnel = NetworkAccess("https_connect", "a.test", 443, "127.0.0.1:1", "CONNECT")
    head, body = messages.block_answer(tunnel, decision, _DATE)
    assert (head.start, body) == (b"HTTP/1.1 403 Forbidden", message.encode())


def test_a_refusal_with_a_sentence_of_its_own() -> None:
    decision = Decision("deny", "baseline_policy", "denied", message="One address is forbidden.")
    request = NetworkAccess("http", "a.test", 80, "127.0.0.1:1", "GET")
    head, body = messages.block_answer(request, decision, _DATE)
    assert json.loads(body)["message"] == "One address is forbidden."
    assert (b"x-proxy-error", b"blocked-by-denylist") in head.headers
    tunnel = NetworkAccess("https_connect", "a.test", 443, "127.0.0.1:1", "CONNECT")
    assert messages.block_answer(tunnel, decision, _DATE).body == b"One address is forbidden."
