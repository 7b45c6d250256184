"""http/request: what becomes of an answer of any shape, speed and size, whole or streamed."""

from __future__ import annotations

import base64

import pytest

from tests.conformance.http_requests import (
    BROKEN,
    CHUNKED,
    INTERNAL,
    INVALID_PARAMS,
    MIB,
    OK,
    ask,
    body_of,
    deltas_of,
    failure_of,
    header_list,
    only_ours,
    params_for,
    streamed,
)
from tests.conformance.origin import HANG_UP, WAIT, WATCH, Flood, Origin, reply
from tests.support.client import DEFAULT_TIMEOUT, Client, RpcFailure, Server, b64, scaled

# ---- answers --------------------------------------------------------------------------


@pytest.mark.quick
def test_headers_are_grouped_by_name_and_what_is_no_text_is_left_out(
    client: Client, origin: Origin
) -> None:
    head = b"HTTP/1.1 404 Not Here\r\nX-Multi: a\r\nOther: o\r\nx-multi: b\r\nutf: \xc3\xbc\r\n"
    url = origin.on("/x", head + b"tab: a\tb\r\nempty:\r\ncontent-length: 2\r\n\r\nok")
    headers = header_list(
        ("x-multi", "a"),
        ("x-multi", "b"),
        ("other", "o"),
        ("tab", "a\tb"),
        ("empty", ""),
        ("content-length", "2"),
    )
    assert ask(client, url) == {"status": 404, "headers": headers, "bodyBase64": b64("ok")}
    assert list(client.messages[-1]["result"]) == ["status", "headers", "bodyBase64"]


def test_bodies_are_not_decompressed(client: Client, origin: Origin) -> None:
    url = origin.on("/x", reply(200, b"\x1f\x8b\x08", "content-encoding: gzip"))
    assert base64.b64decode(ask(client, url)["bodyBase64"]) == b"\x1f\x8b\x08"


