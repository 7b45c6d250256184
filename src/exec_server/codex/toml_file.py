"""TOML files: read with limits, parsed with the position of the fault, and written."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING, Any, Final

from exec_server.codex.selection import Table
from exec_server.errors import RpcError, decode_error_text, os_error_text
from exec_server.filesystem.operations import open_regular

if TYPE_CHECKING:  # slow imports stay out of start-up
    import tomli

# A configuration file: real ones have a few KiB. The parser holds the interpreter's lock, about
# 0.1 s for the worst text of this size. A larger file is an error.
FILE_BYTES: Final = 262_144
# The segments of one key, and the depth of tables and arrays: the time of the parser grows with
# the square of the first, and each writer of a table recurses. More is an error.
KEY_SEGMENTS: Final = 32
DEPTH: Final = 80

# The headers of a text that is written: those of a text that is read may be nested, so that each
# key is written once for each table below it.
TEXT_CHARACTERS: Final = 4 * 1_048_576

_INTEGERS: Final = range(-(2**63), 2**63)
_DECIMAL_BITS: Final = 1024
_SEGMENT: Final = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*')"""
# A key at the beginning of a statement, with or without the brackets of a header.
_KEY: Final = re.compile(rf"[ \t]*\[{{0,2}}[ \t]*(?:{_SEGMENT}[ \t]*\.[ \t]*)*(?P<last>{_SEGMENT})")
# The parts of a text in which dots do not separate segments, then keys, and strings without an end:
# every part is read once, whatever the text is.
_PART: Final = re.compile(
    rf"""\#[^\n]*+
    |\"{{3}}(?:[^"\\]|\\[\s\S]|"(?!""))*+(?:\"{{3}}|\Z)
    |'{{3}}(?:[^']|'(?!''))*+(?:'{{3}}|\Z)
    |(?P<long>(?:{_SEGMENT}[ \t]*+\.[ \t]*+){{{KEY_SEGMENTS}}}+)
    |{_SEGMENT}(?:[ \t]*+\.[ \t]*+{_SEGMENT})*+
    |"(?:[^"\\\n]|\\.)*+
    |'[^'\n]*+""",
    re.VERBOSE,
)
_DUPLICATES: Final = ("Cannot overwrite a value", "Cannot declare", "Cannot mutate immutable")
_DUPLICATE_IN_INLINE: Final = "Duplicate inline table key"
# Lines before the end of a faulty statement that are tried as its beginning; each is parsed.
_STATEMENT_LINES: Final = 8


class UnreadableFile(Exception):
    """A file exists and cannot be read; the text says why."""


class DocumentTooLarge(Exception):
    """A document would become a text that is too long."""


class TomlFault(Exception):
    """A text is not TOML: the fault, and the line and column (from 1) where it was found."""

    def __init__(self, text: str, line: int, column: int) -> None:
        super().__init__(text)
        self.text = text
        self.line = line
        self.column = column


def read_text(path: str) -> str | None:
    """The text of a regular file, None if there is none. Blocking; raises UnreadableFile."""
    try:
        descriptor, _ = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UnreadableFile(os_error_text(error)) from None
    except RpcError as error:
        raise UnreadableFile(error.message) from None
    with os.fdopen(descriptor, "rb") as file:
        try:
            data = file.read(FILE_BYTES + 1)
        except OSError as error:
            raise UnreadableFile(os_error_text(error)) from None
    if len(data) > FILE_BYTES:
        raise UnreadableFile(f"the file exceeds {FILE_BYTES} bytes")
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UnreadableFile(decode_error_text(error)) from None


def parse(text: str) -> Table:
    """The document in a text; raises TomlFault."""
    import tomli

    long_key = _long_key(text)
    if long_key is not None:
        fault = f"a key has more than {KEY_SEGMENTS} segments"
        raise TomlFault(fault, *_line_and_column(text, long_key))
    try:
        document: Table = tomli.loads(text, parse_float=_parse_float)
    except tomli.TOMLDecodeError as error:
        raise _located(error) from None
    except _FloatOverflow as error:
        position = max(text.find(str(error)), 0)
        place = _line_and_column(text, position)
        raise TomlFault("floating-point number overflowed", *place) from None
    except (RecursionError, ValueError) as error:  # nested too deeply; an integer of many digits
        raise TomlFault(str(error), 1, 1) from None
    _check(text, document)
    return document


