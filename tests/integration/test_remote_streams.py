"""Relay streams of an executor, frame by frame: what is accepted, dropped, and ends a stream."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.client import KINDS, TEXT, Client, Server
from tests.support.relay import (
    ENVIRONMENT,
    RESET_REASON,
    RelayLink,
    StreamReset,
    connect,
    relay_link,
    start_executor,
)

from exec_server.relay.frames import Frame, Kind, data_frame, decode, encode, stream_prefix

RECORD_BYTES = 61_440
READY = {"status": "ready"}


@pytest.fixture(scope="module", params=KINDS)
def executor(request: pytest.FixtureRequest) -> Iterator[tuple[ThreadedRelayService, Server]]:
    """One executor for all tests here: what happens to one stream must not matter to others."""
    with ThreadedRelayService() as service:
        with start_executor(service, kind=request.param) as running:
            yield service, running
        # Nothing of all this was reason enough to lose the link.
        assert len(service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 1


@pytest.fixture
def service(executor: tuple[ThreadedRelayService, Server]) -> ThreadedRelayService:
    return executor[0]


@pytest.fixture
def client(service: ThreadedRelayService) -> Iterator[Client]:
    with connect(service) as connected:
        yield connected


@pytest.fixture
def other(service: ThreadedRelayService) -> Iterator[Client]:
    """A stream that must not notice anything."""
    with connect(service) as connected:
        yield connected
        assert connected.call("environment/status") == READY


def _request(number: int, method: str = "environment/status") -> bytes:
    return json.dumps({"id": number, "method": method}).encode()


def _prefixed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message


# ---- what is not a frame ----------------------------------------------------------------


def _unacceptable(stream_id: str) -> dict[str, bytes]:
    """Messages that an executor drops without a word."""
    name = stream_id.encode()
    tail = b"\x12" + bytes([len(name)]) + name
    return {
        "nothing": b"",
        "garbage": b"\xff\xff\xff\xff garbage",
        "version 2": b"\x08\x02" + tail + b"\x42\x03\x0a\x01x",
        "no version": tail + b"\x42\x03\x0a\x01x",
        "blank stream id": b"\x08\x01\x12\x02  \x42\x03\x0a\x01x",
        "no stream id": b"\x08\x01\x42\x03\x0a\x01x",
        "no body": b"\x08\x01" + tail,
        "cut off": encode(Frame(stream_id, Kind.RESET, reason="x"))[:-1],
        "reset without a reason": encode(Frame(stream_id, Kind.RESET)),
        "handshake without a payload": encode(Frame(stream_id, Kind.HANDSHAKE)),
        "data without a payload": encode(Frame(stream_id, Kind.DATA)),
        "data in two segments": encode(Frame(stream_id, Kind.DATA, b"x", segment_count=2)),
        "data of no segment": encode(Frame(stream_id, Kind.DATA, b"x", segment_count=0)),
        "data of a later segment": encode(Frame(stream_id, Kind.DATA, b"x", segment_index=1)),
    }


@pytest.mark.parametrize("what", _unacceptable(""))
def test_an_unacceptable_frame_is_dropped(
    service: ThreadedRelayService, client: Client, other: Client, what: str
) -> None:
    link = relay_link(client)
    # By the relay's own hand: it would not forward all of these.
    service.executor(ENVIRONMENT).send(_unacceptable(link.stream_id)[what])
    assert client.call("environment/status") == READY
    assert other.call("environment/status") == READY


@pytest.mark.quick
def test_an_unacceptable_frame_of_an_unknown_stream_is_dropped(
    service: ThreadedRelayService, other: Client
) -> None:
    with RelayLink(service, handshake=False) as link:
        link.send_kind(Kind.RESUME)
        for frame in _unacceptable(link.stream_id).values():
            service.executor(ENVIRONMENT).send(frame)
        assert link.outcome(other) == []
        link.shake_hands()


def test_text_messages_are_dropped(service: ThreadedRelayService, client: Client) -> None:
    reset = encode(Frame(relay_link(client).stream_id, Kind.RESET, reason="x"))
    service.executor(ENVIRONMENT).send(reset, TEXT)
    service.executor(ENVIRONMENT).send(b"hello", TEXT)
    assert client.call("environment/status") == READY


@pytest.mark.parametrize("kind", [Kind.ACK, Kind.RESUME, Kind.HEARTBEAT])
def test_frames_that_ask_for_nothing_are_ignored(
    service: ThreadedRelayService, client: Client, other: Client, kind: Kind
) -> None:
    relay_link(client).send_kind(kind, next_seq=7 if kind is Kind.RESUME else 0)
    assert client.call("environment/status") == READY
    with RelayLink(service, handshake=False) as link:
        link.send_kind(kind)
        assert link.outcome(other) == []


def test_acknowledgements_traces_and_unknown_fields_are_skipped(client: Client) -> None:
    link = relay_link(client)
    sealed = decode(link.sealed(_request(50))[0])
    frame = sealed._replace(
        ack=3, ack_bits=5, traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01", tracestate="a=b"
    )
    unknown = b"\xa2\x06\x02hi\xa8\x06\x2a\xad\x06abcd"
    link.send_frame(encode(frame) + unknown)
    assert client.result(50) == READY


def test_a_dropped_segment_leaves_its_number_free(client: Client) -> None:
    link = relay_link(client)
    sealed = decode(link.sealed(_request(50))[0])
    link.send_frame(encode(sealed._replace(segment_count=2)))
    link.send_frame(encode(sealed._replace(payload=b"")))
    link.send_frame(encode(sealed))
    assert client.result(50) == READY


# ---- order ------------------------------------------------------------------------------


def test_records_are_put_into_order_and_copies_ignored(client: Client) -> None:
    link = relay_link(client)
    frames = [frame for number in range(50, 115) for frame in link.sealed(_request(number))]
    for frame in reversed(frames):  # the first to arrive is 64 ahead of the one that is next
        link.send_frame(frame)
        link.send_frame(frame)
    for number in range(50, 115):
        assert client.result(number) == READY


def test_of_two_records_with_one_number_the_first_counts(client: Client) -> None:
    link = relay_link(client)
    one, two = (decode(link.sealed(_request(number))[0]) for number in (50, 51))
    link.send_frame(two)
    link.send_frame(two._replace(payload=b"not what was sealed"))
    link.send_frame(one)
    link.send_frame(one._replace(payload=b"not what was sealed"))
    assert client.result(50) == READY
    assert client.result(51) == READY


def test_a_record_too_far_ahead_ends_the_stream(client: Client, other: Client) -> None:
    link = relay_link(client)
    frames = [frame for number in range(66) for frame in link.sealed(_request(number))]
    link.send_frame(frames[-1])
    assert link.wait_reset() == RESET_REASON


@pytest.mark.parametrize(("size", "fits"), [(1_048_576, True), (1_048_577, False)])
def test_what_may_wait_for_a_missing_record(
    client: Client, other: Client, size: int, fits: bool
) -> None:
    link = relay_link(client)
    sealed = decode(link.sealed(_request(50))[0])
    prefix = stream_prefix(link.stream_id)
    pieces = [65_536] * 15 + [size - 15 * 65_536]
    for number, piece in enumerate(pieces, sealed.seq + 1):
        link.send_frame(data_frame(prefix, number, bytes(piece)))
    if fits:
        # All of it waits; when the gap closes, the first of them turns out to be forged.
        assert link.outcome(other) == []
        link.send_frame(sealed)
    assert link.wait_reset() == RESET_REASON


# ---- content ----------------------------------------------------------------------------


def test_messages_may_be_cut_anywhere(client: Client) -> None:
    link = relay_link(client)
    text = b"".join(_prefixed(_request(number)) for number in range(50, 60))
    # Lengths split in the middle, empty records, many messages in one record.
    cuts = [0, 1, 3, 3, 4, 5, 60, 61, 200, len(text)]
    for start, end in itertools.pairwise(cuts):
        link.send_frame(link.seal(text[start:end]))
    for number in range(50, 60):
        assert client.result(number) == READY


def test_the_largest_record_is_accepted(client: Client) -> None:
    link = relay_link(client)
    message = _request(50).ljust(RECORD_BYTES - 4)
    link.send_frame(link.seal(_prefixed(message)))
    assert client.result(50) == READY


_CONTENTS = {
    "record too long": _prefixed(_request(50).ljust(RECORD_BYTES - 3)),
    "message of no bytes": bytes(4),
    "message above 64 MiB": (67_108_865).to_bytes(4, "big"),
    "message of 4 GiB": b"\xff\xff\xff\xff",
    "not JSON": _prefixed(b"hello"),
    "JSON array": _prefixed(b"[" + _request(50) + b"]"),
    "not UTF-8": _prefixed(b'{"id": 50, "method": "\xff"}'),
}


@pytest.mark.parametrize("what", _CONTENTS)
def test_wrong_content_ends_the_stream(client: Client, other: Client, what: str) -> None:
    link = relay_link(client)
    link.send_frame(link.seal(_CONTENTS[what]))
    assert link.wait_reset() == RESET_REASON
    # It is not known any more, whatever comes.
    link.send_frame(link.sealed(_request(51))[0])
    assert link.wait_reset() == RESET_REASON


@pytest.mark.parametrize("change", ["forged", "short", "of another stream"])
def test_what_cannot_be_decrypted_ends_the_stream(
    service: ThreadedRelayService, client: Client, other: Client, change: str
) -> None:
    link = relay_link(client)
    sealed = decode(link.sealed(_request(50))[0])
    if change == "forged":
        payload = bytes([sealed.payload[0] ^ 1]) + sealed.payload[1:]
    elif change == "short":
        payload = sealed.payload[:15]
    else:
        with connect(service) as third:
            payload = decode(relay_link(third).sealed(_request(50))[0]).payload
    link.send_frame(sealed._replace(payload=payload))
    assert link.wait_reset() == RESET_REASON


def test_an_answer_to_no_question_ends_the_stream(client: Client, other: Client) -> None:
    client.send({"id": 1, "result": {}})
    assert relay_link(client).wait_reset() == RESET_REASON


# ---- resets -----------------------------------------------------------------------------


def test_data_of_an_unknown_stream_is_answered_with_a_reset(
    service: ThreadedRelayService, other: Client
) -> None:
    with RelayLink(service, handshake=False) as link:
        for _ in range(2):
            link.send_kind(Kind.DATA, b"something")
            assert link.wait_reset() == RESET_REASON


def test_a_reset_is_not_answered_but_what_follows_is(client: Client, other: Client) -> None:
    link = relay_link(client)
    link.send_kind(Kind.RESET, reason="enough")
    assert link.outcome(other) == []
    link.send_frame(link.sealed(_request(50))[0])
    assert link.wait_reset() == RESET_REASON


def test_a_reset_of_an_unknown_stream_is_ignored(
    service: ThreadedRelayService, other: Client
) -> None:
    with RelayLink(service, handshake=False) as link:
        link.send_kind(Kind.RESET, reason="enough")
        assert link.outcome(other) == []
        link.shake_hands()


def test_a_stream_id_can_be_used_again_after_its_end(service: ThreadedRelayService) -> None:
    with connect(service, stream_id="again and again") as first:
        pass
    service.until(lambda: service.service.harness("again and again") is None)
    with connect(service, stream_id="again and again") as second:
        assert second.call("environment/status") == READY
        assert second.session_id != first.session_id


def test_a_client_that_leaves_takes_its_stream_along(service: ThreadedRelayService) -> None:
    client = connect(service)
    name, session = relay_link(client).stream_id, client.session_id
    client.close()
    service.until(lambda: service.service.harness(name) is None)
    # Its session is free at once, so the executor has been told.
    with connect(service, resume=session) as again:
        assert again.session_id == session


def test_a_handshake_needs_no_resume(service: ThreadedRelayService) -> None:
    with RelayLink(service, handshake=False) as link:
        link.finish(link.begin())
        link.send_text(_request(1, "initialize"))
        assert json.loads(link.receive(10))["id"] == 1


def test_a_handshake_on_an_active_stream_is_reset_and_the_stream_goes_on(
    service: ThreadedRelayService,
) -> None:
    with connect(service) as client:
        link = relay_link(client)
        link.begin()
        with pytest.raises(StreamReset):
            client.receive()
        assert client.call("environment/status") == READY
        link.send_kind(Kind.RESET, reason="done")


def test_streams_do_not_mix(service: ThreadedRelayService) -> None:
    clients = [connect(service) for _ in range(8)]
    names = [
        client.start(["sh", "-c", f"read x; echo {n}-$x"], pipeStdin=True, process_id="same")
        for n, client in enumerate(clients)
    ]
    for n, (client, name) in enumerate(zip(clients, names, strict=True)):
        assert client.write(name, f"{n}\n".encode(), "w") == "accepted"
    for n, (client, name) in enumerate(zip(clients, names, strict=True)):
        assert client.collect(name).stdout == f"{n}-{n}\n".encode()
        client.close()


def test_sessions_are_known_on_every_stream(service: ThreadedRelayService) -> None:
    with connect(service) as client, connect(service, initialize=False) as second:
        params = {"clientName": "test", "resumeSessionId": client.session_id}
        code, text = second.failure("initialize", params)
        assert (code, client.session_id in text) == (-32010, True)
