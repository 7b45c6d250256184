"""Records: their order against a model, and messages however they were cut."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.examples import examples

from exec_server.errors import RelayError
from exec_server.relay.records import (
    MESSAGE_BYTES,
    ONE_RECORD_BYTES,
    RECORD_BYTES,
    WAITING_BYTES,
    WINDOW,
    MessageAssembler,
    RecordSplitter,
    ReorderWindow,
    length_prefix,
    split_records,
    with_length_prefix,
)

_FILE = json.loads((Path(__file__).parents[2] / "vectors" / "relay_frames.json").read_text())


def _refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(RelayError) as refused:
        call(*arguments)
    return str(refused.value)


# ---- order ----------------------------------------------------------------------------


class _Model:
    """What the window must do, said slowly: keep everything, look at all of it each time."""

    def __init__(self) -> None:
        self._seen: dict[int, bytes] = {}

    def push(self, seq: int, record: bytes) -> list[bytes]:
        expected = self._next()
        if seq in self._seen:
            return []
        if seq != expected:
            held = sum(len(other) for number, other in self._seen.items() if number > expected)
            if seq - expected > 64:
                raise RelayError("record exceeds reorder window")
            if held + len(record) > 1024 * 1024:
                raise RelayError("too many bytes wait for a missing record")
        self._seen[seq] = record
        return [self._seen[number] for number in range(expected, self._next())]

    def _next(self) -> int:
        number = 0
        while number in self._seen:
            number += 1
        return number


def _judge(window: ReorderWindow | _Model, arrivals: list[tuple[int, bytes]]) -> list[object]:
    outcome: list[object] = []
    for seq, record in arrivals:
        try:
            outcome.append(window.push(seq, record))
        except RelayError as error:
            return [*outcome, str(error)]
    return outcome


@pytest.mark.parametrize("case", _FILE["reorder"], ids=lambda case: case["name"])
def test_recorded_orders(case: dict[str, Any]) -> None:
    window = ReorderWindow()
    if "error" in case:
        (seq,) = case["arrival"]
        assert case["error"] in _refusal(window.push, seq, b"record")
        return
    # Copies differ here, so that it shows which one counts.
    arrivals = [(seq, b"%d, copy %d" % (seq, at)) for at, seq in enumerate(case["arrival"])]
    first: dict[int, bytes] = {}
    for seq, record in arrivals:
        first.setdefault(seq, record)
    expected = [[first[seq] for seq in released] for released in case["released"]]
    assert [window.push(seq, record) for seq, record in arrivals] == expected


_SIZES = st.sampled_from([1, 17, 100, 61_456, 61_456, 262_000])


@st.composite
def _arrivals(draw: st.DrawFn) -> list[tuple[int, bytes]]:
    """Numbers in some order, with copies and gaps; contents tell copies apart."""
    order = draw(
        st.one_of(
            st.permutations(range(draw(st.integers(1, 30)))),
            st.lists(st.integers(0, 75), max_size=60),
            st.lists(st.integers(0, 9), max_size=40).map(
                lambda jumps: [at + jump for at, jump in enumerate(jumps)]
            ),
        )
    )
    again = draw(st.lists(st.sampled_from(order), max_size=8)) if order else []
    numbers = [*order, *again, *order]
    return [(seq, b"%d" % at + bytes(draw(_SIZES))) for at, seq in enumerate(numbers)]


@settings(max_examples=examples(200))
@given(_arrivals())
@example([(number, bytes(61_456)) for number in range(1, 20)])
@example([(64, b"x"), (65, b"x")])
def test_window_does_what_the_model_does(arrivals: list[tuple[int, bytes]]) -> None:
    assert _judge(ReorderWindow(), arrivals) == _judge(_Model(), arrivals)


def test_window_is_64_records_wide() -> None:
    window = ReorderWindow()
    for seq in range(WINDOW, 0, -1):
        assert window.push(seq, b"%d" % seq) == []
    assert _refusal(window.push, WINDOW + 1, b"") == "record exceeds reorder window"
    assert window.push(0, b"0") == [b"%d" % seq for seq in range(WINDOW + 1)]
    assert window.push(2 * WINDOW + 1, b"far") == []


def test_waiting_bytes_are_counted_until_they_are_released() -> None:
    quarter = bytes(WAITING_BYTES // 4)
    window = ReorderWindow()
    for start in (0, 5, 10):  # as often as it likes
        for seq in range(start + 1, start + 5):
            assert window.push(seq, quarter) == []
        assert window.push(start, b"first") == [b"first", *[quarter] * 4]
    for seq in range(16, 20):
        window.push(seq, quarter)
    assert window.push(17, quarter) == []  # a copy takes nothing
    text = "too many bytes wait for a missing record"
    assert _refusal(window.push, 20, b"x") == text
    # What needs not wait has no limit here.
    assert window.push(15, bytes(WAITING_BYTES + 1))[1:] == [quarter] * 4


# ---- from messages to records ---------------------------------------------------------


@pytest.mark.parametrize("case", _FILE["record_framing"], ids=lambda case: case["name"])
def test_recorded_cuts(case: dict[str, Any]) -> None:
    message = case["message_utf8"].encode() if "message_utf8" in case else None
    data = with_length_prefix(bytes(case["message_len"]) if message is None else message)
    if message is not None:
        assert data.hex() == case["framed"]
    else:
        assert data[:4].hex() == case["length_prefix"]
    sizes = [len(piece) for piece in split_records(data)]
    if "records" in case:
        assert len(sizes) == case["records"]
        assert set(sizes[:-1]) == {RECORD_BYTES}
        assert sizes[-1] == case["last_record_plaintext_length"]
    else:
        assert sizes == case["record_plaintext_lengths"]
    assembler = MessageAssembler()
    found = [message for piece in split_records(data) for message in assembler.feed(bytes(piece))]
    assert len(found) == 1
    assert found[0] == memoryview(data)[4:]


@pytest.mark.parametrize("size", [0, MESSAGE_BYTES + 1])
def test_messages_that_have_no_prefix(size: int) -> None:
    assert _refusal(length_prefix, size) == f"message of {size} bytes"


def test_empty_message_is_not_framed() -> None:
    assert _refusal(with_length_prefix, b"") == "message of 0 bytes"


def test_one_record_holds_so_much_of_a_message() -> None:
    assert len(list(split_records(with_length_prefix(bytes(ONE_RECORD_BYTES))))) == 1
    assert len(list(split_records(with_length_prefix(bytes(ONE_RECORD_BYTES + 1))))) == 2


def test_pieces_join_to_what_was_cut() -> None:
    data = bytes(range(256)) * 700
    for whole in (data, bytearray(data)):
        assert b"".join(split_records(whole)) == data
    assert list(split_records(bytearray(b"short"))) == [b"short"]


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 150_000), max_size=6))
@example([RECORD_BYTES - 4])
@example([RECORD_BYTES])
def test_message_in_parts_is_cut_like_a_whole_one(sizes: list[int]) -> None:
    size = sum(sizes) + 1
    splitter = RecordSplitter(size, start=length_prefix(size))
    records = [record for part in (*sizes, 1) for record in splitter.feed(bytes(part))]
    rest = splitter.finish()
    assert rest is not None
    records += [rest] if rest else []
    assert records == [bytes(piece) for piece in split_records(with_length_prefix(bytes(size)))]


def test_message_in_parts_must_have_the_size_that_was_said() -> None:
    splitter = RecordSplitter(10, start=length_prefix(10))
    assert list(splitter.feed(b"123456789")) == []
    assert splitter.finish() is None
    assert list(splitter.feed(b"0")) == []
    assert splitter.finish() == b"\x00\x00\x00\x0a1234567890"
    assert list(splitter.feed(b"x")) == []
    assert splitter.finish() is None


def test_records_of_a_cutter_may_have_another_size() -> None:
    splitter = RecordSplitter(5, start=b"", record_bytes=5)
    assert list(splitter.feed(b"123")) == []
    assert list(splitter.feed(b"45")) == [b"12345"]
    assert splitter.finish() == b""


# ---- from records to messages ---------------------------------------------------------

_MESSAGES = [b"a", b"bc" * 300, b"{}", b"d" * 70_000]


def test_messages_and_prefixes_may_be_split_anywhere() -> None:
    stream = b"".join(with_length_prefix(message) for message in _MESSAGES[:3])
    assembler = MessageAssembler()
    found = [message for byte in stream for message in assembler.feed(bytes([byte]))]
    assert found == _MESSAGES[:3]


@given(st.lists(st.integers(0, 71_000), max_size=8))
def test_any_cut_gives_the_same_messages(places: list[int]) -> None:
    stream = b"".join(with_length_prefix(message) for message in _MESSAGES)
    edges = sorted({0, len(stream), RECORD_BYTES, *(place % len(stream) for place in places)})
    assembler, found = MessageAssembler(), []
    for start, end in itertools.pairwise(edges):
        found += assembler.feed(stream[start:end])
        assert assembler.incoming_size <= MESSAGE_BYTES
    assert found == _MESSAGES
    assert assembler.incoming_size == 0


def test_many_messages_in_one_record() -> None:
    count = RECORD_BYTES // 5
    messages = [b"%c" % (number % 256) for number in range(count)]
    assembler = MessageAssembler()
    assert assembler.feed(b"".join(map(with_length_prefix, messages))) == messages
    # The last one may go on in the next record.
    record = (
        with_length_prefix(b"one") + with_length_prefix(b"two") + with_length_prefix(b"three")[:-2]
    )
    assert assembler.feed(record) == [b"one", b"two"]
    assert assembler.feed(b"ee" + with_length_prefix(b"four")) == [b"three", b"four"]


def test_empty_records_are_harmless() -> None:
    assembler = MessageAssembler()
    assert assembler.feed(b"") == []
    assert assembler.feed(with_length_prefix(b"one")[:3]) == []
    assert assembler.feed(b"") == []
    assert assembler.feed(with_length_prefix(b"one")[3:]) == [b"one"]
    assert assembler.feed(b"") == []


def test_announced_is_the_size_of_the_message_under_way() -> None:
    assembler = MessageAssembler()
    assert assembler.feed(length_prefix(1000)[:3]) == []
    assert assembler.incoming_size == 0
    assert assembler.feed(length_prefix(1000)[3:]) == []
    assert assembler.incoming_size == 1000
    assert assembler.feed(bytes(999)) == []
    assert assembler.incoming_size == 1000
    assert assembler.feed(b"\x00" + with_length_prefix(b"whole") + length_prefix(7)) == [
        bytes(1000),
        b"whole",
    ]
    assert assembler.incoming_size == 7
    assert assembler.feed(b"7654321") == [b"7654321"]
    assert assembler.incoming_size == 0


def test_record_of_the_largest_size() -> None:
    assembler = MessageAssembler()
    message = bytes(ONE_RECORD_BYTES)
    assert assembler.feed(with_length_prefix(message)) == [message]
    assert _refusal(assembler.feed, with_length_prefix(message) + b"x") == "record is too long"
    assert _refusal(MessageAssembler().feed, bytes(61_441)) == "record is too long"


@pytest.mark.parametrize("case", _FILE["record_framing_invalid_prefixes"])
def test_recorded_prefixes_that_are_refused(case: dict[str, str]) -> None:
    """As soon as the prefix is there, without what it announces."""
    start = bytes.fromhex(case["length_prefix"])
    text = f"message of {int.from_bytes(start, 'big')} bytes"
    assert _refusal(MessageAssembler().feed, start) == text
    assert _refusal(MessageAssembler().feed, start + b"more") == text
    assembler = MessageAssembler()
    for byte in start[:3]:
        assert assembler.feed(bytes([byte])) == []
    assert _refusal(assembler.feed, start[3:]) == text
    assembler = MessageAssembler()
    assert assembler.feed(with_length_prefix(b"good")) == [b"good"]
    assert _refusal(assembler.feed, with_length_prefix(b"good") + start) == text
