"""Parses the patch format of Codex's apply_patch.

    *** Begin Patch
    *** Add File: new.txt
    +first line
    *** Update File: old.txt
    *** Move to: renamed.txt
    @@ def function():
     context
    -removed
    +added
    *** Delete File: gone.txt
    *** End Patch

Hunks have no line numbers: they are found by their lines, below the lines that `@@` names.
"""

from __future__ import annotations

from typing import Final

from exec_server.patching.hunks import FilePatch, Hunk, HunkLine, LineKind, PatchFailed

BEGIN: Final = "*** Begin Patch"
END: Final = "*** End Patch"
_ADD: Final = "*** Add File: "
_DELETE: Final = "*** Delete File: "
_UPDATE: Final = "*** Update File: "
_MOVE: Final = "*** Move to: "
_AT_END: Final = "*** End of File"
_KINDS: Final[dict[str, LineKind]] = {" ": " ", "-": "-", "+": "+"}


def parse(text: str) -> list[FilePatch]:
    """The changes of a patch; raises PatchFailed with the number of the wrong line."""
    lines = text.strip().split("\n")
    if lines[0].strip() != BEGIN:
        raise PatchFailed(f"the first line of the patch must be '{BEGIN}'")
    if lines[-1].strip() != END:
        raise PatchFailed(f"the last line of the patch must be '{END}'")
    return _Parser([line.removesuffix("\r") for line in lines]).files()


class _Parser:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._next = 1  # after the first line

    def files(self) -> list[FilePatch]:
        files = []
        while self._next < len(self._lines) - 1:
            files.append(self._file())
        if not files:
            raise PatchFailed("the patch changes no file")
        return files

    def _file(self) -> FilePatch:
        header = self._lines[self._next].strip()
        self._next += 1
        if header.startswith(_ADD):
            lines = tuple(self._added_lines())
            return FilePatch("add", self._path(header, _ADD), (Hunk(lines),) if lines else ())
        if header.startswith(_DELETE):
            return FilePatch("delete", self._path(header, _DELETE))
        if header.startswith(_UPDATE):
            return self._update(self._path(header, _UPDATE))
        self._next -= 1
        raise self._failure(
            f"'{header}' is not a header: expected '{_ADD}PATH', '{_UPDATE}PATH' or '{_DELETE}PATH'"
        )

    def _path(self, header: str, prefix: str) -> str:
        path = header.removeprefix(prefix).strip()
        if not path:
            raise self._failure("the path is empty", line=self._next)
        return path

    def _current(self) -> str | None:
        """The next line of the current file; None at the next header or at the end."""
        if self._next >= len(self._lines) - 1:
            return None
        line = self._lines[self._next]
        is_header = line.startswith("***") and line.strip() != _AT_END
        return None if is_header else line

    def _added_lines(self) -> list[HunkLine]:
        lines = []
        while (line := self._current()) is not None:
            if not line.startswith("+"):
                raise self._failure("each line of an added file must begin with '+'")
            lines.append(HunkLine("+", line[1:]))
            self._next += 1
        return lines

    def _update(self, path: str) -> FilePatch:
        new_path = None
        if self._lines[self._next].startswith(_MOVE):
            self._next += 1
            new_path = self._path(self._lines[self._next - 1], _MOVE)
        hunks = []
        while self._current() is not None:
            hunks.append(self._hunk())
        if not hunks and new_path is None:
            raise self._failure(f"the update of {path} has no lines", line=self._next)
        return FilePatch("update", path, tuple(hunks), new_path)

    def _hunk(self) -> Hunk:
        anchors = []
        while (line := self._current()) is not None and line.startswith("@@"):
            if anchor := line[2:].removeprefix(" "):
                anchors.append(anchor)
            self._next += 1
        lines: list[HunkLine] = []
        is_at_end = False
        while (line := self._current()) is not None and not line.startswith("@@"):
            self._next += 1
            if line.strip() == _AT_END:
                is_at_end = True
                break
            lines.append(self._line(line))
        if not lines:
            raise self._failure("a hunk needs at least one line", line=self._next)
        return Hunk(tuple(lines), tuple(anchors), is_at_end)

    def _line(self, line: str) -> HunkLine:
        if not line:
            return HunkLine(" ", "")  # editors remove the space of an empty context line
        if line[0] not in _KINDS:
            raise self._failure(
                "each line of a hunk must begin with ' ', '-' or '+'", line=self._next
            )
        return HunkLine(_KINDS[line[0]], line[1:])

    def _failure(self, reason: str, *, line: int | None = None) -> PatchFailed:
        """An error for the next line, or for the line with this number, from 1."""
        return PatchFailed(
            f"line {self._next + 1 if line is None else line} of the patch: {reason}"
        )
