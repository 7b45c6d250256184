"""The registry: any bytes of a peer get a documented refusal, never a 5xx, never a traceback."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.client import scaled
from tests.support.examples import examples
from tests.support.memory_transport import MemoryTransport
from tests.support.raw_links import frame_bytes
from tests.support.registry import Node, RawClient, RawExecutor, start_node

from exec_server.errors import RelayError
from exec_server.hosting import envelope, http_messages, rules
from exec_server.hosting.relay_link import RelayLink
from exec_server.hosting.rules import Refusal, Rejection, Ticket
from exec_server.relay.frames import Frame, Kind, decode, encode, stream_prefix

KEYS = {"7": b"k" * 32}
TICKET = Ticket("0123456789abcdef", "env", "harness", "reg-1", 2000, "nonce", "tok-1")
SIGNED = rules.sign(TICKET, "7", KEYS["7"])
PATH, _, QUERY = SIGNED.partition("?")
_DATA = encode(Frame("stream", Kind.DATA, b"payload", 3))


def _changed(text: bytes, dice: random.Random) -> bytes:
    """A text with some bytes changed, removed, doubled or moved."""
    data = bytearray(text)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(4):
            case 0:
                data[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                del data[at : at + dice.randint(1, 20)]
            case 2:
                data[at:at] = data[: dice.randint(1, 40)]
            case _:
                data[at:at] = dice.choice([b"\r\n", b"\0", b"%00", b"&", b"=", b"{", b"\xff", b":"])
    return bytes(data)


@settings(max_examples=examples(300))
@given(st.text(max_size=300) | st.binary(max_size=200).map(lambda b: b.decode("latin-1")))
@example(QUERY)
def test_any_query_is_a_ticket_or_refused(query: str) -> None:
    status = 200
    try:
        assert rules.check(PATH, query, KEYS) == TICKET
    except Rejection as rejected:
        status = rejected.status
    assert status in (200, 401, 404)


def test_a_changed_query_is_never_a_ticket() -> None:
    dice = random.Random(5)
    for _ in range(examples(2000)):
        target = _changed(SIGNED.encode(), dice).decode("latin-1")
        path, _, query = target.partition("?")
        if target == SIGNED:
            continue
        with pytest.raises(Rejection):
            rules.check(path, query, KEYS)


@settings(max_examples=examples(300))
@given(st.binary(max_size=300))
@example(b'{"harness_public_key": {"suite": 1}}')
@example(b'{"executor_registration_id": "\\ud800"}')
def test_any_body_is_read_or_refused(body: bytes) -> None:
    for read in (
        http_messages.read_registration,
        http_messages.read_connection,
        http_messages.read_validation,
    ):
        status = 200
        try:
            read(body)
        except Refusal as refused:
            status = refused.status
        assert status in (200, 400, 403)


@settings(max_examples=examples(500))
@given(
    st.binary(max_size=100) | st.integers(0, 2**32).map(lambda n: _changed(_DATA, random.Random(n)))
)
@example(_DATA)
@example(_DATA + stream_prefix("other")[2:])
def test_a_frame_means_the_same_stream_to_node_and_executor(frame: bytes) -> None:
    found = envelope.read(frame)
    try:
        decoded = decode(frame)
    except RelayError:
        return  # the executor drops it
    if len(decoded.stream_id.encode()) <= envelope.STREAM_ID_BYTES:
        assert found == (stream_prefix(decoded.stream_id), decoded.kind)


class _Recorder:
    """The end of a link that notes all it is told."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def frame_received(self, frame: bytes) -> None:
        self.events.append(frame)

    def bytes_read(self, count: int, messages: int, frames: int) -> None:
        pass

    def text_received(self) -> None:
        self.events.append("text")

    def writing_changed(self, *, is_paused: bool) -> None:
        raise AssertionError

    def link_lost(self) -> None:
        self.events.append("lost")


def _fed(pieces: list[bytes]) -> tuple[list[object], bytes]:
    async def feed() -> tuple[list[object], bytes]:
        transport = MemoryTransport(asyncio.Protocol())
        recorder = _Recorder()
        link = RelayLink(transport, "tok")
        link.start(recorder, b"", 1 << 20)
        for piece in pieces:
            if not transport.is_closing():
                transport.receive(piece)
        transport.lose()
        return recorder.events, transport.written

    return asyncio.run(feed())


