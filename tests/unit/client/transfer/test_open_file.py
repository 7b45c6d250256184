"""Blocks of files, however a server spells them."""

from __future__ import annotations

import pytest
from msgspec import Raw

from exec_server.client.transfer.open_file import _decode_block
from exec_server.errors import MalformedAnswer, MalformedMessage


@pytest.mark.parametrize(
    ("text", "block"),
    [
        (b'{"chunk":"aGk=","eof":false}', (b"hi", False)),
        (b'{"chunk":"","eof":true}', (b"", True)),
        (b'{"chunk":"aGk=" , "eof":true}', (b"hi", True)),
        (b'{"eof":true,"chunk":"aGk="}', (b"hi", True)),
        (b'{"chunk":"aGk=","eof":false,"more":1}', (b"hi", False)),
    ],
)
def test_a_block_is_understood(text: bytes, block: tuple[bytes, bool]) -> None:
    assert _decode_block(Raw(text)) == block


@pytest.mark.parametrize("chunk", ["aGk", "a\\u0047k=", "!!!!"])
@pytest.mark.parametrize("spelling", ['{"chunk":"%s","eof":false}', '{"eof":false,"chunk":"%s"}'])
def test_what_is_no_base64_is_an_error(spelling: str, chunk: str) -> None:
    with pytest.raises(MalformedAnswer, match="not base64"):
        _decode_block(Raw((spelling % chunk).encode()))


@pytest.mark.parametrize("chunk", ["[]", "{}", "null", "12", "true", "[12]", '["aGk="]'])
def test_a_chunk_that_is_no_text_is_an_error(chunk: str) -> None:
    """Without its first and last character it could be taken for base64, or for nothing."""
    for spelling in ('{"chunk":%s,"eof":true}', '{"eof":true,"chunk":%s}'):
        with pytest.raises(MalformedAnswer, match="not base64"):
            _decode_block(Raw((spelling % chunk).encode()))


@pytest.mark.parametrize("text", [b"{}", b'{"chunk":"aGk="}', b"[]"])
def test_what_is_no_block_is_an_error(text: bytes) -> None:
    with pytest.raises(MalformedMessage, match="block of a file"):
        _decode_block(Raw(text))
