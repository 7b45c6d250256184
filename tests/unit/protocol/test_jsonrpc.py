"""The envelope: which texts are messages, the error for all others, and the encoded forms."""

from __future__ import annotations

import json

import msgspec
import pytest

from exec_server.errors import InvalidRequest, MalformedMessage
from exec_server.protocol import jsonrpc
from exec_server.protocol.decoding import MAX_DEPTH, Notice
from exec_server.protocol.jsonrpc import Message, Notification, Request, RpcResponse
from exec_server.protocol.process import ClosedParams, ProcessId


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"id":1,"method":"m","params":{"a":1}}', Request(1, "m", {"a": 1})),
        (b'{"id":"","method":"m"}', Request("", "m", None)),
        (b'{"jsonrpc":"2.0","id":-9223372036854775808,"method":"m"}', Request(-(2**63), "m", None)),
        (b'{"id":1,"method":"m","trace":null}', Request(1, "m", None)),
        (
            b'{"id":1,"method":"m","params":[],"trace":{"traceparent":"p","tracestate":null}}',
            Request(1, "m", []),
        ),
        (b'{"method":"initialized"}', Notification("initialized", None)),
        (b'{"method":"m","params":5,"unknown":true}', Notification("m", 5)),
        (b'{"id":7,"result":null}', RpcResponse(7)),
        (b'{"id":"x","error":{"code":-1,"message":"no","data":[1]}}', RpcResponse("x")),
    ],
)
def test_message(data: bytes, message: Message) -> None:
    assert jsonrpc.decode(data) == message


_LONG = "x" * MAX_DEPTH  # too long to be flat by its length alone
_FEW = {str(number): _LONG for number in range(8)}


@pytest.mark.parametrize(
    "params",
    [_FEW, {**_FEW, "more": ""}, {"a": [{}], "b": _LONG}, [_LONG], [[[_LONG]]], {"a": [[]] * 200}],
    ids=["few", "many", "nested", "list", "nested-list", "containers"],
)
def test_params_of_every_shape_are_kept(params: object) -> None:
    data = msgspec.json.encode({"id": 1, "method": "m", "params": params})
    assert jsonrpc.decode(data) == Request(1, "m", params)


def test_a_short_request_that_is_nested_too_deep_is_refused() -> None:
    params = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)
    with pytest.raises(MalformedMessage, match="recursion limit exceeded"):
        jsonrpc.decode(f'{{"id":1,"method":"m","params":{params}}}'.encode())


ID = "data did not match any variant of untagged enum RequestId"
STRING = "expected a string"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"[]", "expected a JSON-RPC object"),
        (b"5", "expected a JSON-RPC object"),
        (b"{}", "missing field `error`"),
        (b'{"id":1}', "missing field `error`"),
        (b'{"id":null,"method":"m"}', ID),
        (b'{"id":true,"method":"m"}', ID),
        (b'{"id":1.0,"method":"m"}', ID),
        (b'{"id":9223372036854775808,"method":"m"}', ID),
        (b'{"id":1,"method":5}', f"invalid type: number, {STRING}"),
        (b'{"id":1,"method":null}', f"invalid type: null, {STRING}"),
        (
            b'{"id":1,"method":"m","trace":"x"}',
            'invalid type: string "x", expected struct W3cTraceContext',
        ),
        (b'{"id":1,"method":"m","trace":{"tracestate":5}}', f"invalid type: number, {STRING}"),
        (b'{"result":1}', "missing field `id`"),
        (b'{"id":[],"result":1}', ID),
        (b'{"id":1,"error":5}', "invalid type: number, expected struct JSONRPCErrorError"),
        (b'{"id":1,"error":{"code":"x"}}', 'invalid type: string "x", expected i64'),
        (b'{"id":1,"error":{"code":1,"message":2}}', f"invalid type: number, {STRING}"),
        (b'{"id":1,"error":{"message":"no"}}', "missing field `code`"),
        (b'{"id":1,"error":{"code":1}}', "missing field `message`"),
        (b'{"error":{"code":1,"message":"no"}}', "missing field `id`"),
        (b'{"id":1,"method":"m"} x', "JSON is malformed: trailing characters (byte 23)"),
        (b"x", "JSON is malformed: invalid character (byte 0)"),
    ],
)
def test_malformed_message(data: bytes, text: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        jsonrpc.decode(data)
    assert str(caught.value) == text


def test_result() -> None:
    assert jsonrpc.encode_result(5, b'{"a":1}') == b'{"id":5,"result":{"a":1}}'
    start, end = jsonrpc.result_frame("a\n")
    assert start + b"[]" + end == b'{"id":"a\\n","result":[]}'


def test_error() -> None:
    error = InvalidRequest('no "x"')
    text = b'{"error":{"code":-32600,"message":"no \\"x\\""},"id":%b}'
    assert jsonrpc.encode_error("r", error) == text % b'"r"'
    assert jsonrpc.encode_error(None, error) == text % b"-1"


def test_error_with_data() -> None:
    error = InvalidRequest("no")
    error.data = {"why": [1, None]}
    assert jsonrpc.encode_error(0, error) == (
        b'{"error":{"code":-32600,"message":"no","data":{"why":[1,null]}},"id":0}'
    )


def test_notification() -> None:
    notice = Notice("process/closed", ClosedParams)
    assert jsonrpc.encode_notification(notice, ClosedParams(ProcessId("p"), 3)) == (
        b'{"method":"process/closed","params":{"processId":"p","seq":3}}'
    )


def test_errors_with_names_that_are_not_utf8() -> None:
    """An error that cannot be encoded would be no answer at all."""
    error = InvalidRequest("denied: /x\udcff")
    error.data = {"a\udcfe": ["/x\udcff", 1, None], "struct": Request(1, "\udcff")}
    assert json.loads(jsonrpc.encode_error(5, error)) == {
        "error": {
            "code": -32600,
            "message": "denied: /x\ufffd",
            "data": {"a\ufffd": ["/x\ufffd", 1, None], "struct": {"id": 1, "method": "\ufffd"}},
        },
        "id": 5,
    }
