"""Base64 members: strict decoding with the error texts of the reference."""

from __future__ import annotations

import re
from typing import NoReturn, Self

import pybase64

from exec_server.errors import InvalidParams
from exec_server.protocol.json_text import describe

_ALPHABET = re.compile(rb"[A-Za-z0-9+/]*+")

# The last symbols whose unused bits are zero, by the padding after them.
_LAST_BEFORE_ONE = frozenset("AEIMQUYcgkosw048")
_LAST_BEFORE_TWO = frozenset("AQgw")


class Base64(bytes):
    """Bytes that are base64 on the wire: padded, without white space, unused bits zero."""

    @classmethod
    def from_wire(cls, value: object) -> Self:
        """Decode a JSON string; raises InvalidParams."""
        if not isinstance(value, str):
            raise InvalidParams(f"invalid type: {describe(value)}, expected a string")
        return cls(decode_base64(value))


def decode_base64(text: str) -> bytes:
    """The bytes of a text; raises InvalidParams."""
    try:
        data = pybase64.b64decode(text, validate=True)
    except ValueError:  # binascii.Error is one; characters beyond U+00FF raise another
        _fail_base64(text.encode())
    # The C decoder ignores the unused bits of the last symbol, one of the last four.
    if text.endswith("=") and text[-4:].rstrip("=")[-1] not in (
        _LAST_BEFORE_TWO if text.endswith("==") else _LAST_BEFORE_ONE
    ):
        _fail_base64(text.encode())
    return data


def _fail_base64(data: bytes) -> NoReturn:
    """Raise the error of invalid base64, checked in the order of the reference's decoder."""
    rest = len(data) % 4
    if rest == 1 and data[-1] != 0x3D and not _symbols(data[-1:]):
        _fail_symbol(data, len(data) - 1)
    tail = max(len(data) - (rest or 4), 0)
    if (bad := _symbols(data[:tail])) < tail:
        _fail_symbol(data, bad)
    symbols = _symbols(data[tail:])
    end = tail + symbols
    if data[end:].strip(b"=") or (symbols < 2 and end < len(data)):
        _fail_symbol(data, end)
    if symbols < 2:
        raise InvalidParams(f"Invalid input length: {end}")
    if rest:
        raise InvalidParams("Invalid padding")
    raise InvalidParams(f"Invalid last symbol {data[end - 1]}, offset {end - 1}.")


def _symbols(data: bytes) -> int:
    """The number of bytes at the start of `data` that are in the alphabet."""
    match = _ALPHABET.match(data)
    assert match is not None
    return match.end()


def _fail_symbol(data: bytes, offset: int) -> NoReturn:
    raise InvalidParams(f"Invalid symbol {data[offset]}, offset {offset}.")