def test_pieces_of_any_size_give_the_same_frames_as_all_at_once() -> None:
    dice = random.Random(7)
    for _ in range(examples(150)):
        stream = b"".join(_some_frame(dice) for _ in range(dice.randint(1, 12)))
        if dice.random() < 0.3:
            stream = _changed(stream, dice)
        pieces, start = [], 0
        while start < len(stream):
            step = dice.choice([1, 2, 7, 100, 5000])
            pieces.append(stream[start : start + step])
            start += step
        assert _fed(pieces) == _fed([stream])


def _some_frame(dice: random.Random) -> bytes:
    payload = dice.randbytes(dice.choice([0, 1, 100, 125, 126, 300, 20_000, 70_000]))
    match dice.randrange(10):
        case 0:
            return frame_bytes(9, payload[:100])
        case 1:
            return frame_bytes(10, b"")
        case 2:
            half = len(payload) // 2
            parts = (frame_bytes(2, payload[:half], fin=False), frame_bytes(0, payload[half:]))
            return parts[0] + frame_bytes(9, b"between") * dice.randrange(2) + parts[1]
        case 3:
            return frame_bytes(1, b"text")
        case _:
            return frame_bytes(2, payload)


# ---- a node ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("data"), "--log-level", "info") as running:
        yield running
        text = running.server.stderr()
        assert "Traceback" not in text, text
        assert "defect" not in text, text


def _status(node: Node, request: bytes) -> int | None:
    """The status of the answer; None if the request is not complete."""
    with socket.create_connection(("127.0.0.1", node.port), scaled(10)) as link:
        link.sendall(request)
        link.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := link.recv(65_536):
            answer += piece
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else None


@pytest.mark.quick
def test_changed_requests_are_never_answered_with_an_error_of_the_service(
    node: Node, tmp_path: Path
) -> None:
    dice = random.Random(11)
    url = node.register(name="fuzz")["url"]
    target = "/rendezvous/" + url.partition("/rendezvous/")[2]
    token = node.site.executor_token
    content = json.dumps({"security_profile": "noise_hybrid_ik_v1", "executor_public_key": {}})
    requests = [
        f"POST /cloud/environment/fuzz/{verb} HTTP/1.1\r\nhost: x\r\n"
        f"authorization: Bearer {token}\r\ncontent-length: {len(content)}\r\n\r\n{content}"
        for verb in ("register", "connect", "validate")
    ]
    requests.append(
        f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    requests.append("GET /readyz HTTP/1.1\r\nhost: x\r\n\r\n")
    statuses = set()
    for _ in range(examples(300)):
        request = _changed(dice.choice(requests).encode(), dice)
        status = _status(node, request)
        assert status is None or status < 500 or status == 505, request
        statuses.add(status)
    assert {400, 401} <= statuses
    assert node.get("/readyz").status == 200


def test_changed_frames_leave_the_node_and_the_others_alone(node: Node) -> None:
    dice = random.Random(13)
    tokens = [node.site.token("connect:*") for _ in range(max(1, examples(60) // 20 + 1))]
    with RawExecutor(node, "frames") as executor:
        for number in range(examples(60)):
            with RawClient(node, "frames", tokens[number // 20 % len(tokens)]) as client:
                for _ in range(5):
                    data = frame_bytes(2, _changed(_DATA, dice))
                    data = _changed(data, dice) if dice.random() < 0.4 else data
                    try:
                        client.socket.send_bytes(data)
                    except OSError:
                        break
        with RawClient(node, "frames", node.site.client_token) as client:
            last = Frame("last", Kind.DATA, b"still here")
            client.send(last)
            while _next_stream(executor) != "last":
                pass


def _next_stream(executor: RawExecutor) -> str | None:
    """The stream of the next frame; None for one that an executor drops.

    A node does not look at the characters of a stream id, which random masks make arbitrary.
    """
    try:
        return executor.receive().stream_id
    except RelayError:
        return None
