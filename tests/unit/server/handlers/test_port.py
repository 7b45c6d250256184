"""port/* between a connection and its table of streams."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from tests.support.memory_ports import MemorySockets

from exec_server.net.port_stream import WINDOW_BYTES
from exec_server.protocol import port as wire
from exec_server.protocol.decoding import Base64, EmptyResult
from exec_server.protocol.port import ListenerId, StreamId
from exec_server.server.context import ConnectionContext
from exec_server.server.handlers import port
from exec_server.server.port_table import PortResources, PortTable

NAME = StreamId("s")
TAKEN = EmptyResult()


def test_every_method_reaches_the_stream() -> None:
    sockets = MemorySockets()
    sent: list[Any] = []
    table = PortTable(PortResources(sockets), lambda notice, params: sent.append(params))
    context = cast(ConnectionContext, SimpleNamespace(ports=table))

    async def run() -> None:
        assert await port.probe(context, wire.ProbeParams(80)) == wire.ProbeResult(accepts=True)
        await port.open_(context, wire.OpenParams(NAME, 80, 0))
        socket = sockets.connected[-1]
        assert port.data(context, wire.DataParams(NAME, Base64(b"data"))) == TAKEN
        assert socket.written == b"data"
        assert port.credit(context, wire.CreditParams(NAME, 1)) == TAKEN
        assert socket.is_reading
        assert port.end(context, wire.EndParams(NAME)) == TAKEN
        assert socket.calls == ["write_eof"]
        assert port.reset(context, wire.ResetParams(NAME)) == TAKEN
        assert socket.calls == ["write_eof", "abort"]
        await port.listen(context, wire.ListenParams(ListenerId("l"), 0))
        sockets.listeners[0].connect()
        assert sent == [wire.AcceptedNotice(ListenerId("l"), StreamId("l/1"), WINDOW_BYTES)]
        port.close_listener(context, wire.CloseListenerParams(ListenerId("l")))
        assert sockets.listeners[0].is_closed

    asyncio.run(run())


def test_messages_for_a_stream_that_has_ended_have_no_effect() -> None:
    table = PortTable(PortResources(MemorySockets()), lambda notice, params: None)
    context = cast(ConnectionContext, SimpleNamespace(ports=table))
    assert port.data(context, wire.DataParams(NAME, Base64(b"data"))) == TAKEN
    assert port.credit(context, wire.CreditParams(NAME, 1)) == TAKEN
    assert port.end(context, wire.EndParams(NAME)) == TAKEN
    assert port.reset(context, wire.ResetParams(NAME)) == TAKEN
