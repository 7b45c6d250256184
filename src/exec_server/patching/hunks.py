"""Applies hunks to the text of a file.

A hunk of a unified diff is tried at its line number, then ever further away; one whose counts are
wrong, or that has no numbers, has to fit one place alone. One of Codex is the first match below the
one before it. Lines match exactly, or else without blanks at their ends; those of Codex also
without blanks at both ends, or with plain punctuation, as in Codex. Kept lines and line ends are
those of the file, unless a unified diff states line ends and its lines match with them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final, Literal

from exec_server.errors import InvalidRequest, PatchDoesNotApply

LineKind = Literal[" ", "-", "+"]

# Normal patches take milliseconds. Each search of a hostile one takes time in proportion to its
# file, and there may be a search for each line of the patch.
SECONDS: Final = 5.0
# Lines of a file that is patched, and of a patch: each one is an object of about 100 bytes.
MAX_LINES: Final = 1_000_000
# Places of a hunk that an error names: enough to look at each. A search for each takes time in
# proportion to the file.
MAX_PLACES: Final = 5
# Lines of a hunk that an error shows.
_SHOWN_LINES: Final = 5
_PLAIN: Final = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        **dict.fromkeys("\u2018\u2019\u201a\u201b", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f", '"'),
        **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f", " "),
        "\u205f": " ",
        "\u3000": " ",
    }
)

Normalize = Callable[[str], str]
_NORMALIZATIONS: Final[tuple[Normalize, ...]] = (
    lambda line: line,
    str.rstrip,
    str.strip,
    lambda line: line.strip().translate(_PLAIN),
)
_CODEX_LEVELS: Final = len(_NORMALIZATIONS)
_WITH_LINE_ENDS: Final = (
    _NORMALIZATIONS[0],
    lambda line: line.rstrip() + "\r" if line.endswith("\r") else line.rstrip(),
    *_NORMALIZATIONS[2:],
)
# Other blanks at the beginning of a line are another block of code: git and patch refuse them.
_DIFF_LEVELS: Final = 2


@dataclass(frozen=True, slots=True)
class HunkLine:
    """A line of a hunk: kept (" "), removed ("-") or added ("+"), without its newline."""

    kind: LineKind
    text: str
    has_newline: bool = True  # False only for the last line of a file


@dataclass(frozen=True, slots=True)
class Hunk:
    """Adjacent lines of a file and their change."""

    lines: tuple[HunkLine, ...]
    # Codex: lines to find, one after the other, before the hunk itself is searched below them.
    anchors: tuple[str, ...] = ()
    # Codex: the hunk is at the end of the file.
    is_at_end: bool = False
    # Unified diff: the number of the first old line, from 1.
    first_line: int | None = None
    # Unified diff without line numbers, or with wrong counts: it is at its line, or else fits one
    # place alone.
    is_loose: bool = False

    @property
    def old(self) -> list[str]:
        return [line.text for line in self.lines if line.kind != "+"]

    @property
    def levels(self) -> int:
        """How many normalizations its lines may need to match."""
        return _DIFF_LEVELS if self.is_loose or self.first_line is not None else _CODEX_LEVELS

    @property
    def has_final_newline(self) -> bool:
        """False for lines at the end of a file that lacks a newline, before or after the change."""
        return all(line.has_newline for line in self.lines)


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The change of one file. An added file has one hunk with added lines only, or none."""

    kind: Literal["add", "delete", "update"]
    path: str
    hunks: tuple[Hunk, ...] = ()
    new_path: str | None = None  # of a file that is renamed
    mode: int | None = None  # permission bits that git states
    # Codex: another file may be replaced, and a deleted one have any lines.
    is_forced: bool = False


