"""http/request on the wire."""

from __future__ import annotations

import msgspec
import pytest

from exec_server.protocol.decoding import decode
from exec_server.protocol.http import (
    BodyDeltaParams,
    Header,
    RequestParams,
    RequestResult,
    encode_body_delta,
)


@pytest.mark.parametrize(
    "params",
    [
        BodyDeltaParams('é"', 1, b"\x00\xff1", False, None),
        BodyDeltaParams("", 2**40, b"", True, 'broken "here"'),
    ],
)
def test_delta_is_written_as_a_struct_would_be(params: BodyDeltaParams) -> None:
    text = encode_body_delta(params)
    assert text == msgspec.json.encode(params)
    assert msgspec.json.decode(text, type=BodyDeltaParams) == params


def test_what_may_be_left_out() -> None:
    params = decode(RequestParams, {"method": "GET", "url": "u", "requestId": "r"})
    assert params == decode(RequestParams, ["GET", "u", [], None, None, "follow", "r"])
    assert (params.headers, params.redirect_policy, params.stream_response) == ([], "follow", False)
    assert decode(Header, ["A", "v"]) == Header("A", "v", None)


def test_result_is_read_as_it_is_written() -> None:
    result = RequestResult(200, [], b"\x00body")
    assert msgspec.json.decode(msgspec.json.encode(result), type=RequestResult) == result
