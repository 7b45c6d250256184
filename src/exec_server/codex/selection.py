"""Parts of TOML documents: the keys that a client asks for, and keys that a layer may not set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Table = dict[str, Any]


class _KeyTree(dict[str, "_KeyTree | None"]):
    """The keys below a table; None for a key whose whole value is meant."""


def select(document: Table, paths: Iterable[Sequence[str]]) -> Table:
    """The values at these paths, in the order of the document.

    A table on the way to a missing key stays, empty. A value that is no table where the path goes
    on stays whole.
    """
    tree = _KeyTree()
    for path in paths:
        _add(tree, path)
    return _selected(document, tree)


def _add(tree: _KeyTree, path: Sequence[str]) -> None:
    for key in path[:-1]:
        below = tree.setdefault(key, _KeyTree())
        if below is None:
            return  # a shorter path includes this one
        tree = below
    tree[path[-1]] = None


def _selected(table: Table, tree: _KeyTree) -> Table:
    found: Table = {}
    for key, value in table.items():
        if key in tree:
            below = tree[key]
            is_whole = below is None or not isinstance(value, dict)
            found[key] = value if is_whole else _selected(value, below or _KeyTree())
    return found


def without(document: Table, paths: Iterable[Sequence[str]]) -> Table:
    """A copy without the values at these paths."""
    for path in paths:
        document = _without(document, path)
    return document


def _without(table: Table, path: Sequence[str]) -> Table:
    key, *rest = path
    if key not in table:
        return table
    copy = dict(table)
    if not rest:
        del copy[key]
    elif isinstance(copy[key], dict):
        copy[key] = _without(copy[key], rest)
    return copy


def merged(documents: Iterable[Table]) -> Table:
    """All documents in one: the later wins, tables are merged key by key."""
    result: Table = {}
    for document in documents:
        result = _merged(result, document)
    return result


def _merged(low: Table, high: Table) -> Table:
    result = dict(low)
    for key, value in high.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            result[key] = _merged(below, value)
        else:
            result[key] = value
    return result
