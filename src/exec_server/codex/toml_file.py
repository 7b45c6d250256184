"""TOML files: read and parsed with limits, and written."""

from __future__ import annotations

import math
import os
import re
from typing import Any, Final

from exec_server.codex.bundle import Table
from exec_server.errors import RpcError, decode_error_text, os_error_text
from exec_server.filesystem.operations import open_regular

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
_SEGMENT: Final = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*')"""
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


class UnreadableFile(Exception):
    """A file exists and cannot be read; the text says why."""


class DocumentTooLarge(Exception):
    """A document would become a text that is too long."""


class TomlFault(Exception):
    """A text is not TOML; the text of the fault names its line and column if they are known."""


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

    if _has_long_key(text):
        raise TomlFault(f"a key has more than {KEY_SEGMENTS} segments")
    try:
        document: Table = tomli.loads(text, parse_float=_parse_float)
    except (RecursionError, ValueError) as error:  # also an integer of many digits
        raise TomlFault(str(error)) from None
    _check(document)
    return document


def _parse_float(digits: str) -> float:
    """A number; raises TomlFault where other parsers refuse it instead of infinity."""
    number = float(digits)
    if math.isinf(number) and "inf" not in digits:
        raise TomlFault("floating-point number overflowed")
    return number


def _has_long_key(text: str) -> bool:
    """Whether a key has too many segments."""
    if text.count(".") < KEY_SEGMENTS:
        return False
    return any(part["long"] is not None for part in _PART.finditer(text))


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


def _check(document: Table) -> None:
    """Refuse what other parsers do not read: integers of more than 64 bits, deep documents."""
    pending: list[tuple[int, Any]] = [(0, document)]
    while pending:
        depth, value = pending.pop()
        if depth > DEPTH:
            raise TomlFault(f"the document is more than {DEPTH} levels deep")
        if isinstance(value, dict):
            pending += ((depth + 1, each) for each in value.values())
        elif isinstance(value, list):
            pending += ((depth + 1, each) for each in value)
        elif isinstance(value, int) and value not in _INTEGERS:
            raise TomlFault("integer number overflowed")