class Effort:
    """Bounds the processor time of one patch or list of edits, by a clock like `thread_time`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._end = clock() + SECONDS

    def check(self) -> None:
        """Raise InvalidRequest if the time is over."""
        if self._clock() > self._end:
            raise InvalidRequest(
                f"the change takes more than {SECONDS:g} s of processor time: split it, "
                "or write the whole file"
            )


# For programs that apply their own patches.
UNBOUNDED: Final = Effort(lambda: 0.0)


def check_lines(text: str, name: str) -> None:
    """Raise PatchDoesNotApply if the text has too many lines for a patch."""
    if text.count("\n") > MAX_LINES:
        raise PatchDoesNotApply(
            f"{name} has more than {MAX_LINES} lines: too many for a patch; "
            "write the whole file, or append to it"
        )


def line_end(text: str) -> str:
    """CRLF if all lines of the text end with it, otherwise a newline."""
    return "\r\n" if "\r\n" in text and text.count("\n") == text.count("\r\n") else "\n"


@dataclass(frozen=True, slots=True)
class _Replacement:
    start: int
    stop: int
    lines: list[str]
    ends_without_newline: bool | None  # None: the hunk does not say


def apply_hunks(text: str, hunks: Sequence[Hunk], path: str, effort: Effort = UNBOUNDED) -> str:
    """The text after all hunks; raises PatchDoesNotApply if one does not fit, or takes too long."""
    check_lines(text, path)
    if any(line.text.endswith("\r") for hunk in hunks for line in hunk.lines):
        # The hunks may change line ends: these are characters like all others, if the lines of the
        # file have the same.
        try:
            return _applied(text, "\n", hunks, path, effort, normalizations=_WITH_LINE_ENDS)
        except PatchDoesNotApply:
            if line_end(text) == "\r\n" or "\r\n" not in text:
                hunks = [_without_carriage_returns(hunk) for hunk in hunks]
    return _applied(text, line_end(text), hunks, path, effort)


def _without_carriage_returns(hunk: Hunk) -> Hunk:
    lines = (replace(line, text=line.text.removesuffix("\r")) for line in hunk.lines)
    return replace(hunk, lines=tuple(lines))


def _applied(
    text: str,
    newline: str,
    hunks: Sequence[Hunk],
    path: str,
    effort: Effort,
    *,
    normalizations: Sequence[Normalize] = _NORMALIZATIONS,
) -> str:
    lines = text.split(newline)
    has_final_newline = lines[-1] == ""
    if has_final_newline:
        lines.pop()
    finder = _Finder(lines, normalizations, effort)
    replacements = list(_replacements(lines, hunks, path, finder))
    lines = _replaced(lines, replacements)
    for replacement in replacements:
        if replacement.ends_without_newline is not None:
            has_final_newline = not replacement.ends_without_newline
    if not text:
        has_final_newline = bool(lines) and not any(
            replacement.ends_without_newline for replacement in replacements
        )
    return newline.join(lines) + (newline if has_final_newline and lines else "")


def _replaced(lines: list[str], replacements: Sequence[_Replacement]) -> list[str]:
    """The lines after all replacements, in time that does not depend on their number."""
    new: list[str] = []
    position = 0
    for replacement in replacements:
        new += lines[position : replacement.start]
        new += replacement.lines
        position = replacement.stop
    return new + lines[position:]


def _replacements(
    lines: Sequence[str], hunks: Sequence[Hunk], path: str, finder: _Finder
) -> Iterator[_Replacement]:
    """The replacements of all hunks, in the order of the file and without overlaps."""
    below = 0  # the first line that no earlier hunk has used
    shift = 0  # how far from its line number the last hunk was found
    for number, hunk in enumerate(hunks, 1):
        if not hunk.has_final_newline:
            start = _find_last(finder, hunk, shift, below)
        elif hunk.is_loose:
            start = _find_only(finder, hunk, shift, below, f"hunk {number} for {path}")
        elif hunk.first_line is not None:
            wanted = max(hunk.first_line - 1 + shift, below)
            start = finder.nearest(hunk.old, wanted, below, hunk.levels)
        else:
            start = _find_anchored(finder, hunk, below, path)
        if start is None:
            reason = _reason(finder, hunk, below, number)
            raise PatchDoesNotApply(f"hunk {number} does not fit {path}: {reason}")
        if hunk.first_line is not None and not hunk.is_loose:
            shift = start - (hunk.first_line - 1)
        yield _replacement(lines, hunk, start)
        below = start + len(hunk.old)


def _replacement(lines: Sequence[str], hunk: Hunk, start: int) -> _Replacement:
    """Keep the file's own form of context lines, which may differ from the patch in spaces."""
    new = []
    position = start
    for line in hunk.lines:
        if line.kind == "+":
            new.append(line.text)
        else:
            if line.kind == " ":
                new.append(lines[position])
            position += 1
    last = next((line for line in reversed(hunk.lines) if line.kind != "-"), None)
    ends_without_newline = None
    if not hunk.has_final_newline:
        lacks_newline = last is not None and not last.has_newline
        is_kept = last is not None and last.kind == " "
        ends_without_newline = None if lacks_newline and is_kept else lacks_newline
    return _Replacement(start, position, new, ends_without_newline)


def _find_anchored(finder: _Finder, hunk: Hunk, below: int, path: str) -> int | None:
    """The first line of a hunk of Codex; None if its lines are not in the file."""
    for anchor in hunk.anchors:
        line = finder.first([anchor], below, hunk.levels)
        if line is None:
            raise PatchDoesNotApply(f"{path} has no line '{anchor}' below line {below}")
        below = line + 1
    old = hunk.old
    if not old:
        return below if hunk.anchors and not hunk.is_at_end else finder.size
    if hunk.is_at_end:
        last = finder.first(old, max(below, finder.size - len(old)), hunk.levels)
        if last is not None:
            return last
    return finder.first(old, below, hunk.levels)


def _find_last(finder: _Finder, hunk: Hunk, shift: int, below: int) -> int | None:
    """The first line of a hunk whose last line is that of the file."""
    old = hunk.old
    last = finder.size - len(old)
    if not old and hunk.first_line is not None and hunk.first_line - 1 + shift != last:
        return None
    if last < below or finder.nearest(old, last, last, hunk.levels) != last:
        return None
    return last


