"""Lines of output that report an error, the error itself, and the names of files. Pure."""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Iterator
from typing import Final

# Errors of the mounts of a view: EROFS for changes, EACCES for masked paths, EBUSY for renaming
# and removing mount points. EPERM is the error of the system call filter.
_ERRORS: Final = {
    "permission denied": errno.EACCES,
    "operation not permitted": errno.EPERM,
    "read-only file system": errno.EROFS,
    "device or resource busy": errno.EBUSY,
    "failed to write file": errno.EROFS,  # of tools that do not print the error itself
}
# The texts of these errors in lower case.
ERROR_PHRASES: Final = tuple(text.encode() for text in _ERRORS)
_error_text = re.compile("|".join(_ERRORS), re.IGNORECASE | re.ASCII).search

# The lines before an error that are examined with it: no known message needs more.
CONTEXT_LINES: Final = 4
# Of a longer line only the part around the phrase is examined; it can hold the longest path.
LINE_BYTES: Final = 8192

_escapes = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*\x07|[\x00-\x08\x0b-\x1f\x7f]")
# A word in the quotes of a shell, as GNU tools print names: 'a b', 'it'\''s', 'a'$'\n''b'.
_SHELL_WORD: Final = r"(?<!\w)((?:\$'(?:[^'\\]|\\.)*'|'[^']*'|\\')+)"
_shell_part = re.compile(r"\$'((?:[^'\\]|\\.)*)'|'([^']*)'|\\(')").finditer
# Other pairs of quotes.
_PAIRS: Final = ('""', "`'", "``", "\u2018\u2019", "\u201c\u201d")
_quoted = re.compile(
    "|".join([_SHELL_WORD, *(f"{first}([^{first}{last}]+){last}" for first, last in _PAIRS)])
).finditer
_absolute = re.compile(r"(?:(?<=[\s:=(\[])|^)/[^\s:'\"`,;()<>|\[\]]*").finditer
_complaint = re.compile(
    r"(?i)\b(?:can ?not|can't|could ?n[o']t|couldn't|unable to|failed to)\s+\w+\b.*\s(\S+)$"
).search
# Text between colons that is no name: numbers, words of errors, and sentences.
_no_name = re.compile(
    r"\d+|\[.*|.*\s.*|(?i:\w*(?:error|exception|fatal|warning))|E[A-Z]+"
).fullmatch


def find_error(line: str) -> tuple[int, int] | None:
    """The position and the number of the first error in a line; its text is known in English."""
    match = _error_text(line)
    return None if match is None else (match.start(), _ERRORS[match[0].lower()])


def lines_with(data: bytes, phrases: Collection[bytes]) -> Iterator[tuple[str, list[str]]]:
    """The lines with one of the phrases, which are in lower case, and a few lines before each."""
    lowered = data.lower()
    # The next position of each phrase; a phrase without one is not searched for again.
    positions = {phrase: -1 for phrase in phrases if phrase in lowered}
    start = 0
    while positions:
        for phrase, position in list(positions.items()):
            if position < start:
                positions[phrase] = lowered.find(phrase, start)
                if positions[phrase] < 0:
                    del positions[phrase]
        if positions:
            position = min(positions.values())
            yield _line_at(data, position), _lines_before(data, position)
            start = data.find(b"\n", position) % (len(data) + 1)


def last_lines(data: bytes, count: int) -> list[str]:
    """The last lines that are not empty."""
    lines = map(_readable, data[-LINE_BYTES:].split(b"\n"))
    return [line for line in lines if line][-count:]


def _line_at(data: bytes, position: int) -> str:
    start = max(data.rfind(b"\n", 0, position) + 1, position - LINE_BYTES // 2)
    end = data.find(b"\n", position, position + LINE_BYTES // 2)
    return _readable(data[start : end if end >= 0 else position + LINE_BYTES // 2])


def _lines_before(data: bytes, position: int) -> list[str]:
    before = data[max(0, position - LINE_BYTES) : position].split(b"\n")[:-1]
    return [_readable(line) for line in before[-CONTEXT_LINES:]]


def _readable(line: bytes) -> str:
    return _escapes.sub("", line.decode("utf-8", "surrogateescape")).rstrip()


def certain_names(line: str) -> list[str]:
    """Quoted names and absolute paths, without the program that reports the error."""
    found = list(_absolute(line))
    names = [_unquoted(match) for match in _quoted(line)]
    names += [
        match[0] for match in found if match.start() or line[match.end() : match.end() + 1] != ":"
    ]
    return list(dict.fromkeys(names)) or [match[0] for match in found]


def _unquoted(match: re.Match[str]) -> str:
    if match[1] is None:
        name: str = next(filter(None, match.groups()))
        return name
    parts = []
    for part in _shell_part(match[1]):
        if part[1] is None:
            parts.append(part[2] or part[3] or "")
        else:
            escaped = part[1].encode("latin-1", "backslashreplace").decode("unicode_escape")
            octets = escaped.encode("latin-1", "replace")
            parts.append(octets.decode("utf-8", "surrogateescape"))
    return "".join(parts)


def likely_names(before: str) -> list[str]:
    """The relative name before the text of an error, as in `cat: notes.txt: Permission denied`."""
    for part in reversed(before.split(": ")[1:]):
        complaint = _complaint(part)
        name = complaint[1] if complaint else part.strip()
        if name and _no_name(name) is None:
            return [name]
    return []


def names_above(context: list[str]) -> list[str]:
    """Names in the line above the reason, which some tools write in a line of its own."""
    for line in reversed(context):
        if _complaint(line):
            return certain_names(line)
    return []
