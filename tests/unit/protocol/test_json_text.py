"""The JSON decoder: what it accepts, and the reference's text for what it does not."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from exec_server.errors import MalformedMessage
from exec_server.protocol import json_text
from exec_server.protocol.json_text import (
    MAX_DEPTH,
    MAX_VALUES,
    TrailingCharacters,
    describe,
    parse,
    quote,
)

# Recorded from the reference: the text, and the line and column that follow it.
MALFORMED = [
    (b"not json", "expected ident", 1, 2),
    (b"nul", "EOF while parsing a value", 1, 3),
    (b"nulx", "expected ident", 1, 4),
    (b"nux", "expected ident", 1, 3),
    (b"n", "EOF while parsing a value", 1, 1),
    (b"t", "EOF while parsing a value", 1, 1),
    (b"tru", "EOF while parsing a value", 1, 3),
    (b"trux", "expected ident", 1, 4),
    (b"fals", "EOF while parsing a value", 1, 4),
    (b"falsy", "expected ident", 1, 5),
    (b"garbage", "expected value", 1, 1),
    (b"{", "EOF while parsing an object", 1, 1),
    (b'{"', "EOF while parsing a string", 1, 2),
    (b'{"a', "EOF while parsing a string", 1, 3),
    (b'{"a"', "EOF while parsing an object", 1, 4),
    (b'{"a"  ', "EOF while parsing an object", 1, 6),
    (b'{"a":', "EOF while parsing a value", 1, 5),
    (b'{"a":1', "EOF while parsing an object", 1, 6),
    (b'{"a":1,', "EOF while parsing a value", 1, 7),
    (b'{"a":1,}', "trailing comma", 1, 8),
    (b'{"a" 1}', "expected `:`", 1, 6),
    (b"{a:1}", "key must be a string", 1, 2),
    (b'{"a":1 "b":2}', "expected `,` or `}`", 1, 8),
    (b"{,}", "key must be a string", 1, 2),
    (b"{1:2}", "key must be a string", 1, 2),
    (b'{"a":}', "expected value", 1, 6),
    (b'{"a":,}', "expected value", 1, 6),
    (b"[", "EOF while parsing a list", 1, 1),
    (b"[1", "EOF while parsing a list", 1, 2),
    (b"[1,", "EOF while parsing a value", 1, 3),
    (b"[1,]", "trailing comma", 1, 4),
    (b"[1 2]", "expected `,` or `]`", 1, 4),
    (b"[,]", "expected value", 1, 2),
    (b"]", "expected value", 1, 1),
    (b"}", "expected value", 1, 1),
    (b",", "expected value", 1, 1),
    (b":", "expected value", 1, 1),
    (b"[}", "expected value", 1, 2),
    (b"{]", "key must be a string", 1, 2),
    (b'{"a":1]', "expected `,` or `}`", 1, 7),
    (b"[1}", "expected `,` or `]`", 1, 3),
    (b"-x", "invalid number", 1, 2),
    (b"-a", "invalid number", 1, 2),
    (b"+1", "expected value", 1, 1),
    (b".5", "expected value", 1, 1),
    (b'"', "EOF while parsing a string", 1, 1),
    (b'"abc', "EOF while parsing a string", 1, 4),
    (b'"\\', "EOF while parsing a string", 1, 2),
    (b'"\\x"', "invalid escape", 1, 3),
    (b'"\\u', "EOF while parsing a string", 1, 3),
    (b'"\\u1', "EOF while parsing a string", 1, 4),
    (b'"\\u12', "EOF while parsing a string", 1, 5),
    (b'"\\u123', "EOF while parsing a string", 1, 6),
    (b'"\\ud800"', "unexpected end of hex escape", 1, 8),
    (b'"\\ud800x"', "unexpected end of hex escape", 1, 8),
    (b'"\\ud800\\', "EOF while parsing a string", 1, 8),
    (b'"\\udc00"', "lone leading surrogate in hex escape", 1, 7),
    (b'"\\udc00\\ud800"', "lone leading surrogate in hex escape", 1, 7),
    (b'"\\ud800\\u', "EOF while parsing a string", 1, 9),
    (b'"\\ud800\\u00"', "EOF while parsing a string", 1, 12),
    (b'{"a\\ud800":1}', "unexpected end of hex escape", 1, 10),
    (b'{"\\ud800":1}', "unexpected end of hex escape", 1, 9),
    (b'"tab\ttab"', "control character (\\u0000-\\u001F) found while parsing a string", 1, 5),
    (b"NaN", "expected value", 1, 1),
    (b"Infinity", "expected value", 1, 1),
    (b"-Infinity", "invalid number", 1, 2),
    (b"-NaN", "invalid number", 1, 2),
    (b"[NaN]", "expected value", 1, 2),
    (b"[-Infinity]", "invalid number", 1, 3),
    (b'{"a":1,"a":2}', "duplicate JSON object key `a`", 1, 10),
    (b'{"a":{"b":1,"b":2}}', "duplicate JSON object key `b`", 1, 15),
    (b'[{"b":1,"c":3,"b":2}]', "duplicate JSON object key `b`", 1, 17),
    (b'{"":1,"":2}', "duplicate JSON object key ``", 1, 8),
    (b'{"a`b":1,"a`b":2}', "duplicate JSON object key `a`b`", 1, 14),
    (b'{"\\"":1,"\\"":2}', 'duplicate JSON object key `"`', 1, 12),
    (b"{'a':1}", "key must be a string", 1, 2),
    (b"'a'", "expected value", 1, 1),
    (b"// c", "expected value", 1, 1),
    (b"/* c */1", "expected value", 1, 1),
    (b"[1,/*x*/2]", "expected value", 1, 4),
    (b"[tru]", "expected ident", 1, 5),
    (b"[nulL]", "expected ident", 1, 5),
    (b'{"a":tru}', "expected ident", 1, 9),
    (b'{"a":nul}', "expected ident", 1, 9),
    (b"[true,]", "trailing comma", 1, 7),
    (b'["a",]', "trailing comma", 1, 6),
    (b'["a" "b"]', "expected `,` or `]`", 1, 6),
    (b'["a":1]', "expected `,` or `]`", 1, 5),
    (b'{"a","b"}', "expected `:`", 1, 5),
    (b'{"a":1,,}', "key must be a string", 1, 8),
    (b'{"a":1,"b"}', "expected `:`", 1, 11),
    (b'{"a":1 ,  }', "trailing comma", 1, 11),
    (b"[1 ,  ]", "trailing comma", 1, 7),
    (b'{"a":01}', "invalid number", 1, 7),
    (b"[01]", "invalid number", 1, 3),
    (b"[-]", "invalid number", 1, 3),
    (b"[-,1]", "invalid number", 1, 3),
    (b'{"a":-}', "invalid number", 1, 7),
    (b"\\", "expected value", 1, 1),
    (b"[\\]", "expected value", 1, 2),
    (b"", "EOF while parsing a value", 1, 0),
    (b" ", "EOF while parsing a value", 1, 1),
    (b"\n", "EOF while parsing a value", 2, 0),
    (b"\n\n ", "EOF while parsing a value", 3, 1),
    (b"\n x", "expected value", 2, 2),
    (b'{\n"a":1,\n"a":2}', "duplicate JSON object key `a`", 3, 3),
    (b'{\n"a\n', "control character (\\u0000-\\u001F) found while parsing a string", 3, 0),
    (b'{"a":\n', "EOF while parsing a value", 2, 0),
    (b"[1,\n2\n", "EOF while parsing a list", 3, 0),
    (b"[1,\n2\nx", "expected `,` or `]`", 3, 1),
    (b"\r\nx", "expected value", 2, 1),
    (b"\xff\xfe", "expected value", 1, 1),
    (b'"a\xff', "EOF while parsing a string", 1, 3),
    (b'"a\xffbc', "EOF while parsing a string", 1, 5),
    (b'"\xc3', "EOF while parsing a string", 1, 2),
    (b'"\x00"', "control character (\\u0000-\\u001F) found while parsing a string", 1, 2),
    (b'"\x01', "control character (\\u0000-\\u001F) found while parsing a string", 1, 2),
    (b'"a\nb"', "control character (\\u0000-\\u001F) found while parsing a string", 2, 0),
    (b'"a\n\nb"', "control character (\\u0000-\\u001F) found while parsing a string", 2, 0),
    (b'"\x1f"', "control character (\\u0000-\\u001F) found while parsing a string", 1, 2),
    (b"\x00", "expected value", 1, 1),
    (b'{"a\x01":1}', "control character (\\u0000-\\u001F) found while parsing a string", 1, 4),
    (b'"\xff\x01"', "control character (\\u0000-\\u001F) found while parsing a string", 1, 3),
    (b'"\xff\\x"', "invalid escape", 1, 4),
    (b'{"\xe2\x82\xac":1,"\xe2\x82\xac":1}', "duplicate JSON object key `€`", 1, 14),
    (b'"\\n\n"', "control character (\\u0000-\\u001F) found while parsing a string", 2, 0),
    (b'"\xff\n"', "control character (\\u0000-\\u001F) found while parsing a string", 2, 0),
    (b'[\n"x\\ud800"]', "unexpected end of hex escape", 2, 9),
    (b"\x0c1", "expected value", 1, 1),
    (b"\xa01", "expected value", 1, 1),
    (b"[1,\x0c2]", "expected value", 1, 4),
    (b'"\\\n"', "invalid escape", 2, 0),
    (b"[nu\nll]", "expected ident", 2, 0),
    (b"[-\n]", "invalid number", 2, 0),
    (b"-\n", "invalid number", 2, 0),
    (b'{"a"\n1}', "expected `:`", 2, 1),
    (b"[1\n 2]", "expected `,` or `]`", 2, 2),
    (b'{"a":1,\n}', "trailing comma", 2, 1),
    (b"[1,\n]", "trailing comma", 2, 1),
    (b"\ntru", "EOF while parsing a value", 2, 3),
    (b'{"a":1,"a', "EOF while parsing a string", 1, 9),
]


@pytest.mark.parametrize(("data", "text", "line", "column"), MALFORMED)
def test_malformed_text_is_worded_as_the_reference_does(
    data: bytes, text: str, line: int, column: int
) -> None:
    assert failure(data) == f"{text} at line {line} column {column}"


def failure(data: bytes) -> str:
    with pytest.raises(MalformedMessage) as caught:
        parse(data)
    return str(caught.value)


# The reference has the same text at another column.
ELSEWHERE = [
    (b'"\\u12g4"', "invalid escape"),
    (b'"\\u123"', "invalid escape"),
    (b'"\\ud800\\n"', "unexpected end of hex escape"),
    (b'"\\ud800\\uzzzz"', "invalid escape"),
    (b'{"a":1,"a" :2}', "duplicate JSON object key `a`"),
    (b'{"a":1,"\\u0061":2}', "duplicate JSON object key `a`"),
    (b"[1.]", "invalid number"),
    (b"[1e]", "invalid number"),
    (b"[1.e5]", "invalid number"),
    (b"\xef\xbb\xbf{}", "expected value"),
    (b'"\xff"', "invalid unicode code point"),
    (b'"\xc3"', "invalid unicode code point"),
    (b'"\xed\xa0\x80"', "invalid unicode code point"),
    (b'{"\xff":1}', "invalid unicode code point"),
    (b'{"a":"\xff"}', "invalid unicode code point"),
    (b'"\\n\xff"', "invalid unicode code point"),
    (b'"\\u00\n0"', "invalid escape"),
    (b"\xc2\xa01", "expected value"),
    (b"[1.\n]", "invalid number"),
    (b"[1e\n]", "invalid number"),
]


@pytest.mark.parametrize(("data", "text"), ELSEWHERE)
def test_malformed_text_is_worded_as_the_reference_does_but_for_the_column(
    data: bytes, text: str
) -> None:
    assert re.fullmatch(re.escape(text) + r" at line \d+ column \d+", failure(data))


# Where a text breaks two rules, or a number is cut off, the reference names another mistake.
WORDED_OTHERWISE = [
    (b"-", "invalid number at line 1 column 1"),
    (b"01", "trailing characters at line 1 column 2"),
    (b"1.", "trailing characters at line 1 column 2"),
    (b'"\\ud800\\u0041"', "unexpected end of hex escape at line 1 column 8"),
    (b'{"a":1,"a"', "EOF while parsing an object at line 1 column 10"),
    (b'{"a":1,"a"x', "expected `:` at line 1 column 11"),
    (b'["\xff",x', "expected value at line 1 column 6"),
    (b"[" * 130, "EOF while parsing a list at line 1 column 130"),
]


@pytest.mark.parametrize(("data", "text"), WORDED_OTHERWISE)
def test_malformed_text_with_words_of_ours(data: bytes, text: str) -> None:
    assert failure(data) == text


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
    (b"1" * 5000, float("inf")),
    (b"-" + b"1" * 4299, -int("1" * 4299)),
]


@pytest.mark.parametrize(("data", "value"), ACCEPTED)
def test_value_is_decoded(data: bytes, value: object) -> None:
    assert parse(data) == value


def refuse(data: bytes) -> object:
    raise msgspec.DecodeError


@pytest.mark.parametrize(("data", "value"), ACCEPTED)
def test_every_way_of_decoding_agrees(
    data: bytes, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_text, "_SHORT", -1)
    assert parse(data) == value
    monkeypatch.setattr(json_text, "_FEW_QUOTES", 0)
    assert parse(data) == value
    monkeypatch.setattr(json_text, "_STEP", 1)
    assert parse(data) == value
    monkeypatch.setattr(json_text, "_decode", refuse)
    assert parse(data) == value


@pytest.mark.parametrize(
    ("data", "text"),
    [(data, text) for data, text, _, _ in MALFORMED] + ELSEWHERE + WORDED_OTHERWISE,
)
def test_long_malformed_text_is_refused_the_same_way(
    data: bytes, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = failure(data)
    assert expected.startswith(text)
    monkeypatch.setattr(json_text, "_SHORT", -1)
    assert failure(data) == expected
    monkeypatch.setattr(json_text, "_FEW_QUOTES", 0)
    assert failure(data) == expected
    monkeypatch.setattr(json_text, "_STEP", 1)
    assert failure(data) == expected


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (b'"a', "EOF while parsing a string"),
        (b"1", "EOF while parsing a value"),
        (b'"\\ud800"]', "EOF while parsing a value"),
        (b"1] x", "trailing characters"),
        (b"1e999]", "number out of range"),
        (b'"\xff"]', "invalid unicode code point"),
        (b"[" * 2_000 + b"]" * 2_001, "recursion limit exceeded"),
        (b'"\\q"]', "invalid escape"),
        (b"nul]", "expected value"),
        (b'"\\u12"]', "invalid escape"),
        (b'"\\udc00"]', "lone leading surrogate in hex escape"),
        (b"1,]", "trailing comma"),
        (b"1 2]", "expected `,` or `]`"),
        (b'{"a" 1}]', "expected `:`"),
        (b'{"a":1 "b":2}]', "expected `,` or `}`"),
        (b"{1:2}]", "key must be a string"),
        (b"1.]", "invalid number"),
    ],
)
def test_long_malformed_text_is_not_decoded_again(
    end: bytes, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(json_text, "_decode_slowly")
    start = b'["' + b"a" * 65_536 + b'",'
    assert re.fullmatch(rf"{re.escape(text)} at line 1 column 65\d+", failure(start + end))


def test_decoding_stops_at_the_first_duplicate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of all members are looked through once, in C, and again only up to this one."""
    seen: list[int] = []
    refuse = json_text._refuse_duplicate

    def count(pairs: list[tuple[str, object]]) -> None:
        seen.append(len(pairs))
        refuse(pairs)

    monkeypatch.setattr(json_text, "_refuse_duplicate", count)
    text = failure(b'[{},{"a":0,"a":0},' + b'{"b":0,"b":0},' * 10_000 + b"0]")
    assert text == "duplicate JSON object key `a` at line 1 column 14"
    assert seen == [0, 2]


