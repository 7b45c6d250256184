"""The forwarded connections of a client, with sockets in memory."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from tests.support.client import DEFAULT_TIMEOUT, scaled
from tests.support.memory_ports import MemoryListener, MemorySocket, MemorySockets

from exec_server.errors import InternalError, InvalidParams, InvalidRequest
from exec_server.net.port_stream import CHUNK_BYTES, WINDOW_BYTES
from exec_server.protocol import port as wire
from exec_server.protocol.decoding import Notice
from exec_server.protocol.port import ListenerId, StreamId
from exec_server.server import port_table
from exec_server.server.port_table import PortResources, PortTable


class Bench:
    """A table, its sockets, and the notifications that it sends."""

    def __init__(self) -> None:
        self.sockets = MemorySockets()
        self.resources = PortResources(self.sockets)
        self.sent: list[msgspec.Struct] = []
        self.table = PortTable(self.resources, self._notify)

    def _notify(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        assert notice.params is type(params)
        self.sent.append(params)

    async def open(self, name: str = "s", window: int = WINDOW_BYTES) -> MemorySocket:
        params = wire.OpenParams(StreamId(name), 80, window)
        assert await self.table.open(params) == wire.OpenResult(WINDOW_BYTES)
        await asyncio.sleep(0)
        return self.sockets.connected[-1]

    async def listen(self, name: str = "l") -> MemoryListener:
        result = await self.table.listen(wire.ListenParams(ListenerId(name), 0))
        listener = self.sockets.listeners[-1]
        assert result == wire.ListenResult(listener.port)
        return listener


def scene(play: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
    def test() -> None:
        async def run() -> None:
            async with asyncio.timeout(scaled(DEFAULT_TIMEOUT)):
                bench = Bench()
                await play(bench)
                bench.table.close()
            for socket in bench.sockets.made:
                socket.lose()
            assert (bench.resources.streams, bench.resources.listeners) == (0, 0)

        asyncio.run(run())

    test.__doc__ = play.__doc__
    return test


@scene
async def test_data_follows_the_answer(bench: Bench) -> None:
    opening = bench.table.open(wire.OpenParams(StreamId("s"), 80, 5, "host"))
    await opening
    [socket] = bench.sockets.connected
    assert not socket.is_reading
    await asyncio.sleep(0)
    assert socket.is_reading
    socket.read(b"hello")
    assert bench.sent == [wire.DataNotice(StreamId("s"), b"hello")]
    assert bench.sockets.dialled == [("host", 80)]


@scene
async def test_messages_of_a_stream(bench: Bench) -> None:
    socket = await bench.open()
    stream = bench.table.stream(StreamId("s"))
    assert stream is not None
    stream.data_received(bytes(WINDOW_BYTES))
    socket.read_eof()
    stream.end_received()
    socket.lose()
    name = StreamId("s")
    assert bench.sent == [wire.CreditNotice(name, WINDOW_BYTES), wire.EndNotice(name)]
    assert bench.table.stream(name) is None


@scene
async def test_a_socket_that_breaks(bench: Bench) -> None:
    socket = await bench.open()
    socket.lose("broken")
    assert bench.sent == [wire.ResetNotice(StreamId("s"), "broken")]
    await bench.open()  # its id is free again


@scene
async def test_ids_are_used_once_at_a_time(bench: Bench) -> None:
    await bench.open()
    with pytest.raises(InvalidRequest, match="stream s already exists"):
        await bench.open()
    await bench.listen()
    with pytest.raises(InvalidRequest, match="listener l already exists"):
        await bench.listen()


@scene
async def test_long_ids_are_refused(bench: Bench) -> None:
    name = "x" * (port_table.ID_BYTES + 1)
    with pytest.raises(InvalidParams, match="must not exceed 256 bytes"):
        await bench.open(name)
    with pytest.raises(InvalidParams, match="must not exceed 256 bytes"):
        await bench.listen(name)


@scene
async def test_a_refused_connection(bench: Bench) -> None:
    bench.sockets.failure = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    with pytest.raises(InternalError) as caught:
        await bench.open()
    text = "cannot connect to localhost:80: Connection refused (os error 111)"
    assert (caught.value.message, caught.value.data) == (text, {"errno": errno.ECONNREFUSED})
    assert bench.table.stream(StreamId("s")) is None


@scene
async def test_a_refused_host(bench: Bench) -> None:
    bench.sockets.failure = InvalidRequest("not here")
    with pytest.raises(InvalidRequest, match="not here"):
        await bench.open()
    with pytest.raises(InvalidRequest, match="not here"):
        await bench.listen()


def test_a_host_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_table, "CONNECT_SECONDS", 0.0)

    async def play(bench: Bench) -> None:
        bench.sockets.gate = asyncio.Event()
        with pytest.raises(InternalError) as caught:
            await bench.open()
        assert caught.value.data == {"errno": errno.ETIMEDOUT}

    scene(play)()


@scene
async def test_a_probe_tells_whether_a_port_accepts(bench: Bench) -> None:
    assert (await bench.table.probe(wire.ProbeParams(80))).accepts
    [socket] = bench.sockets.connected
    assert socket.calls == ["close"]
    bench.sockets.failure = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    assert not (await bench.table.probe(wire.ProbeParams(80))).accepts
    bench.sockets.failure = OSError(errno.ENETUNREACH, "Network unreachable")
    with pytest.raises(InternalError, match="Network unreachable"):
        await bench.table.probe(wire.ProbeParams(80))


@scene
async def test_an_accepted_connection_sends_nothing_before_the_first_credit(bench: Bench) -> None:
    listener = await bench.listen()
    socket = listener.connect()
    stream_id = StreamId("l/1")
    assert bench.sent == [wire.AcceptedNotice(ListenerId("l"), stream_id, WINDOW_BYTES)]
    assert not socket.is_reading
    stream = bench.table.stream(stream_id)
    assert stream is not None
    stream.credit_received(1)
    assert socket.is_reading


@scene
async def test_an_accepted_connection_survives_its_listener(bench: Bench) -> None:
    listener = await bench.listen()
    socket = listener.connect()
    bench.table.close_listener(ListenerId("l"))
    bench.table.close_listener(ListenerId("l"))
    assert listener.is_closed
    assert socket.calls == []
    assert listener.connect().calls == ["abort"]  # it was accepted too late


@scene
async def test_a_listener_that_is_closed_before_it_listens(bench: Bench) -> None:
    bench.sockets.gate = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        waiting = bench.table.listen(wire.ListenParams(ListenerId("l"), 0))
        task = tasks.create_task(_result(waiting))
        await asyncio.sleep(0)
        bench.table.close_listener(ListenerId("l"))
        bench.sockets.gate.set()
    assert task.done()
    assert bench.sockets.listeners[0].is_closed


@scene
async def test_a_port_in_use(bench: Bench) -> None:
    bench.sockets.failure = OSError(errno.EADDRINUSE, "Address already in use")
    with pytest.raises(InternalError) as caught:
        await bench.table.listen(wire.ListenParams(ListenerId("l"), 8080))
    text = "cannot listen on port 8080: Address in use (os error 98)"
    assert (caught.value.message, caught.value.data) == (text, {"errno": errno.EADDRINUSE})


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("MAX_STREAMS", "at most 1 streams may be open per connection"),
        ("MAX_SERVER_STREAMS", "at most 1 streams may be open"),
    ],
)
def test_the_number_of_streams_is_limited(
    limit: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_table, limit, 1)

    async def play(bench: Bench) -> None:
        listener = await bench.listen()
        socket = await bench.open()
        with pytest.raises(InvalidRequest, match=f"^{text}$"):
            await bench.open("another")
        with pytest.raises(InvalidRequest, match=f"^{text}$"):
            await bench.table.probe(wire.ProbeParams(80))
        assert listener.connect().calls == ["abort"]
        assert not bench.sent
        socket.lose()
        await bench.open("another")

    scene(play)()


@pytest.mark.parametrize("limit", ["MAX_STREAMS", "MAX_SERVER_STREAMS"])
def test_probes_count_as_streams(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_table, limit, 1)

    async def play(bench: Bench) -> None:
        bench.sockets.gate = asyncio.Event()
        probe = asyncio.get_running_loop().create_task(
            _result(bench.table.probe(wire.ProbeParams(80)))
        )
        with pytest.raises(InvalidRequest, match="at most 1 streams may be open"):
            await bench.open()
        bench.sockets.gate.set()
        assert await probe == wire.ProbeResult(accepts=True)
        await bench.open()

    scene(play)()


@pytest.mark.parametrize("limit", ["MAX_LISTENERS", "MAX_SERVER_LISTENERS"])
def test_the_number_of_listeners_is_limited(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_table, limit, 1)

    async def play(bench: Bench) -> None:
        await bench.listen()
        with pytest.raises(InvalidRequest, match="at most 1 ports may be listened on"):
            await bench.listen("another")
        bench.table.close_listener(ListenerId("l"))
        await bench.listen("another")

    scene(play)()


@scene
async def test_a_congested_link_stops_all_streams(bench: Bench) -> None:
    first = await bench.open("first")
    bench.sockets.gate = asyncio.Event()
    opening = asyncio.get_running_loop().create_task(bench.open("second"))
    await asyncio.sleep(0)
    bench.table.pause_reading()
    bench.sockets.gate.set()
    second = await opening
    assert (first.is_reading, second.is_reading) == (False, False)
    bench.table.resume_reading()
    assert (first.is_reading, second.is_reading) == (True, True)


@scene
async def test_after_a_pause_the_stream_that_sent_last_comes_last(bench: Bench) -> None:
    names = ["a", "b", "c"]
    sockets = {name: await bench.open(name) for name in names}
    sockets["a"].read(bytes(CHUNK_BYTES))
    bench.table.pause_reading()
    MemorySocket.resumed.clear()
    bench.table.resume_reading()
    assert MemorySocket.resumed == [sockets["b"], sockets["c"], sockets["a"]]


@scene
async def test_everything_ends_with_the_connection(bench: Bench) -> None:
    socket = await bench.open()
    listener = await bench.listen()
    accepted = listener.connect()
    bench.sockets.gate = asyncio.Event()
    opening = asyncio.get_running_loop().create_task(bench.open("late"))
    await asyncio.sleep(0)
    bench.table.pause_reading()
    bench.table.resume_reading()
    bench.table.close()
    assert (socket.calls, accepted.calls, listener.is_closed) == (["abort"], ["abort"], True)
    bench.sockets.gate.set()
    assert (await opening).calls == ["abort"]


@scene
async def test_an_id_of_the_client_is_not_taken_by_an_accepted_connection(bench: Bench) -> None:
    listener = await bench.listen()
    await bench.open("l/1")
    assert listener.connect().calls == ["abort"]


def test_a_server_without_sockets() -> None:
    table = PortTable(None, lambda notice, params: None)
    for refused in (
        lambda: table.probe(wire.ProbeParams(80)),
        lambda: table.open(wire.OpenParams(StreamId("s"), 80, 1)),
        lambda: table.listen(wire.ListenParams(ListenerId("l"), 80)),
    ):
        with pytest.raises(InternalError, match="forwards no ports"):
            refused()
    table.close_listener(ListenerId("l"))
    table.close()


async def _result(waiting: Awaitable[Any]) -> Any:
    return await waiting
