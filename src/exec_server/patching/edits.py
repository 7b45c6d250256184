"""Exact edits of a text: an old text that occurs once is replaced by a new one. Pure.

A text that does not occur as it is may differ from the file in its line ends, or else in blanks at
the ends of lines. The file keeps its line ends, and unchanged lines stay as they are.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Final

from exec_server.errors import EditAmbiguous, EditNotFound, InvalidRequest
from exec_server.patching.hunks import MAX_LINES, UNBOUNDED, Effort, line_end

# A few edits of a small text could make one that fills the memory.
MAX_CHARACTERS: Final = 8 * 1_048_576
# Each edit reads the whole text.
MAX_EDITS: Final = 1_000
# In a longer text the reason of a failure is not looked for: each word would be an object.
_HINT_CHARACTERS: Final = 1_048_576
# Lines that the error of an ambiguous edit names: enough to look at each.
MAX_NAMED_LINES: Final = 10

Normalize = Callable[[str], str]
# Both remove characters at the end alone, so that columns stay what they are.
_NORMALIZATIONS: Final[tuple[Normalize, ...]] = (lambda line: line.removesuffix("\r"), str.rstrip)


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace `old` by `new`: its only occurrence, or `all` of them."""

    old: str
    new: str
    all: bool = False


def apply_edits(text: str, edits: Sequence[Edit], effort: Effort = UNBOUNDED) -> tuple[str, int]:
    """The text after all edits, one after the other, and the number of replacements.

    Raises EditNotFound, EditAmbiguous, or InvalidRequest for an empty old text or at a limit.
    """
    if len(edits) > MAX_EDITS:
        raise InvalidRequest(f"at most {MAX_EDITS} edits may be made at once: split them")
    replaced = 0
    for number, edit in enumerate(edits, 1):
        which = f"edit {number} of {len(edits)}: " if len(edits) > 1 else ""
        effort.check()
        if not edit.old:
            raise InvalidRequest(f"{which}the old text must not be empty")
        text, count = _applied(text, edit, which, effort)
        replaced += count
    return text, replaced


def _applied(text: str, edit: Edit, which: str, effort: Effort) -> tuple[str, int]:
    """The text after one edit, and the number of replacements."""
    old, new = edit.old, edit.new
    count = text.count(old)
    if count:
        if "\r" not in old + new and line_end(text) == "\r\n":
            # The old text may begin with the second character of a line end.
            old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
        if not edit.all and len(starts := _exact_places(text, old)) > 1:
            raise _ambiguous(text, count, starts, which)
        _check_size(text, count * (len(new) - len(old)), which)
        return text.replace(old, new), count
    for normalize in _NORMALIZATIONS:
        effort.check()
        places = list(_similar_places(text, edit.old, normalize))
        if not places:
            continue
        if not edit.all:
            overlapping = _similar_places(text, edit.old, normalize, overlapping=True)
            starts = [start for start, _ in islice(overlapping, MAX_NAMED_LINES)]
            if len(starts) > 1:
                raise _ambiguous(text, len(places), starts, which)
        return _replaced(text, places, edit, normalize, which), len(places)
    raise EditNotFound(f"{which}the old text does not occur{_hint(text, edit.old)}")


def _check_size(text: str, growth: int, which: str) -> None:
    if len(text) + growth > MAX_CHARACTERS:
        raise InvalidRequest(
            f"{which}the new text would have more than {MAX_CHARACTERS} characters"
        )


def _exact_places(text: str, old: str) -> list[int]:
    """The first occurrences, which may overlap: an edit of `}\\n}\\n` fits `}\\n}\\n}\\n` twice."""
    places: list[int] = []
    start = text.find(old)
    while start >= 0 and len(places) < MAX_NAMED_LINES:
        places.append(start)
        start = text.find(old, start + 1)
    return places


