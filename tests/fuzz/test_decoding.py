"""Any bytes give a JSON value or a documented error, whichever way they are decoded."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.errors import MalformedMessage
from exec_server.protocol import decoding

TEXTS = re.compile(
    r"JSON is malformed: .* \(byte \d+\)|Input data was truncated|'utf-8' codec can't decode .*"
    r"|recursion limit exceeded|duplicate JSON object key `.*`",
    re.DOTALL,
)

# Pieces that meet in ways random bytes hardly ever do.
PIECES = st.sampled_from(
    [
        *(bytes([byte]) for byte in b'{}[],:" \n\t\\x-.e0\x01\xff'),
        b'"a":',
        b'"b":',
        b'"\\u0061":',
        b'"a"',
        b'"\\ud83d\\ude00"',
        b"\\ud800",
        b"\\u00",
        b"1.5e3",
        b"1e999",
        b"true",
        b"nul",
        b"\xc3\xa9",
        b'{"a":1}',
        b"[1,2]",
        b'":"',
    ]
)
TEXT = st.binary(max_size=40) | st.lists(PIECES, max_size=20).map(b"".join)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def outcome(data: bytes) -> tuple[str, Any]:
    try:
        return ("value", decoding.parse(data))
    except MalformedMessage as error:
        return ("error", str(error))


class _DuplicateError(ValueError):
    pass


def _members(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) < len(pairs):
        raise _DuplicateError
    return dict(pairs)


def _no_constant(name: str) -> object:
    raise ValueError(name)


def standard_outcome(data: bytes) -> tuple[str, Any] | None:
    """What the standard library makes of it, with the rules it leaves out added."""
    try:
        text = data.decode()
        value = json.loads(text, object_pairs_hook=_members, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # Fails if there is a lone surrogate.
    except ValueError:
        return None
    return ("value", value)


@given(TEXT)
def test_any_bytes_give_a_value_or_a_documented_error(data: bytes) -> None:
    kind, content = outcome(data)
    if kind == "error":
        assert TEXTS.fullmatch(content), content


@given(TEXT)
def test_the_standard_library_agrees(data: bytes) -> None:
    ours = outcome(data)
    expected = standard_outcome(data)
    if expected is None:
        assert ours[0] == "error"
    else:
        assert ours == expected


@given(JSON_VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_written_values_come_back(value: object, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert decoding.parse(text.encode()) == value


@given(TEXT | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
def test_every_way_of_decoding_agrees(data: bytes) -> None:
    expected = outcome(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "_SHORT", -1)
        assert outcome(data) == expected
        patch.setattr(decoding, "_FEW_QUOTES", 0)
        assert outcome(data) == expected