_ANSWERS = {
    "chunked": ((CHUNKED + b"2\r\nab\r\n1\r\nc\r\n0\r\nTrailer: x\r\n\r\n",), 200, b"abc"),
    "until-closed": ((OK + b"\r\nall of it", HANG_UP), 200, b"all of it"),
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
    result = ask(client, url)
    assert (result["status"], base64.b64decode(result["bodyBase64"])) == (status, body)
    head, deltas = streamed(client, url)
    assert (head["status"], head["bodyBase64"], head["headers"]) == (status, "", result["headers"])
    assert (body_of(deltas), deltas[-1]["error"]) == (body, None)


_NO_ANSWERS = {
    "silence": (HANG_UP,),
    "no-http": (b"SSH-2.0-something\r\n\r\n", HANG_UP),
    "half-a-head": (b"HTTP/1.1 200 OK\r\nx:", HANG_UP),
    "two-lengths": (OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nok", HANG_UP),
}


@pytest.mark.parametrize("name", _NO_ANSWERS)
def test_no_answer(client: Client, origin: Origin, name: str) -> None:
    url = origin.on("/x?q", *_NO_ANSWERS[name])
    expected = (INTERNAL, f"http/request failed: error sending request for url ({url}#f)")
    assert failure_of(client, url + "#f") == expected
    assert failure_of(client, url + "#f", streamResponse=True) == expected


_BROKEN_BODIES = {
    "short": ((OK + b"content-length: 5\r\n\r\nab", HANG_UP), b"ab"),
    "cut-between-chunks": ((CHUNKED + b"2\r\nab\r\n", HANG_UP), b"ab"),
    "no-chunk": ((CHUNKED + b"zz\r\nab\r\n", HANG_UP), b""),
}


@pytest.mark.parametrize("name", _BROKEN_BODIES)
def test_broken_body(client: Client, origin: Origin, name: str) -> None:
    answer, body = _BROKEN_BODIES[name]
    url = origin.on("/x", *answer)
    text = f"failed to read http/request response body: {BROKEN}"
    assert failure_of(client, url) == (INTERNAL, text)
    _, deltas = streamed(client, url)
    assert (body_of(deltas), deltas[-1]["error"]) == (body, BROKEN)


def test_nobody_listens(client: Client, kind: str) -> None:
    url = "http://us:pa@127.0.0.1:9/x?y#z"
    text = "http/request failed: error sending request for url (http://127.0.0.1:9/x?y#z)"
    assert failure_of(client, url) == (INTERNAL, text)
    if kind == "ours":  # the reference does not say what has happened
        causes = client.messages[-1]["error"]["data"]["causes"]
        assert causes[-1] == "Connection refused (os error 111)"


def test_byte_format_of_deltas(client: Client, origin: Origin) -> None:
    streamed(client, origin.url, requestId="é")
    first, last = client.raw[-2:]
    start = '{"method":"http/request/bodyDelta","params":{"requestId":"é",'.encode()
    assert first == start + b'"seq":1,"deltaBase64":"b2s=","done":false,"error":null}}'
    assert last == start + b'"seq":2,"deltaBase64":"","done":true,"error":null}}'


# ---- time -----------------------------------------------------------------------------


def test_time_until_the_head_is_limited(client: Client, origin: Origin) -> None:
    slow = origin.on("/slow", WAIT)
    url = origin.on("/x", reply(302, b"", "location: /slow"))
    text = f"http/request failed: error sending request for url ({slow})"
    assert failure_of(client, url, timeoutMs=100) == (INTERNAL, text)
    assert failure_of(client, url, timeoutMs=100, streamResponse=True) == (INTERNAL, text)


def test_time_of_the_body_is_limited(client: Client, origin: Origin) -> None:
    url = origin.on("/x", OK + b"content-length: 4\r\n\r\nab", WAIT)
    text = f"failed to read http/request response body: {BROKEN}"
    assert failure_of(client, url, timeoutMs=200) == (INTERNAL, text)
    _, deltas = streamed(client, url, timeoutMs=200)
    assert (body_of(deltas), deltas[-1]["error"]) == (b"ab", BROKEN)


def test_no_time_and_all_the_time(client: Client, origin: Origin) -> None:
    text = "http/request failed: route-aware request timed out"
    assert failure_of(client, origin.url, timeoutMs=0) == (INTERNAL, text)
    assert ask(client, origin.url, timeoutMs=2**64 - 1)["status"] == 200


# ---- streams --------------------------------------------------------------------------


def test_parts_are_passed_on_as_they_come(client: Client, origin: Origin) -> None:
    url = origin.on("/x", CHUNKED + b"3\r\none\r\n", WAIT, b"3\r\ntwo\r\n0\r\n\r\n")
    ask(client, url, streamResponse=True)
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
    assert body_of(deltas_of(client, "r")) == b"onetwo"


def test_large_body(client: Client, origin: Origin) -> None:
    body = bytes(range(256)) * 20_000
    _, deltas = streamed(client, origin.on("/x", reply(200, body)))
    assert body_of(deltas) == body
    assert base64.b64decode(ask(client, origin.url + "/x")["bodyBase64"]) == body


def test_stream_id_is_taken_until_the_end(client: Client, origin: Origin) -> None:
    url = origin.on("/x", CHUNKED, WAIT, b"0\r\n\r\n")
    ask(client, url, streamResponse=True)
    text = "http/request streamResponse requestId `r` is already active"
    assert failure_of(client, url, streamResponse=True) == (INVALID_PARAMS, text)
    failure = failure_of(client, "nope", method="", streamResponse=True)
    assert failure == (INVALID_PARAMS, text)
    assert ask(client, origin.url)["status"] == 200
    origin.go()
    assert body_of(deltas_of(client, "r")) == b""
    assert failure_of(client, "nope", streamResponse=True)[1] != text
    assert body_of(streamed(client, origin.url)[1]) == b"ok"


def test_streams_end_with_their_connection(server: Server, origin: Origin) -> None:
    url = origin.on("/x", CHUNKED, WATCH)
    with server.connect() as client:
        ask(client, url, streamResponse=True)
    assert origin.hung_up.wait(scaled(DEFAULT_TIMEOUT))


def test_requests_end_with_their_connection(server: Server, origin: Origin) -> None:
    url = origin.on("/x", WATCH)
    with server.connect() as client:
        client.request("http/request", params_for(url))
        client.request("http/request", params_for(url, streamResponse=True))
        origin.wait_for_request()
    assert origin.hung_up.wait(scaled(DEFAULT_TIMEOUT))


def test_unread_body_is_not_taken_in(server: Server, origin: Origin, kind: str) -> None:
    only_ours(kind, "in the reference 256 deltas wait, whatever their size")
    flood = Flood(64 * MIB)
    head = OK + b"content-length: %d\r\n\r\n" % flood.size
    with server.connect() as stalled, server.connect() as other:
        ask(stalled, origin.on("/x", head, flood), streamResponse=True)
        assert flood.stalled.wait(scaled(20)), "the server took in what nobody read"
        assert flood.sent < flood.size
        assert ask(other, origin.url)["status"] == 200
        assert len(body_of(deltas_of(stalled, "r"))) == flood.size


# ---- limits ---------------------------------------------------------------------------


def test_streams_are_limited(client: Client, origin: Origin, kind: str) -> None:
    only_ours(kind, "the reference has no limit")
    url = origin.on("/x", CHUNKED, WAIT, b"0\r\n\r\n")
    for number in range(128):
        ask(client, url, streamResponse=True, requestId=str(number))
    text = "at most 128 http/request bodies may be streamed per connection"
    assert failure_of(client, url, streamResponse=True) == (-32600, text)
    assert ask(client, origin.url)["status"] == 200
    origin.go()
    for number in range(128):
        assert body_of(deltas_of(client, str(number))) == b""
    assert body_of(streamed(client, origin.url)[1]) == b"ok"


def test_whole_bodies_are_limited(client: Client, origin: Origin, kind: str) -> None:
    only_ours(kind, "the reference sends messages of any size")
    fits, size = 47 * MIB, 47 * MIB + 1
    head = OK + b"content-length: %d\r\n\r\n"
    result = ask(client, origin.on("/x", head % fits, Flood(fits)))
    assert len(base64.b64decode(result["bodyBase64"])) == fits
    assert len(client.raw[-1]) < 64 * MIB
    with pytest.raises(RpcFailure) as failed:
        ask(client, origin.on("/y", head % size, Flood(size)))
    assert "exceeds 49283072 bytes, set streamResponse to receive it" in failed.value.message
    assert len(body_of(streamed(client, origin.on("/y", head % size, Flood(size)))[1])) == size


def test_request_ids_are_limited(client: Client, origin: Origin, kind: str) -> None:
    only_ours(kind, "the reference takes any length")
    assert ask(client, origin.url, requestId="é" * 2048)["status"] == 200
    text = "requestId must not exceed 4096 bytes"
    failure = failure_of(client, origin.url, requestId="é" * 2048 + "x")
    assert failure == (INVALID_PARAMS, text)