def test_one_long_integer_leaves_the_others_exact() -> None:
    assert parse(b'{"id":7,"x":' + b"1" * 5000 + b"}") == {"id": 7, "x": float("inf")}


def test_duplicate_name_that_cannot_be_sent_is_replaced() -> None:
    text = failure(b'{"a":{"\\ud800":1,"\\ud800":2},"a":1}')
    assert text.startswith("duplicate JSON object key `?` at line 1 column ")


def test_duplicate_hidden_by_an_escaped_colon_is_found() -> None:
    with pytest.raises(
        MalformedMessage, match=r"^duplicate JSON object key `a` at line 1 column 17"
    ):
        parse(b'{"a":"\\u003a","a":2}')


def test_duplicate_with_a_colon_in_its_name_is_found() -> None:
    with pytest.raises(MalformedMessage, match=r"^duplicate JSON object key `a:b` at"):
        parse(b'{"a:b":1,"c":{"a:b":2},"a:b":3}')


def test_dropped_object_counts_as_a_duplicate() -> None:
    with pytest.raises(MalformedMessage, match=r"^duplicate JSON object key `a` at"):
        parse(b'{"a":{"x":1,"y":2},"a":3}')


@pytest.mark.parametrize(
    ("data", "value", "text"),
    [
        (b'{"id":1} x', {"id": 1}, "trailing characters at line 1 column 10"),
        (b'{"id":1}\n\n  ,', {"id": 1}, "trailing characters at line 3 column 3"),
        (b"5 5", 5, "trailing characters at line 1 column 3"),
        (b"1.5.5", 1.5, "trailing characters at line 1 column 4"),
        (b"0x10", 0, "trailing characters at line 1 column 2"),
        (b'"\xe2\x82\xac"x', "\u20ac", "trailing characters at line 1 column 6"),
    ],
)
def test_trailing_characters_come_with_the_value(data: bytes, value: object, text: str) -> None:
    with pytest.raises(TrailingCharacters) as caught:
        parse(data)
    assert caught.value.value == value
    assert str(caught.value) == text