def _find_only(finder: _Finder, hunk: Hunk, shift: int, below: int, name: str) -> int | None:
    """The first line of a hunk with a doubtful header; raises if it fits several places."""
    old = hunk.old
    if not old:
        if finder.size == 0:
            return 0
        raise PatchDoesNotApply(
            f"{name} adds lines without a line number and without a line of the file: add the "
            "line before or after them"
        )
    if hunk.first_line is not None:
        wanted = hunk.first_line - 1 + shift
        if wanted >= below and finder.nearest(old, wanted, below, hunk.levels) == wanted:
            return wanted
    places = finder.places(old, below, hunk.levels)
    if len(places) > 1:
        # The text behind `@@` is a line above the hunk.
        anchors = finder.places(hunk.anchors, below, _CODEX_LEVELS) if hunk.anchors else []
        if len(anchors) == 1:
            return finder.first(old, anchors[0] + 1, hunk.levels)
        lines = ", ".join(str(place + 1) for place in places)
        raise PatchDoesNotApply(f"{name} fits several places (lines {lines}): add lines around it")
    return places[0] if places else None


class _Finder:
    """Searches lines in a file: exactly, and then with less precision, up to a number of levels."""

    def __init__(
        self, lines: Sequence[str], normalizations: Sequence[Normalize], effort: Effort
    ) -> None:
        self.size = len(lines)
        self._lines = lines
        self._normalizations = normalizations
        self._effort = effort
        self._levels: list[_Level] = []

    def _searches(self, wanted: Sequence[str], levels: int) -> Iterator[tuple[_Level, str]]:
        for number, normalize in enumerate(self._normalizations[:levels]):
            self._effort.check()
            if number == len(self._levels):
                self._levels.append(_Level([normalize(line) for line in self._lines]))
            yield self._levels[number], _joined([normalize(line) for line in wanted])

    def first(self, wanted: Sequence[str], below: int, levels: int) -> int | None:
        """The first place at or after `below`."""
        for level, pattern in self._searches(wanted, levels):
            place = level.find(pattern, below)
            if place is not None:
                return place
        return None

    def places(self, wanted: Sequence[str], below: int, levels: int) -> list[int]:
        """The first places at or after `below`, at most MAX_PLACES."""
        places: list[int] = []
        for level, pattern in self._searches(wanted, levels):
            place = level.find(pattern, below)
            while place is not None and len(places) < MAX_PLACES:
                places.append(place)
                place = level.find(pattern, place + 1)
            if places:
                break
        return places

    def nearest(self, wanted: Sequence[str], near: int, below: int, levels: int) -> int | None:
        """The place at or after `below` that is nearest to `near`; of two, the later, as in git."""
        if not wanted:
            return min(near, self.size)
        for level, pattern in self._searches(wanted, levels):
            after = level.find(pattern, near)
            if after == near:
                return near
            before = level.rfind(pattern, below, near)
            places = [place for place in (after, before) if place is not None]
            if places:
                return min(places, key=lambda place: abs(place - near))
        return None


class _Level:
    """All lines of a file as one text, in which a search takes time in proportion to its size."""

    def __init__(self, lines: list[str]) -> None:
        self._text = _joined(lines)
        # An array takes a fifth of the memory of a list of integers.
        self._starts = array("Q", accumulate((len(line) + 1 for line in lines), initial=0))

    def find(self, pattern: str, first: int) -> int | None:
        """The first line at or after `first` at which the pattern is found."""
        if first >= len(self._starts):
            return None
        return self._line_at(self._text.find(pattern, self._starts[first]))

    def rfind(self, pattern: str, first: int, last: int) -> int | None:
        """The last line from `first` to `last` at which the pattern is found."""
        last = min(last, len(self._starts) - 1)
        if first > last:
            return None
        start = self._starts[first]
        text = self._text[start : self._starts[last] + len(pattern)]
        # Backwards, because `rfind` may take the product of both lengths; `find` takes their sum.
        distance = text[::-1].find(pattern[::-1])
        return None if distance < 0 else self._line_at(start + len(text) - distance - len(pattern))

    def _line_at(self, position: int) -> int | None:
        return None if position < 0 else bisect_left(self._starts, position)


def _joined(lines: list[str]) -> str:
    return "\n" + "\n".join(lines) + "\n" if lines else "\n"


def _reason(finder: _Finder, hunk: Hunk, below: int, number: int) -> str:
    """Why a hunk does not fit below the line that the hunk before it has reached."""
    old = hunk.old
    is_searched = old and below and hunk.has_final_newline
    above = finder.first(old, 0, hunk.levels) if is_searched else None
    if above is not None:
        return (
            f"its lines are at line {above + 1}, but not below hunk {number - 1}: put the hunks "
            "in the order of the file, without overlaps"
        )
    lines = "\n".join(old[:_SHOWN_LINES])
    more = f"\n… and {len(old) - _SHOWN_LINES} more lines" if len(old) > _SHOWN_LINES else ""
    where = "found" if hunk.has_final_newline else "found at the end of the file"
    return f"these lines were not {where}\n{lines}{more}"
