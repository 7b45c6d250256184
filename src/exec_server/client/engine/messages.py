"""Messages of a server as bytes and structs, and requests until their answers; no I/O.

Servers may be newer or older: unknown members are ignored, missing ones have defaults.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

import msgspec
import pybase64
from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from exec_server.errors import (
    ExecServerError,
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
from exec_server.net.stream import BinaryStream, MessageStream
from exec_server.protocol import jsonrpc, process
from exec_server.protocol.decoding import Base64, Notice, Uuid
from exec_server.protocol.jsonrpc import RequestId
from exec_server.protocol.paths import PathUri
from exec_server.protocol.session import EnvironmentInfo, SessionId

R = TypeVar("R")

# How long a flood may last: a person would not wait longer for a command that does nothing.
FLOOD_SECONDS = 30.0
# A pause of this length ends a flood: a client with fewer messages is not busy.
PAUSE_SECONDS = 0.25

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

_PROCESS_NOTICES: dict[str, Notice[Any]] = {
    notice.name: notice for notice in (process.OUTPUT, process.EXITED, process.CLOSED)
}


def find_notice(name: str) -> Notice[Any] | None:
    """The notification of this name; None for those that are not decoded and thus ignored."""
    return _PROCESS_NOTICES.get(name) or _other_notices().get(name)


@cache
def _other_notices() -> dict[str, Notice[Any]]:
    # Imported at the first such notification: most clients only run commands.
    from exec_server.protocol import files, http, port

    notices: tuple[Notice[Any], ...] = (
        files.MISSING_CHANGED,
        files.CHANGED,
        http.BODY_DELTA,
        port.ACCEPTED,
        port.DATA_NOTICE,
        port.CREDIT_NOTICE,
        port.END_NOTICE,
        port.RESET_NOTICE,
    )
    return {notice.name: notice for notice in notices}


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

    session_id: SessionId | None = None  # None: the server has no sessions
    environment_info: Raw | UnsetType = UNSET
    session_retention_seconds: int | None = None  # None: it was not asked for, or is not known


class InitializeRequest(msgspec.Struct, frozen=True, rename="camel"):
    """The params of `initialize`, by default exactly those of the reference's client."""

    client_name: str
    resume_session_id: SessionId | None
    session_retention_seconds: int | UnsetType = UNSET
    binary_output: bool | UnsetType = UNSET


_decode_envelope = msgspec.json.Decoder(Envelope).decode
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


def _to_native_wire(value: object) -> object:
    """The hook for servers whose paths are native ones."""
    return value.native() if isinstance(value, PathUri) else _to_wire(value)


encode = msgspec.json.Encoder(enc_hook=_to_wire).encode
_encode_native = msgspec.json.Encoder(enc_hook=_to_native_wire).encode


class BinaryBody(bytes):
    """The body of a request that is sent as a binary message."""

    data: bytes


def request_body(method: str, params: object, *, has_uri_paths: bool = True) -> bytes:
    """A request without its start, the id; params may be Attached data. Raises InvalidParams."""
    if isinstance(params, jsonrpc.Attached):
        body = BinaryBody(request_body(method, params.value, has_uri_paths=has_uri_paths))
        body.data = bytes(params.data)
        return body
    encode_params = encode if has_uri_paths else _encode_native
    try:
        return b'"method":%b,"params":%b}' % (encode(method), encode_params(params))
    except UnicodeEncodeError:
        raise InvalidParams("text that is not UTF-8 cannot be sent") from None
    except (NotImplementedError, TypeError) as error:
        raise InvalidParams(str(error)) from None


def decode(message: bytes) -> Envelope:
    """One message; MalformedMessage unless it is JSON-RPC.

    The result of a binary message is Attached, or the params of a notification.
    """
    if jsonrpc.is_binary(message):
        text, data = jsonrpc.split(message)
        envelope = _decode_text(text)
        if envelope.result is not UNSET:
            return replace(envelope, result=jsonrpc.Attached(envelope.result, data))
        if envelope.method is UNSET or envelope.id is not UNSET:
            raise MalformedMessage("a binary message that is neither a result nor a notification")
        return replace(envelope, params=jsonrpc.Attached(envelope.params, data))
    return _decode_text(message)


