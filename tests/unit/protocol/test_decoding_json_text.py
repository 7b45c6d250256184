"""The JSON decoder: what it accepts, its limits, and the texts for what it does not accept."""

from __future__ import annotations

import json

import pytest

from exec_server.errors import MalformedMessage
from exec_server.protocol import decoding
from exec_server.protocol.decoding import MAX_DEPTH, MAX_VALUES, describe, parse, quote

MALFORMED = [
    b"",
    b" \n",
    b"not json",
    b"nul",
    b"NaN",
    b"-Infinity",
    b"{",
    b'{"a"',
    b'{"a":1,}',
    b'{"a" 1}',
    b"{a:1}",
    b"{'a':1}",
    b'{"a":1 "b":2}',
    b'{"a":1]',
    b"[1",
    b"[1,]",
    b"[1 2]",
    b"[1}",
    b"[1,/*x*/2]",
    b"01",
    b"1.",
    b"[1e]",
    b"-",
    b"+1",
    b".5",
    b'"abc',
    b'"\\x"',
    b'"\\u12g4"',
    b'"\\ud800"',
    b'"\\ud800\\u0041"',
    b'{"\\udc00":1}',
    b'"tab\ttab"',
    b'"\x00"',
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b"\x0c1",
    b'{"id":1} x',
    b"5 5",
    b"[1e999,x]",
]


@pytest.mark.parametrize("data", MALFORMED)
def test_malformed_text_is_refused_in_every_way(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = failure(data)
    assert text
    monkeypatch.setattr(decoding, "_SHORT", -1)
    assert failure(data) == text
    monkeypatch.setattr(decoding, "_FEW_QUOTES", 0)
    assert failure(data) == text
    monkeypatch.setattr(decoding, "_STEP", 1)
    assert failure(data) == text


def failure(data: bytes) -> str:
    with pytest.raises(MalformedMessage) as caught:
        parse(data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"{a:1}", "JSON is malformed: object keys must be strings (byte 1)"),
        (b"[1", "Input data was truncated"),
        (b'"\xff"', "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"1" * 5000, "Integer value out of range"),
    ],
)
def test_malformed_text_is_worded_as_msgspec_does(data: bytes, text: str) -> None:
    assert failure(data) == text


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b'{"a":1,"a":2}', "a"),
        (b'{"a":1,"a" :2}', "a"),
        (b'{"a":1,"\\u0061":2}', "a"),
        (b'{"a":{"b":1,"b":2}}', "b"),
        (b'[{"b":1,"c":3,"b":2}]', "b"),
        (b'{"":1,"":2}', ""),
        (b'{"\\"":1,"\\"":2}', '"'),
        (b'{"\xe2\x82\xac":1,"\xe2\x82\xac":1}', "€"),
        (b'{"a":"\\u003a","a":2}', "a"),  # hidden by an escaped colon
        (b'{"a:b":1,"c":{"a:b":2},"a:b":3}', "a:b"),
        (b'{"a":{"x":1,"y":2},"a":3}', "a"),
        (b'{"a":1e999,"a":' + b"1" * 4300 + b"}", "a"),
    ],
)
def test_duplicate_member_is_named(data: bytes, name: str) -> None:
    assert failure(data) == f"duplicate JSON object key `{name}`"


ACCEPTED = [
    (b"{}", {}),
    (b" \n\t\r[ ] ", []),
    (b'{"id":1,"method":"x"}', {"id": 1, "method": "x"}),
    (b'{"a":{"a":{"a":[{"a":1},{"a":2}]}}}', {"a": {"a": {"a": [{"a": 1}, {"a": 2}]}}}),
    (b'{"a:b":"c:d","e":":"}', {"a:b": "c:d", "e": ":"}),
    (b'{"a":"\\u003a\\"","b":"\\\\"}', {"a": ':"', "b": "\\"}),
    (b'["\\u0000\\ud83d\\ude00\\/\\b\\f\\n\\r\\t"]', ["\0\U0001f600/\b\f\n\r\t"]),
    (b'"\x7f\xe2\x82\xac"', "\x7f\u20ac"),
    (b"[0,-0,-1.5e3,1E2]", [0, 0, -1500.0, 100.0]),
    (b"[true,false,null]", [True, False, None]),
    (b"18446744073709551616", 2**64),
    (b"1e999", float("inf")),
    (b"[-1e999,0,-0.0,12,true,null,false]", [float("-inf"), 0, -0.0, 12, True, None, False]),
    (b'[1e999,{"a":[],"b":{}},"\\u00e9"]', [float("inf"), {"a": [], "b": {}}, "\u00e9"]),
    (b"-" + b"1" * 4299, -int("1" * 4299)),
]


@pytest.mark.parametrize(("data", "value"), ACCEPTED)
def test_value_is_decoded(data: bytes, value: object) -> None:
    assert parse(data) == value


