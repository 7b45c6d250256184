"""Heads of requests before they are parsed: where they end, and what is amended."""

from __future__ import annotations

import h11
import pytest

from exec_server.proxy.http_messages import HeadBuffer

_HEAD = b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n"


def _amended(data: bytes) -> bytes:
    return HeadBuffer(data).amended()


@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\n\n", b"\n\r\n"])
def test_a_head_ends_with_an_empty_line(end: bytes) -> None:
    buffer = HeadBuffer()
    for byte in b"GET / HTTP/1.1\r\nHost: a" + end[:-1]:
        buffer.receive(bytes([byte]))
        assert not buffer.is_complete
    buffer.receive(end[-1:] + b"rest")
    assert buffer.is_complete
    assert buffer.amended().endswith(end + b"rest")


def test_what_is_no_head_is_not_waited_for() -> None:
    assert HeadBuffer(b"\x16\x03\x01").is_complete
    assert HeadBuffer(b"\r").is_complete
    assert not HeadBuffer(b"GET").is_complete
    buffer = HeadBuffer(b"GET")
    buffer.receive(b"")
    assert (buffer.is_complete, buffer.is_closed, buffer.amended()) == (True, True, b"GET")


def test_a_whole_head_stays_as_it_is() -> None:
    for data in (_HEAD, _HEAD.replace(b"Host", b"hOsT"), _HEAD + b"\xffbody\n\n"):
        assert _amended(data) == data


def test_a_missing_host_is_empty() -> None:
    assert _amended(b"GET / HTTP/1.1\r\n\r\nrest") == b"GET / HTTP/1.1\r\nHost:\r\n\r\nrest"
    head = b"GET / HTTP/1.1\nX: host:\n\n"
    assert _amended(head) == b"GET / HTTP/1.1\nX: host:\nHost:\r\n\n"


def test_targets_of_utf_8_are_encoded() -> None:
    head = "GET /é?ü=%41&a=b HTTP/1.1\r\nHost: a\r\nX: é\r\n\r\n".encode()
    assert _amended(head) == head.replace("/é?ü".encode(), b"/%C3%A9?%C3%BC")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /\xe9 HTTP/1.1\r\nHost: a\r\n\r\n",  # no UTF-8
        "GÉT / HTTP/1.1\r\nHost: a\r\n\r\n".encode(),
        "GET / HTTP/1.é\r\nHost: a\r\n\r\n".encode(),
        "É\r\nHost: a\r\n\r\n".encode(),
        "GET /\x01é HTTP/1.1\r\nHost: a\r\n\r\n".encode(),
        "GET /é x HTTP/1.1\r\nHost: a\r\n\r\n".encode(),
        b"GET / HTTP/1.1\r\n other.test\r\n\r\n",  # continues no line
        b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    ],
)
def test_invalid_heads_remain_invalid(head: bytes) -> None:
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(_amended(head))
    with pytest.raises(h11.RemoteProtocolError):
        parser.next_event()
