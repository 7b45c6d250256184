"""Websocket frames: fragments, control frames, limits, and what ends a connection.

The reference ends every offence by closing TCP without a word. Ours says why with a close
frame; that is the only difference, and `_ended` knows it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    Client,
    Disconnected,
    Server,
    WebSocketLink,
    frame_bytes,
    scaled,
    uri,
)

pytestmark = pytest.mark.quick

_MIB = 1024 * 1024
_STATUS = b'{"id":7,"method":"no/such"}'
_ANSWER = (
    b'{"error":{"code":-32601,"message":"exec-server stub does not implement `no/such` yet"}'
    b',"id":7}'
)


@pytest.fixture
def link(server: Server) -> Any:
    connected = server.link()
    yield connected
    connected.close()


def _ended(link: WebSocketLink, kind: str, code: int) -> None:
    """The connection ends, with this close code if it is ours."""
    with pytest.raises(Disconnected) as end:
        link.receive(scaled(10))
    assert end.value.close_code == (code if kind == "ours" else None)


def _answered(link: WebSocketLink) -> None:
    assert link.receive(scaled(10)) == _ANSWER


def test_fragments(link: WebSocketLink) -> None:
    link.send_fragments([_STATUS[:1], _STATUS[1:10], b"", _STATUS[10:]])
    _answered(link)


def test_one_byte_per_fragment(link: WebSocketLink) -> None:
    link.send_fragments([bytes([byte]) for byte in _STATUS], opcode=BINARY)
    _answered(link)


def test_control_frames_between_fragments(link: WebSocketLink) -> None:
    link.send_frame(TEXT, _STATUS[:5], fin=False)
    link.send_frame(PING, b"in between")
    link.send_frame(PONG, b"nobody asked")
    link.send_frame(CONTINUATION, _STATUS[5:])
    assert link.receive_frame(scaled(5)).payload == b"in between"
    _answered(link)


def test_utf_8_character_across_fragments(link: WebSocketLink) -> None:
    message = '{"id":7,"method":"no/such","x":"ü😀"}'.encode()
    cut = message.index("😀".encode()) + 2
    link.send_fragments([message[:cut], message[cut:]])
    _answered(link)


def test_frames_in_small_pieces(link: WebSocketLink) -> None:
    for byte in frame_bytes(TEXT, _STATUS):
        link.send_bytes(bytes([byte]))
    _answered(link)


def test_many_messages_in_one_piece(link: WebSocketLink) -> None:
    link.send_bytes(frame_bytes(TEXT, _STATUS) * 50)
    for _ in range(50):
        _answered(link)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(125))])
def test_ping_is_answered_with_its_payload(link: WebSocketLink, payload: bytes) -> None:
    link.send_frame(PING, payload)
    frame = link.receive_frame(scaled(5))
    assert (frame.opcode, frame.payload, frame.fin, frame.rsv) == (PONG, payload, True, 0)


def test_unsolicited_pong_is_ignored(link: WebSocketLink) -> None:
    link.send_frame(PONG, b"?")
    link.send_text(_STATUS)
    _answered(link)


def test_answers_are_unfragmented_text(client: Client, folder: Path) -> None:
    (folder / "f").write_bytes(bytes(2 * _MIB))
    client.call("fs/readFile", {"path": uri(folder / "f")})
    frame = client.websocket.frames[-1]
    assert (frame.opcode, frame.fin, frame.rsv) == (TEXT, True, 0)
    assert len(frame.payload) > 2 * _MIB


@pytest.mark.parametrize(
    ("opcode", "payload", "rules"),
    [
        pytest.param(TEXT, _STATUS, {"mask": False}, id="unmasked"),
        pytest.param(TEXT, _STATUS, {"rsv": 4}, id="rsv1"),
        pytest.param(TEXT, _STATUS, {"rsv": 1}, id="rsv3"),
        pytest.param(0x3, _STATUS, {}, id="unknown-data-opcode"),
        pytest.param(0xB, b"", {}, id="unknown-control-opcode"),
        pytest.param(PING, b"", {"fin": False}, id="fragmented-ping"),
        pytest.param(PING, bytes(126), {}, id="long-ping"),
        pytest.param(CONTINUATION, _STATUS, {}, id="continuation-of-nothing"),
    ],
)
def test_broken_frame_ends_the_connection(
    link: WebSocketLink, kind: str, opcode: int, payload: bytes, rules: dict[str, Any]
) -> None:
    link.send_frame(opcode, payload, **rules)
    _ended(link, kind, 1002)


def test_message_inside_a_message_ends_the_connection(link: WebSocketLink, kind: str) -> None:
    link.send_frame(TEXT, b"{", fin=False)
    link.send_frame(TEXT, _STATUS)
    _ended(link, kind, 1002)


@pytest.mark.parametrize("text", [b'"\xff"', b'"\xc3', b'"\xed\xa0\x80"'])
def test_invalid_utf_8_in_text_ends_the_connection(
    link: WebSocketLink, kind: str, text: bytes
) -> None:
    link.send_text(text)
    _ended(link, kind, 1007)


def test_close_frame_is_answered(link: WebSocketLink, kind: str) -> None:
    link.close_politely(1000)
    _ended(link, kind, 1000)


def test_empty_close_frame(link: WebSocketLink, kind: str) -> None:
    link.send_frame(CLOSE)
    with pytest.raises(Disconnected) as end:
        link.receive(scaled(5))
    assert end.value.close_code in ((1000, 1005) if kind == "ours" else (None,))


def _padded(size: int) -> bytes:
    return _STATUS + b" " * (size - len(_STATUS))


def test_frame_of_16_mib(link: WebSocketLink) -> None:
    link.send_text(_padded(16 * _MIB))
    _answered(link)


def test_frame_beyond_16_mib(link: WebSocketLink, kind: str) -> None:
    """By choice ours takes whole messages up to the message limit in one frame."""
    message = _padded(16 * _MIB + 1)
    if kind == "ours":
        link.send_text(message)
        _answered(link)
    else:
        # Only the head: the rest would be written into a closed connection.
        link.send_bytes(
            bytes([0x80 | TEXT, 0x80 | 127]) + struct.pack("!Q", len(message)) + b"1234"
        )
        _ended(link, kind, 1009)


def test_message_of_64_mib_in_fragments(link: WebSocketLink) -> None:
    message = _padded(64 * _MIB)
    link.send_fragments([message[at : at + 8 * _MIB] for at in range(0, len(message), 8 * _MIB)])
    assert link.receive(scaled(30)) == _ANSWER


def test_message_beyond_64_mib_ends_the_connection(link: WebSocketLink, kind: str) -> None:
    part = b" " * (16 * _MIB)
    try:
        link.send_frame(TEXT, part, fin=False)
        for _ in range(3):
            link.send_frame(CONTINUATION, part, fin=False)
        link.send_frame(CONTINUATION, b" ")
    except OSError:
        pass
    _ended(link, kind, 1009)


def test_announced_frame_beyond_64_mib_ends_the_connection(link: WebSocketLink, kind: str) -> None:
    link.send_bytes(bytes([0x80 | TEXT, 0x80 | 127]) + struct.pack("!Q", 64 * _MIB + 1) + b"1234")
    _ended(link, kind, 1009)


def test_large_answer_can_be_read_with_a_16_mib_frame_limit(
    server: Server, kind: str, folder: Path
) -> None:
    if kind == "reference":
        pytest.skip("by choice only ours fragments: the newest client cannot read the other")
    (folder / "f").write_bytes(bytes(14 * _MIB))
    with server.connect() as client:
        result = client.call("fs/readFile", {"path": uri(folder / "f")}, timeout=30)
        assert len(result["dataBase64"]) > 18 * _MIB
        assert all(len(frame.payload) <= 16 * _MIB for frame in client.websocket.frames)


def test_value_limit(client: Client) -> None:
    # The envelope, its id, its method and the list are four values.
    fits = ",".join("0" * (262144 - 4))
    client.link.send_text(f'{{"id":1,"method":"no/such","x":[{fits}]}}')
    assert client.receive()["error"]["code"] == -32601
    client.link.send_text(f'{{"id":1,"method":"no/such","x":[{fits},0]}}')
    error = client.receive()
    assert (error["id"], error["error"]["code"]) == (-1, -32600)
    assert "JSON-RPC message exceeds the limit of 262144 JSON values" in json.dumps(error)
