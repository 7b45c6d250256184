"""One HTTP request for a client: redirects, bodies and their limits, with answers made up."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from exec_server.core import http
from exec_server.core.http import Body, Means, Request, answer_headers, checked, send
from exec_server.errors import ExecServerError, InternalError, InvalidParams
from exec_server.protocol.http import AnswerHeader, Header, RequestParams


@dataclass
class FakeAnswer:
    """An answer whose body is some pieces, then perhaps a failure."""

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
class FakeFetch:
    """Gives its answers in order, and remembers what was asked."""

    answers: list[FakeAnswer | ExecServerError]
    asked: list[tuple[str, str, dict[str, str], bytes, bool]] = field(default_factory=list)

    async def open(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        *,
        repeatable: bool,
    ) -> FakeAnswer:
        self.asked.append((method, url, dict(headers), body, repeatable))
        answer = self.answers.pop(0)
        if isinstance(answer, ExecServerError):
            raise answer
        return answer


def _request(**members: object) -> Request:
    params = RequestParams(method="GET", url="http://h/a#f", request_id="r")
    changed = {name: getattr(params, name) for name in params.__struct_fields__} | members
    return checked(RequestParams(**changed), {"KEY": "secret", "ODD": "\udcff"})


def _moved(location: str, status: int = 302) -> FakeAnswer:
    return FakeAnswer(status, [("location", location)])


def test_what_is_sent() -> None:
    fetch = FakeFetch([FakeAnswer()])
    request = _request(headers=[Header("X-Key", " Bearer ", "KEY"), Header("X-B", "\tb ")])
    asyncio.run(send(fetch, request, None))
    headers = {"x-key": "Bearer secret", "x-b": "b", "accept": "*/*"}
    assert fetch.asked == [("GET", "http://h/a", headers, b"", True)]


@pytest.mark.parametrize(("method", "repeatable"), [("PUT", True), ("POST", False), ("X", False)])
def test_what_may_be_sent_twice(method: str, repeatable: bool) -> None:
    fetch = FakeFetch([FakeAnswer()])
    asyncio.run(send(fetch, _request(method=method), None))
    assert fetch.asked[0][-1] is repeatable


def test_variable_that_is_no_text() -> None:
    with pytest.raises(InvalidParams) as failed:
        _request(headers=[Header("A", "", "ODD")])
    assert (
        failed.value.message == "http/request header A requires executor environment variable ODD"
    )


def test_secrets_are_not_shown() -> None:
    request = _request(headers=[Header("X-Key", "", "KEY")], url="http://us:word@h/")
    fetch = FakeFetch([ExecServerError("text", "outer", "inner")])
    with pytest.raises(InternalError) as failed:
        asyncio.run(send(fetch, request, None))
    text = "http/request failed: error sending request for url (http://h/)"
    assert failed.value.message == text
    assert failed.value.data == {"causes": ["outer", "inner"]}
    with pytest.raises(InvalidParams) as refused:
        checked(
            RequestParams(
                method="GET", url="http://h", request_id="r", headers=[Header("A", "\n", "KEY")]
            ),
            {"KEY": "secret"},
        )
    assert "secret" not in refused.value.message


def test_redirects_are_closed() -> None:
    moved, last = _moved("/b"), FakeAnswer()
    fetch = FakeFetch([moved, last])
    assert asyncio.run(send(fetch, _request(), None)) is last
    assert (moved.closed, last.closed) == (True, False)
    assert fetch.asked[1][:3] == ("GET", "http://h/b", {"accept": "*/*", "referer": "http://h/a"})


def test_answer_that_is_refused_is_closed() -> None:
    moved = _moved("ftp://h/")
    with pytest.raises(InternalError):
        asyncio.run(send(FakeFetch([moved]), _request(), None))
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
    fetch = FakeFetch([_moved(location), FakeAnswer()])
    asyncio.run(send(fetch, _request(url=source), None))
    assert fetch.asked[1][2].get("referer") == referer


def test_credentials_of_a_url_stay_with_its_server() -> None:
    fetch = FakeFetch([_moved("/b"), _moved("http://k/"), FakeAnswer()])
    asyncio.run(send(fetch, _request(url="http://us:pa@h/"), None))
    sent = [headers.get("authorization") for _, _, headers, _, _ in fetch.asked]
    assert sent == ["Basic dXM6cGE=", "Basic dXM6cGE=", None]


def test_redirects_are_limited() -> None:
    answers = [_moved("/b") for _ in range(http.MAX_REDIRECTS + 1)]
    with pytest.raises(InternalError, match="too many redirects"):
        asyncio.run(send(FakeFetch([*answers, FakeAnswer()]), _request(), None))
    assert all(answer.closed for answer in answers)


def test_headers_of_an_answer() -> None:
    lines = [("a", "1"), ("b", "\xff"), ("c", "\t ~"), ("a", "2"), ("d", "\x7f")]
    expected = [AnswerHeader("a", "1"), AnswerHeader("a", "2"), AnswerHeader("c", "\t ~")]
    assert answer_headers(FakeAnswer(headers=lines)) == expected


# ---- bodies ---------------------------------------------------------------------------


def _fill(body: Body, answer: FakeAnswer) -> None:
    asyncio.run(body.fill(answer, None))


def test_room_is_given_back() -> None:
    means = Means(FakeFetch([]), room=10)
    body = Body(means)
    _fill(body, FakeAnswer(pieces=[b"abc", b"def"]))
    assert (bytes(body.data), means.room) == (b"abcdef", 4)
    other = Body(means)
    with pytest.raises(InternalError, match="too much is being read for others"):
        _fill(other, FakeAnswer(pieces=[b"1234", b"5"]))
    assert means.room == 0
    del body, other
    gc.collect()  # the failure's traceback held them too
    assert means.room == 10


def test_a_body_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_BYTES", 6)
    _fill(Body(Means(FakeFetch([]))), FakeAnswer(pieces=[b"abc", b"def"]))
    with pytest.raises(InternalError) as failed:
        _fill(Body(Means(FakeFetch([]))), FakeAnswer(pieces=[b"abc", b"defg"]))
    text = "it exceeds 6 bytes, ask for it with streamResponse"
    assert failed.value.message == f"failed to read http/request response body: {text}"


def test_a_body_that_breaks_off() -> None:
    answer = FakeAnswer(pieces=[b"abc"], failure=ExecServerError("text", "reset"))
    with pytest.raises(InternalError) as failed:
        _fill(Body(Means(FakeFetch([]))), answer)
    text = "failed to read http/request response body: error decoding response body"
    assert (failed.value.message, failed.value.data) == (text, {"causes": ["reset"]})
