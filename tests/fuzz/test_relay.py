"""The relay: any bytes are a frame or none, as a second decoder says, and no frames do harm."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from exec_server.errors import CredentialRejected, RelayError
from exec_server.relay import multiplexer
from exec_server.relay.frames import MAX_DEPTH, Frame, Kind, decode, encode
from exec_server.relay.multiplexer import (
    RESET_REASON,
    EncryptedMultiplexer,
    PendingHandshake,
    Verdict,
)
from exec_server.relay.noise import Identity, Initiator, prologue
from exec_server.relay.records import Channel, RelayChannel

_FILE = json.loads((Path(__file__).parents[1] / "vectors" / "relay_frames.json").read_text())
_SCHEMA = _FILE["schema"]
_RECORDED = [
    bytes.fromhex(case["encoded"])
    for group in ("valid", "invalid", "from_reference_binary_0_166_0")
    for case in _FILE[group]
]

# ---- a second decoder, slow and by the book -------------------------------------------


class _Reader:
    """Takes protobuf fields from the start of some bytes; ValueError when there are none."""

    def __init__(self, data: bytes) -> None:
        self.rest = data

    def take(self, size: int) -> bytes:
        if size > len(self.rest):
            raise ValueError("cut off")
        taken, self.rest = self.rest[:size], self.rest[size:]
        return taken

    def varint(self) -> int:
        digits: list[int] = []
        while not digits or digits[-1] >= 128:
            digits.append(self.take(1)[0])
        number = sum((digit % 128) << 7 * place for place, digit in enumerate(digits))
        if len(digits) > 10 or number >= 2**64:
            raise ValueError("more than 64 bits")
        return number

    def fields(self, depth: int = 0, group: int = 0) -> Iterator[tuple[int, int, int | bytes]]:
        """Number, wire type and value of each field, up to the end of the bytes or the group."""
        while self.rest or group:
            number, wire = divmod(self.varint(), 8)
            if not 1 <= number <= 2**29 - 1:
                raise ValueError("number")
            if wire == 4:
                if number != group:
                    raise ValueError("end of another group")
                return
            value: int | bytes = 0
            if wire == 0:
                value = self.varint()
            elif wire == 2:
                value = self.take(self.varint())
            elif wire in (1, 5):
                self.take(8 if wire == 1 else 4)
            elif wire == 3 and depth < MAX_DEPTH:
                list(self.fields(depth + 1, number))
            else:
                raise ValueError("wire type")
            yield number, wire, value


def _message(data: bytes, type_name: str) -> dict[str, Any]:
    """The members of a message as the schema names them; bodies as lists of their encodings."""
    known = {number: (name, kind) for name, (number, kind) in _SCHEMA[type_name].items()}
    members: dict[str, Any] = {}
    for number, wire, value in _Reader(data).fields():
        if number not in known:
            continue
        name, kind = known[number]
        if wire != (0 if kind == "uint32" else 2):
            raise ValueError("type")
        if isinstance(value, int):
            members[name] = value % 2**32
        elif kind.endswith("string"):
            members[name] = value.decode()
        elif kind == "bytes":
            members[name] = value
        else:
            # Of the bodies the last one stays, joined to those of its kind right before it.
            _message(value, kind)
            before = members.pop("body", None)
            parts = before[1] if isinstance(before, tuple) and before[0] == number else b""
            members["body"] = (number, parts + value, kind)
    return members


def _second_opinion(data: bytes) -> Frame | None:
    try:
        members = _message(data, "RelayMessageFrame")
        number, content, kind = members.pop("body")
        body = _message(content, kind)
    except (ValueError, KeyError):
        return None
    if members.pop("version", 0) != 1 or not str(members.get("stream_id", "")).strip():
        return None
    needed = {5: "payload", 8: "reason", 10: "payload"}.get(number)
    if needed and not body.get(needed):
        return None
    if number == 5:
        body.setdefault("segment_count", 0)
    return Frame(kind=Kind(number), **members, **body)


def _opinion(data: bytes) -> Frame | None:
    try:
        return decode(data)
    except RelayError:
        return None


_VARINTS = st.one_of(
    st.integers(0, 300).map(lambda number: bytes([number % 128 | 128, number // 128])),
    st.binary(min_size=1, max_size=11),
)


@st.composite
def _field(draw: st.DrawFn, depth: int = 0) -> bytes:
    """A field of any number and type, known or not, with a value that often fits."""
    tag = draw(st.integers(1, 14)) << 3 | draw(st.sampled_from([0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 7]))
    if tag & 7 == 0:
        value = draw(_VARINTS)
    elif tag & 7 == 2:
        content = draw(st.binary(max_size=6))
        if depth < 2 and draw(st.booleans()):
            content = b"".join(draw(st.lists(_field(depth + 1), max_size=4)))
        value = bytes([len(content) % 128]) + content
    elif tag & 7 == 3:
        value = bytes([tag ^ 7]) if draw(st.booleans()) else b""
    else:
        value = draw(st.binary(max_size=8))
    return bytes([tag]) + value


@st.composite
def _changed(draw: st.DrawFn) -> bytes:
    """A recorded frame with some bytes changed, cut out or added."""
    data = bytearray(draw(st.sampled_from(_RECORDED))[:300])
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 2))] = draw(st.binary(max_size=3))
    return bytes(data)


_START = b"\x08\x01\x12\x01s"
_HOSTILE = st.one_of(
    st.binary(max_size=60),
    st.lists(_field(), max_size=6).map(b"".join),
    st.lists(_field(), max_size=6).map(lambda fields: _START + b"".join(fields)),
    _changed(),
)


@settings(max_examples=examples(800))
@given(_HOSTILE)
@example(_START + b"\x6b" * (MAX_DEPTH + 1) + b"\x6c" * (MAX_DEPTH + 1) + b"\x4a\x00")
@example(_START + b"\x6b" * MAX_DEPTH + b"\x6c" * MAX_DEPTH + b"\x4a\x00")
@example(_START + b"\x2a\x03\x22\x01x\x4a\x00\x2a\x02\x18\x01")
def test_two_decoders_agree_on_any_bytes(data: bytes) -> None:
    frame = _opinion(data)
    assert frame == _second_opinion(data)
    if frame is not None:
        assert decode(encode(frame)) == frame


def test_two_decoders_agree_on_recorded_frames() -> None:
    for data in _RECORDED:
        assert _opinion(data) == _second_opinion(data)


# ---- sequences of frames --------------------------------------------------------------

_EXECUTOR, _HARNESS = Identity.generate(), Identity.generate()
_IDS = ["a", "b", "c", "d"]
_STREAMS, _PENDING = 3, 2


class _Receiver:
    """Counts what arrives."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.endings = 0

    def messages_received(self, messages: list[bytes]) -> None:
        self.messages += messages
        if b"refuse" in messages:
            raise RelayError("refused")

    def stream_lost(self) -> None:
        self.endings += 1


