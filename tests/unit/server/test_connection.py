"""Connection: handshake, responses, tasks and end, over an in-memory stream."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from tests.support.connection_bench import (
    ConnectionBench,
    MemoryStream,
    named,
    request,
    run_scenario,
    settle,
)

from exec_server.filesystem.handles import HandleTable
from exec_server.filesystem.watch import MissingWatch
from exec_server.protocol import jsonrpc, process, session
from exec_server.protocol.decoding import Call, Params, Result
from exec_server.protocol.network import POLICY_REQUEST, Destination, PolicyParams
from exec_server.server import connection
from exec_server.server.connection import Connection
from exec_server.server.context import ConnectionContext, WithData
from exec_server.server.methods import Method
from exec_server.server.port_table import PortTable

# ---- the handshake -------------------------------------------------------------------


def test_initialize_and_initialized() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        stream = bench.stream
        stream.say(named(1, "quick", "a"))
        stream.say(request("i", "initialize", clientName="x"))
        stream.say(named(2, "quick", "b"))
        stream.say({"method": "initialized"}, {"method": "initialized", "params": [1]})
        stream.say(named(3, "quick", "c"))
        before, initialized, between, after = stream.sent
        assert before["error"] == {
            "code": -32600,
            "message": "client must call initialize before using fake methods",
        }
        assert initialized["id"] == "i"
        assert initialized["result"]["environmentInfo"]["shell"] == {
            "name": "sh",
            "path": "/bin/sh",
        }
        assert between["error"]["message"] == (
            "client must send initialized before using fake methods"
        )
        assert after == {"id": 3, "result": {"name": "c"}}
        assert bench.ran == ["c"]

    run_scenario(scenario)


def test_params_are_judged_before_the_handshake() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.stream.say(request(1, "quick", processId=5), request(2, "unit", x=1))
        bench.stream.say({"id": 3, "method": "unit", "params": []})
        bench.stream.say({"id": 4, "method": "unit", "params": None})
        codes = [message["error"]["code"] for message in bench.stream.sent]
        assert codes == [-32602, -32602, -32602, -32600]
        assert "unit words methods" in bench.stream.sent[3]["error"]["message"]

    run_scenario(scenario)


def test_initialize_succeeds_once() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        unknown = request(1, "initialize", clientName="x", resumeSessionId="no")
        bench.stream.say(
            unknown, request(2, "initialize"), request(3, "initialize", clientName="x")
        )
        bench.stream.say(request(4, "initialize", clientName="x"))
        texts = [message.get("error", {}).get("message") for message in bench.stream.sent]
        assert texts == [
            "unknown session id no",
            "missing field `clientName`",
            None,
            "initialize may only be sent once per connection",
        ]

    run_scenario(scenario)


def test_the_retention_is_granted_to_those_who_ask() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        params = {"clientName": "x", "sessionRetentionSeconds": 5000}
        bench.stream.say(request(1, "initialize", **params))
        result = bench.stream.sent[0]["result"]
        assert result["sessionRetentionSeconds"] == 2000
        other = MemoryStream()
        bench.connect(other)
        other.say(request(1, "initialize", clientName="x"))
        assert "sessionRetentionSeconds" not in other.sent[0]["result"]

    run_scenario(scenario)


def test_no_request_follows_the_end_of_the_session() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        [own] = bench.sessions._sessions.values()
        await bench.sessions.close(own)
        assert bench.tables[0].calls == ["end"]
        bench.stream.say(named(2, "quick", "a"))
        assert bench.stream.sent[-1]["error"]["message"] == (
            "client must open another connection before using fake methods"
        )
        bench.connection.connection_lost()
        assert bench.ran == []

    run_scenario(scenario)


def test_early_initialized_ends_the_connection() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.stream.say({"method": "initialized"})
        assert bench.stream.closed == (1008, "initialized before initialize")

    run_scenario(scenario)


@pytest.mark.parametrize(
    "message", [{"id": 1, "result": None}, {"id": "x", "error": {"code": 1, "message": "m"}}]
)
def test_stray_response_ends_the_connection(message: object) -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(message)
        assert bench.stream.closed == (1008, "response to a request that was never made")

    run_scenario(scenario)


def test_responses_to_questions_of_the_server() -> None:
    question = PolicyParams("p", Destination("http", "a.test", 80))

    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        first = bench.connection.ask(POLICY_REQUEST, question)
        second = bench.connection.ask(POLICY_REQUEST, question)
        params = {"processId": "p", "request": {"protocol": "http", "host": "a.test", "port": 80}}
        assert bench.stream.sent[-2:] == [
            {"id": number, "method": "network/policyRequest", "params": params} for number in (1, 2)
        ]
        bench.stream.say({"id": 2, "result": {"x": 1}}, {"id": 2, "result": 5})
        assert await second == {"x": 1}
        bench.stream.say({"id": 1, "error": {"code": 1, "message": "m"}})
        assert await first is None
        lost = bench.connection.ask(POLICY_REQUEST, question)
        bench.connection.connection_lost()
        assert await lost is None

    run_scenario(scenario)


# ---- messages that are not requests --------------------------------------------------


def test_malformed_messages_are_answered_and_survived() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.stream.say(b"garbage", [], {"method": "no/such"})
        bench.ready()
        bench.stream.say(b"garbage", [], {"method": "no/such", "params": 1})
        prefix = "failed to parse message from memory: "
        assert bench.stream.sent == [
            {"error": {"code": -32600, "message": text}, "id": -1}
            for text in (
                prefix + "JSON is malformed: invalid character (byte 0)",
                prefix + "expected a JSON-RPC object",
                "unexpected notification method: no/such",
            )
        ]
        assert bench.stream.closed is None

    run_scenario(scenario)


def test_unknown_methods() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.stream.say(request("a", "no/such"), request(5, "initialized"))
        assert [message["id"] for message in bench.stream.sent] == ["a", 5]
        assert bench.stream.sent[0]["error"] == {
            "code": -32601,
            "message": "exec-server stub does not implement `no/such` yet",
        }

    run_scenario(scenario)


# ---- responses -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fail", "failLater"])
def test_exceptions_become_answers(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(*(named(n, method, n) for n in ("rpc", "os", "bug")))
        await settle(20)
        errors = {message["id"]: message["error"] for message in bench.stream.sent}
        assert errors == {
            "rpc": {"code": -32004, "message": "it is not there"},
            "os": {"code": -32004, "message": "anything (os error 2)"},
            "bug": {"code": -32603, "message": "internal error"},
        }
        bench.stream.say(named(1, "quick", "still alive"))
        assert bench.ran == ["still alive"]

    with caplog.at_level(logging.ERROR):
        run_scenario(scenario)
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_results_that_are_text_already() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(named(1, "encoded", "x"), named(2, "streamed", "x"))
        await settle()
        assert bench.stream.sent == [{"id": 1, "result": {"x": 1}}, {"id": 2, "result": {"big": 1}}]
        assert len(bench.stream.parts) == 4

    run_scenario(scenario)


def test_half_an_answer_ends_the_connection() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(named(1, "streamed", "broken"))
        await settle()
        assert bench.stream.closed == (1011, "a file could not be read to its end")

    run_scenario(scenario)


# ---- tasks that outlive their request ------------------------------------------------


def _context(bench: ConnectionBench) -> ConnectionContext:
    assert bench.connection._context is not None
    return bench.connection._context


def test_what_was_started_waits_for_the_client_and_ends_with_the_link() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        seen: list[str] = []

        async def go_on() -> None:
            try:
                await _context(bench).drain()
                seen.append("writable")
                await asyncio.get_running_loop().create_future()
            finally:
                seen.append("ended")

        bench.connection.pause_writing()
        bench.ready()
        assert _context(bench).start_task(go_on())
        await settle()
        assert seen == []
        bench.connection.resume_writing()
        await settle()
        assert seen == ["writable"]
        bench.connection.connection_lost()
        assert not _context(bench).start_task(go_on())
        await settle()
        assert seen == ["writable", "ended"]

    run_scenario(scenario)


def test_what_was_started_and_fails_ends_only_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise ValueError("a bug")

    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        assert _context(bench).start_task(fail())
        await settle()
        assert bench.stream.closed == (1011, "internal error")

    run_scenario(scenario)
    assert "a bug" in caplog.text


# ---- end of the connection -----------------------------------------------------------


def test_end_of_input_ends_an_idle_connection() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.connection.eof_received()
        assert bench.tables[0].calls == ["terminate"]
        assert bench.stream.closed == (1000, "end of input")

    run_scenario(scenario)


@pytest.mark.parametrize("method", ["slow", "parked"])
def test_requests_are_answered_after_the_end_of_input(method: str) -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(named(1, method, "a"))
        bench.connection.eof_received()
        await settle()
        assert bench.stream.closed is None
        bench.open("a")
        await settle()
        assert bench.stream.answered == [1]
        assert bench.stream.closed == (1000, "end of input")

    run_scenario(scenario)


def test_requests_that_yield_their_slot_do_not_outlive_the_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "EOF_GRACE_SECONDS", 0.0)

    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(named(1, "parked", "a"), named(2, "slow", "b"))
        bench.connection.eof_received()
        await settle(20)
        assert bench.stream.closed is None
        bench.open("b")
        await settle(20)
        assert bench.stream.answered == [2]
        assert bench.stream.closed == (1000, "end of input")

    run_scenario(scenario)


def test_lost_link_closes_what_the_client_opened() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        watch = mock.Mock()
        context = _context(bench)
        assert context.handles is not None  # made at their first use
        assert context.watch is not None
        assert context.ports is not None
        context.change_watches[1] = watch
        with (
            mock.patch.object(HandleTable, "close_all") as close_handles,
            mock.patch.object(MissingWatch, "close") as close_missing,
            mock.patch.object(PortTable, "close") as close_ports,
        ):
            bench.connection.connection_lost()
            await settle()
        for close in (close_handles, close_missing, close_ports, watch.close):
            close.assert_called_once_with()
        assert not _context(bench).change_watches

    run_scenario(scenario)


def test_lost_link_abandons_requests_and_detaches() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        bench.stream.say(named(1, "slow", "a"), named(2, "quick", "b"), named(3, "parked", "c"))
        bench.stream.say(named(4, "slowControl", "d"), named(5, "control", "e"))
        await settle()
        bench.connection.connection_lost()
        await settle()
        assert all(gate.cancelled() for gate in bench.gates.values())
        assert bench.stream.sent == []
        assert bench.ran == ["a", "d"]
        assert bench.tables[0].calls == ["resume"]

    run_scenario(scenario)


def test_session_moves_to_another_connection() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.stream.say(request(0, "initialize", clientName="x"), {"method": "initialized"})
        session_id = bench.stream.sent[0]["result"]["sessionId"]
        second = MemoryStream()
        bench.connect(second)
        resume = request(1, "initialize", clientName="y", resumeSessionId=session_id)
        second.say(resume)
        assert second.sent[0]["error"]["code"] == -32010
        assert bench.stream.probed == 1
        bench.connection.connection_lost()
        await settle()
        second.say(resume)
        assert second.sent[1]["result"]["sessionId"] == session_id
        notice = session_notice(bench, session_id)
        assert second.sent[2] == notice
        assert notice not in bench.stream.sent

    run_scenario(scenario)


def session_notice(bench: ConnectionBench, session_id: str) -> dict[str, Any]:
    """Has the session say something; returns what should be on the wire."""
    found = bench.sessions._sessions[session.SessionId(session_id)]
    found.notify(process.CLOSED, process.ClosedParams(process.ProcessId("p"), 3))
    return {"method": "process/closed", "params": {"processId": "p", "seq": 3}}


class IdentifiedStream(MemoryStream):
    """A RelayedStream."""

    stream_id = "stream 7"


def test_a_session_knows_the_relayed_stream_of_its_client() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        stream = IdentifiedStream()
        bench.connect(stream)
        hello = request(0, "initialize", clientName="x")
        for each in (bench.stream, stream):
            each.say(hello)
        ids = [
            bench.sessions._sessions[each.sent[0]["result"]["sessionId"]].stream_id
            for each in (bench.stream, stream)
        ]
        assert ids == [None, "stream 7"]

    run_scenario(scenario)


def test_notifications_are_compact() -> None:
    text = jsonrpc.encode_notification(
        process.CLOSED, process.ClosedParams(process.ProcessId("ü"), 3)
    )
    assert text == '{"method":"process/closed","params":{"processId":"ü","seq":3}}'.encode()


class MixedStream(MemoryStream):
    """A BinaryStream."""

    def __init__(self) -> None:
        super().__init__()
        self.binary: list[bytes] = []

    def send_binary(self, head: bytes, data: bytes) -> None:
        self.binary.append(head + data)


class StoreParams(Params, frozen=True):
    wire_name = "Store"


class StoreResult(Result, frozen=True):
    pass


def _data_methods() -> dict[str, Method]:
    """`store` takes data, and `load` sends all of it back."""
    stored: list[bytes] = []

    async def store(context: ConnectionContext, params: Any) -> StoreResult:
        stored.append(bytes(params.data))
        return StoreResult()

    async def load(context: ConnectionContext, params: StoreParams) -> WithData:
        return WithData(StoreResult(), b"".join(stored))

    return {
        "store": Method(Call("store", StoreParams, StoreResult), store, "fake", takes_data=True),
        "load": Method(Call("load", StoreParams, StoreResult), cast(Any, load), "fake"),
    }


def _with_data(message: object, data: bytes) -> bytes:
    return jsonrpc.head(json.dumps(message, separators=(",", ":")).encode()) + data


@pytest.mark.parametrize("size", [3, connection.INLINE_DECODE_BYTES + 1])
def test_binary_messages(size: int) -> None:
    async def scenario(bench: ConnectionBench) -> None:
        stream = MixedStream()
        bench.connect(stream)
        stream.say(request(0, "initialize", clientName="x"), {"method": "initialized"})
        assert stream.sent[0]["result"]["environmentInfo"]["capabilities"]["fsBinary"] is True
        with mock.patch.object(connection, "METHODS", _data_methods()):
            stream.say(_with_data(request(1, "store"), b"x" * size))
            await settle()
            stream.say(request(2, "load"))
            await settle()
            stream.say(_with_data(request(3, "load"), b""), _with_data(request(4, "no/such"), b""))
        assert stream.sent[1] == {"id": 1, "result": {}}
        assert stream.binary == [_with_data({"id": 2, "result": {}}, b"x" * size)]
        refusal = "failed to parse message from memory: no request of a method that takes data"
        assert [message["error"]["message"] for message in stream.sent[2:]] == [refusal] * 2

    run_scenario(scenario)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_output_is_sent_as_bytes_to_a_client_that_asks_for_that(is_wanted: bool) -> None:
    async def scenario(bench: ConnectionBench) -> None:
        stream = MixedStream()
        connected = bench.connect(stream)
        wish = {"binaryOutput": True} if is_wanted else {}
        stream.say(request(0, "initialize", clientName="x", **wish), {"method": "initialized"})
        data = bytes(range(256)) * 33  # two chunks
        run = process.output(process.ProcessId("p"), 3, "stdout", data)
        connected.notify(process.OUTPUT, run)
        notice = {"method": "process/output", "params": {"processId": "p", "seq": 3}}
        notice["params"]["stream"] = "stdout"  # type: ignore[index]
        if is_wanted:
            assert stream.binary == [_with_data(notice, data)]
        else:
            sent = [message["params"] for message in stream.sent[1:]]
            chunks = [base64.b64decode(params["chunk"]) for params in sent]
            assert [params["seq"] for params in sent] == [3, 4]
            assert chunks == [data[: process.CHUNK_BYTES], data[process.CHUNK_BYTES :]]

    run_scenario(scenario)


def test_a_wish_for_bytes_has_no_effect_where_there_are_none() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        wish = request(0, "initialize", clientName="x", binaryOutput=True)
        bench.stream.say(wish, {"method": "initialized"})
        params = process.output(process.ProcessId("p"), 1, "stdout", b"x")
        _context(bench).notify(process.OUTPUT, params)
        assert bench.stream.sent[1]["params"]["chunk"] == "eA=="

    run_scenario(scenario)


@pytest.mark.parametrize("size", [0, connection.INLINE_DECODE_BYTES + 1])
def test_refused_binary_messages_stop_the_reading_like_others(size: int) -> None:
    async def scenario(bench: ConnectionBench) -> None:
        stream = MixedStream()
        congested = bench.connect(stream)
        stream.say(request(0, "initialize", clientName="x"), {"method": "initialized"})
        stream.unsent_bytes = connection.UNSENT_HARD_BYTES + 1
        congested.pause_writing()
        with mock.patch.object(connection, "METHODS", _data_methods()):
            stream.say(_with_data(request(1, "load"), bytes(size)))
        assert not stream.receiving
        congested.resume_writing()

    run_scenario(scenario)


def test_binary_messages_need_a_stream_that_carries_them() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.stream.say(request(0, "initialize", clientName="x"), {"method": "initialized"})
        info = bench.stream.sent[0]["result"]["environmentInfo"]
        assert info["capabilities"]["fsBinary"] is False
        with mock.patch.object(connection, "METHODS", _data_methods()):
            bench.stream.say(_with_data(request(1, "store"), b"x"), request(2, "load"))
            await settle()
        malformed, refused = (message["error"]["message"] for message in bench.stream.sent[1:])
        assert malformed.startswith("failed to parse message from memory: ")
        assert refused == "binary messages need a WebSocket without a relay"

    run_scenario(scenario)


class PieceStream(MemoryStream):
    """A GatheringStream."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[tuple[bytes, bytes, bytes]] = []

    def send_pieces(self, head: bytes, body: bytes, tail: bytes) -> None:
        self.pieces.append((head, body, tail))


def test_handlers_notify_the_client_of_their_connection() -> None:
    async def scenario(bench: ConnectionBench) -> None:
        bench.ready()
        _context(bench).notify(process.CLOSED, process.ClosedParams(process.ProcessId("p"), 3))
        [notice] = bench.stream.sent
        assert notice == {"method": "process/closed", "params": {"processId": "p", "seq": 3}}

    run_scenario(scenario)


def test_output_is_sent_in_pieces_where_the_stream_can() -> None:
    params = process.OutputParams(process.ProcessId("p"), 3, "stdout", b"data")
    server = cast(Any, SimpleNamespace(concurrent_requests=1))

    async def scenario() -> None:
        plain, gathering = MemoryStream(), PieceStream()
        for stream in (plain, gathering):
            Connection(server, stream).notify(process.OUTPUT, params)
        assert gathering.sent == []
        assert [json.loads(b"".join(pieces)) for pieces in gathering.pieces] == plain.sent
        assert plain.sent[0]["params"]["chunk"] == "ZGF0YQ=="

    asyncio.run(scenario())