def _ambiguous(text: str, separate: int, starts: Sequence[int], which: str) -> EditAmbiguous:
    """The error for a text with so many separate occurrences, and overlapping ones at `starts`."""
    count = max(separate, len(starts))
    numbers = [text.count("\n", 0, start) + 1 for start in starts]
    lines = list(dict.fromkeys(numbers))
    more = ", …" if count > len(numbers) else ""
    where = "lines" if more or len(lines) > 1 else "line"
    message = (
        f"{which}the old text occurs {count} times ({where} {', '.join(map(str, lines))}{more}): "
        "add lines around it until it is unique, or replace all of them"
    )
    return EditAmbiguous.at(message, count, numbers)


def _similar_places(
    text: str, old: str, normalize: Normalize, *, overlapping: bool = False
) -> Iterator[tuple[int, int]]:
    """Where the old text begins and ends, if the ends of all lines are normalized."""
    wanted_lines = old.split("\n")
    wanted = [normalize(line) for line in wanted_lines]
    if not old.strip() or text.count("\n") > MAX_LINES:
        return
    # A line of blanks is a whole line, and so is what stands before blanks at the end.
    is_at_start = bool(wanted_lines[0]) and not wanted[0]
    is_at_end = wanted_lines[-1] != wanted[-1]
    lines = _Lines(text, normalize)
    middle = "\n".join(wanted)
    pattern = ("\n" if is_at_start else "") + middle + ("\n" if is_at_end else "")
    found = lines.plain.find(pattern, 0 if is_at_start else 1)
    while found >= 0:
        start = found + is_at_start
        end = start + len(middle)
        if end == len(lines.plain):
            break  # the last line end is not in the text
        yield lines.position(start), lines.position(end, with_blanks=is_at_end)
        found = lines.plain.find(pattern, found + 1 if overlapping else end)


class _Lines:
    """The lines of a text with normalized ends, in one text between two line ends."""

    def __init__(self, text: str, normalize: Normalize) -> None:
        self._lines = text.split("\n")
        plain = [normalize(line) for line in self._lines]
        self.plain = "\n" + "\n".join(plain) + "\n"
        self._starts = array("Q", accumulate((len(line) + 1 for line in self._lines), initial=0))
        self._plain_starts = array("Q", accumulate((len(line) + 1 for line in plain), initial=1))

    def position(self, plain: int, *, with_blanks: bool = False) -> int:
        """The position in the text, or with blanks the one behind the blanks of the line."""
        number = bisect_right(self._plain_starts, plain) - 1
        if with_blanks:
            return self._starts[number] + len(self._lines[number].removesuffix("\r"))
        return self._starts[number] + plain - self._plain_starts[number]


def _replaced(
    text: str, places: Sequence[tuple[int, int]], edit: Edit, normalize: Normalize, which: str
) -> str:
    file_end = line_end(text)
    parts: list[str] = []
    position = growth = 0
    for start, end in places:
        new = _new_lines(text[start:end], edit, normalize, file_end)
        growth += len(new) - (end - start)
        _check_size(text, growth, which)
        parts += (text[position:start], new)
        position = end
    return "".join((*parts, text[position:]))


def _new_lines(region: str, edit: Edit, normalize: Normalize, file_end: str) -> str:
    """The new text for a region of the file, whose unchanged lines stay as they are."""
    end = file_end if "\n" not in region else "\r\n" if "\r\n" in region else "\n"
    kept = [line.removesuffix("\r") for line in region.split("\n")]
    new = [line.removesuffix("\r") for line in edit.new.split("\n")]
    before = [normalize(line) for line in edit.old.split("\n")]
    after = [normalize(line) for line in new]
    head = _common(before, after)
    tail = _common(before[head:][::-1], after[head:][::-1])
    return end.join(kept[:head] + new[head : len(new) - tail] + kept[len(kept) - tail :])


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """The number of equal lines at the beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((number for number, (left, right) in pairs if left != right), shorter)


def _hint(text: str, old: str) -> str:
    if len(text) <= _HINT_CHARACTERS and " ".join(old.split()) in " ".join(text.split()):
        return ", except with other spaces or line breaks"
    return ""
