"""port/*: connections that are forwarded to and from this machine; see `server.port_table`."""

from __future__ import annotations

from collections.abc import Awaitable

from exec_server.protocol import port
from exec_server.protocol.decoding import EmptyResult
from exec_server.server.context import ConnectionContext

_EMPTY = EmptyResult()


def probe(context: ConnectionContext, params: port.ProbeParams) -> Awaitable[port.ProbeResult]:
    return context.ports.probe(params)


def open_(context: ConnectionContext, params: port.OpenParams) -> Awaitable[port.OpenResult]:
    return context.ports.open(params)


def listen(context: ConnectionContext, params: port.ListenParams) -> Awaitable[port.ListenResult]:
    return context.ports.listen(params)


def close_listener(context: ConnectionContext, params: port.CloseListenerParams) -> EmptyResult:
    context.ports.close_listener(params.listener_id)
    return _EMPTY


# A stream may have ended while the message was on its way, so a missing one is not an error.


def data(context: ConnectionContext, params: port.DataParams) -> EmptyResult:
    if (stream := context.ports.stream(params.stream_id)) is not None:
        stream.data_received(params.chunk)
    return _EMPTY


def credit(context: ConnectionContext, params: port.CreditParams) -> EmptyResult:
    if (stream := context.ports.stream(params.stream_id)) is not None:
        stream.credit_received(params.bytes)
    return _EMPTY


def end(context: ConnectionContext, params: port.EndParams) -> EmptyResult:
    if (stream := context.ports.stream(params.stream_id)) is not None:
        stream.end_received()
    return _EMPTY


def reset(context: ConnectionContext, params: port.ResetParams) -> EmptyResult:
    if (stream := context.ports.stream(params.stream_id)) is not None:
        stream.reset_received()
    return _EMPTY
