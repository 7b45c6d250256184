"""One HTTP request for a client: redirects, bodies and their limits, with a fake transport."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from exec_server.errors import ExecServerError, InternalError, InvalidParams
from exec_server.host import http
from exec_server.host.http import (
    HttpRequest,
    HttpResources,
    ResponseBody,
    build_request,
    response_headers,
    send,
)
from exec_server.protocol.http import Header, RequestParams, ResponseHeader


@dataclass
class FakeResponse:
    """A response whose body is some pieces, then perhaps a failure."""

    status: int = 200
    headers: Sequence[tuple[str, str]] = ()
    pieces: list[bytes] = field(default_factory=list)
    failure: ExecServerError | None = None
    closed: bool = False

    async def read(self) -> bytes:
        if self.pieces:
            return self.pieces.pop(0)
        if self.failure is not None:
            raise self.failure
        return b""

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeTransport:
    """Returns its responses in order and records the requests."""

    responses: list[FakeResponse | ExecServerError]
    sent: list[tuple[str, str, dict[str, str], bytes, bool]] = field(default_factory=list)

    async def open(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        *,
        repeatable: bool,
    ) -> FakeResponse:
        self.sent.append((method, url, dict(headers), body, repeatable))
        response = self.responses.pop(0)
        if isinstance(response, ExecServerError):
            raise response
        return response


def _request(**members: object) -> HttpRequest:
    params = RequestParams(method="GET", url="http://h/a#f", request_id="r")
    changed = {name: getattr(params, name) for name in params.__struct_fields__} | members
    return build_request(RequestParams(**changed), {"KEY": "secret", "ODD": "\udcff"})


def _moved(location: str, status: int = 302) -> FakeResponse:
    return FakeResponse(status, [("location", location)])


def test_what_is_sent() -> None:
    transport = FakeTransport([FakeResponse()])
    request = _request(headers=[Header("X-Key", " Bearer ", "KEY"), Header("X-B", "\tb ")])
    asyncio.run(send(transport, request, None))
    headers = {"x-key": "Bearer secret", "x-b": "b", "accept": "*/*"}
    assert transport.sent == [("GET", "http://h/a", headers, b"", True)]


@pytest.mark.parametrize(("method", "repeatable"), [("PUT", True), ("POST", False), ("X", False)])
def test_what_may_be_sent_twice(method: str, repeatable: bool) -> None:
    transport = FakeTransport([FakeResponse()])
    asyncio.run(send(transport, _request(method=method), None))
    assert transport.sent[0][-1] is repeatable


def test_variable_that_is_no_text() -> None:
    with pytest.raises(InvalidParams) as failed:
        _request(headers=[Header("A", "", "ODD")])
    assert (
        failed.value.message == "http/request header A requires executor environment variable ODD"
    )


def test_secrets_are_not_shown() -> None:
    request = _request(headers=[Header("X-Key", "", "KEY")], url="http://us:word@h/")
    transport = FakeTransport([ExecServerError("text", "outer", "inner")])
    with pytest.raises(InternalError) as failed:
        asyncio.run(send(transport, request, None))
    text = "http/request failed: error sending request for url (http://h/)"
    assert failed.value.message == text
    assert failed.value.data == {"causes": ["outer", "inner"]}
    with pytest.raises(InvalidParams) as refused:
        build_request(
            RequestParams(
                method="GET", url="http://h", request_id="r", headers=[Header("A", "\n", "KEY")]
            ),
            {"KEY": "secret"},
        )
    assert "secret" not in refused.value.message


def test_redirects_are_closed() -> None:
    moved, last = _moved("/b"), FakeResponse()
    transport = FakeTransport([moved, last])
    assert asyncio.run(send(transport, _request(), None)) is last
    assert (moved.closed, last.closed) == (True, False)
    assert transport.sent[1][:3] == (
        "GET",
        "http://h/b",
        {"accept": "*/*", "referer": "http://h/a"},
    )


def test_answer_that_is_refused_is_closed() -> None:
    moved = _moved("ftp://h/")
    with pytest.raises(InternalError):
        asyncio.run(send(FakeTransport([moved]), _request(), None))
    assert moved.closed


@pytest.mark.parametrize(
    ("source", "location", "referer"),
    [
        ("http://us:pa@h/a?b#c", "/d", "http://h/a?b"),
        ("http://h/a", "http://h:81/", "http://h/"),
        ("http://h/a", "https://h/", "http://h/"),
        ("https://h/a", "https://k/", "https://h/"),
        ("https://h/a", "http://h/", None),
    ],
)
def test_referer(source: str, location: str, referer: str | None) -> None:
    transport = FakeTransport([_moved(location), FakeResponse()])
    asyncio.run(send(transport, _request(url=source), None))
    assert transport.sent[1][2].get("referer") == referer


def test_credentials_of_a_url_stay_with_its_server() -> None:
    transport = FakeTransport([_moved("/b"), _moved("http://k/"), FakeResponse()])
    asyncio.run(send(transport, _request(url="http://us:pa@h/"), None))
    sent = [headers.get("authorization") for _, _, headers, _, _ in transport.sent]
    assert sent == ["Basic dXM6cGE=", "Basic dXM6cGE=", None]


def test_redirects_are_limited() -> None:
    responses = [_moved("/b") for _ in range(http.MAX_REDIRECTS + 1)]
    with pytest.raises(InternalError, match="too many redirects"):
        asyncio.run(send(FakeTransport([*responses, FakeResponse()]), _request(), None))
    assert all(response.closed for response in responses)


def test_headers_of_an_answer() -> None:
    lines = [("a", "1"), ("b", "\xff"), ("c", "\t ~"), ("a", "2"), ("d", "\x7f")]
    expected = [ResponseHeader("a", "1"), ResponseHeader("a", "2"), ResponseHeader("c", "\t ~")]
    assert response_headers(FakeResponse(headers=lines)) == expected


# ---- bodies ---------------------------------------------------------------------------


def _fill(body: ResponseBody, response: FakeResponse) -> None:
    asyncio.run(body.fill(response, None))


def test_room_is_given_back() -> None:
    resources = HttpResources(FakeTransport([]), free_body_bytes=10)
    body = ResponseBody(resources)
    _fill(body, FakeResponse(pieces=[b"abc", b"def"]))
    assert (bytes(body.data), resources.free_body_bytes) == (b"abcdef", 4)
    other = ResponseBody(resources)
    with pytest.raises(InternalError, match="too many bodies are buffered"):
        _fill(other, FakeResponse(pieces=[b"1234", b"5"]))
    assert resources.free_body_bytes == 0
    del body, other
    gc.collect()  # the failure's traceback held them too
    assert resources.free_body_bytes == 10


def test_a_body_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_BYTES", 6)
    _fill(ResponseBody(HttpResources(FakeTransport([]))), FakeResponse(pieces=[b"abc", b"def"]))
    with pytest.raises(InternalError) as failed:
        _fill(
            ResponseBody(HttpResources(FakeTransport([]))), FakeResponse(pieces=[b"abc", b"defg"])
        )
    text = "it exceeds 6 bytes, set streamResponse to receive it"
    assert failed.value.message == f"failed to read http/request response body: {text}"


def test_a_body_that_breaks_off() -> None:
    response = FakeResponse(pieces=[b"abc"], failure=ExecServerError("text", "reset"))
    with pytest.raises(InternalError) as failed:
        _fill(ResponseBody(HttpResources(FakeTransport([]))), response)
    text = "failed to read http/request response body: error decoding response body"
    assert (failed.value.message, failed.value.data) == (text, {"causes": ["reset"]})
