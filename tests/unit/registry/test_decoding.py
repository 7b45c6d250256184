"""JSON of others."""

from __future__ import annotations

import msgspec
import pytest

from exec_server.registry.decoding import decode_json


class _Kind(msgspec.Struct):
    name: str


def test_valid_json() -> None:
    assert decode_json(b'{"name": "x", "more": [[]]}', _Kind) == _Kind("x")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"name": "\xff"}', "can't decode byte 0xff"),
        (b'{"name": ' + b"[" * 200_000, "Expected `str`"),
        (b'{"more": ' + b"[" * 200_000, "recursion limit exceeded"),
    ],
)
def test_everything_else_is_one_error(content: bytes, text: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=text):
        decode_json(content, _Kind)
