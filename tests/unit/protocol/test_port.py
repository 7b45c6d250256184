"""port/* on the wire."""

from __future__ import annotations

import msgspec
import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol.decoding import decode
from exec_server.protocol.port import (
    AcceptedNotice,
    CreditNotice,
    CreditParams,
    DataNotice,
    DataParams,
    ListenerId,
    ListenParams,
    ListenResult,
    OpenParams,
    OpenResult,
    ProbeParams,
    StreamId,
    encode_data,
)


@pytest.mark.parametrize(
    "params", [DataNotice(StreamId('é"'), b"\x00\xff1"), DataNotice(StreamId(""), b"")]
)
def test_data_is_written_as_a_struct_would_be(params: DataNotice) -> None:
    text = encode_data(params)
    assert text == msgspec.json.encode(params)
    assert msgspec.json.decode(text, type=DataNotice) == params


def test_a_host_may_be_left_out() -> None:
    params = decode(OpenParams, {"streamId": "s", "port": 80, "window": 7})
    assert params == decode(OpenParams, ["s", 80, 7]) == OpenParams(StreamId("s"), 80, 7, None)
    assert decode(ProbeParams, [80]) == ProbeParams(80, None)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (OpenParams, {"streamId": "s", "port": 0, "window": 7}),
        (OpenParams, {"streamId": "s", "port": 65_536, "window": 7}),
        (OpenParams, {"streamId": "s", "port": 1, "window": -1}),
        (CreditParams, {"streamId": "s", "bytes": 2**32}),
        (DataParams, {"streamId": "s", "chunk": "*"}),
    ],
)
def test_numbers_and_data_are_checked(kind: type[OpenParams], params: object) -> None:
    with pytest.raises(InvalidParams):
        decode(kind, params)


def test_any_free_port_may_be_listened_on() -> None:
    assert decode(ListenParams, ["l", 0]) == ListenParams(ListenerId("l"), 0)


@pytest.mark.parametrize(
    ("kind", "member", "highest", "others"),
    [
        (AcceptedNotice, "window", 2**32 - 1, {"listenerId": "l", "streamId": "s"}),
        (CreditNotice, "bytes", 2**32 - 1, {"streamId": "s"}),
        (OpenResult, "window", 2**32 - 1, {}),
        (ListenResult, "port", 65_535, {}),
    ],
)
def test_numbers_of_the_server_are_checked(
    kind: type[msgspec.Struct], member: str, highest: int, others: dict[str, str]
) -> None:
    for number in (0, highest):
        text = msgspec.json.encode({**others, member: number})
        assert getattr(msgspec.json.decode(text, type=kind), member) == number
    for number in (-1, highest + 1):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode({**others, member: number}), type=kind)