def _enlarged(payload: bytes) -> bytes:
    """Some payloads stand for larger ones, which would be hard to read in a failure."""
    return payload * 13_000 if payload == b"large" else payload


# The registry answers by the id of the step; other ids are valid.
_VERDICTS = {"d": Verdict.INVALID, "c": Verdict.REJECTED}


class _Relay:
    """An executor's streams, and harnesses that behave as well or badly as they are told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pending: list[PendingHandshake] = []
        self.receivers: dict[str, list[_Receiver]] = defaultdict(list)
        self._initiators: dict[str, Initiator] = {}
        self._channels: dict[str, RelayChannel] = {}
        self.streams = EncryptedMultiplexer(_EXECUTOR, "env", "reg", self, lambda: self.now)

    # The owner's part.

    def send_frame(self, frame: bytes) -> None:
        sent = decode(frame)
        if sent.kind is Kind.HANDSHAKE:
            initiator = self._initiators[sent.stream_id]
            try:
                ciphers = initiator.read_second(sent.payload)
            except CredentialRejected:
                return
            self._channels[sent.stream_id] = RelayChannel(sent.stream_id, ciphers)
        else:
            assert (sent.kind, sent.reason) == (Kind.RESET, RESET_REASON)

    def validate(self, handshake: PendingHandshake) -> None:
        self.pending.append(handshake)

    def stream_revoked(self, stream_id: str) -> None:
        raise AssertionError("no harness may say so")

    def stream_opened(self, channel: Channel) -> _Receiver:
        receiver = _Receiver()
        self.receivers[channel.stream_id].append(receiver)
        return receiver

    # The harnesses' part.

    def handshake(self, name: str, payload: bytes) -> None:
        # One that fits to an attempt under way must not take the place of the first.
        initiator = Initiator(_HARNESS, _EXECUTOR.public, prologue("env", "reg", name))
        message = initiator.write_first(_enlarged(payload)[:5000])
        if not any(a.stream_id == name and not a.is_cancelled for a in self.pending):
            self._initiators[name] = initiator
        self.streams.frame_received(encode(Frame(name, Kind.HANDSHAKE, message)))

    def bad_handshake(self, name: str, payload: bytes) -> None:
        self.streams.frame_received(encode(Frame(name, Kind.HANDSHAKE, payload or b"x")))

    def data(self, name: str, payload: bytes) -> None:
        """What the peer of a stream sends: must arrive if the stream is there."""
        channel = self._channels.get(name)
        if channel is None or not payload:
            return
        for piece in channel.records(_enlarged(payload)):
            self.streams.frame_received(channel.seal(piece))

    def raw_record(self, name: str, payload: bytes) -> None:
        """A record with anything in it."""
        if name in self._channels:
            self.streams.frame_received(self._channels[name].seal(payload))

    def forged_data(self, name: str, payload: bytes) -> None:
        seq = payload[0] if payload else 0
        self.streams.frame_received(encode(Frame(name, Kind.DATA, payload or b"x", seq=seq)))

    def reset(self, name: str, payload: bytes) -> None:
        self.streams.frame_received(encode(Frame(name, Kind.RESET, reason="reason")))

    def garbage(self, name: str, payload: bytes) -> None:
        self.streams.frame_received(payload)

    def finish_handshake(self, name: str, payload: bytes) -> None:
        """An answer of the registry, perhaps for an attempt that was given up."""
        if self.pending:
            handshake = self.pending.pop(len(payload) % len(self.pending))
            self.streams.finish_handshake(handshake, _VERDICTS.get(name, Verdict.VALID))

    def open(self, name: str, payload: bytes) -> None:
        """A handshake and the answer to it, with nothing between them."""
        before = len(self.pending)
        self.handshake(name, b"")
        if len(self.pending) > before:
            self.streams.finish_handshake(self.pending.pop(), Verdict.VALID)

    def end(self, name: str, payload: bytes) -> None:
        """Our side ends the stream: nobody tells the receiver."""
        before = len(self.streams)
        self.streams.end(name)
        if len(self.streams) < before:
            self.receivers[name][-1].endings += 1

    def wait(self, name: str, payload: bytes) -> None:
        self.now += 4.0

    def check(self) -> None:
        """What must hold at any time."""
        ended = [receiver.endings for some in self.receivers.values() for receiver in some]
        assert set(ended) <= {0, 1}
        assert ended.count(0) == len(self.streams) <= _STREAMS
        waiting = [handshake.stream_id for handshake in self.pending if not handshake.is_cancelled]
        assert len(waiting) == len(set(waiting)) <= _PENDING
        for some in self.receivers.values():
            assert all(receiver.endings for receiver in some[:-1])


_STEPS = [
    _Relay.open,
    _Relay.open,
    _Relay.handshake,
    _Relay.handshake,
    _Relay.bad_handshake,
    _Relay.finish_handshake,
    _Relay.finish_handshake,
    _Relay.data,
    _Relay.data,
    _Relay.raw_record,
    _Relay.forged_data,
    _Relay.reset,
    _Relay.garbage,
    _Relay.end,
    _Relay.wait,
]
_PAYLOADS = st.one_of(
    st.binary(max_size=12), st.sampled_from([b"refuse", bytes(4), b"\xff", b"large"])
)


@pytest.fixture(scope="module", autouse=True)
def _small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiplexer, "MAX_STREAMS", _STREAMS)
        patch.setattr(multiplexer, "MAX_PENDING", _PENDING)
        yield


_SEQUENCES = st.lists(
    st.tuples(st.sampled_from(_STEPS), st.sampled_from(_IDS), _PAYLOADS), min_size=25, max_size=60
)


@settings(max_examples=examples(120))
@given(_SEQUENCES)
def test_any_frames_leave_the_streams_in_order(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    relay = _Relay()
    for step, name, payload in steps:
        step(relay, name, payload)
        relay.check()
    relay.streams.link_lost()
    for handshake in relay.pending:
        relay.streams.finish_handshake(handshake, Verdict.VALID)
    relay.check()
    assert len(relay.streams) == 0


@settings(max_examples=examples(50))
@given(st.lists(_HOSTILE, max_size=10))
def test_hostile_bytes_do_not_disturb_a_stream(hostile: list[bytes]) -> None:
    relay, name = _Relay(), "an id that nobody finds by chance"
    relay.handshake(name, b"")
    relay.finish_handshake(name, b"")
    for data in hostile:
        relay.garbage(name, data)
        relay.data(name, b"message")
    (receiver,) = relay.receivers[name]
    assert receiver.messages == [b"message"] * len(hostile)
