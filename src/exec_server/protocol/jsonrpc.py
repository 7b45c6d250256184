"""Decodes and encodes the envelope: JSON-RPC without its version member."""

from __future__ import annotations

from typing import Annotated, Final, Generic, NamedTuple, TypeGuard, TypeVar

import msgspec

from exec_server.errors import InvalidParams, MalformedMessage, RpcError, lossy
from exec_server.protocol.decoding import (
    I64,
    MAX_DEPTH,
    Notice,
    decode_value,
    has_few_containers,
    invalid_type,
    parse,
)

RequestId = int | str

_I64_MIN, _I64_MAX = -(2**63), 2**63 - 1
_I64 = Annotated[int, msgspec.Meta(ge=_I64_MIN, le=_I64_MAX)]
encode = msgspec.json.Encoder().encode
_NO_ID = b"-1"
_ERROR_MEMBERS: Final = {"code": I64, "message": str}
# Messages up to this size are first decoded as a plain request. Longer ones are not, because their
# decoding would take twice the time if they are something else.
PLAIN_BYTES = 4096
# Up to this number of members, looking at each one is faster than searching the text for brackets.
_FEW_MEMBERS = 8
_CONTAINERS = frozenset({dict, list})

# Of the JSON text: it is decoded on the event loop, so it must not take long.
TEXT_BYTES: Final = 32_768

_SIZE_BYTES: Final = 4
# The first byte of a binary message.
BINARY_MARK: Final = b"\0"

P = TypeVar("P")


# gc=False: not tracked by the garbage collector, which makes them cheap to create.