@pytest.mark.parametrize(("data", "value"), ACCEPTED)
def test_every_way_of_decoding_agrees(
    data: bytes, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_SHORT", -1)
    assert parse(data) == value
    monkeypatch.setattr(decoding, "_FEW_QUOTES", 0)
    assert parse(data) == value
    monkeypatch.setattr(decoding, "_STEP", 1)
    assert parse(data) == value


def test_decoding_stops_at_the_first_duplicate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of all members are looked through once, in C, and again only up to this one."""
    seen: list[int] = []
    refuse = decoding._refuse_duplicate

    def count(pairs: list[tuple[str, object]]) -> None:
        seen.append(len(pairs))
        refuse(pairs)

    monkeypatch.setattr(decoding, "_refuse_duplicate", count)
    text = failure(b'[{},{"a":0,"a":0},' + b'{"b":0,"b":0},' * 10_000 + b"0]")
    assert text == "duplicate JSON object key `a`"
    assert seen == [0, 2]


@pytest.mark.parametrize("spaces", [0, 70_000])
def test_nesting_up_to_the_limit_is_accepted(spaces: int) -> None:
    value = parse(b"[" * MAX_DEPTH + b" " * spaces + b"]" * MAX_DEPTH)
    for _ in range(MAX_DEPTH - 1):
        [value] = value  # type: ignore[misc]
    assert value == []


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 128 + b"]" * 128,
        b"[" * 127 + b" {}" + b"]" * 127,
        b"[" * 126 + b'\n\n{"a":[]}' + b"]" * 126,
        b'{"id":1,"method":"x","params":' + b"[" * 127 + b"]" * 127 + b"}",
        b"[" * 100_000,
    ],
)
def test_deeper_nesting_is_refused(data: bytes) -> None:
    assert failure(data) == "recursion limit exceeded"


def test_many_brackets_that_are_not_nested_are_accepted() -> None:
    assert parse(b'["[[[[",' + b"[]," * 200 + b"1]") == ["[[[[", *[[]] * 200, 1]


FEW = 50
LIMIT_TEXT = f"JSON-RPC message exceeds the limit of {FEW} JSON values"
FULL_ARRAY = b"[" + b"0," * (FEW - 2) + b"0"
FULL_OBJECT = b'{"a":{' + b",".join(b'"%d":0' % i for i in range(FEW - 2))


@pytest.fixture
def few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller limit, which keeps the texts readable."""
    monkeypatch.setattr(decoding, "MAX_VALUES", FEW)
    monkeypatch.setattr(decoding, "_SHORT", -1)


@pytest.mark.usefixtures("few_values")
def test_as_many_values_as_the_limit_are_accepted() -> None:
    assert parse(FULL_ARRAY + b"]") == [0] * (FEW - 1)
    assert parse(b'{"a":1,"b":"' + b"," * FEW + b'"}') == {"a": 1, "b": "," * FEW}
    assert parse(b"[" + b"{}," * (FEW - 2) + b"{}]") == [{}] * (FEW - 1)
    assert parse(b"[" + b"[ ]," * (FEW - 2) + b"[\n]]") == [[]] * (FEW - 1)
    assert parse(FULL_OBJECT + b"}}") == {"a": {str(i): 0 for i in range(FEW - 2)}}


@pytest.mark.usefixtures("few_values")
@pytest.mark.parametrize(
    "data",
    [
        FULL_ARRAY + b",1]",
        FULL_ARRAY + b", true , x]",
        FULL_ARRAY + b',"',
        FULL_OBJECT + b',"b": 1}}',
        FULL_OBJECT + b',"b":[]}}',
        b"[" + b"{}," * (FEW - 1) + b"{}]",
        b"[" + b"[0]," * FEW + b"0]",
        b"[" + b'"",' * (3 * FEW) + b'""]',
        b'"' * (4 * FEW + 1),
    ],
)
def test_one_value_more_is_refused(data: bytes) -> None:
    assert failure(data) == LIMIT_TEXT


def test_limits_are_those_of_the_reference() -> None:
    values = b"[" + b"0," * 262_142 + b"0"
    assert parse(values + b"]") == [0] * 262_143
    with pytest.raises(MalformedMessage, match=r"exceeds the limit of 262144 JSON values$"):
        parse(values + b",0]")
    assert (MAX_VALUES, MAX_DEPTH) == (262_144, 127)


def test_long_strings_are_accepted() -> None:
    value = {"path": "file:///x", "dataBase64": "QUJD" * 100_000, "text": '\\"\n:' * 30_000}
    assert parse(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("value", "plain", "buffered"),
    [
        (None, "null", "null"),
        (True, "boolean `true`", "boolean `true`"),
        (False, "boolean `false`", "boolean `false`"),
        ("x", 'string "x"', 'string "x"'),
        ([1], "sequence", "sequence"),
        ({}, "map", "map"),
        (-5, "number", "integer `-5`"),
        (1.5, "number", "floating point `1.5`"),
        (1e16, "number", "floating point `1e+16`"),
    ],
)
def test_values_are_described(value: object, plain: str, buffered: str) -> None:
    assert describe(value) == plain
    assert describe(value, buffered=True) == buffered


def test_strings_are_quoted_as_the_reference_does() -> None:
    assert quote("plain ' text") == '"plain \' text"'
    text = "\n\"'\u00a0\u0301e\u0301\u200b\0\x7f\ue000\U0001f600\\\u00fc`\t\r"
    assert quote(text) == (
        '"\\n\\"\'\\u{a0}\\u{301}e\\u{301}\\u{200b}\\0\\u{7f}\\u{e000}\U0001f600\\\\\u00fc`\\t\\r"'
    )