@pytest.mark.parametrize("spaces", [0, 70_000])
def test_nesting_up_to_the_limit_is_accepted(spaces: int) -> None:
    value = parse(b"[" * MAX_DEPTH + b" " * spaces + b"]" * MAX_DEPTH)
    for _ in range(MAX_DEPTH - 1):
        [value] = value  # type: ignore[misc]
    assert value == []


@pytest.mark.parametrize(
    ("data", "position"),
    [
        (b"[" * 128 + b"]" * 128, "line 1 column 128"),
        (b"[" * 127 + b" {}" + b"]" * 127, "line 1 column 129"),
        (b"[" * 127 + b"{}" + b"]" * 127, "line 1 column 128"),
        (b"[" * 126 + b'\n\n{"a":[]}' + b"]" * 126, "line 3 column 6"),
        (b"[" * 30_000, "line 1 column 128"),
        (b"[" * 100_000, "line 1 column 128"),
        (b'{"id":1,"method":"x","params":' + b"[" * 127 + b"]" * 127 + b"}", "line 1 column 157"),
    ],
)
def test_deeper_nesting_is_refused(data: bytes, position: str) -> None:
    with pytest.raises(MalformedMessage, match=f"^recursion limit exceeded at {position}$"):
        parse(data)


def test_many_brackets_that_are_not_nested_are_accepted() -> None:
    assert parse(b'["[[[[",' + b"[]," * 200 + b"1]") == ["[[[[", *[[]] * 200, 1]


