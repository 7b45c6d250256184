"""Lines of files by our own search: patterns, filters, context, limits and time."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.forked import in_own_process

from exec_server.errors import InvalidParams
from exec_server.filesystem import line_search
from exec_server.filesystem.line_search import LineSearch, Options, PathFilter, perform
from exec_server.filesystem.path_guard import GUARD

_EVIL = "(a+)+$"


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


def _options(pattern: str = "two", root: str = "", **changes: Any) -> Options:
    options = Options(
        os.path.join(os.getcwd(), root), pattern, False, False, None, None, 0, 0, limit=1000
    )
    return replace(options, **changes)


def _search(pattern: str = "two", root: str = "", **changes: Any) -> list[tuple[Any, ...]]:
    found = LineSearch(_options(pattern, root, **changes)).run()
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
    monkeypatch.setattr(line_search, "LINE_BYTES", 4)
    monkeypatch.setattr(line_search, "BLOCK_BYTES", 8)
    (folder / "f").write_bytes(b"aaaabbbbccx\nx\nddddeeeeffffx")
    found = _search("x", "f")
    assert [(number, text) for _, number, _, text in found] == [(1, "ccx"), (2, "x"), (3, "x")]


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
    monkeypatch.setattr(line_search, name, value)
    found = LineSearch(_options()).run()
    assert (len(found.lines), found.truncated) == (count, True)


def test_the_first_matches_are_returned(folder: Path) -> None:
    (folder / "f").write_text("x1\nx2\nx3\n")
    found = LineSearch(_options("x", "f", limit=2, after=1)).run()
    assert [(line.number, line.column) for line in found.lines] == [(1, 1), (2, 1), (3, 0)]
    assert found.truncated


def test_a_match_of_exponential_time_is_interrupted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "f").write_text("a" * 60 + "b")
    monkeypatch.setattr(line_search, "MAX_SECONDS", 0.05)
    found = LineSearch(_options(_EVIL, "f")).run()
    assert (found.lines, found.truncated) == ([], True)


def test_the_time_is_up_between_two_files(monkeypatch: pytest.MonkeyPatch) -> None:
    search = LineSearch(_options())
    search._on_alarm(14, None)
    assert search.run().truncated


def test_paths_are_filtered_without_a_walk() -> None:
    only = PathFilter("*.py", "old")
    assert only.is_path_searched("a/b.py")
    assert not only.is_path_searched("a/b.txt")
    assert not only.is_path_searched("old/b.py")
    assert PathFilter(None, None).is_path_searched("a")


def test_the_answer_as_json() -> None:
    def ask(options: Options) -> dict[str, Any]:
        return perform(json.dumps(asdict(options)).encode())

    assert ask(_options(root="a.py")) == {
        "lines": [{"path": "a.py", "number": 2, "column": 1, "text": "two"}],
        "truncated": False,
    }
    assert ask(_options(root="missing")) == {"errno": 2}
    assert "not a regular expression" in ask(_options("("))["refusal"]


def test_the_process_reads_stdin_and_writes_stdout() -> None:
    options = json.dumps(asdict(_options(root="a.py"))).encode()

    def run() -> None:
        sys.stdin = io.TextIOWrapper(io.BytesIO(options))
        sys.stdout = io.StringIO()
        line_search.main()
        answer = json.loads(sys.stdout.getvalue())
        assert [line["number"] for line in answer["lines"]] == [2]
        assert Path("/proc/self/comm").read_text() == "exec-search\n"

    in_own_process(run)()
