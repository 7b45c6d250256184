"""What a mirror deletes, and what a dry run says."""

from __future__ import annotations

import pytest

from exec_server.client.results import Planned
from exec_server.client.transfer.mirror import (
    Extra,
    Item,
    check_not_root,
    extra_entries,
    plan_of,
    without_filled,
)
from exec_server.errors import InvalidRequest


def items(*paths: str) -> list[Item]:
    """Directories end in a slash; the top comes first."""
    return [
        Item("", "d", None, 0, "1"),
        *(Item(path.rstrip("/"), "d" if path[-1] == "/" else "f", None, 5, "1") for path in paths),
    ]


def compared(source: list[Item], existing: list[Item], *kept: str) -> tuple[list[str], list[str]]:
    extra = extra_entries(source, existing, kept, [])
    return [item.path for item in extra.in_the_way], [item.path for item in extra.others]


def test_what_the_source_lacks_is_extra_and_the_deepest_comes_first() -> None:
    existing = items("a", "d/", "d/e/", "d/e/f", "d/g", "x")
    assert compared(items("a"), existing) == ([], ["d/e/f", "d/e", "d/g", "d", "x"])
    assert compared(items("a", "d/"), existing) == ([], ["d/e/f", "d/e", "d/g", "x"])
    assert compared(items("a"), existing, "d", "d/e") == ([], ["d/e/f", "d/g", "x"])
    assert compared(existing, existing) == ([], [])


def test_what_is_of_another_kind_is_in_the_way() -> None:
    assert compared(items("a", "b/"), items("a/", "a/c/", "a/c/d", "b", "e")) == (
        ["a/c/d", "a/c", "a", "b"],
        ["e"],
    )


def test_a_link_is_in_the_way_of_what_would_be_written_through_it() -> None:
    links = [Item(name, "l", None, 1, "1", "elsewhere") for name in ("a", "b", "c")]
    source = [*items("a", "b/"), Item("c", "l", None, 1, "1", "x")]
    assert compared(source, [*items(), *links]) == (["a", "b"], [])


def test_the_root_directory_is_refused() -> None:
    check_not_root("/srv", "x")
    with pytest.raises(InvalidRequest, match="x: nothing is deleted in the root directory"):
        check_not_root("/", "x")


def test_a_plan_is_in_the_order_of_paths() -> None:
    extra = Extra(items("b")[1:], items("old/")[1:], ["node_modules"])
    tree = [*items("a", "d/", "d/x", "empty/", "there/"), Item("l", "l", None, 3, "1")]
    plan = plan_of(without_filled(tree), {"a", "there"}, extra)
    assert plan == (
        Planned("skip", "a", 5),
        Planned("delete", "b"),
        Planned("copy", "d/x", 5),
        Planned("copy", "empty"),
        Planned("copy", "l"),
        Planned("exclude", "node_modules"),
        Planned("delete", "old"),
        Planned("skip", "there"),
    )
