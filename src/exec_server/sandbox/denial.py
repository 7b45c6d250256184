"""Whether a confined command failed because of its confinement, and at what. Pure.

`judge` is the reference's rule, word for word, because clients act on it. It only reads what the
command printed, so it is a guess: any command can print "permission denied". `find` looks at the
same output for what people want to know: which path, and which rule of the policy.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, Literal

from exec_server.protocol.process import Chunk
from exec_server.protocol.sandbox import Denial, Operation

# What a policy says about a path: the rule that denies the operation, None if none does.
Explain = Callable[[str, Literal["read", "write"]], str | None]

# 128 + SIGSYS, which the filter sends for calls of another architecture.
_SIGSYS_EXIT: Final = 159
_FOREIGN_CALL: Final = "system calls of another architecture are not allowed"
_NO_NETWORK: Final = "network access is restricted"

# The reference compares lower-cased text. Of all characters outside ASCII only the Kelvin sign
# becomes an ASCII letter and nothing else, so lower-casing bytes and looking for both finds the
# same; what is no UTF-8 never takes part in a match.
_PHRASES: Final = (
    b"permission denied",
    b"operation not permitted",
    b"read-only file system",
    b"sandbox",
    b"seccomp",
    b"landlock",
    "landloc\N{KELVIN SIGN}".encode(),
    b"failed to write file",
)
_phrase = re.compile("|".join(phrase.decode() for phrase in _PHRASES), re.IGNORECASE).search

# A command may complain about thousands of files; the first few lines say what is wrong.
CONSIDERED_LINES: Final = 32
# So many names in a line, and so many lines before it, are looked at: no known message needs more.
CONSIDERED_NAMES: Final = 8
CONTEXT_LINES: Final = 4
# Of a longer line only the part around the words is looked at; this leaves room for the longest
# path.
LINE_BYTES: Final = 8192
# What a log line or a status bar has room for.
TEXT_CHARACTERS: Final = 200

_escapes = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*\x07|[\x00-\x08\x0b-\x1f\x7f]")
_quoted = re.compile(
    r"'([^']+)'|\"([^\"]+)\"|`([^`']+)[`']|\u2018([^\u2018\u2019]+)\u2019|\u201c([^\u201c\u201d]+)\u201d"
).finditer
_absolute = re.compile(r"(?:(?<=[\s:=(\[])|^)/[^\s:'\"`,;()<>|\[\]]*").finditer
_complaint = re.compile(
    r"(?i)\b(?:can ?not|can't|could ?n[o']t|couldn't|unable to|failed to)\s+\w+\b.*\s(\S+)$"
).search
# What stands between colons and is no name: numbers, words of errors, and sentences.
_no_name = re.compile(
    r"\d+|\[.*|.*\s.*|(?i:\w*(?:error|exception|fatal|warning))|E[A-Z]+"
).fullmatch
_means_writing = re.compile(
    r"(?i)\b(?:creat|writ|remov|delet|unlink|touch|mkdir|rmdir|renam|mov|overwrit|truncat|chmod|"
    r"chown|changing|setting|setattr|lock|symlink|link|mknod|append|temp|output|save|update)"
).search
_means_network = re.compile(r"(?i)\bsocket|\bconnect|\bnetwork|\bbind\b|\blisten").search


def judge(exit_code: int, chunks: Iterable[Chunk]) -> bool:
    """Whether clients are told that the sandbox denied something to this command.

    Each stream is looked at, and all of them as one text in the order of arrival, so the words
    may be spread over streams.
    """
    if exit_code == 0:
        return False
    if exit_code == _SIGSYS_EXIT:
        return True
    chunks = list(chunks)
    if _mentions_denial(b"".join([chunk.chunk for chunk in chunks])):
        return True
    streams = {chunk.stream for chunk in chunks}
    return len(streams) > 1 and any(_mentions_denial(_text(chunks, name)) for name in streams)


def _mentions_denial(data: bytes) -> bool:
    lowered = data.lower()
    return any(phrase in lowered for phrase in _PHRASES)


def _text(chunks: list[Chunk], stream: str) -> bytes:
    return b"".join([chunk.chunk for chunk in chunks if chunk.stream == stream])


def find(
    exit_code: int, chunks: Iterable[Chunk], explain: Explain, *, cwd: str, is_offline: bool
) -> Denial | None:
    """What was denied, None if nothing was; relative names are those of `cwd`.

    The first message about something that the policy does forbid is taken, otherwise the first
    one at all: then the rule is None, and an ordinary lack of rights may be the reason.
    """
    if exit_code == 0:
        return None
    chunks = list(chunks)
    first: Denial | None = None
    lines = (line for name in ("stderr", "stdout", "pty") for line in _lines(_text(chunks, name)))
    for line, context in islice(lines, CONSIDERED_LINES):
        denial = _explained(line, context, explain, cwd=cwd, is_offline=is_offline)
        if denial.rule is not None:
            return denial
        first = first or denial
    if exit_code == _SIGSYS_EXIT:
        return Denial(first.text if first else None, None, "syscall", _FOREIGN_CALL)
    if first is None and judge(exit_code, chunks):
        return Denial(None, None, None, None)
    return first


def _lines(data: bytes) -> Iterator[tuple[str, list[str]]]:
    """The lines with one of the phrases, each with a few lines before it."""
    lowered = data.lower()
    # Where each phrase comes next; one that is nowhere is not looked for again.
    places = {phrase: -1 for phrase in _PHRASES if phrase in lowered}
    start = 0
    while places:
        for phrase, place in list(places.items()):
            if place < start:
                places[phrase] = lowered.find(phrase, start)
                if places[phrase] < 0:
                    del places[phrase]
        if places:
            place = min(places.values())
            yield _line_at(data, place), _lines_before(data, place)
            start = data.find(b"\n", place) % (len(data) + 1)


def _line_at(data: bytes, place: int) -> str:
    start = max(data.rfind(b"\n", 0, place) + 1, place - LINE_BYTES // 2)
    end = data.find(b"\n", place, place + LINE_BYTES // 2)
    return _readable(data[start : end if end >= 0 else place + LINE_BYTES // 2])


def _lines_before(data: bytes, place: int) -> list[str]:
    before = data[max(0, place - LINE_BYTES) : place].split(b"\n")[:-1]
    return [_readable(line) for line in before[-CONTEXT_LINES:]]


def _readable(line: bytes) -> str:
    return _escapes.sub("", line.decode("utf-8", "surrogateescape")).rstrip()


def _explained(
    line: str, context: list[str], explain: Explain, *, cwd: str, is_offline: bool
) -> Denial:
    """What one line says was denied."""
    text = _sendable(line.strip()[:TEXT_CHARACTERS])
    names = _certain_names(line)
    if not names and is_offline and _is_about_network(line, context):
        return Denial(text, None, "network", _NO_NETWORK)
    names = names or _likely_names(line) or _names_above(context)
    is_writing = _is_about_writing(line)
    paths = [posixpath.normpath(posixpath.join(cwd, name)) for name in names[:CONSIDERED_NAMES]]
    for path in paths:
        rule = explain(path, "write" if is_writing else "read")
        if rule is not None:
            operation: Operation = "write" if is_writing else "read"
            return Denial(text, _sendable(path), operation, _sendable(rule))
    return Denial(
        text, _sendable(paths[0]) if paths else None, "write" if is_writing else None, None
    )


def _is_about_writing(line: str) -> bool:
    """Whether something was to be changed.

    Without a word to that effect it is not: what a sandbox makes read-only says so, and what it
    hides denies permission to readers and writers alike.
    """
    lowered = line.lower()
    return (
        "read-only file system" in lowered
        or "failed to write file" in lowered
        or _means_writing(line) is not None
    )


def _is_about_network(line: str, context: list[str]) -> bool:
    # A traceback has the call above the error.
    return "operation not permitted" in line.lower() and any(
        _means_network(said) for said in [line, *context]
    )


def _certain_names(line: str) -> list[str]:
    """Quoted names and absolute paths, without the program that complains."""
    names = [next(filter(None, match.groups())) for match in _quoted(line)]
    if not names:
        found = list(_absolute(line))
        names = [
            match[0]
            for match in found
            if match.start() or line[match.end() : match.end() + 1] != ":"
        ] or [match[0] for match in found]
    return [name for name in names if _phrase(name) is None]


def _likely_names(line: str) -> list[str]:
    """The relative name in a message of colons, as in `cat: notes.txt: Permission denied`."""
    phrase = _phrase(line)
    parts = line[: phrase.start()].split(": ") if phrase else []
    for part in reversed(parts[1:]):
        complaint = _complaint(part)
        name = complaint[1] if complaint else part.strip()
        if name and _no_name(name) is None:
            return [name]
    return []


def _names_above(context: list[str]) -> list[str]:
    """Names in a complaint above its reason, which some tools write in a line of its own."""
    for line in reversed(context):
        if _complaint(line):
            return _certain_names(line)
    return []


def _sendable(text: str) -> str:
    """The text without what JSON cannot say: bytes that are no UTF-8 are marked."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
