"""The fast path of short requests and the ordinary path: same answers, same order, same limits.

The same traffic of a client goes through both. On the fast path each frame arrives in one piece; on
the ordinary one it arrives in two, its message is decoded without the decoder of plain requests,
and every request takes a place in its lane.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.connection_bench import ConnectionBench, run_scenario, settle, start
from tests.support.examples import examples
from tests.support.memory_transport import MemoryTransport
from tests.support.raw_links import frame_bytes
from tests.support.websocket_server import UPGRADE

from exec_server.errors import MalformedMessage
from exec_server.net import inbox
from exec_server.net.websocket.frames import FrameReader, Opcode
from exec_server.net.websocket.server import WebSocketSettings, WebSocketStream
from exec_server.protocol import jsonrpc
from exec_server.server import connection, lanes
from exec_server.server.connection import UNSENT_BYTES, UNSENT_HARD_BYTES, Connection

_NAMES = st.sampled_from(["a", "b", "rpc", "os", "p", "long" * 50])
_HANDSHAKE = (
    b'{"id":0,"method":"initialize","params":{"clientName":"x"}}',
    b'{"method":"initialized"}',
)
_METHODS = st.sampled_from(
    [
        *("quick", "quick", "quick", "control", "control", "encoded", "fail", "fs/close"),
        *("slow", "slowControl", "slowControl", "parked", "failLater", "streamed"),
        *("unknown", "initialize"),
    ]
)
_IDS = st.one_of(st.integers(0, 9), st.integers(0, 9), st.integers(), st.text(max_size=3))


@st.composite
def _request(draw: st.DrawFn) -> bytes:
    """A request as this or that client writes it, or almost one."""
    content: dict[str, object] = {"id": draw(_IDS), "method": draw(_METHODS)}
    content["params"] = draw(
        st.one_of(
            st.fixed_dictionaries({"processId": _NAMES}),
            st.fixed_dictionaries({"processId": _NAMES}),
            st.fixed_dictionaries({"processId": _NAMES, "pad": st.text(max_size=5)}),
            st.sampled_from([None, {}, [], ["a"], {"processId": 5}, {"x": [[{}]]}]),
        )
    )
    separators = draw(st.sampled_from([(",", ":"), (",", ":"), (", ", ": ")]))
    text = json.dumps(content, separators=separators, ensure_ascii=draw(st.booleans()))
    text = draw(
        st.sampled_from(
            [
                *([text] * 12),
                text[:-1],
                text + "x",
                text.replace('"params":', '"trace":null,"params":'),
                text.replace('"method":', '"method":"quick","method":'),
                text.replace('"processId":', '"processId":"a:b","process\\u0049d":'),
                text.replace('"processId":', '"x":{"y":1,"y":2},"processId":'),
                text.replace('"id":', '"jsonrpc":"2.0","id":'),
                text.replace('"id"', ' \\n"id" '),
                json.dumps(dict(reversed(content.items()))),
                json.dumps({key: content[key] for key in ("id", "method")}, separators=(",", ":")),
            ]
        )
    )
    return text.encode("utf-8", "replace")


_ACTIONS = st.lists(
    st.one_of(
        st.lists(_request(), min_size=1, max_size=4).map(lambda found: ("say", found)),
        st.just(("start", None)),
        st.just(("open", None)),
        st.just(("settle", None)),
        st.sampled_from([0, 1000, UNSENT_BYTES + 1, UNSENT_HARD_BYTES + 1]).map(
            lambda size: ("unsent", size)
        ),
    ),
    max_size=14,
)


class _Client:
    """A client of a connection whose frames arrive whole or in two pieces."""

    def __init__(self, bench: ConnectionBench, handshake: int, *, in_pieces: bool) -> None:
        self._bench = bench
        self._in_pieces = in_pieces
        self._frames: list[bytes] = []
        self._messages = FrameReader(from_client=False)
        self._answers: list[bytes] = []
        stream = WebSocketStream(
            WebSocketSettings(lambda link: Connection(bench.server, link)), set()
        )
        self.stream = stream
        self.transport = MemoryTransport(stream)
        self.transport.receive(UPGRADE)
        self.transport.take_written()
        self.say(*_HANDSHAKE[:handshake])
        self.transport.take_written()  # with the id of the session, which differs

    def say(self, *messages: bytes) -> None:
        self._frames += [frame_bytes(Opcode.TEXT, message) for message in messages]
        self.deliver()

    def deliver(self) -> None:
        """Send the frames that the server reads."""
        while self._frames and not self.transport.is_reading_paused:
            frame = self._frames.pop(0)
            if self._in_pieces:
                self.transport.receive(frame[:3])
                frame = frame[3:]
            self.transport.receive(frame)

    def set_unsent(self, size: int) -> None:
        """Make the kernel take all bytes, or leave some of them unsent."""
        was_full, is_full = self.transport.buffered > 524_288, size > 524_288
        self.transport.buffered = size
        if is_full and not was_full:
            self.stream.pause_writing()
        elif was_full and not is_full:
            self.stream.resume_writing()

    def state(self) -> object:
        self._messages.feed(self.transport.take_written())
        while (event := self._messages.next_event()) is not None:
            self._answers.append(event.payload)
        return (
            list(self._answers),
            list(self._bench.ran),
            self.transport.is_reading_paused,
            len(self._frames),
        )


def _trace(
    actions: list[tuple[str, Any]], *, is_fast: bool, slots: int = 1, handshake: int = 2
) -> list[object]:
    """The state of the client's side after each action."""
    states: list[object] = []

    async def scenario(bench: ConnectionBench) -> None:
        client = _Client(bench, handshake, in_pieces=not is_fast)
        for number, (action, value) in enumerate(actions):
            if action == "say":
                client.say(*value)
            elif action == "start":
                client.say(json.dumps(start(number, "p")).encode())
            elif action == "open":
                for gate in bench.gates.values():
                    if not gate.done():
                        gate.set_result(None)
            elif action == "unsent":
                client.set_unsent(value)
            if action != "say":
                await settle(9)
                client.deliver()
            states.append(client.state())
        client.transport.lose()
        await settle()

    with ExitStack() as patches:
        # A busy machine must not end a burst of messages.
        for module in (inbox, connection):
            patches.enter_context(mock.patch.object(module, "BURST_SECONDS", 60.0))
        if not is_fast:
            patches.enter_context(
                mock.patch.object(Connection, "_is_unhindered", return_value=False)
            )
            patches.enter_context(mock.patch.object(jsonrpc, "decode", jsonrpc._decode_any))
        run_scenario(scenario, slots=slots)
    return states