FEW = 50
LIMIT_TEXT = f"JSON-RPC message exceeds the limit of {FEW} JSON values"
FULL_ARRAY = b"[" + b"0," * (FEW - 2) + b"0"
FULL_OBJECT = b'{"a":{' + b",".join(b'"%d":0' % i for i in range(FEW - 2))


@pytest.fixture
def few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller limit, which keeps the texts readable."""
    monkeypatch.setattr(json_text, "MAX_VALUES", FEW)
    monkeypatch.setattr(json_text, "_SHORT", -1)


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
    assert failure(data) == f"{LIMIT_TEXT} at line 1 column {len(data)}"


def test_limits_are_those_of_the_reference() -> None:
    values = b"[" + b"0," * 262_142 + b"0"
    assert parse(values + b"]") == [0] * 262_143
    with pytest.raises(MalformedMessage, match=r"exceeds the limit of 262144 JSON values at"):
        parse(values + b",0]")
    assert (MAX_VALUES, MAX_DEPTH) == (262_144, 127)


def test_long_strings_are_accepted() -> None:
    value = {"path": "file:///x", "dataBase64": "QUJD" * 100_000, "text": '\\"\n:' * 30_000}
    assert parse(json.dumps(value).encode()) == value


def test_long_text_with_an_error_is_refused() -> None:
    with pytest.raises(MalformedMessage, match=r"^invalid escape at line 1 column 2000\d\d$"):
        parse(b'["' + b"\\n" * 100_000 + b'\\ux"]' + b" " * 100_000)
    with pytest.raises(MalformedMessage, match=r"^EOF while parsing a string at"):
        parse(b'["' + b"x" * 100_000)


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
