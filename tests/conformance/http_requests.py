"""http/request as the tests ask for it, with answers at once or as a stream of deltas."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.support.client import Client, Message

INVALID_PARAMS = -32602
INTERNAL = -32603
MIB = 1024 * 1024
BROKEN = "error decoding response body"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


def only_ours(kind: str, reason: str) -> None:
    """Skip the rest of a test whose behaviour the reference lacks."""
    if kind != "ours":
        pytest.skip(f"by choice only ours does this: {reason}")


def params_for(url: str, **params: Any) -> Message:
    """Params of a request, by default a GET."""
    return {"method": "GET", "url": url, "requestId": "r"} | params


def ask(client: Client, url: str, **params: Any) -> Message:
    """The answer to a request."""
    result: Message = client.call("http/request", params_for(url, **params))
    return result


def failure_of(client: Client, url: str, **params: Any) -> tuple[int, str]:
    """Code and text of the error that answers a request."""
    return client.failure("http/request", params_for(url, **params))


def header_list(*lines: tuple[str, str]) -> list[Message]:
    """Headers as they are in params and answers."""
    return [{"name": name, "value": value} for name, value in lines]


def streamed(client: Client, url: str, **params: Any) -> tuple[Message, list[Message]]:
    """The head of a streamed answer, and its deltas up to the last."""
    wanted = params_for(url, streamResponse=True, **params)
    head: Message = client.call("http/request", wanted)
    return head, deltas_of(client, wanted["requestId"])


def deltas_of(client: Client, request_id: str) -> list[Message]:
    """The deltas of a stream up to the last, taken out of the notifications."""

    def is_last(notice: Message) -> bool:
        params = notice["params"]
        return bool(params["requestId"] == request_id and params["done"])

    client.wait_for(is_last)
    mine = [n for n in client.notifications if n["params"]["requestId"] == request_id]
    client.notifications[:] = [n for n in client.notifications if n not in mine]
    assert {notice["method"] for notice in mine} == {"http/request/bodyDelta"}
    return [notice["params"] for notice in mine]


def body_of(deltas: list[Message]) -> bytes:
    """The body in some deltas, after checking the rules of every stream."""
    assert [delta["seq"] for delta in deltas] == list(range(1, len(deltas) + 1))
    assert [delta["done"] for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    pieces = [base64.b64decode(delta["deltaBase64"], validate=True) for delta in deltas]
    assert pieces[-1] == b""
    assert all(0 < len(piece) <= MIB for piece in pieces[:-1])
    assert not any(delta["error"] for delta in deltas[:-1])
    return b"".join(pieces)