def _decode_text(text: bytes) -> Envelope:
    try:
        envelope = _decode_envelope(text)
    except _UNDECODABLE as error:
        raise MalformedMessage(str(error)) from None
    if envelope.method is UNSET and (
        envelope.id is UNSET or (envelope.result is UNSET and envelope.error is UNSET)
    ):
        raise MalformedMessage("neither a request nor an answer")
    return envelope


def decode_as(kind: type[R], text: Raw, name: str) -> R:
    """Decode JSON text as a struct; the MalformedAnswer it raises names the text `name`."""
    if isinstance(text, jsonrpc.Attached) != (kind is jsonrpc.Attached):
        raise MalformedAnswer(f"{name}: data is missing, or was not asked for")
    if kind is Raw or kind is jsonrpc.Attached:
        return text  # type: ignore[return-value]  # the caller decodes it
    try:
        value: R = _decoders(kind).decode(text)
    except _UNDECODABLE as error:
        raise MalformedAnswer(f"{name}: {error}") from None
    return value


def decode_params(notice: Notice[Any], params: Raw) -> Any:
    """The struct of a notification; raises MalformedMessage."""
    if not isinstance(params, jsonrpc.Attached):
        return decode_as(notice.params, params, notice.name)
    size = len(params.data)
    if notice is not process.OUTPUT or not 0 < size <= process.RUN_BYTES:
        raise MalformedMessage(f"{notice.name} with {size} bytes of data")
    head = decode_as(process.OutputHead, params.value, notice.name)
    return process.output(head.process_id, head.seq, head.stream, bytes(params.data))


class _StartResult(process.StartResult, frozen=True):
    sandbox_type: process.SandboxType = "none"


class _ReadResult(process.ReadResult, frozen=True):
    sandbox_denied: bool = False


class _ExitedParams(process.ExitedParams, frozen=True):
    sandbox_denied: bool = False


# The structs of a server, with defaults for members that older servers do not send.
_LENIENT: dict[Any, Any] = {
    kind.__base__: kind for kind in (_StartResult, _ReadResult, _ExitedParams)
}


def _make_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(_LENIENT.get(kind, kind), dec_hook=_from_wire)


# Bounded by the number of structs.
_decoders: Callable[[Any], msgspec.json.Decoder[Any]] = cache(_make_decoder)


def _from_wire(kind: Any, value: object) -> object:
    """The hook that msgspec calls for annotations it does not know."""
    return value if kind is object else kind.from_wire(value)


def decode_environment(text: Raw) -> EnvironmentInfo:
    """Decode an environment, with defaults for missing members; raises MalformedAnswer."""
    received = decode_as(dict[str, Any], text, "environment")
    members = {name: value for name, value in received.items() if value is not None}
    try:
        return msgspec.convert(_DEFAULTS | members, EnvironmentInfo)
    except msgspec.ValidationError as error:
        raise MalformedAnswer(f"environment: {error}") from None


def without_binary(info: EnvironmentInfo) -> EnvironmentInfo:
    """The environment for a connection without binary messages.

    A server behind `exec-server forward` knows only that its own end is a WebSocket.
    """
    capabilities = replace(info.capabilities, fs_binary=False, process_binary=False)
    return replace(info, capabilities=capabilities)


