"""fs/grep in this process, and with a ripgrep that is the test."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.trees import do, uri

from exec_server.errors import InvalidParams, NotFound
from exec_server.filesystem import search
from exec_server.filesystem.search import Ripgrep, grep
from exec_server.protocol import files as wire

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_text("a\nx1\nx2\nb\nc\nx3\n")
    (tmp_path / "g").write_text("x\n")
    return tmp_path


def _params(**changes: Any) -> wire.GrepParams:
    members: dict[str, Any] = {"path": uri("."), "pattern": "x"} | changes
    return wire.GrepParams(**members)


class Program:
    """Answers as ripgrep with these messages."""

    def __init__(self, *messages: Any, piece: int = 50) -> None:
        self.output = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
        self.piece = piece
        self.argv: list[str] = []

    def run(self, argv: Sequence[str], seconds: float, feed: Callable[[bytes], None]) -> None:
        self.argv = list(argv)
        for start in range(0, len(self.output), self.piece):
            feed(self.output[start : start + self.piece])

    def grep(self, params: wire.GrepParams) -> wire.GrepResult:
        return grep(params, Ripgrep("rg", self.run))

    def paths(self, params: wire.GrepParams) -> list[str]:
        return [match.path for match in self.grep(params).matches]


def _begin(path: str) -> dict[str, Any]:
    return {"type": "begin", "data": {"path": {"text": path}}}


_SUMMARY = {"data": {"elapsed_total": {"secs": 0}}, "type": "summary"}


def test_matches_have_their_context() -> None:
    found = do(_params(before=1, after=1))
    assert found == wire.GrepResult(
        [
            wire.GrepMatch("f", 2, 1, "x1", ["a"], ["x2"]),
            wire.GrepMatch("f", 3, 1, "x2", ["x1"], ["b"]),
            wire.GrepMatch("f", 6, 1, "x3", ["c"], []),
            wire.GrepMatch("g", 1, 1, "x", [], []),
        ],
        False,
    )


def test_other_lines_and_counts(folder: Path) -> None:
    found = grep(_params(invert=True, before=1, limit=2))
    assert [(each.path, each.line, each.before) for each in found.matches] == [
        ("f", 1, []),
        ("f", 4, ["x2"]),
    ]
    assert found.truncated
    (folder / "binary").write_bytes(b"x\n\0")
    counts = [wire.GrepCount("f", 3), wire.GrepCount("g", 1)]
    assert do(_params(count_only=True)) == wire.GrepResult([], False, counts)
    assert do(_params(count_only=True, limit=1)) == wire.GrepResult([], True, counts[:1])
    assert grep(_params(count_only=True, invert=True)).counts == counts[:1]


def test_long_lines_are_counted_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "BLOCK_BYTES", 4)
    (folder / "f").write_text("....x...x...\n............\na\n....\n")
    assert grep(_params(count_only=True)).counts == [wire.GrepCount("f", 1), wire.GrepCount("g", 1)]
    found = grep(_params(invert=True))
    assert [(each.path, each.line) for each in found.matches] == [("f", 2), ("f", 3), ("f", 4)]
    (folder / "f").write_text("............x")
    assert grep(_params(invert=True)).matches == []
    (folder / "f").write_text("x............")
    assert grep(_params(invert=True, count_only=True)).counts == []


def test_other_lines_are_searched_for_without_ripgrep(folder: Path) -> None:
    program = Program(_SUMMARY)
    assert program.paths(_params(invert=True)) == ["f"] * 3
    assert program.argv == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pattern": ""}, "1 to 4096"),
        ({"after": 21}, "at most 20"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"glob": "/x"}, "must be relative"),
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "*"}, "not a regular expression: nothing to repeat$"),
    ],
)
def test_refused_params(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParams, match=text):
        grep(_params(**changes))


def test_a_missing_root() -> None:
    with pytest.raises(FileNotFoundError):
        Program().grep(_params(path=uri("missing")))
    with pytest.raises(NotFound):
        do(_params(path=uri("missing")))


def test_ripgrep_selects_files(folder: Path) -> None:
    (folder / "\udcff").write_text("x")
    program = Program(
        _begin(f"{folder}/g"),
        {"type": "match", "data": {"path": {"text": f"{folder}/f"}, "lines": {"text": "x"}}},
        {"type": "begin", "data": {"path": {"bytes": "/w=="}}},
        _SUMMARY,
    )
    assert program.paths(_params(ignore_case=True)) == ["g", "\ufffd"]
    assert program.argv[-4:] == ["--ignore-case", "--regexp=x", "--", str(folder)]
    assert program.paths(_params(glob="f")) == []
    assert "--case-sensitive" in program.argv


def test_a_root_that_is_a_file_needs_no_ripgrep() -> None:
    program = Program()
    assert program.paths(_params(path=uri("g"))) == ["g"]
    assert program.argv == []


@pytest.mark.parametrize("messages", [[], [_begin("f")], ["x", {"type": 7}]])
def test_a_ripgrep_that_fails(messages: list[Any]) -> None:
    assert Program(*messages).paths(_params()) == ["f", "f", "f", "g"]


def test_a_ripgrep_that_cannot_be_started() -> None:
    def run(*_: object) -> None:
        raise OSError(8, "Exec format error")

    assert len(grep(_params(), Ripgrep("rg", run)).matches) == 4


def test_a_search_ends_at_its_limit_and_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(_begin(f"{folder}/f"), _SUMMARY)
    found = program.grep(_params(limit=1, after=1))
    assert found == wire.GrepResult([wire.GrepMatch("f", 2, 1, "x1", [], ["x2"])], True)
    monkeypatch.setattr(search, "MAX_SECONDS", 0.0)
    assert program.grep(_params()) == wire.GrepResult([], True)


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_a_long_message_of_ripgrep_is_skipped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(search, "MESSAGE_BYTES", 400)
    long = {"type": "match", "data": {"lines": {"text": "x" * 2000}}}
    program = Program(_begin(f"{folder}/f"), long, _begin(f"{folder}/g"), _SUMMARY, piece=piece)
    assert program.paths(_params(pattern="[13]|x$")) == ["f", "f", "g"]
