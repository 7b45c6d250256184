"""fs/grep by programs that are the test, and in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.trees import do, uri

from exec_server.errors import InternalError, InvalidParams, NotFound
from exec_server.filesystem import grep as module
from exec_server.filesystem.grep import grep_by_program
from exec_server.filesystem.line_search import perform
from exec_server.protocol import file_changes as wire

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


class Programs:
    """Answers as ripgrep with these messages, and as our own process."""

    def __init__(self, *messages: Any, is_killed: bool = False) -> None:
        self.messages = messages
        self.is_killed = is_killed
        self.argv: list[list[str]] = []

    def run(
        self, argv: Sequence[str], data: bytes, seconds: float, feed: Callable[[bytes], bool]
    ) -> bool:
        self.argv.append(list(argv))
        if argv[0] != "rg":
            return feed(json.dumps(perform(data)).encode())
        output = b"".join(json.dumps(message).encode() + b"\n" for message in self.messages)
        return feed(output[:50]) and feed(output[50:]) and not self.is_killed

    def grep(self, params: wire.GrepParams, ripgrep: str | None = "rg") -> wire.GrepResult:
        return grep_by_program(params, self.run, ripgrep)


def _message(kind: str, **data: Any) -> dict[str, Any]:
    return {"type": kind, "data": data}


def _begin(folder: Path, name: str = "f") -> dict[str, Any]:
    return _message("begin", path={"text": f"{folder}/{name}"})


def _line(kind: str, number: int, text: str = "a x\n", start: int = 2) -> dict[str, Any]:
    submatches = [{"start": start, "end": start + 1}] if kind == "match" else []
    return _message(kind, lines={"text": text}, line_number=number, submatches=submatches)


_SUMMARY = _message("summary", elapsed_total={"secs": 0})


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
    programs = Programs()
    assert programs.grep(_params(before=1, after=1), None) == found
    assert programs.grep(_params(before=1, after=1)) == found  # ripgrep has failed
    assert [argv[0] == "rg" for argv in programs.argv] == [False, True, False]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pattern": ""}, "1 to 4096"),
        ({"pattern": "x" * 4097}, "1 to 4096"),
        ({"pattern": "a\nb"}, "line break"),
        ({"after": 21}, "at most 20"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"glob": "/x"}, "must be relative"),
        ({"pattern": "("}, "not a regular expression"),
    ],
)
def test_refused_params(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParams, match=text):
        Programs().grep(_params(**changes))


def test_a_missing_root() -> None:
    with pytest.raises(FileNotFoundError):
        Programs().grep(_params(path=uri("missing")))
    with pytest.raises(NotFound):
        do(_params(path=uri("missing")))


def test_the_root_may_vanish() -> None:
    with pytest.raises(FileNotFoundError):
        grep_by_program(_params(), lambda argv, data, seconds, feed: feed(b'{"errno":2}'), None)


def test_the_output_of_ripgrep_is_read(folder: Path) -> None:
    programs = Programs(
        _begin(folder),
        _line("context", 1),
        _line("match", 2, "äx\r\n", 2),
        _message("end", binary_offset=None),
        _begin(folder, "binary"),
        _line("match", 1),
        _message("end", binary_offset=7),
        _begin(folder, "other.txt"),
        _line("match", 1),
        _message("end", binary_offset=None),
        _message("begin", path={"bytes": "AAAA"}, lines=7),
        _SUMMARY,
    )
    found = programs.grep(_params(before=1, exclude="*.txt", ignore_case=True, literal=True))
    assert found == wire.GrepResult([wire.GrepMatch("f", 2, 2, "äx", ["a x"], [])], False)
    assert "--glob=!*.txt" not in programs.argv[0]
    assert {"--fixed-strings", "--ignore-case", "--before-context=1"} < set(programs.argv[0])
    simple = programs.grep(_params(glob="*.py", exclude=".git"))
    assert simple.matches == []
    assert {"--glob=*.py", "--glob=!.git", "--case-sensitive"} < set(programs.argv[1])


def test_a_root_that_is_a_file(folder: Path) -> None:
    programs = Programs(_begin(folder), _line("match", 1), _SUMMARY)
    (match,) = programs.grep(_params(path=uri("f"))).matches
    assert match.path == "f"


def test_bytes_that_are_not_utf8(folder: Path) -> None:
    line = _line("match", 1, start=1)
    line["data"]["lines"] = {"bytes": "/3gK"}
    programs = Programs(_message("begin", path={"bytes": "L/8="}), line, _SUMMARY)
    (match,) = programs.grep(_params()).matches
    assert (match.path, match.column, match.text) == ("\ufffd", 2, "\ufffdx")


def test_ripgrep_is_stopped_at_the_limit(folder: Path) -> None:
    programs = Programs(_begin(folder), _line("match", 1), _line("match", 2), _SUMMARY)
    found = programs.grep(_params(limit=1, after=1))
    assert found == wire.GrepResult([wire.GrepMatch("f", 1, 3, "a x", [], ["a x"])], True)


def test_ripgrep_is_stopped_at_its_time(folder: Path) -> None:
    found = Programs(_begin(folder), _line("match", 1), is_killed=True).grep(_params())
    assert (len(found.matches), found.truncated) == (1, True)


def test_the_answer_of_ripgrep_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINES", 1)
    found = Programs(_begin(folder), _line("match", 1), _line("match", 2)).grep(_params())
    assert (len(found.matches), found.truncated) == (1, True)


def test_a_very_long_message_of_ripgrep_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MESSAGE_BYTES", 400)
    long = _line("match", 1, "x" * 400)
    end = _message("end", binary_offset=None)
    found = Programs(_begin(folder), long, _line("match", 2), end, _SUMMARY).grep(_params())
    assert ([match.line for match in found.matches], found.truncated) == ([2], True)
    binary = _message("end", binary_offset=7)
    skipped = [_begin(folder), long, binary, _begin(folder, "a.txt"), long, end]
    programs = Programs(*skipped, _begin(folder, "g"), _line("match", 3), end, _SUMMARY)
    found = programs.grep(_params(exclude="*.txt"))
    assert ([match.line for match in found.matches], found.truncated) == ([3], False)


def test_the_output_of_ripgrep_comes_in_pieces(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MESSAGE_BYTES", 400)
    messages = [_begin(folder), _line("match", 1, "x" * 400), _line("match", 2), _SUMMARY]
    output = "".join(f"{json.dumps(message)}\n" for message in messages).encode()

    def run(argv: object, data: bytes, seconds: float, feed: Callable[[bytes], bool]) -> bool:
        return all(feed(output[index : index + 1]) for index in range(len(output)))

    found = grep_by_program(_params(), run, "rg")
    assert ([match.line for match in found.matches], found.truncated) == ([2], True)


def test_a_ripgrep_that_cannot_be_started() -> None:
    programs = Programs()

    def run(argv: Sequence[str], *arguments: Any) -> bool:
        if argv[0] == "rg":
            raise OSError(8, "Exec format error")
        return programs.run(argv, *arguments)

    assert len(grep_by_program(_params(), run, "rg").matches) == 4


def test_a_process_that_says_too_much_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OUTPUT_BYTES", 1)
    assert Programs().grep(_params(), None).matches  # it had said everything
    with pytest.raises(InternalError, match="ended early"):
        grep_by_program(_params(), lambda argv, data, seconds, feed: feed(b"{"), None)
