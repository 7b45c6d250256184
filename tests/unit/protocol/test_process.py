"""process/*: what our additions to the reference's params and results look like on the wire."""

from __future__ import annotations

import json
import signal
from typing import Any, get_args

import msgspec
import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol.decoding import decode
from exec_server.protocol.jsonrpc import encode_notification
from exec_server.protocol.process import (
    OUTPUT,
    ListResult,
    OutputParams,
    ProcessId,
    ProcessInfo,
    ReadResult,
    Signal,
    SignalParams,
    StartParams,
    Stream,
    TtySize,
    output_pieces,
    output_text,
)

_ID = ProcessId("p")
_START = {"processId": "p", "argv": ["x"], "cwd": "file:///", "env": {}, "tty": True}


def _refusal(kind: type[SignalParams] | type[StartParams], value: object) -> str:
    with pytest.raises(InvalidParams) as caught:
        decode(kind, value)
    return caught.value.message


@pytest.mark.parametrize("name", get_args(Signal))
def test_signal_is_known_by_its_name(name: Signal) -> None:
    expected = SignalParams(_ID, name)
    assert decode(SignalParams, {"processId": "p", "signal": name}) == expected
    assert decode(SignalParams, ["p", name]) == expected
    assert name == "interrupt" or signal.Signals[name] > 0


def test_signals_are_those_of_linux_but_for_the_unused() -> None:
    names = {number.name for number in signal.Signals if number < signal.SIGRTMIN}
    assert names - set(get_args(Signal)) <= {"SIGSTKFLT", "SIGPWR", "SIGIOT", "SIGPOLL", "SIGCLD"}


@pytest.mark.parametrize("name", ["kill", "sigterm", "Sigterm", "", "15", "SIGterm"])
def test_unknown_signal_is_refused_in_the_words_of_the_reference(name: str) -> None:
    text = f"unknown variant `{name}`, expected `interrupt`"
    assert _refusal(SignalParams, {"processId": "p", "signal": name}) == text
    assert _refusal(SignalParams, {"signal": name, "processId": 5}) == text
    other = "invalid type: number, expected a string"
    assert _refusal(SignalParams, {"processId": 5, "signal": name}) == other


@pytest.mark.parametrize("name", ["TERM", "SIGFOO", "SIGRTMIN"])
def test_unknown_signal_in_capitals_is_told_the_names(name: str) -> None:
    listed = ", ".join(f"`{known}`" for known in get_args(Signal))
    text = f"unknown variant `{name}`, expected one of {listed}"
    assert _refusal(SignalParams, {"processId": "p", "signal": name}) == text


def test_size_of_the_terminal_has_a_name_but_no_place() -> None:
    size = {"rows": 1, "columns": 65_535}
    assert decode(StartParams, _START | {"ttySize": size}).tty_size == TtySize(1, 65_535)
    assert decode(StartParams, _START).tty_size is None
    text = "invalid length 0, expected struct WireExecParams with 14 elements"
    assert _refusal(StartParams, []) == text
    values: list[Any] = ["p", None, ["x"], "file:///", None, None, {}, True, False, None]
    values += [None, False, None, None]
    assert decode(StartParams, values) == decode(StartParams, _START)
    text = "invalid length 15, expected fewer elements in array"
    assert _refusal(StartParams, [*values, size]) == text


def test_loss_is_only_written_where_there_is_one() -> None:
    result = ReadResult([], 9, False, None, False, None, False)
    plain = (
        b'{"chunks":[],"nextSeq":9,"exited":false,"exitCode":null,"closed":false,'
        b'"failure":null,"sandboxDenied":false'
    )
    assert msgspec.json.encode(result) == plain + b"}"
    known = msgspec.structs.replace(result, first_seq=5, lost_bytes=7)
    assert msgspec.json.encode(known) == plain + b',"firstSeq":5,"lostBytes":7}'
    unknown = msgspec.structs.replace(result, first_seq=5)
    assert msgspec.json.encode(unknown) == plain + b',"firstSeq":5}'


@pytest.mark.parametrize("name", ["p", 'ü"\n', "100%d", "%%"])
def test_output_is_encoded_as_its_struct_would_be(name: str) -> None:
    streams: list[Stream] = ["stderr", "stdout", "pty", "stderr"]
    for seq, stream in enumerate(streams, 7):
        params = OutputParams(ProcessId(name), seq, stream, bytes(range(256)))
        [pieces] = output_pieces(params)
        assert b"".join(pieces) == encode_notification(OUTPUT, params)
        text = json.loads(output_text(params))
        assert text["params"] == {"processId": name, "seq": seq, "stream": stream}


def test_listed_process() -> None:
    listed = ProcessInfo(_ID, ["a", "b"], False, True, None, False, 3, 44)
    assert msgspec.json.encode(ListResult([listed], False)) == (
        b'{"processes":[{"processId":"p","argv":["a","b"],"tty":false,"running":true,'
        b'"exitCode":null,"closed":false,"nextSeq":3,"pid":44}],"truncated":false}'
    )
