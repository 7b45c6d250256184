"""A patch in either format, and the files after it.

A patch is planned before any file is changed: every file is read and every hunk applied in memory.
So a patch that does not fit changes nothing.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass

from exec_server.patching import codex_patch, unified_diff
from exec_server.patching.hunks import (
    UNBOUNDED,
    Effort,
    FilePatch,
    PatchFailed,
    apply_hunks,
    check_lines,
)

# Reads a file; None if it is missing. Raises OSError for a directory and the like.
Read = Callable[[str], bytes | None]


@dataclass(frozen=True, slots=True)
class PatchedFile:
    """The content of a file before and after a patch; None if there is no file."""

    path: str
    old: bytes | None
    new: bytes | None
    mode: int | None = None  # permission bits that the patch states
    renamed_from: str | None = None  # the file whose permission bits it keeps


def parse_patch(text: str) -> list[FilePatch]:
    """The changes of a patch of Codex or of a unified diff; raises PatchFailed."""
    check_lines(text, "the patch")
    if text.lstrip().startswith(codex_patch.BEGIN):
        return codex_patch.parse(text)
    return unified_diff.parse(text)


def plan(
    files: list[FilePatch], root: str, read: Read, effort: Effort = UNBOUNDED
) -> list[PatchedFile]:
    """The changed files, each once, with paths below `root`; raises PatchFailed.

    As in Codex, an added or renamed file replaces an existing one.
    """
    planner = _Planner(root, read, effort)
    for file in files:
        planner.add(file)
    return planner.changes()


class _Planner:
    """The files as they are after the patches that were added."""

    def __init__(self, root: str, read: Read, effort: Effort) -> None:
        self._root = posixpath.normpath(root)
        self._read = read
        self._effort = effort
        self._old: dict[str, bytes | None] = {}
        self._new: dict[str, bytes | None] = {}
        self._modes: dict[str, int] = {}
        self._origins: dict[str, str] = {}  # of renamed files that existed before the patch

    def add(self, file: FilePatch) -> None:
        path = self._below_root(file.path)
        old = self._current(path)
        if file.kind != "add" and old is None:
            raise PatchFailed(f"{file.path} does not exist")
        target = path if file.new_path is None else self._below_root(file.new_path)
        self._current(target)
        origin = self._origins.pop(path, path)
        if file.kind == "delete":
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

    def _below_root(self, path: str) -> str:
        if posixpath.basename(path) in ("", ".", "..") or "\0" in path:
            raise PatchFailed(f"'{path}' is not the path of a file")
        absolute = posixpath.normpath(posixpath.join(self._root, path))
        if not absolute.startswith(f"{self._root.rstrip('/')}/"):
            raise PatchFailed(f"{path} is outside of the root {self._root}")
        return absolute

    def changes(self) -> list[PatchedFile]:
        return [
            PatchedFile(path, self._old[path], new, self._modes.get(path), self._origins.get(path))
            for path, new in self._new.items()
            if new != self._old[path] or path in self._modes
        ]


def _patched(file: FilePatch, content: bytes, effort: Effort) -> bytes:
    """The content after the hunks; bytes that are not UTF-8 stay as they are."""
    text = content.decode("utf-8", "surrogateescape")
    text = apply_hunks(text, file.hunks, file.path, effort)
    return text.encode("utf-8", "surrogateescape")
