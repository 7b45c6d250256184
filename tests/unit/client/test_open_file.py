"""Blocks of files, however a server spells them."""

from __future__ import annotations

import pytest
from msgspec import Raw

from exec_server.client.open_file import _decoded
from exec_server.errors import InternalError, MalformedMessage


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
    assert _decoded(Raw(text)) == block


@pytest.mark.parametrize("chunk", ["aGk", "a\\u0047k=", "!!!!"])
@pytest.mark.parametrize("spelling", ['{"chunk":"%s","eof":false}', '{"eof":false,"chunk":"%s"}'])
def test_what_is_no_base64_is_an_error(spelling: str, chunk: str) -> None:
    with pytest.raises(InternalError, match="no base64"):
        _decoded(Raw((spelling % chunk).encode()))


@pytest.mark.parametrize("text", [b"{}", b'{"chunk":"aGk="}', b"[]"])
def test_what_is_no_block_is_an_error(text: bytes) -> None:
    with pytest.raises(MalformedMessage, match="block of a file"):
        _decoded(Raw(text))
