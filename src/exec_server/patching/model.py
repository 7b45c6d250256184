"""The parsed form of a patch, common to both formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from exec_server.errors import InvalidRequest

LineKind = Literal[" ", "-", "+"]


class PatchFailed(InvalidRequest):
    """A patch or an edit that is malformed, or does not fit the file that it changes."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a hunk: kept (" "), removed ("-") or added ("+"), without its line end."""

    kind: LineKind
    text: str
    has_newline: bool = True  # False only for the last line of a file


@dataclass(frozen=True, slots=True)
class Hunk:
    """Adjacent lines of a file and their change."""

    lines: tuple[Line, ...]
    # Codex: lines to find, one after the other, before the hunk itself is searched below them.
    anchors: tuple[str, ...] = ()
    # Codex: the hunk is at the end of the file.
    is_at_end: bool = False
    # Unified diff: the number of the first old line, from 1.
    first_line: int | None = None

    @property
    def old(self) -> list[str]:
        return [line.text for line in self.lines if line.kind != "+"]


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The change of one file. An added file has one hunk with added lines only, or none."""

    kind: Literal["add", "delete", "update"]
    path: str
    hunks: tuple[Hunk, ...] = ()
    new_path: str | None = None  # of a file that is renamed
    mode: int | None = None  # permission bits that git states