@settings(max_examples=examples(80), deadline=None)
@given(_ACTIONS, st.sampled_from([1, 1, 3]), st.sampled_from([2, 2, 2, 2, 1, 0]))
def test_the_fast_path_answers_as_the_ordinary_one(
    actions: list[tuple[str, Any]], slots: int, handshake: int
) -> None:
    with mock.patch.object(lanes, "QUEUED_REQUESTS", 3):  # reached more often
        fast, ordinary = (
            _trace(actions, is_fast=is_fast, slots=slots, handshake=handshake)
            for is_fast in (True, False)
        )
    assert fast == ordinary


def test_short_requests_take_the_fast_path() -> None:
    taken: list[str] = []
    answer = Connection._answer

    def count(self: Connection, request: jsonrpc.Request, *rest: Any) -> None:
        taken.append(request.method)
        answer(self, request, *rest)

    texts = [b'{"id":%d,"method":"quick","params":{"processId":"a"}}' % n for n in range(3)]
    with mock.patch.object(Connection, "_answer", count):
        fast = _trace([("say", texts)], is_fast=True)
        assert taken == ["quick"] * 3
        assert fast == _trace([("say", texts)], is_fast=False)
    assert taken == ["quick"] * 3


@settings(max_examples=examples(2000), deadline=None)
@given(st.one_of(_request(), st.binary(max_size=60)))
def test_plain_requests_are_decoded_as_all_others(data: bytes) -> None:
    def outcome(decode: Any) -> object:
        try:
            return decode(data)
        except MalformedMessage as error:
            return str(error)

    assert outcome(jsonrpc.decode) == outcome(jsonrpc._decode_any)
