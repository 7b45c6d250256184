"""Parts of TOML documents."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.codex.bundle import merged, select, without

_DOCUMENT: dict[str, Any] = {
    "model": "m",
    "tab": {"x": {"y": 1, "z": 2}, "w": 3},
    "a.b": 4,
    "list": [{"x": 1}],
}


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([["model"]], {"model": "m"}),
        ([["a.b"]], {"a.b": 4}),
        ([["a", "b"]], {}),
        ([["tab", "x", "y"]], {"tab": {"x": {"y": 1}}}),
        ([["tab", "nope"]], {"tab": {}}),
        ([["model", "deeper"]], {"model": "m"}),
        ([["list", "x"]], {"list": [{"x": 1}]}),
        ([["tab", "w"], ["model"]], {"model": "m", "tab": {"w": 3}}),
        ([["tab"], ["tab", "x", "y"]], {"tab": _DOCUMENT["tab"]}),
        ([["tab", "x", "y"], ["tab"]], {"tab": _DOCUMENT["tab"]}),
    ],
)
def test_select(paths: list[list[str]], expected: dict[str, Any]) -> None:
    found = select(_DOCUMENT, paths)
    assert found == expected
    assert list(found) == [key for key in _DOCUMENT if key in expected]


def test_without_leaves_the_document_alone() -> None:
    paths = [["model"], ["tab", "x", "y"], ["nope"], ["a.b", "c"], ["tab", "nope", "x"]]
    assert without(_DOCUMENT, paths) == {
        "tab": {"x": {"z": 2}, "w": 3},
        "a.b": 4,
        "list": [{"x": 1}],
    }
    assert _DOCUMENT["tab"]["x"] == {"y": 1, "z": 2}


def test_the_later_document_wins_key_by_key() -> None:
    documents: list[dict[str, Any]] = [
        {"a": {"x": 1, "y": 1}, "b": 1},
        {"a": {"y": 2}, "b": {"z": 3}},
        {"a": {"w": 4}},
    ]
    assert merged(documents) == {"a": {"x": 1, "y": 2, "w": 4}, "b": {"z": 3}}
    assert merged([]) == {}
