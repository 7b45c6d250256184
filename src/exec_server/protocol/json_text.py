"""One JSON text in, one Python value out, with the limits of the reference.

msgspec decodes, and counting characters outside of strings proves that the text keeps the rules
that msgspec does not check (duplicate members, nesting, number of values). Errors have the words
of msgspec: the specification leaves the texts for malformed messages open. Decoding and proof
take a third of the time of the standard library (`python -m bench.alternatives`).
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterator

import msgspec

from exec_server.errors import MalformedMessage

# The limits of the reference for one message; both are on the wire as error texts, and they
# keep a message of 64 MiB from becoming gigabytes of Python objects.
MAX_VALUES = 262_144
MAX_DEPTH = 127

# Up to this size, encoding the value again is the cheapest proof. A value takes at least one
# byte, so short texts never have too many of them.
_SHORT = 65_536

# Up to this number of quotes, finding each one is faster than splitting a large text.
_FEW_QUOTES = 1_000
# Bytes that are split at a time: other threads wait for the interpreter's lock meanwhile.
_STEP = 65_536

_decode = msgspec.json.Decoder().decode
# `1e999` is infinity here and an error there. Calling `float` for each number takes 2.8x the time.
_decode_any_float = msgspec.json.Decoder(float_hook=float).decode
_encode = msgspec.json.Encoder().encode
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def parse(data: bytes) -> object:
    """Decode one JSON text; raises MalformedMessage.

    Integers are exact (at most 4,300 digits), other numbers are floats (`1e999` is infinity).
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
            pass  # the error is raised below
    return _decode_long(data)


def has_few_containers(data: bytes) -> bool:
    """Whether there are too few containers for nesting above the limit."""
    return data.count(b"[") + data.count(b"{") <= MAX_DEPTH


def _decode_long(data: bytes) -> object:
    """Decode after checking the number of values, before any is built."""
    outside = _outside_strings(data)
    if _has_too_many_values(outside):
        raise _too_many_values()
    try:
        value = _decode_numbers(data)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessage(str(error)) from None
    members = _members_within_depth(value)
    if members < 0:
        raise _too_deep()
    if members != outside.count(b":"):
        raise MalformedMessage(f"duplicate JSON object key `{_first_duplicate(data)}`")
    return value


def _decode_numbers(data: bytes) -> object:
    try:
        return _decode(data)
    except msgspec.ValidationError:  # a number that is out of range: nothing else has a type
        return _decode_any_float(data)


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
        raise _too_many_values()  # each string is a value or the name of one
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


def _too_many_values() -> MalformedMessage:
    return MalformedMessage(f"JSON-RPC message exceeds the limit of {MAX_VALUES} JSON values")


def _too_deep() -> MalformedMessage:
    return MalformedMessage("recursion limit exceeded")


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


class _DuplicateError(Exception):
    """The first object with two members of the same name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _refuse_duplicate(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise _DuplicateError(Counter(name for name, _ in pairs).most_common(1)[0][0])


def _first_duplicate(data: bytes) -> str:
    """The name of a member that occurs twice; msgspec has decoded the text."""
    try:
        json.loads(data.decode(), parse_int=str, object_pairs_hook=_refuse_duplicate)
    except _DuplicateError as duplicate:
        return duplicate.name
    raise AssertionError("no member occurs twice")


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
