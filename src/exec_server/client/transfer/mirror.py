"""Items of trees: what a mirror deletes at its destination, and what a dry run says. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable
from typing import NamedTuple, Self

from exec_server.client.results import Planned
from exec_server.errors import InvalidRequest


class Item(NamedTuple):
    """An entry of a tree; `path` is relative to the top, and empty for the top itself."""

    path: str
    kind: str  # as in `find -printf %y`: f, d, l or another letter
    mode: int | None
    size: int
    modified: str  # a version: it changes with the content
    target: str = ""  # of a symlink

    @property
    def time_ns(self) -> int:
        """The modification time in nanoseconds since 1970."""
        *_, word = self.modified.split()
        if " " in self.modified:
            return int(word)
        seconds, _, fraction = word.removeprefix("-").partition(".")
        nanoseconds = int(seconds) * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))
        return -nanoseconds if word.startswith("-") else nanoseconds

    @property
    def time(self) -> float:
        """The modification time in seconds since 1970, to about 200 ns."""
        return self.time_ns / 1e9


class Extra(NamedTuple):
    """Entries of a destination that the source lacks, each directory after those in it.

    A directory with an excluded entry is not among them. `excluded` has the source's entries.
    """

    in_the_way: list[Item]  # of entries of another kind: deleted before the copy
    others: list[Item]
    excluded: list[str]

    @classmethod
    def nothing(cls, excluded: list[str]) -> Self:
        return cls([], [], excluded)


def extra_entries(
    source: Iterable[Item], existing: Iterable[Item], kept: Collection[str], excluded: list[str]
) -> Extra:
    """Compare two trees, both from the top down; paths in `kept` are not deleted.

    A link is in the way of a file, which the server would write through it.
    """
    kinds = {item.path: item.kind for item in source}
    obstacles: set[str] = set()
    in_the_way: list[Item] = []
    others: list[Item] = []
    for item in existing:
        kind = kinds.get(item.path)
        if not item.path or (kind is not None and not _is_obstacle(item.kind, kind)):
            continue
        if kind is not None or posixpath.dirname(item.path) in obstacles:
            obstacles.add(item.path)
        if item.path not in kept:
            (in_the_way if item.path in obstacles else others).append(item)
    return Extra(_deepest_first(in_the_way), _deepest_first(others), excluded)


def _is_obstacle(existing: str, kind: str) -> bool:
    """Whether an entry of the second kind cannot take the place of one of the first."""
    return (existing == "d") != (kind == "d") or (existing, kind) == ("l", "f")


def _deepest_first(items: list[Item]) -> list[Item]:
    return sorted(items, key=depth, reverse=True)


def depth(item: Item) -> int:
    return item.path.count("/")


def check_not_root(directory: str, name: str) -> None:
    """Refuse to delete in the root directory; raises InvalidRequest."""
    if posixpath.dirname(directory) == directory:
        raise InvalidRequest(f"{name}: nothing is deleted in the root directory of a machine")


def without_filled(items: Iterable[Item]) -> list[Item]:
    """The items without the directories that have entries: these come with their entries."""
    items = list(items)
    filled = {posixpath.dirname(item.path) for item in items if item.path}
    return [item for item in items if item.kind != "d" or item.path not in filled]


def plan_of(items: Iterable[Item], skipped: Collection[str], extra: Extra) -> tuple[Planned, ...]:
    """What a copy of these items would do, by path."""
    plan = [Planned("exclude", path) for path in extra.excluded]
    for item in items:
        size = item.size if item.kind == "f" else 0
        plan.append(Planned("skip" if item.path in skipped else "copy", item.path, size))
    plan += (Planned("delete", item.path) for item in (*extra.in_the_way, *extra.others))
    return tuple(sorted(plan, key=lambda each: each.path.split("/")))
