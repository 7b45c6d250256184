"""Lines of files: filters, context, limits and time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exec_server.errors import InvalidParams
from exec_server.filesystem import search
from exec_server.filesystem.line_patterns import LinePattern
from exec_server.filesystem.safe_write import GUARD
from exec_server.filesystem.search import LineSearch, PathFilter
from exec_server.protocol.files import GrepParams
from exec_server.protocol.paths import PathUri


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src/deep").mkdir(parents=True)
    (tmp_path / "a.py").write_text("one\ntwo\nthree\n")
    (tmp_path / "src/b.py").write_bytes(b"no\r\nTWO and two\r\n")
    (tmp_path / "src/deep/c.txt").write_text("two")
    (tmp_path / "binary").write_bytes(b"two\n\0")
    (tmp_path / "link").symlink_to("a.py")
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


def _params(pattern: str = "two", root: str = "", **changes: Any) -> GrepParams:
    path = PathUri.from_wire(os.path.join(os.getcwd(), root))
    return GrepParams(path, pattern, **changes)


def _search(pattern: str = "two", root: str = "", **changes: Any) -> list[tuple[Any, ...]]:
    found = LineSearch(_params(pattern, root, **changes)).run()
    assert not found.truncated
    return [(line.path, line.number, line.column, line.text) for line in found.lines]


def test_matches_are_in_the_order_of_paths() -> None:
    assert _search() == [
        ("a.py", 2, 1, "two"),
        ("src/b.py", 2, 9, "TWO and two"),
        ("src/deep/c.txt", 1, 1, "two"),
    ]


@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        ({"pattern": "^two$"}, [1, 1]),
        ({"pattern": "TWO", "ignore_case": True}, [1, 1, 1]),
        ({"pattern": "t.o", "literal": True}, []),
        ({"pattern": "w(?=o)", "glob": "*.py"}, [2, 10]),
        ({"glob": "src/**"}, [9, 1]),
        ({"exclude": "src"}, [1]),
        ({"exclude": "*.{py,txt}"}, []),
        ({"glob": "*.py", "exclude": "src/*.py"}, [1]),
    ],
)
def test_patterns_and_filters(changes: dict[str, Any], columns: list[int]) -> None:
    assert [column for _, _, column, _ in _search(**changes)] == columns


def test_context_lines_occur_once(folder: Path) -> None:
    (folder / "f").write_text("\n".join("axbxcdex"))
    found = _search("x", "f", before=1, after=1)
    assert [(number, column) for _, number, column, _ in found] == [
        (1, 0),
        (2, 1),
        (3, 0),
        (4, 1),
        (5, 0),
        (7, 0),
        (8, 1),
    ]
    assert {path for path, *_ in found} == {"f"}


def test_the_root_is_a_file_a_directory_or_missing(folder: Path) -> None:
    assert _search(root="link") == [("link", 2, 1, "two")]
    assert _search(root="fifo") == []
    with pytest.raises(FileNotFoundError):
        _search(root="missing")
    with pytest.raises(InvalidParams, match="not a regular expression"):
        _search("(")


def test_unreadable_entries_are_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(path: str, writing: bool) -> int:
        return 13 if path.endswith(("/src", "/a.py")) else 0

    monkeypatch.setattr(GUARD, "_path_checks", [check])
    (folder / "z").write_text("two")
    assert _search() == [("z", 1, 1, "two")]


def test_an_entry_that_vanishes_is_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = LineSearch._entries_of

    def list_and_remove(*arguments: Any) -> Any:
        entries = listed(*arguments)
        (folder / "a.py").unlink(missing_ok=True)
        (folder / "src").rename(folder / "gone") if (folder / "src").exists() else None
        return entries

    monkeypatch.setattr(LineSearch, "_entries_of", list_and_remove)
    assert _search() == []


def test_long_lines_are_searched_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "BLOCK_BYTES", 4)
    (folder / "f").write_bytes(b"aaaabbbbccx\nx\nddddeeeeffffxxxxx\n\nx")
    found = _search("x", "f", before=1)
    assert [(number, column, text) for _, number, column, text in found if column] == [
        (1, 11, "ccx"),
        (2, 1, "x"),
        (3, 13, "ffxx"),
        (5, 1, "x"),
    ]
    assert [number for _, number, column, _ in found if not column] == [1, 3, 4]


def test_context_reaches_into_other_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "BLOCK_BYTES", 4)
    (folder / "f").write_text("a\nb\nc\nx\nd\ne\nf\ng\n")
    found = _search("x", "f", before=2, after=3)
    assert [(number, text) for _, number, _, text in found] == list(enumerate("bcxdef", 2))


def test_a_null_byte_in_a_later_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "BLOCK_BYTES", 4)
    (folder / "f").write_bytes(b"x\nx\nx\n\0")
    assert _search("x", "f") == []


def test_text_is_cut_and_bytes_are_replaced(folder: Path) -> None:
    (folder / "f").write_bytes(b"\xff\xc3\xa4" + b"y" * 2000)
    ((_, _, column, text),) = _search("y", "f")
    assert (column, text) == (3, "\ufffdä" + "y" * 998)


@pytest.mark.parametrize(
    ("name", "value", "count"),
    [("MAX_LINES", 1, 1), ("MAX_CHARACTERS", 10, 1), ("MAX_ENTRIES", 2, 0)],
)
def test_the_answer_is_bounded(
    name: str, value: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, name, value)
    found = LineSearch(_params()).run()
    assert (len(found.lines), found.truncated) == (count, True)


def test_the_first_matches_are_returned(folder: Path) -> None:
    (folder / "f").write_text("x1\nx2\nx3\n")
    found = LineSearch(_params("x", "f", limit=2, after=1)).run()
    assert [(line.number, line.column) for line in found.lines] == [(1, 1), (2, 1), (3, 0)]
    assert found.truncated


def test_a_match_of_exponential_time_is_interrupted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "f").write_text("ok\n" + "a" * 60 + "b")
    monkeypatch.setattr(search, "MAX_SECONDS", 0.05)
    found = LineSearch(_params("ok|(?:a|aa)+$", "f")).run()
    assert ([line.number for line in found.lines], found.truncated) == ([1], True)


def test_a_cancelled_search_ends() -> None:
    found = LineSearch(_params(), is_cancelled=lambda: True).run()
    assert (found.lines, found.truncated) == ([], True)


@pytest.mark.parametrize(
    ("is_complete", "paths"), [(True, ["src/b.py"]), (False, ["a.py", "src/b.py"])]
)
def test_files_can_be_selected_by_others(is_complete: bool, paths: list[str]) -> None:
    def preselect(
        root: str, pattern: LinePattern, seconds: float, visit: Callable[[str], None]
    ) -> bool:
        assert 0 < seconds <= search.MAX_SECONDS
        for path in ("src/b.py", "src/deep/c.txt", "missing", "link"):
            visit(path)
        return is_complete

    found = LineSearch(_params(glob="*.py")).run(preselect)
    assert [line.path for line in found.lines] == paths


def test_names_are_in_the_order_of_their_bytes(folder: Path) -> None:
    for name in ("\U00010000", "\udcff", "\ue000"):
        (folder / name).write_text("zwei")
    assert [path for path, *_ in _search("zwei")] == ["\ue000", "\U00010000", "\ufffd"]


def test_paths_are_filtered_without_a_walk() -> None:
    only = PathFilter("*.py", "old")
    assert only.is_path_searched("a/b.py")
    assert not only.is_path_searched("a/b.txt")
    assert not only.is_path_searched("old/b.py")
    assert PathFilter(None, None).is_path_searched("a")
