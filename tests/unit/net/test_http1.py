"""Heads of HTTP/1 without a socket; `test_handshake` and `test_upgrade` have their refusals."""

from __future__ import annotations

import pytest

from exec_server.net import http1


def test_fields_have_lower_names_and_stripped_values() -> None:
    assert http1.parse_fields(["A:  b \t", "c:"]) == [("a", "b"), ("c", "")]
    assert http1.parse_fields([]) == []


@pytest.mark.parametrize("line", ["", "no colon", " folded: x", "name : x", ": x", "a: b\nc: d"])
def test_other_lines_are_no_fields(line: str) -> None:
    assert http1.parse_fields(["a: b", line]) is None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("X", "é\t ", True), ("X Y", "a", False), ("", "a", False), ("X", "a\r\nb: c", False)],
)
def test_headers_that_can_be_sent(name: str, value: str, expected: bool) -> None:
    assert http1.can_send(name, value) is expected


@pytest.mark.parametrize(
    ("response", "status"),
    [
        (b"HTTP/1.1 200 OK\r\nx: y", 200),
        (b"HTTP/1.0 407", 407),
        (b"HTTP/1.1 200 ", 200),
        (b"HTTP/2 200 OK", None),
        (b"HTTP/1.1 20 OK", None),
        (b"HTTP/1.1 2000 OK", None),
        (b"HTTP/1.1 200 a\nb", None),
        (b"SSH-2.0", None),
    ],
)
def test_status_lines(response: bytes, status: int | None) -> None:
    assert http1.parse_status(response) == status


def test_list_items() -> None:
    assert http1.list_items("keep-alive, Upgrade") == ["keep-alive", "upgrade"]
    assert http1.list_items("") == [""]


def test_reasons_are_those_of_the_standard_library() -> None:
    from http import HTTPStatus

    for status in HTTPStatus:
        assert http1.reason(status) == status.phrase
    with pytest.raises(ValueError, match="299"):
        http1.reason(299)


def test_messages_are_encoded() -> None:
    assert http1.encode_response(404, [("A", "é")], b"body") == (
        b"HTTP/1.1 404 Not Found\r\nA: \xe9\r\n\r\nbody"
    )
    assert http1.connect_request("a:1", None) == b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n"
    assert http1.connect_request("a:1", "Basic x") == (
        b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\nProxy-Authorization: Basic x\r\n\r\n"
    )


def test_dates() -> None:
    assert http1.date(784_111_777) == "Sun, 06 Nov 1994 08:49:37 GMT"


def test_control_characters_except_a_tab_are_found() -> None:
    found = [code for code in range(256) if http1.has_control(bytes([code]))]
    assert found == [*range(9), *range(0x0A, 0x20), 0x7F]