class Request(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    id: _I64 | str
    method: str
    params: object = None


class Notification(msgspec.Struct, frozen=True, gc=False):
    method: str
    params: object


class RpcResponse(msgspec.Struct, frozen=True, gc=False):
    """A response of the client; `result` is None for an error."""

    id: RequestId
    result: object = None


Message = Request | Notification | RpcResponse


_decode_request = msgspec.json.Decoder(Request).decode
_NO_REQUEST = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode(data: bytes) -> Message:
    """Decode one message; raises MalformedMessage with the text for the client."""
    if len(data) <= PLAIN_BYTES:
        # Fast path: the message is a request with known members only.
        try:
            request = _decode_request(data)
            again = encode(request)
            if (again == data or _has_lost_nothing(again, data)) and (
                len(data) <= MAX_DEPTH or _is_flat(request.params) or has_few_containers(data)
            ):
                return request
        except _NO_REQUEST:
            pass  # the slow path raises the error
    return _decode_any(data)


def _has_lost_nothing(again: bytes, data: bytes) -> bool:
    """Whether a request that is encoded again has all members of its text, none of them twice.

    Some clients write spaces or have another order of members. Without \\u escapes decoding a
    string neither adds nor removes colons, so a member that was lost is a colon missing.
    """
    return again.count(b":") == data.count(b":") and b"\\u" not in data


def _is_flat(params: object) -> bool:
    """Whether the params are a few members without members of their own, so not nested deep."""
    if type(params) is not dict or len(params) > _FEW_MEMBERS:
        return False
    return _CONTAINERS.isdisjoint(map(type, params.values()))


def _decode_any(data: bytes) -> Message:
    value = parse(data)
    if type(value) is dict and "trace" not in value:
        method = value.get("method")
        request_id = value.get("id")
        if type(method) is str and _is_id(request_id):
            return Request(request_id, method, value.get("params"))
    return _decode_unusual(value)


def _is_id(value: object) -> TypeGuard[RequestId]:
    return (type(value) is int and _I64_MIN <= value <= _I64_MAX) or type(value) is str


def _decode_unusual(value: object) -> Message:
    """Decode all but plain requests; errors have the texts of the reference."""
    if type(value) is not dict:
        raise MalformedMessage("expected a JSON-RPC object")
    if "method" in value:
        for name, member in value.items():
            _check_member(name, member)
        method = value["method"]
        assert type(method) is str
        if "id" not in value:
            return Notification(method, value.get("params"))
        return Request(value["id"], method, value.get("params"))
    if "result" in value:
        return RpcResponse(_response_id(value), value["result"])
    if "error" not in value:
        raise MalformedMessage("missing field `error`")
    _check_error(value["error"])
    return RpcResponse(_response_id(value))


def _check_member(name: str, member: object) -> None:
    if name == "id" and not _is_id(member):
        raise MalformedMessage("data did not match any variant of untagged enum RequestId")
    try:
        if name == "method":
            decode_value(str, member)
        elif name == "trace" and member is not None:
            _check_trace(member)
    except InvalidParams as error:
        raise MalformedMessage(error.message) from None


def _check_trace(member: object) -> None:
    if type(member) is not dict:
        raise invalid_type(member, "struct W3cTraceContext")
    for name in ("traceparent", "tracestate"):
        if member.get(name) is not None:
            decode_value(str, member[name])


def _response_id(value: dict[str, object]) -> RequestId:
    if "id" not in value:
        raise MalformedMessage("missing field `id`")
    _check_member("id", value["id"])
    return value["id"]  # type: ignore[return-value]


def _check_error(error: object) -> None:
    try:
        if type(error) is not dict:
            raise invalid_type(error, "struct JSONRPCErrorError")
        for name, member in error.items():
            if name in _ERROR_MEMBERS:
                decode_value(_ERROR_MEMBERS[name], member)
        for name in _ERROR_MEMBERS:
            if name not in error:
                raise InvalidParams(f"missing field `{name}`")
    except InvalidParams as failure:
        raise MalformedMessage(failure.message) from None


def encode_result(request_id: RequestId, text: bytes) -> bytes:
    """Encode a response from the JSON text of its result."""
    return b'{"id":%b,"result":%b}' % (encode(request_id), text)


def result_frame(request_id: RequestId) -> tuple[bytes, bytes]:
    """The text before and after a result that is sent in parts."""
    return b'{"id":%b,"result":' % encode(request_id), b"}"


def encode_error(request_id: RequestId | None, error: RpcError) -> bytes:
    """Encode an error response; without an id, it is about a message that had none."""
    identifier = _NO_ID if request_id is None else encode(request_id)
    message = encode_lossy(error.message)
    if error.data is not None:
        message += b',"data":' + encode_lossy(error.data)
    return b'{"error":{"code":%d,"message":%b},"id":%b}' % (error.code, message, identifier)


def encode_lossy(value: object) -> bytes:
    """Encode a value that may contain names of files, with U+FFFD for what is not UTF-8."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(_lossy_value(msgspec.to_builtins(value)))


def _lossy_value(value: object) -> object:
    if isinstance(value, str):
        return lossy(value)
    if isinstance(value, list | tuple):
        return [_lossy_value(each) for each in value]
    if isinstance(value, dict):
        return {_lossy_value(name): _lossy_value(member) for name, member in value.items()}
    return value


def encode_request(request_id: RequestId, method: str, params: msgspec.Struct) -> bytes:
    return b'{"id":%b,"method":"%b","params":%b}' % (
        encode(request_id),
        method.encode(),
        encode(params),
    )


def encode_notification(notice: Notice[msgspec.Struct], params: msgspec.Struct) -> bytes:
    return b'{"method":"%b","params":%b}' % (notice.name.encode(), notice.encode(params))


# Binary messages, an extension: the size of a JSON text in four bytes (big-endian), the text, data.
# The size is limited, so the first byte is 0, with which no JSON text begins.
class Attached(NamedTuple, Generic[P]):
    """The params of a request, or its result, and the data that came with it."""

    value: P
    data: bytes | memoryview


def is_binary(message: bytes) -> bool:
    """Whether a message is binary, if its stream carries such messages at all."""
    return message[:1] == BINARY_MARK


def head(text: bytes) -> bytes:
    """The beginning of a message with this JSON text; its data follows."""
    assert len(text) <= TEXT_BYTES
    return len(text).to_bytes(_SIZE_BYTES, "big") + text


def split(message: bytes) -> tuple[bytes, memoryview]:
    """The JSON text and the data of a message; raises MalformedMessage."""
    end = _SIZE_BYTES + int.from_bytes(message[:_SIZE_BYTES], "big")
    if len(message) < _SIZE_BYTES or end > len(message) or end > _SIZE_BYTES + TEXT_BYTES:
        raise MalformedMessage("a binary message is shorter than its text, or its text is too long")
    return message[_SIZE_BYTES:end], memoryview(message)[end:]
