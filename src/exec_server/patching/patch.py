"""A patch in either format, and the files after it.

All hunks are applied in memory first, so a patch that does not fit changes nothing.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from exec_server.errors import PatchDoesNotApply
from exec_server.patching import unified_diff
from exec_server.patching.hunks import (
    UNBOUNDED,
    Effort,
    FilePatch,
    Hunk,
    HunkLine,
    LineKind,
    apply_hunks,
    check_lines,
)

BEGIN: Final = "*** Begin Patch"
END: Final = "*** End Patch"
_ADD: Final = "*** Add File: "
_DELETE: Final = "*** Delete File: "
_UPDATE: Final = "*** Update File: "
_MOVE: Final = "*** Move to: "
_AT_END: Final = "*** End of File"
_KINDS: Final[dict[str, LineKind]] = {" ": " ", "-": "-", "+": "+"}

# Reads a file; None if it is missing. Raises OSError for a directory and the like.
Read = Callable[[str], bytes | None]


# Parses the patch format of Codex's apply_patch.
#
#     *** Begin Patch
#     *** Add File: new.txt
#     +first line
#     *** Update File: old.txt
#     *** Move to: renamed.txt
#     @@ def function():
#      context
#     -removed
#     +added
#     *** Delete File: gone.txt
#     *** End Patch
#
# Hunks have no line numbers: they are found by their lines, below the lines that `@@` names.
def parse(text: str) -> list[FilePatch]:
    """The changes of a patch; raises PatchDoesNotApply with the number of the wrong line."""
    lines = text.strip().split("\n")
    if lines[0].strip() != BEGIN:
        raise PatchDoesNotApply(f"the first line of the patch must be '{BEGIN}'")
    if lines[-1].strip() != END:
        raise PatchDoesNotApply(f"the last line of the patch must be '{END}'")
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
            raise PatchDoesNotApply("the patch changes no file")
        return files

    def _file(self) -> FilePatch:
        header = self._lines[self._next].strip()
        self._next += 1
        if header.startswith(_ADD):
            lines = tuple(self._added_lines())
            hunks = (Hunk(lines),) if lines else ()
            return FilePatch("add", self._path(header, _ADD), hunks, is_forced=True)
        if header.startswith(_DELETE):
            return FilePatch("delete", self._path(header, _DELETE), is_forced=True)
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
        return FilePatch("update", path, tuple(hunks), new_path, is_forced=True)

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

    def _failure(self, reason: str, *, line: int | None = None) -> PatchDoesNotApply:
        return PatchDoesNotApply(
            f"line {self._next + 1 if line is None else line} of the patch: {reason}"
        )


@dataclass(frozen=True, slots=True)
class PatchedFile:
    """The content of a file before and after a patch; None if there is no file."""

    path: str
    old: bytes | None
    new: bytes | None
    mode: int | None = None  # permission bits that the patch states
    renamed_from: str | None = None  # the file whose permission bits it keeps


def parse_patch(text: str) -> list[FilePatch]:
    """The changes of a patch of Codex or of a unified diff; raises PatchDoesNotApply."""
    check_lines(text, "the patch")
    if text.lstrip().startswith(BEGIN):
        return parse(text)
    return unified_diff.parse(text)


def named_paths(files: list[FilePatch], root: str) -> list[str]:
    """The paths that `plan` reads for a patch, each once; raises PatchDoesNotApply outside of root.

    For a `Read` that cannot wait: its files are read before.
    """
    names = (name for file in files for name in (file.path, file.new_path) if name is not None)
    return list(dict.fromkeys(_below_root(root, name) for name in names))


def plan(
    files: list[FilePatch], root: str, read: Read, effort: Effort = UNBOUNDED
) -> list[PatchedFile]:
    """The changed files, each once. Raises PatchDoesNotApply.

    As in Codex's apply_patch, an added or renamed file of its format may replace another one; as
    in git, one of a unified diff may not.
    """
    planner = _Planner(root, read, effort)
    for file in files:
        planner.add(file)
    return planner.changes()


class _Planner:
    """The files as they are after the patches that were added."""

    def __init__(self, root: str, read: Read, effort: Effort) -> None:
        self._root = root
        self._read = read
        self._effort = effort
        self._old: dict[str, bytes | None] = {}
        self._new: dict[str, bytes | None] = {}
        self._modes: dict[str, int] = {}
        self._origins: dict[str, str] = {}  # of renamed files that existed before the patch

    def add(self, file: FilePatch) -> None:
        path = _below_root(self._root, file.path)
        old = self._current(path)
        if file.kind != "add" and old is None:
            raise PatchDoesNotApply(f"{file.path} does not exist")
        target = path if file.new_path is None else _below_root(self._root, file.new_path)
        replaced = self._current(target) if file.kind == "add" or target != path else None
        if replaced is not None and not file.is_forced:
            raise PatchDoesNotApply(f"{file.new_path or file.path} already exists")
        origin = self._origins.pop(path, path)
        if file.kind == "delete":
            if not file.is_forced and old is not None and _patched(file, old, self._effort):
                raise PatchDoesNotApply(f"{file.path} has more lines than those that are deleted")
            self._new[path] = None
            return
        self._new[path] = None  # unless it is the target
        content = b"" if file.kind == "add" or old is None else old
        self._new[target] = _patched(file, content, self._effort)
        if file.kind == "update" and origin != target and self._old[origin] is not None:
            self._origins[target] = origin
        if file.mode is not None:
            self._modes[target] = file.mode

    def _current(self, path: str) -> bytes | None:
        if path not in self._new:
            self._old[path] = self._new[path] = self._read(path)
        return self._new[path]

    def changes(self) -> list[PatchedFile]:
        return [
            PatchedFile(path, self._old[path], new, self._modes.get(path), self._origins.get(path))
            for path, new in self._new.items()
            if new != self._old[path] or path in self._modes
        ]


def _below_root(root: str, path: str) -> str:
    if posixpath.basename(path) in ("", ".", "..") or "\0" in path:
        raise PatchDoesNotApply(f"'{path}' is not the path of a file")
    root = posixpath.normpath(root)
    absolute = posixpath.normpath(posixpath.join(root, path))
    if not absolute.startswith(f"{root.rstrip('/')}/"):
        raise PatchDoesNotApply(f"{path} is outside of the root {root}")
    return absolute


def _patched(file: FilePatch, content: bytes, effort: Effort) -> bytes:
    """The content after the hunks; bytes that are not UTF-8 stay as they are."""
    text = content.decode("utf-8", "surrogateescape")
    text = apply_hunks(text, file.hunks, file.path, effort)
    return text.encode("utf-8", "surrogateescape")
