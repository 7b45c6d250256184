"""The project that a directory belongs to: its root, its git repository, and the user's trust."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from exec_server.codex.selection import Table
from exec_server.errors import InternalError, RpcError
from exec_server.filesystem.operations import open_regular

DEFAULT_MARKERS: Final = (".git",)
# Real configurations have a few. Each is looked for in each directory above a path, of which there
# may be 2000. More are an error.
MARKERS: Final = 64
# The file `.git` of a linked worktree, and git's record of where it is: one path.
_LINK_BYTES: Final = 8192
_LEVELS: Final = ("trusted", "untrusted")


@dataclass(frozen=True, slots=True)
class Checkout:
    """A working directory of git; `main` is that of its repository, which may be another one."""

    root: str
    main: str

    @property
    def is_linked(self) -> bool:
        return self.main != self.root


def project_root(cwd: str, markers: Sequence[str]) -> str:
    """The nearest directory with a marker, else the directory itself. Blocking."""
    for directory in _upwards(cwd):
        for marker in markers:
            if _has_marker(directory, marker):
                return directory
    return cwd


def chain(root: str, cwd: str) -> list[str]:
    """The directories from the root down to the working directory."""
    found = []
    for directory in _upwards(cwd):
        found.append(directory)
        if directory == root:
            break
    return found[::-1]


def _upwards(directory: str) -> Iterator[str]:
    yield directory
    while directory != "/":
        directory = os.path.dirname(directory)
        yield directory


def _has_marker(directory: str, marker: str) -> bool:
    path = os.path.join(directory, marker)
    if marker == ".git" and os.path.isdir(path):
        return os.path.exists(os.path.join(path, "HEAD"))
    return os.path.exists(path)


def find_checkout(directory: str) -> Checkout | None:
    """The checkout that holds a directory. Blocking."""
    for root in _upwards(directory):
        if _has_marker(root, ".git"):
            return Checkout(root, _main_checkout(root))
    return None


def _main_checkout(root: str) -> str:
    """The checkout that a linked worktree belongs to; a checkout that is none belongs to itself.

    The file `.git` names a directory of the main checkout, and that directory must name the
    worktree in turn: a file alone, which any archive may hold, gains no trust.
    """
    link = os.path.join(root, ".git")
    text = _read_line(link)
    if text is None or not text.startswith("gitdir:"):
        return root
    record = os.path.normpath(os.path.join(root, text.removeprefix("gitdir:").strip()))
    repository, worktrees = os.path.split(os.path.dirname(record))
    if worktrees != "worktrees" or os.path.basename(repository) != ".git":
        return root
    back = _read_line(os.path.join(record, "gitdir"))
    if back is None or os.path.realpath(os.path.join(record, back)) != os.path.realpath(link):
        return root
    return os.path.dirname(repository)


def _read_line(path: str) -> str | None:
    """The text of a file with one line; None if it is no small regular file."""
    try:
        descriptor, _ = open_regular(path)
    except (OSError, RpcError):
        return None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(_LINK_BYTES + 1)
    return os.fsdecode(data).strip() if len(data) <= _LINK_BYTES else None


class Trust:
    """The `projects` table of a configuration; raises InternalError if it is invalid."""

    def __init__(self, projects: Any) -> None:
        if not isinstance(projects, dict):
            raise InternalError(f"{_invalid(projects)}, expected a map\nin `projects`\n")
        self._levels = {path: _level(path, entry) for path, entry in projects.items()}

    def is_trusted(self, directory: str, root: str, checkout: Checkout | None) -> bool:
        """Whether layers of a directory count; the first entry that is found decides. Blocking."""
        places = [directory, root]
        if checkout is not None:
            places.append(checkout.main)
        for place in places:
            for spelling in (os.path.realpath(place), place):
                level = self._levels.get(spelling)
                if level is not None:
                    return level == "trusted"
        return False


def _level(path: str, entry: Table) -> str | None:
    if not isinstance(entry, dict):
        expected = f"expected struct ProjectConfig\nin `projects.{path}`\n"
        raise InternalError(f"{_invalid(entry)}, {expected}")
    level = entry.get("trust_level")
    if level is None or (isinstance(level, str) and level in _LEVELS):
        return level
    where = f"in `projects.{path}.trust_level`\n"
    if isinstance(level, str):
        expected = "expected `trusted` or `untrusted`"
        raise InternalError(f"unknown variant `{level}`, {expected}\n{where}")
    raise InternalError(f"invalid type: unit variant, expected string only\n{where}")


def _invalid(value: object) -> str:
    kind = type(value).__name__
    names = {"bool": "boolean", "int": "integer", "float": "floating point", "str": "string"}
    shown = f'"{value}"' if kind == "str" else f"`{value}`"
    return f"invalid type: {names[kind]} {shown}" if kind in names else "invalid type: sequence"


def root_markers(document: Table) -> Sequence[str]:
    """The markers of project roots in a configuration; raises InternalError."""
    markers = document.get("project_root_markers", DEFAULT_MARKERS)
    if not isinstance(markers, list | tuple) or not all(isinstance(m, str) for m in markers):
        raise InternalError("project_root_markers must be an array of strings")
    if len(markers) > MARKERS:
        raise InternalError(f"project_root_markers must be at most {MARKERS} strings")
    return markers
