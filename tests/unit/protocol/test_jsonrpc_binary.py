"""Binary messages."""

from __future__ import annotations

import pytest

from exec_server.errors import MalformedMessage
from exec_server.protocol.jsonrpc import TEXT_BYTES, head, is_binary, split


@pytest.mark.parametrize(
    ("text", "data"), [(b"{}", b"\x00\xff"), (b"", b""), (b"x" * TEXT_BYTES, b"1")]
)
def test_a_message_is_text_and_data(text: bytes, data: bytes) -> None:
    message = head(text) + data
    assert is_binary(message)
    found, rest = split(message)
    assert (found, bytes(rest)) == (text, data)


@pytest.mark.parametrize(
    "message",
    [
        b"\0",
        b"\0\0\0",
        b"\0\0\0\x02{",
        b"\0\0\x80\x01" + b" " * (TEXT_BYTES + 1),
        b"{}  " + b" " * 99,
    ],
)
def test_other_messages_are_malformed(message: bytes) -> None:
    with pytest.raises(MalformedMessage):
        split(message)


def test_json_is_not_binary() -> None:
    assert not any(map(is_binary, (b"", b"{}", b" {}", b"[", b'"')))
