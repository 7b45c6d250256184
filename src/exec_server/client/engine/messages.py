"""Messages to and from a server as bytes and as structs; no I/O.

A server may be newer or older than this client, so decoding is lenient: unknown members are
ignored, and the shell is the only required member of an environment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgspec
import pybase64
from msgspec import UNSET, Raw, UnsetType

from exec_server.errors import (
    InternalError,
    InvalidParams,
    InvalidRequest,
    MalformedAnswer,
    MalformedMessage,
    MethodNotFound,
    NotFound,
    RpcError,
    SessionAttached,
)
from exec_server.protocol import file_watches, files, http, port, process
from exec_server.protocol.base64_text import Base64
from exec_server.protocol.jsonrpc import RequestId
from exec_server.protocol.method import Notice
from exec_server.protocol.paths import PathUri
from exec_server.protocol.session import EnvironmentInfo, SessionId
from exec_server.protocol.uuid_text import Uuid

R = TypeVar("R")

# The notifications that are decoded; others are ignored.
NOTICES: dict[str, Notice[Any]] = {
    notice.name: notice
    for notice in (
        process.OUTPUT,
        process.EXITED,
        process.CLOSED,
        files.MISSING_CHANGED,
        file_watches.CHANGED,
        http.BODY_DELTA,
        port.ACCEPTED,
        port.DATA_NOTICE,
        port.CREDIT_NOTICE,
        port.END_NOTICE,
        port.RESET_NOTICE,
    )
}

_ERRORS: dict[int, type[RpcError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        MethodNotFound,
        InvalidParams,
        InternalError,
        NotFound,
        SessionAttached,
    )
}

# The members of an environment that a server may omit.
_DEFAULTS: dict[str, object] = {
    "executorVersion": "",
    "providerId": "",
    "cwd": None,
    "userHomeDir": None,
    "platformOs": "",
    "prependPathDirs": [],
    "temporaryDirectories": [],
    "tempDir": "/tmp",
    "capabilities": {},
}


class Failure(msgspec.Struct, frozen=True, gc=False):
    """The `error` member of an answer."""

    code: int
    message: str
    data: object = None

    def exception(self) -> RpcError:
        """The exception for this code."""
        error = _ERRORS.get(self.code, RpcError)(self.message)
        error.code = self.code
        error.data = self.data
        return error


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """Any message of a server; params and result stay JSON text."""

    id: RequestId | UnsetType = UNSET
    method: str | UnsetType = UNSET
    params: Raw = Raw(b"null")
    result: Raw | UnsetType = UNSET
    error: Failure | UnsetType = UNSET


class InitializeAnswer(msgspec.Struct, frozen=True, rename="camel"):
    """The answer to `initialize`."""

    session_id: SessionId
    environment_info: Raw | UnsetType = UNSET


_decode_envelope = msgspec.json.Decoder(Envelope).decode
_decode_initialize_answer = msgspec.json.Decoder(InitializeAnswer).decode
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _to_wire(value: object) -> object:
    """The hook that msgspec calls for types it cannot encode."""
    if isinstance(value, PathUri):
        return value.uri
    if isinstance(value, Base64):
        return pybase64.b64encode(value).decode()
    if isinstance(value, Uuid):
        return str.__str__(value)
    raise NotImplementedError(f"{type(value).__name__} has no form on the wire")


encode = msgspec.json.Encoder(enc_hook=_to_wire).encode


def request_body(method: str, params: object) -> bytes:
    """A request without its start, which holds the id."""
    return b'"method":%b,"params":%b}' % (encode(method), encode(params))


def decode(message: bytes) -> Envelope:
    """Decode one message; raises MalformedMessage unless it is JSON-RPC."""
    try:
        envelope = _decode_envelope(message)
    except _UNDECODABLE as error:
        raise MalformedMessage(str(error)) from None
    if envelope.method is UNSET and (
        envelope.id is UNSET or (envelope.result is UNSET and envelope.error is UNSET)
    ):
        raise MalformedMessage("neither a request nor an answer")
    return envelope


def decode_as(kind: type[R], text: Raw, name: str) -> R:
    """Decode JSON text as a struct; the MalformedAnswer it raises names the text `name`."""
    if kind is Raw:
        return text  # type: ignore[return-value]  # the caller decodes it
    try:
        value: R = _decoders(kind).decode(text)
    except _UNDECODABLE as error:
        raise MalformedAnswer(f"{name}: {error}") from None
    return value


def _make_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=_from_wire)


# Bounded by the number of structs.
_decoders: Callable[[Any], msgspec.json.Decoder[Any]] = cache(_make_decoder)


def _from_wire(kind: Any, value: object) -> object:
    """The hook that msgspec calls for annotations it does not know."""
    return value if kind is object else kind.from_wire(value)


def decode_initialize_answer(text: Raw) -> InitializeAnswer:
    """Decode the answer to `initialize`; raises MalformedAnswer."""
    try:
        return _decode_initialize_answer(text)
    except _UNDECODABLE as error:
        raise MalformedAnswer(f"answer to initialize: {error}") from None


def decode_environment(text: Raw) -> EnvironmentInfo:
    """Decode an environment, with defaults for missing members; raises MalformedAnswer."""
    try:
        received = msgspec.json.decode(text, type=dict[str, Any])
        members = {name: value for name, value in received.items() if value is not None}
        return msgspec.convert(_DEFAULTS | members, EnvironmentInfo)
    except _UNDECODABLE as error:
        raise MalformedAnswer(f"environment: {error}") from None
