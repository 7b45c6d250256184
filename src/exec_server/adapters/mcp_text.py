"""Texts for a model: output with its middle left out, and the lines of a file; no I/O."""

from __future__ import annotations

import difflib
import io
import posixpath
from itertools import islice
from typing import Final

# Output of one command that can still be read: what a build prints in a few minutes. Older output
# is forgotten.
KEPT_BYTES: Final = 1_048_576
# A token has about this many bytes of English or code.
BYTES_PER_TOKEN: Final = 4
# Half of the longest answer: clients refuse answers above 25,000 tokens.
MAX_TOKENS: Final = 20_000
HEAD_BYTES: Final = MAX_TOKENS * BYTES_PER_TOKEN // 2
# Text of a file in one answer; the rest is read with the next offset.
FILE_CHARACTERS: Final = 65_536

# Lines from the first to the last change of which a diff is made: the time grows with their square.
DIFF_LINES: Final = 1_000
_CONTEXT: Final = 3  # lines around a change, as diff(1) prints them


class CommandOutput:
    """The output of a command: the beginning of what is unseen, and the last KEPT_BYTES of all."""

    def __init__(self, session_id: int) -> None:
        self._session_id = session_id
        self._kept = bytearray()
        self._first = 0  # offset of the first byte that is kept
        self._head = bytearray()  # the first unseen bytes
        self._seen = 0  # offset behind the last byte that was shown

    @property
    def size(self) -> int:
        """Bytes of output until now."""
        return self._first + len(self._kept)

    def append(self, data: bytes) -> None:
        self._head += data[: HEAD_BYTES - len(self._head)]
        self._kept += data
        surplus = max(0, len(self._kept) - KEPT_BYTES)
        del self._kept[:surplus]
        self._first += surplus

    def take(self, tokens: int) -> str:
        """The output since the last call, without its middle if it is long."""
        limit = _limit(tokens)
        unseen = self.size - self._seen
        if unseen <= limit:  # far less than what is kept
            shown = _text(self._kept[len(self._kept) - unseen :])
        else:
            head = self._head[: limit // 2]
            tail = self._kept[len(self._kept) - limit // 2 :]
            left_out = unseen - len(head) - len(tail)
            first = max(self._seen + len(head), self._first)
            shown = (
                f"{_text(head)}\n[{left_out} bytes left out: read_output with session_id="
                f"{self._session_id} and offset={first} shows them]\n{_text(tail)}"
            )
        self._seen = self.size
        self._head.clear()
        return shown

    def read(self, offset: int, tokens: int) -> str:
        """The output from an offset on, as far as it is kept."""
        first = min(max(offset, self._first), self.size)
        start = first - self._first
        data = self._kept[start : start + _limit(tokens)]
        end = first + len(data)
        more = f"; continue with offset={end}" if end < self.size else ""
        lost = f"; the {first - offset} bytes before are gone" if offset < first else ""
        return f"[bytes {first} to {end} of {self.size}{lost}{more}]\n{_text(data)}"


def select_lines(text: str, offset: int, limit: int) -> str:
    """Some lines of a file, and a note if there are others; `offset` is counted from 1."""
    # Not str.splitlines, which splits at form feeds, and would make a list of all lines.
    count = text.count("\n") + (not text.endswith("\n") and bool(text))
    first = min(max(offset, 1) - 1, count)
    last = min(first + max(limit, 1), count)
    shown: list[str] = []
    size = 0
    for line in islice(io.StringIO(text, newline="\n"), first, last):
        if size + len(line) > FILE_CHARACTERS:
            if not shown:
                shown.append(f"{line[:FILE_CHARACTERS]} [{len(line)} characters, cut]\n")
            break
        shown.append(line)
        size += len(line)
    last = first + len(shown)
    if not count or (first == 0 and last == count):
        return "".join(shown)
    if not shown:
        return f"[the file has {count} lines]"
    more = f"; continue with offset={last + 1}" if last < count else ""
    end = "" if shown[-1].endswith("\n") else "\n"
    return f"{''.join(shown)}{end}[lines {first + 1} to {last} of {count}{more}]"


def join_found(lines: list[str], *, is_cut: bool) -> str:
    """The results of a search, as many as fit into an answer."""
    size = 0
    for number, line in enumerate(lines):
        size += len(line) + 1
        if size > FILE_CHARACTERS:
            lines, is_cut = lines[:number] or [line[:FILE_CHARACTERS]], True
            break
    note = ["[there are more: narrow the search]"] if is_cut else []
    return "\n".join(lines + note) or "[nothing found]"


def diff_texts(old: str, new: str, path: str) -> str:
    """A unified diff of the two texts; a note if the changes are far apart."""
    if old == new:
        return "nothing has changed"
    before, after = old.split("\n"), new.split("\n")
    start = _common(before, after)
    end = _common(before[start:][::-1], after[start:][::-1])
    changed = max(len(before), len(after)) - start - end
    if changed > DIFF_LINES:
        return f"changed: {changed} lines from the first to the last change, too many for a diff"
    first, rest = max(start - _CONTEXT, 0), max(end - _CONTEXT, 0)
    old_lines = before[first : len(before) - rest]
    new_lines = after[first : len(after) - rest]
    diff = [f"--- {path}", f"+++ {path}"]
    # Not difflib.unified_diff: its line numbers would be those of the parts.
    for group in difflib.SequenceMatcher(None, old_lines, new_lines).get_grouped_opcodes(_CONTEXT):
        (_, old_start, _, new_start, _), (_, _, old_end, _, new_end) = group[0], group[-1]
        old_range = _line_range(first + old_start, old_end - old_start)
        diff.append(f"@@ -{old_range} +{_line_range(first + new_start, new_end - new_start)} @@")
        for tag, a, b, c, d in group:
            if tag == "equal":
                diff += [f" {line}" for line in old_lines[a:b]]
            else:
                diff += [f"-{line}" for line in old_lines[a:b]]
                diff += [f"+{line}" for line in new_lines[c:d]]
    return "\n".join(diff)


def found_path(folder: str, name: str) -> str:
    """A path that a search of `folder` has found, as the other tools take it."""
    return name if folder in {"", ".", "./"} else posixpath.join(folder, name)


def _common(before: list[str], after: list[str]) -> int:
    """The number of lines with which both begin."""
    pairs = enumerate(zip(before, after, strict=False))
    shorter = min(len(before), len(after))
    return next((number for number, (one, other) in pairs if one != other), shorter)


def _line_range(start: int, count: int) -> str:
    """The range of lines in the head of a hunk; an empty one names the line before it."""
    if count == 1:
        return str(start + 1)
    return f"{start + 1 if count else start},{count}"


def _limit(tokens: int) -> int:
    return min(max(tokens, 1), MAX_TOKENS) * BYTES_PER_TOKEN


def _text(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "replace")