# PendingCall: a request of the client until its answer. CallQueue: those that wait to be sent.
class PendingCall:
    """A request that is queued or sent; cancelling its future discards the answer.

    A call that `is_retryable` may be sent again if its answer is lost, one that `is_bound` names
    something that ends with the session. `on_send` is called whenever the call is sent, `on_answer`
    before the next message is received.
    """

    __slots__ = (
        "body",
        "future",
        "is_bound",
        "is_retryable",
        "is_urgent",
        "on_answer",
        "on_send",
        "times_sent",
    )

    def __init__(
        self,
        body: bytes,
        *,
        is_retryable: bool,
        is_urgent: bool = False,
        is_bound: bool = False,
        on_send: Callable[[], None] | None = None,
        on_answer: Callable[[], None] | None = None,
    ) -> None:
        self.body = body
        self.is_retryable = is_retryable
        self.is_urgent = is_urgent
        self.is_bound = is_bound
        self.on_send = on_send
        self.on_answer = on_answer
        self.times_sent = 0
        self.future: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()

    def send(self, stream: MessageStream, number: int) -> None:
        """Send the request with this id; data needs a stream that carries binary messages."""
        text = b'{"id":%d,%b' % (number, self.body)
        if isinstance(self.body, BinaryBody):
            assert isinstance(stream, BinaryStream)
            stream.send_binary(jsonrpc.head(text), self.body.data)
        else:
            stream.send(text)
        self.times_sent += 1
        if self.on_send is not None:
            self.on_send()
        if not self.is_retryable:
            self.body = b""  # it may be large, and the answer may take long

    @property
    def fits_any_session(self) -> bool:
        """Whether the call can be made in another session than the one it was meant for."""
        return self.times_sent == 0 and not self.is_bound

    def resolve(self, result: Raw) -> None:
        if not self.future.done():
            self.future.set_result(result)
            if self.on_answer is not None:
                self.on_answer()

    def fail(self, error: ExecServerError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # the caller may be cancelled before it retrieves this


class InitializeCall(PendingCall):
    """`initialize`, whose answer is processed as soon as it is received."""

    __slots__ = ("_accept",)

    def __init__(self, body: bytes, accept: Callable[[Raw], None]) -> None:
        super().__init__(body, is_retryable=False)
        self._accept = accept

    def resolve(self, result: Raw) -> None:
        try:
            self._accept(result)
        except ExecServerError as error:
            self.fail(error)
        else:
            super().resolve(result)


class CallQueue:
    """Calls that wait to be sent, in order; urgent ones are first."""

    def __init__(self) -> None:
        self._calls: OrderedDict[PendingCall, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: PendingCall) -> None:
        self._calls[call] = None
        if call.is_urgent:
            self._calls.move_to_end(call, last=False)

    def put_back(self, calls: Iterable[PendingCall]) -> None:
        """Queue calls that were sent in this order before all others."""
        for call in reversed(list(calls)):
            self._calls[call] = None
            self._calls.move_to_end(call, last=False)

    @property
    def is_urgent(self) -> bool:
        """Whether the first call is urgent."""
        return next(iter(self._calls)).is_urgent

    def pop(self) -> PendingCall:
        """Take the first call."""
        return self._calls.popitem(last=False)[0]

    def discard(self, call: PendingCall) -> None:
        """Remove a call that is cancelled, if it is still here."""
        self._calls.pop(call, None)

    def fail(self, error: ExecServerError, *, keep_movable: bool = False) -> None:
        """Fail all calls, or all except those that can be made in another session."""
        calls, self._calls = self._calls, OrderedDict()
        for call in calls:
            if keep_movable and call.fits_any_session:
                self._calls[call] = None
            else:
                call.fail(error)


class UselessMessages:
    """The useless messages of one connection since the last useful one.

    Useless are unknown, refused, repeated or empty messages and frames. A few are normal: servers
    may be newer, and events may cross a request that ends their subject. Without pause they are a
    flood, which no time-out of a call would end.
    """

    __slots__ = ("_last", "_since")

    def __init__(self) -> None:
        self._since = self._last = float("-inf")

    def useful_received(self) -> None:
        self._last = float("-inf")

    def useless_received(self, now: float) -> bool:
        """Count a useless message; returns whether the flood has lasted too long."""
        if now - self._last > PAUSE_SECONDS:
            self._since = now
        self._last = now
        return now - self._since >= FLOOD_SECONDS