class _FloatOverflow(Exception):
    """A number is too large; the text is its digits."""


def _parse_float(digits: str) -> float:
    """A number; raises _FloatOverflow where other parsers refuse it instead of infinity."""
    number = float(digits)
    if math.isinf(number) and "inf" not in digits:
        raise _FloatOverflow(digits)
    return number


def _long_key(text: str) -> int | None:
    """The position of a key with too many segments."""
    if text.count(".") < KEY_SEGMENTS:
        return None
    for part in _PART.finditer(text):
        if part["long"] is not None:
            return part.start()
    return None


def dump(document: Table) -> str:
    """A document as text; raises DocumentTooLarge."""
    import tomli_w

    if _header_characters(document) > TEXT_CHARACTERS:
        raise DocumentTooLarge
    # Indentation of nested arrays would make the text a hundred times as long.
    text: str = tomli_w.dumps(document, indent=0)
    return text


def _header_characters(document: Table) -> int:
    """At least the characters of all headers of tables: each has the keys of all tables around."""
    total = 0
    pending: list[tuple[int, Any]] = [(0, document)]
    while pending:
        length, value = pending.pop()
        if isinstance(value, dict):
            total += length
            pending += ((length + len(key) + 1, each) for key, each in value.items())
        elif isinstance(value, list):
            pending += ((length, each) for each in value)
    return total


def _check(text: str, document: Table) -> None:
    """Refuse what other parsers do not read: integers of more than 64 bits, deep documents."""
    pending: list[tuple[int, Any]] = [(0, document)]
    while pending:
        depth, value = pending.pop()
        if depth > DEPTH:
            raise TomlFault(f"the document is more than {DEPTH} levels deep", 1, 1)
        if isinstance(value, dict):
            pending += ((depth + 1, each) for each in value.values())
        elif isinstance(value, list):
            pending += ((depth + 1, each) for each in value)
        elif isinstance(value, int) and value not in _INTEGERS:
            # A number with another base may be too long for Python to write as a decimal one.
            digits = str(value) if value.bit_length() < _DECIMAL_BITS else hex(value)
            position = max(text.find(digits), 0)
            raise TomlFault("integer number overflowed", *_line_and_column(text, position))


def _line_and_column(text: str, position: int) -> tuple[int, int]:
    start = text.rfind("\n", 0, position) + 1
    return text.count("\n", 0, position) + 1, position - start + 1


def _located(error: tomli.TOMLDecodeError) -> TomlFault:
    """The fault that a parser has found; for a key that is there twice, the start of the second."""
    text = error.doc  # with other ends of lines, so the position is one of this text
    if error.msg.startswith(_DUPLICATE_IN_INLINE):
        before = list(re.finditer(rf"{_SEGMENT}(?=[ \t]*=)", text[: error.pos]))
        position = before[-1].start() if before else error.pos
        return TomlFault("duplicate key", *_line_and_column(text, position))
    if error.msg.startswith(_DUPLICATES):
        position = _statement_start(text, error.lineno)
        key = _KEY.match(text, position)
        position = position if key is None else key.start("last")
        return TomlFault("duplicate key", *_line_and_column(text, position))
    return TomlFault(error.msg, error.lineno, error.colno)


def _statement_start(text: str, line: int) -> int:
    """The position of the statement that ends in this line: what precedes it is a document."""
    import tomli

    lines = [f"{each}\n" for each in text.split("\n")]
    for first in range(line - 1, max(line - 1 - _STATEMENT_LINES, -1), -1):
        before = "".join(lines[:first])
        try:
            tomli.loads(before)
        except tomli.TOMLDecodeError:
            continue
        return len(before)
    return len("".join(lines[: line - 1]))
