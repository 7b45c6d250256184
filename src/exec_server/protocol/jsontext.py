"""One JSON text in, one Python value out, with the reference's rules and error texts.

Almost every message takes the fast path: a C decoder, and a proof by counting that nothing
it would let pass is there. Whatever it refuses, or cannot be proven, is read again by an
exact scanner, which decides and words the error the way the reference's decoder does.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NoReturn

import msgspec

from exec_server.errors import MalformedMessage

# What the reference allows in one message; both bounds are on the wire as error texts, and
# they keep a message of 64 MiB from becoming gigabytes of Python objects.
MAX_VALUES = 262_144
MAX_DEPTH = 127

# Every value may be a string and have a name, which is another.
_MAX_STRINGS = 2 * MAX_VALUES

# Python refuses longer decimal integers, and nothing on the wire is near it: such a number
# only has to stay a number that fits no integer type.
_MAX_INTEGER_DIGITS = 4_300

# Up to here, writing the value out again is the cheapest proof; a value takes at least one
# byte, so short texts always have few enough of them.
_SHORT = 65_536

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
            # Clients write without spaces, as we do: then nothing was lost in decoding.
            if again == data and (len(data) <= MAX_DEPTH or _few_containers(data)):
                return value
            # Without \u escapes no colon appears or vanishes in decoding a string, so a member
            # that was overwritten by its duplicate is a colon missing from what is left.
            if (
                b"\\u" not in data
                and again.count(b":") == data.count(b":")
                and _few_containers(data)
            ):
                return value
        except _UNDECODABLE:
            return _Scanner(data).text()
    return _parse_counting(data)


def _few_containers(data: bytes) -> bool:
    """Whether there are too few of them to be nested too deep."""
    return data.count(b"[") + data.count(b"{") <= MAX_DEPTH


def _parse_counting(data: bytes) -> object:
    """Decode by C as well, proving with what is outside the strings that all is allowed."""
    outside = _outside_strings(data)
    # A value is the outermost one, the first of its container, or comes after a comma. This
    # bound is known before any of them is built.
    if outside is not None and (
        1 + outside.count(b",") + outside.count(b"[") + outside.count(b"{") <= MAX_VALUES
    ):
        try:
            value = _decode(data)
        except _UNDECODABLE:
            return _Scanner(data).text()
        if _members_within_depth(value) == outside.count(b":"):
            return value
    return _Scanner(data).text()


def _outside_strings(data: bytes) -> bytes | None:
    """What a JSON text has outside its strings; None if they are too many or do not end.

    For a text that is no JSON this is right up to the first mistake, which is as far as a
    decoder reads.
    """
    if b"\\" in data:
        # Backslashes pair up from the left of a run, so what is left before a quote after
        # removing the pairs is exactly the escape of that quote.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Strings are stepped over, not copied: there may be megabytes of base64 in one.
    pieces = []
    start = 0
    while (end := data.find(b'"', start)) >= 0:
        pieces.append(data[start:end])
        start = data.find(b'"', end + 1) + 1
        if start == 0 or len(pieces) > _MAX_STRINGS:
            return None
    pieces.append(data[start:])
    return b"".join(pieces)


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


_SPACE = re.compile(rb"[ \t\n\r]*")
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# The longest text that could still become a number: where it ends, a broken number breaks.
_NUMBER_START = re.compile(
    rb"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE][+-]?[0-9]*)?)?|[eE][+-]?[0-9]*)?)?"
)
# Everything a string may contain, up to its end or its first mistake. Possessive, because
# the matcher would otherwise remember every escape of a long string to come back to it.
_STRING_BODY = re.compile(
    rb"""[^"\\\x00-\x1f]*+
    (?:\\(?:["\\/bfnrt]
          |u(?![dD][89a-fA-F])[0-9a-fA-F]{4}
          |u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})
       [^"\\\x00-\x1f]*+)*+""",
    re.VERBOSE,
)
_HEX = re.compile(rb"[0-9a-fA-F]{4}")
_NAMES = {0x6E: (b"null", None), 0x74: (b"true", True), 0x66: (b"false", False)}
_END = -1  # the byte after the last one


class _Scanner:
    """Reads a text byte for byte in the reference's order, so that the same mistake is found.

    Nesting is recursion, bounded by MAX_DEPTH; time is linear, and it stops at MAX_VALUES.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._values = 1  # the outermost one
        self._depth = 0

    def text(self) -> object:
        """The value of the whole text."""
        value = self._value()
        if self._next() != _END:
            raise TrailingCharacters(self._located("trailing characters", self._at + 1), value)
        return value

    def _next(self) -> int:
        """The next byte that is not white space, without taking it."""
        match = _SPACE.match(self._data, self._at)
        assert match is not None
        self._at = match.end()
        return self._data[self._at] if self._at < len(self._data) else _END

    def _value(self) -> object:
        byte = self._next()
        if byte == 0x22:
            return self._string()
        if byte in (0x7B, 0x5B):
            if self._depth == MAX_DEPTH:
                self._fail("recursion limit exceeded", self._at + 1)
            self._depth += 1
            self._at += 1
            value: object = self._object() if byte == 0x7B else self._array()
            self._depth -= 1
            return value
        if byte == 0x2D or 0x30 <= byte <= 0x39:
            return self._number()
        if byte in _NAMES:
            return self._name(*_NAMES[byte])
        if byte == _END:
            self._fail("EOF while parsing a value", self._at)
        raise MalformedMessage(self._located("expected value", self._at + 1))

    def _array(self) -> list[object]:
        items: list[object] = []
        if (byte := self._next()) == 0x5D:
            self._at += 1
            return items
        if byte == _END:
            self._fail("EOF while parsing a list", self._at)
        while True:
            if self._values == MAX_VALUES:
                self._fail_in_array()
            self._values += 1
            items.append(self._value())
            byte = self._next()
            self._at += 1
            if byte == 0x5D:
                return items
            if byte == _END:
                self._fail("EOF while parsing a list", self._at - 1)
            if byte != 0x2C:
                self._fail("expected `,` or `]`", self._at)
            if self._next() == 0x5D:
                self._fail("trailing comma", self._at + 1)

    def _object(self) -> dict[str, object]:
        members: dict[str, object] = {}
        if (byte := self._next()) == 0x7D:
            self._at += 1
            return members
        if byte == _END:
            self._fail("EOF while parsing an object", self._at)
        while True:
            name = self._member_name(members)
            if self._values == MAX_VALUES:
                self._fail_in_object(_too_many_values())
            self._values += 1
            members[name] = self._value()
            byte = self._next()
            self._at += 1
            if byte == 0x7D:
                return members
            if byte == _END:
                self._fail("EOF while parsing an object", self._at - 1)
            if byte != 0x2C:
                self._fail("expected `,` or `}`", self._at)
            byte = self._next()
            if byte == 0x7D:
                self._fail("trailing comma", self._at + 1)
            if byte == _END:
                self._fail("EOF while parsing a value", self._at)

    def _member_name(self, members: dict[str, object]) -> str:
        """A new member's name and the colon after it."""
        if self._next() != 0x22:
            self._fail("key must be a string", self._at + 1)
        name = self._string()
        if name in members:
            self._fail_in_object(f"duplicate JSON object key `{name}`")
        byte = self._next()
        if byte == _END:
            self._fail("EOF while parsing an object", self._at)
        self._at += 1
        if byte != 0x3A:
            self._fail("expected `:`", self._at)
        return name

    def _string(self) -> str:
        start = self._at
        match = _STRING_BODY.match(self._data, start + 1)
        assert match is not None
        end = match.end()
        if end == len(self._data) or self._data[end] != 0x22:
            self._fail_in_string(end)
        self._at = end + 1
        try:
            text: str = _decode(self._data[start : self._at])
        except UnicodeDecodeError:
            self._fail("invalid unicode code point", self._at)
        return text

    def _number(self) -> int | float:
        match = _NUMBER.match(self._data, self._at)
        start = _NUMBER_START.match(self._data, self._at)
        assert start is not None
        end = start.end()
        followed_by_digit = end < len(self._data) and 0x30 <= self._data[end] <= 0x39
        if match is None or match.end() < end or followed_by_digit:
            if end == len(self._data):
                self._fail("EOF while parsing a value", end)
            self._fail("invalid number", end + 1)
        self._at = end
        if match.lastindex is None and end - match.start() <= _MAX_INTEGER_DIGITS:
            return int(match.group())
        return float(match.group())

    def _name(self, name: bytes, value: bool | None) -> bool | None:
        for offset, byte in enumerate(name):
            at = self._at + offset
            if at == len(self._data):
                self._fail("EOF while parsing a value", at)
            if self._data[at] != byte:
                self._fail("expected ident", at + 1)
        self._at += len(name)
        return value

    def _fail_in_string(self, at: int) -> NoReturn:
        """Say what is wrong at `at`, the first byte that no string may continue with."""
        data = self._data
        if at < len(data) and data[at] != 0x5C:
            self._fail("control character (\\u0000-\\u001F) found while parsing a string", at + 1)
        if at + 1 < len(data) and data[at + 1] != 0x75:
            self._fail("invalid escape", at + 2)
        first = self._hex_escape(at)
        if first >= 0xDC00:
            self._fail("lone leading surrogate in hex escape", at + 6)
        at += 6
        for expected in b"\\u":
            if at < len(data) and data[at] != expected:
                self._fail("unexpected end of hex escape", at + 1)
            at += 1
        self._hex_escape(at - 2)
        self._fail("lone leading surrogate in hex escape", at + 4)

    def _hex_escape(self, at: int) -> int:
        """The four digits of the escape at `at`, or what is wrong with them."""
        if at + 6 > len(self._data):
            self._fail("EOF while parsing a string", len(self._data))
        match = _HEX.match(self._data, at + 2)
        if match is None:
            self._fail("invalid escape", at + 6)
        return int(match.group(), 16)

    def _fail_in_array(self) -> NoReturn:
        # The reference locates this error after looking for the end of the array, which
        # takes a comma and the white space after it.
        if self._next() == 0x2C:
            self._at += 1
            self._next()
        self._fail(_too_many_values(), self._at)

    def _fail_in_object(self, text: str) -> NoReturn:
        # As above: looking for the end of the object takes its closing brace.
        self._fail(text, self._at + 1 if self._next() == 0x7D else self._at)

    def _fail(self, text: str, index: int) -> NoReturn:
        raise MalformedMessage(self._located(text, index))

    def _located(self, text: str, index: int) -> str:
        """`text` with the line and column of the first `index` bytes."""
        line = self._data.count(b"\n", 0, index) + 1
        column = index - (self._data.rfind(b"\n", 0, index) + 1)
        return f"{text} at line {line} column {column}"


def _too_many_values() -> str:
    return f"JSON-RPC message exceeds the limit of {MAX_VALUES} JSON values"


def describe(value: object, *, buffered: bool = False) -> str:
    """What a value of the wrong type is called in an error text.

    Inside internally tagged objects (`buffered`) the reference knows numbers more exactly.
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
