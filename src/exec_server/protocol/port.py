"""port/*: forwarded connections. Data, credit, end and reset are requests and notifications."""

from __future__ import annotations

from typing import ClassVar, NewType

import msgspec
import pybase64

from exec_server.protocol.decoding import (
    U16,
    U32,
    Base64,
    Call,
    EmptyResult,
    NonZeroU16,
    Notice,
    Params,
    Result,
)

StreamId = NewType("StreamId", str)
ListenerId = NewType("ListenerId", str)


class ProbeParams(Params, frozen=True):
    wire_name: ClassVar[str] = "PortProbeParams"
    omissible: ClassVar[tuple[str, ...]] = ("host",)
    port: NonZeroU16
    host: str | None = None  # None: loopback


class ProbeResult(Result, frozen=True):
    accepts: bool


class OpenParams(Params, frozen=True):
    wire_name: ClassVar[str] = "PortOpenParams"
    omissible: ClassVar[tuple[str, ...]] = ("host",)
    stream_id: StreamId
    port: NonZeroU16
    window: U32  # bytes that the server may send before the first credit
    host: str | None = None  # None: loopback


class OpenResult(Result, frozen=True):
    window: U32  # bytes that the client may send before the first credit


class ListenParams(Params, frozen=True):
    wire_name: ClassVar[str] = "PortListenParams"
    listener_id: ListenerId
    port: U16  # 0: any free port


class ListenResult(Result, frozen=True):
    port: U16


class CloseListenerParams(Params, frozen=True):
    wire_name: ClassVar[str] = "PortCloseListenerParams"
    listener_id: ListenerId


class DataParams(Params, frozen=True):
    wire_name: ClassVar[str] = "PortDataParams"
    stream_id: StreamId
    chunk: Base64


class CreditParams(Params, frozen=True):
    wire_name: ClassVar[str] = "PortCreditParams"
    stream_id: StreamId
    bytes: U32


class EndParams(Params, frozen=True):
    wire_name: ClassVar[str] = "PortEndParams"
    stream_id: StreamId


class ResetParams(Params, frozen=True):
    wire_name: ClassVar[str] = "PortResetParams"
    stream_id: StreamId


class AcceptedNotice(Result, frozen=True):
    listener_id: ListenerId
    stream_id: StreamId
    window: U32


class DataNotice(Result, frozen=True, gc=False):
    stream_id: StreamId
    chunk: bytes


class CreditNotice(Result, frozen=True, gc=False):
    stream_id: StreamId
    bytes: U32


class EndNotice(Result, frozen=True, gc=False):
    stream_id: StreamId


class ResetNotice(Result, frozen=True, gc=False):
    stream_id: StreamId
    reason: str


def encode_data(params: DataNotice) -> bytes:
    """Encode params as msgspec would, but with the faster base64 of pybase64."""
    return b'{"streamId":%b,"chunk":"%b"}' % (
        msgspec.json.encode(params.stream_id),
        pybase64.b64encode(params.chunk),
    )


PROBE = Call("port/probe", ProbeParams, ProbeResult)
OPEN = Call("port/open", OpenParams, OpenResult)
LISTEN = Call("port/listen", ListenParams, ListenResult)
CLOSE_LISTENER = Call("port/closeListener", CloseListenerParams, EmptyResult)
DATA = Call("port/data", DataParams, EmptyResult)
CREDIT = Call("port/credit", CreditParams, EmptyResult)
END = Call("port/end", EndParams, EmptyResult)
RESET = Call("port/reset", ResetParams, EmptyResult)

ACCEPTED = Notice("port/accepted", AcceptedNotice)
DATA_NOTICE = Notice("port/data", DataNotice, encode_data)
CREDIT_NOTICE = Notice("port/credit", CreditNotice)
END_NOTICE = Notice("port/end", EndNotice)
RESET_NOTICE = Notice("port/reset", ResetNotice)
