"""Binary messages: a JSON-RPC message together with bytes that need no base64. An extension.

A message is the size of its JSON text in four bytes (big-endian), the text, and the data. The size
is limited, so the first byte is 0, with which no JSON text begins.
"""

from __future__ import annotations

from typing import Final, Generic, NamedTuple, TypeVar

from exec_server.errors import MalformedMessage

# Of the JSON text: it is decoded on the event loop, so it must not take long.
TEXT_BYTES: Final = 32_768

_SIZE_BYTES: Final = 4

P = TypeVar("P")


class Attached(NamedTuple, Generic[P]):
    """The params of a request, or its result, and the data that came with it."""

    value: P
    data: bytes | memoryview


def is_binary(message: bytes) -> bool:
    """Whether a message is binary, if its stream carries such messages at all."""
    return message[:1] == b"\0"


def head(text: bytes) -> bytes:
    """The beginning of a message with this JSON text; its data follows."""
    assert len(text) <= TEXT_BYTES
    return len(text).to_bytes(_SIZE_BYTES, "big") + text


def split(message: bytes) -> tuple[bytes, memoryview]:
    """The JSON text and the data of a message; raises MalformedMessage."""
    end = _SIZE_BYTES + int.from_bytes(message[:_SIZE_BYTES], "big")
    if len(message) < _SIZE_BYTES or end > len(message) or end > _SIZE_BYTES + TEXT_BYTES:
        raise MalformedMessage("a binary message is shorter than its text, or its text is too long")
    return message[_SIZE_BYTES:end], memoryview(message)[end:]
