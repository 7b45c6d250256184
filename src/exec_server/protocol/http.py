"""http/request: structs, the call, and the notification of streamed bodies."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
import pybase64

from exec_server.protocol.decoding import U64, Base64, Call, Notice, Params, Result


class Header(Params, frozen=True):
    wire_name: ClassVar[str] = "HttpHeader"
    omissible: ClassVar[tuple[str, ...]] = ("value_env_var",)
    name: str
    value: str
    value_env_var: str | None = None


class RequestParams(Params, frozen=True, kw_only=True):
    wire_name: ClassVar[str] = "HttpRequestParams"
    omissible: ClassVar[tuple[str, ...]] = ("body_base64", "timeout_ms")
    method: str
    url: str
    headers: list[Header] = msgspec.field(default_factory=list)
    body_base64: Base64 | None = None
    timeout_ms: U64 | None = None
    redirect_policy: Literal["follow", "stop"] = "follow"
    request_id: str
    stream_response: bool = False


class ResponseHeader(Result, frozen=True, gc=False):
    name: str
    value: str


class RequestResult(Result, frozen=True):
    status: int
    headers: list[ResponseHeader]
    body_base64: bytes


class BodyDeltaParams(Result, frozen=True, gc=False):
    request_id: str
    seq: int
    delta_base64: bytes
    done: bool
    error: str | None


def encode_body_delta(params: BodyDeltaParams) -> bytes:
    """Encode params as msgspec would, but with the faster base64 of pybase64."""
    return b'{"requestId":%b,"seq":%d,"deltaBase64":"%b","done":%b,"error":%b}' % (
        msgspec.json.encode(params.request_id),
        params.seq,
        pybase64.b64encode(params.delta_base64),
        b"true" if params.done else b"false",
        msgspec.json.encode(params.error),
    )


REQUEST = Call("http/request", RequestParams, RequestResult)

BODY_DELTA = Notice("http/request/bodyDelta", BodyDeltaParams, encode_body_delta)
