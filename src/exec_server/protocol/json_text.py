"""One JSON text in, one Python value out, with the reference's rules and error texts.

Fast path: msgspec decodes, and counting characters outside of strings proves that the text keeps
the rules that msgspec does not check (duplicate members, nesting, number of values). Texts that
msgspec rejects or that are not proven are decoded again by the standard library, whose errors
are reworded as the reference words them. Lines and columns are those of the reference in most
cases; clients need not rely on them. The fast path takes a third of the time of the standard
library (`python -m bench.alternatives`).
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import NoReturn

import msgspec

from exec_server.errors import MalformedMessage

# The limits of the reference for one message; both are on the wire as error texts, and they
# keep a message of 64 MiB from becoming gigabytes of Python objects.
MAX_VALUES = 262_144
MAX_DEPTH = 127

# Up to this size, encoding the value again is the cheapest proof. A value takes at least one
# byte, so short texts never have too many of them.
_SHORT = 65_536

# Longer texts that msgspec rejects are not decoded again for an exact error text, which takes up
# to a second for each MiB, and several times the memory of the text.
_LONG = 65_536

_MAX_INTEGER_DIGITS = 4_300

# Up to this number of quotes, finding each one is faster than splitting a large text.
_FEW_QUOTES = 1_000
# Bytes that are split at a time: other threads wait for the interpreter's lock meanwhile.
_STEP = 65_536

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class TrailingCharacters(MalformedMessage):
    """A whole value is followed by more text; the reference looks at `value` first."""

    def __init__(self, message: str, value: object) -> None:
        super().__init__(message)
        self.value = value


def parse(data: bytes) -> object:
    """Decode one JSON text, or raise MalformedMessage with the reference's text.

    Integers are exact, other numbers are floats (`1e999` is infinity).
    """
    if len(data) <= _SHORT:
        try:
            value = _decode(data)
            again = _encode(value)
            # Most clients write without spaces, as the encoder does: then nothing was lost.
            if again == data and (len(data) <= MAX_DEPTH or has_few_containers(data)):
                return value
            # Without \u escapes decoding a string neither adds nor removes colons, so a member
            # that its duplicate has overwritten is a colon missing from the encoded value.
            if (
                b"\\u" not in data
                and again.count(b":") == data.count(b":")
                and has_few_containers(data)
            ):
                return value
        except _UNDECODABLE:
            return _decode_slowly(data)
    return _decode_long(data)


def has_few_containers(data: bytes) -> bool:
    """Whether there are too few containers for nesting above the limit."""
    return data.count(b"[") + data.count(b"{") <= MAX_DEPTH


def _decode_long(data: bytes) -> object:
    """Decode with msgspec too, after checking the number of values before any is built."""
    outside = _outside_strings(data)
    if _has_too_many_values(outside):
        raise _too_many_values(data)
    try:
        value = _decode(data)
    except _UNDECODABLE as error:
        if len(data) > _LONG:
            _fail_long(error, data)
        return _decode_slowly(data)
    members = _members_within_depth(value)
    if members != outside.count(b":"):
        _fail_members(members, data.decode())
    return value


def _fail_long(error: Exception, data: bytes) -> NoReturn:
    """Raise the error for a long text from the text and the position that msgspec reports."""
    if isinstance(error, RecursionError):
        _fail_members(-1, data.decode("utf-8", "surrogateescape"))
    reported = str(error)
    position = _find_position(reported)
    at = int(position[1]) + 1 if position else len(data)
    message = next((ours for theirs, ours in _LONG_ERRORS if theirs in reported), "expected value")
    if message == _EOF_IN_VALUE and _without_escapes(data).count(b'"') % 2:
        message = "EOF while parsing a string"
    raise MalformedMessage(_located(message, data[:at])) from None


def _without_escapes(data: bytes) -> bytes:
    """The text without escaped backslashes and quotes."""
    # Backslashes pair up from the left of a run, so after removing the pairs a backslash before a
    # quote is the escape of that quote.
    return data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data


def _outside_strings(data: bytes) -> bytes:
    """The text with `"` in the place of each string, up to the first one that does not end."""
    data = _without_escapes(data)
    quotes = data.count(b'"')
    if quotes > 4 * MAX_VALUES:
        raise _too_many_values(data)  # each string is a value or the name of one
    if quotes > _FEW_QUOTES:
        return b"".join(_outside_steps(data))
    # Few strings are skipped, not copied: one may hold megabytes of base64.
    pieces = []
    start = 0
    while (end := data.find(b'"', start)) >= 0:
        pieces.append(data[start:end])
        start = data.find(b'"', end + 1) + 1
        if start == 0:
            return b'"'.join([*pieces, b""])
    pieces.append(data[start:])
    return b'"'.join(pieces)


def _outside_steps(data: bytes) -> Iterator[bytes]:
    """The result of `_outside_strings` in steps, none of which takes long."""
    is_inside = False
    for start in range(0, len(data), _STEP):
        parts = data[start : start + _STEP].split(b'"')
        if is_inside:
            parts[0] = b""
            yield b'"'.join(parts[:1] + parts[1::2])
        else:
            yield b'"'.join(parts[::2])
        is_inside ^= len(parts) % 2 == 0


def _has_too_many_values(outside: bytes) -> bool:
    """Whether there are too many values, names of members excluded."""
    # A value is the outermost one, the first of its container, or follows a comma.
    count = 1 + outside.count(b",") + outside.count(b"[") + outside.count(b"{")
    if count > MAX_VALUES:
        outside = outside.translate(None, b" \t\n\r")
        count -= outside.count(b"[]") + outside.count(b"{}")
    return count > MAX_VALUES


def _too_many_values(data: bytes) -> MalformedMessage:
    text = f"JSON-RPC message exceeds the limit of {MAX_VALUES} JSON values"
    return MalformedMessage(_located(text, data))


def _members_within_depth(value: object) -> int:
    """The number of members of all objects in `value`, or -1 if it is nested too deep."""
    members = 0
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for container in level:
            if type(container) is dict:
                members += len(container)
                inner += [v for v in container.values() if type(v) is dict or type(v) is list]
            elif type(container) is list:
                inner += [v for v in container if type(v) is dict or type(v) is list]
        if not inner:
            return members
        level = inner
    return -1


# ---- slow path ------------------------------------------------------------------------


class _Constant(Exception):
    """A NaN or Infinity, which the standard library would accept."""


def _refuse_constant(name: str) -> NoReturn:
    raise _Constant


def _integer(text: str) -> int | float:
    # Python refuses longer integers. No type of the wire holds one, so infinity does as well.
    return int(text) if len(text) <= _MAX_INTEGER_DIGITS else float(text)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_LONG_NUMBER_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_integer)

_STRING = r'"(?:[^"\\]|\\.)*+"'
_find_tokens = partial(re.finditer, rf"{_STRING}|([\[{{])|(-?)(?:NaN|Infinity)")
_EOF_IN_VALUE = "EOF while parsing a value"
# Parts of msgspec's errors, and the reference's text for the same fault.
_LONG_ERRORS = (
    ("truncated", _EOF_IN_VALUE),
    ("trailing characters", "trailing characters"),
    ("trailing comma", "trailing comma"),
    ("expected ':'", "expected `:`"),
    ("expected ',' or ']'", "expected `,` or `]`"),
    ("expected ',' or '}'", "expected `,` or `}`"),
    ("keys must be strings", "key must be a string"),
    ("invalid number", "invalid number"),
    ("out of range", "number out of range"),
    ("utf-8", "invalid unicode code point"),
    ("surrogate pair", "lone leading surrogate in hex escape"),
    ("escape", "invalid escape"),
)
_find_position = partial(re.search, r"\(byte (\d+)\)")
_find_broken_byte = partial(re.search, r"[\udc80-\udcff]")
_skip_space = re.compile(r"[ \t\n\r]*").match
_CONTROL = "control character (\\u0000-\\u001F) found while parsing a string"
_LITERALS = {"n": "null", "t": "true", "f": "false"}


def _decode_slowly(data: bytes) -> object:
    """Decode with the standard library; raises MalformedMessage for all that is not allowed."""
    # Bytes that are not UTF-8 become lone surrogates, so that errors before them come first.
    text = data.decode("utf-8", "surrogateescape")
    try:
        value, end = _raw_decode(text)
    except json.JSONDecodeError as error:
        _fail(*_worded(error), text)
    except _Constant:
        token = next(token for token in _find_tokens(text) if token[2] is not None)
        _fail("invalid number" if token[2] else "expected value", token.end(2) + 1, text)
    except RecursionError:
        _fail_members(-1, text)
    members = _members_within_depth(value)
    if members != _outside_strings(_encoded(text[:end])).count(b":"):
        _fail_members(members, text[:end])
    _check_strings(value, text[:end])
    after = _end_of_space(text, end)
    if after < len(text):
        where = _encoded(text[: after + 1])
        raise TrailingCharacters(_located("trailing characters", where), value)
    return value


def _fail_members(members: int, text: str) -> NoReturn:
    """Raise the error for nesting above the limit (-1 members), or else for a duplicate."""
    if members < 0:
        brackets = (token.end() for token in _find_tokens(text) if token[1])
        # Exact if no container ends before the one that is nested too deep.
        _fail("recursion limit exceeded", next(islice(brackets, MAX_DEPTH, None)), text)
    name = ""
    try:
        json.JSONDecoder(parse_int=_integer, object_pairs_hook=_refuse_duplicate).decode(text)
    except _DuplicateError as duplicate:
        name = duplicate.name.encode(errors="replace").decode()  # half a pair cannot be sent
    _fail(f"duplicate JSON object key `{name}`", _second_end(text, name), text)


class _DuplicateError(Exception):
    """The first object with two members of the same name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _refuse_duplicate(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise _DuplicateError(Counter(name for name, _ in pairs).most_common(1)[0][0])


def _raw_decode(text: str) -> tuple[object, int]:
    """The value at the start of the text, and the end of it."""
    start = _end_of_space(text, 0)
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return _LONG_NUMBER_DECODER.raw_decode(text, start)


def _check_strings(value: object, text: str) -> None:
    """Raise MalformedMessage if a string holds a byte that is not UTF-8, or half a pair."""
    if broken := _find_broken_byte(text):
        _fail("invalid unicode code point", broken.end(), text)
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            is_leading = half < "\udc00"
            wording = "unexpected end of hex" if is_leading else "lone leading surrogate in hex"
            at = text.lower().index(f"\\u{ord(half):x}")
            _fail(f"{wording} escape", at + 6 + is_leading, text)


def _worded(error: json.JSONDecodeError) -> tuple[str, int]:
    """The reference's text for a syntax error, and how many characters it has read then."""
    text, at, expected = error.doc, error.pos, error.msg
    if expected.startswith("Unterminated string"):
        return "EOF while parsing a string", len(text)
    if expected.startswith("Invalid control"):
        return _CONTROL, at + 1
    if expected.startswith("Invalid \\u"):
        is_cut_off = len(text) < at + 5
        return ("EOF while parsing a string", len(text)) if is_cut_off else ("invalid escape", at)
    if expected.startswith("Invalid"):
        return "invalid escape", at + 2
    before, found = text[:at].rstrip(" \t\n\r")[-1:], text[at : at + 1]
    if not found:
        return f"EOF while parsing {_unfinished(error, before)}", at
    # Up to Python 3.12 the position is that of the bracket, then that of the comma.
    if (before == "," and found in "]}") or expected.startswith("Illegal trailing comma"):
        return "trailing comma", _end_of_space(text, at + (found == ",")) + 1
    if expected.startswith("Expecting value"):
        return _worded_value(text, at)
    if expected.startswith("Expecting property name"):
        return "key must be a string", at + 1
    if expected.startswith("Expecting ':'"):
        return "expected `:`", at + 1
    if before.isdigit() and text[at - 1] == before and found in "0123456789.eE":
        return "invalid number", at + 1
    return f"expected `,` or `{_closing_bracket(error)}`", at + 1


def _unfinished(error: json.JSONDecodeError, before: str) -> str:
    """The thing that the end of the text cuts off."""
    if error.msg.startswith("Expecting ','"):
        return "a list" if _closing_bracket(error) == "]" else "an object"
    if before == "[":
        return "a list"
    return "an object" if before == "{" or error.msg.startswith("Expecting ':'") else "a value"


def _worded_value(text: str, at: int) -> tuple[str, int]:
    literal = _LITERALS.get(text[at])
    if literal is None:
        return ("invalid number", at + 2) if text[at] == "-" else ("expected value", at + 1)
    # Some character differs, or the literal would have been accepted.
    at += next(i for i, character in enumerate(literal) if text[at + i : at + i + 1] != character)
    return ("expected ident", at + 1) if at < len(text) else (_EOF_IN_VALUE, at)


def _closing_bracket(error: json.JSONDecodeError) -> str:
    """The bracket that the decoder would have accepted at the position of an error."""
    try:
        _raw_decode(error.doc[: error.pos] + "]")
    except json.JSONDecodeError as other:
        return "}" if other.pos == error.pos else "]"
    return "]"


def _second_end(text: str, name: str) -> int:
    """The end of the second occurrence of a name: nearly always that of the duplicate."""
    quoted = json.dumps(name, ensure_ascii=False)
    second = text.find(quoted, text.find(quoted) + 1)
    return second + len(quoted) if second >= 0 else len(text)


def _end_of_space(text: str, start: int) -> int:
    match = _skip_space(text, start)
    assert match is not None
    return match.end()


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _fail(message: str, end: int, text: str) -> NoReturn:
    # The reference names the first byte of a character that it does not expect.
    last = _encoded(text[end - 1 : end])[:1] if end else b""
    raise MalformedMessage(_located(message, _encoded(text[: max(end - 1, 0)]) + last)) from None


def _located(message: str, read: bytes) -> str:
    """The message with line and column of the last byte of `read`."""
    line = read.count(b"\n") + 1
    column = len(read) - (read.rfind(b"\n") + 1)
    return f"{message} at line {line} column {column}"


# ---- values in error texts ------------------------------------------------------------


def describe(value: object, *, buffered: bool = False) -> str:
    """The description of a value of the wrong type in an error text.

    Inside internally tagged objects (`buffered`) the reference shows numbers.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, str):
        return f"string {quote(value)}"
    if isinstance(value, list):
        return "sequence"
    if isinstance(value, dict):
        return "map"
    if not buffered:
        return "number"
    if isinstance(value, int):
        return f"integer `{value}`"
    return f"floating point `{value!r}`"


_SHORT_ESCAPES = {"\0": "\\0", "\t": "\\t", "\n": "\\n", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def quote(text: str) -> str:
    """A string as Rust's Debug prints it, which is how error texts show strings."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join([_escaped(character) for character in text]) + '"'


def _escaped(character: str) -> str:
    if short := _SHORT_ESCAPES.get(character):
        return short
    # Combining marks are escaped although printable, so that they cannot join the quote.
    if character.isprintable() and unicodedata.category(character) not in ("Mn", "Me"):
        return character
    return f"\\u{{{ord(character):x}}}"
