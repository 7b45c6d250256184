"""The lines that `exec-server grep` prints."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exec_server.cli.files import grep, operands
from exec_server.cli.files.operands import Operand
from exec_server.client.results import Found, GrepCount, GrepMatch, Stat

pytestmark = pytest.mark.quick

OPERAND = Operand(cast(Any, None), "src", "box:src")


def test_lines_like_those_of_grep() -> None:
    plain = GrepMatch("a.py", 7, 1, "x\ty\x1b")
    assert grep._text_lines(["a.py"], [plain], has_groups=False) == "a.py:7:x\ty\\x1b\n"
    around = GrepMatch("a.py", 7, 1, "x", ("p", "q"), ("r",))
    assert grep._text_lines(["a.py"], [around], has_groups=True) == (
        "a.py-5-p\na.py-6-q\na.py:7:x\na.py-8-r\n"
    )


def test_groups_that_overlap_or_touch_are_one() -> None:
    matches = [
        GrepMatch("a", 2, 1, "two", ("one",), ("three",)),
        GrepMatch("a", 3, 1, "three", ("two",), ("four",)),
        GrepMatch("a", 6, 1, "six", ("five",), ("seven",)),
        GrepMatch("a", 9, 1, "nine"),
        GrepMatch("b", 10, 1, "ten"),
    ]
    text = grep._text_lines(list("aaaab"), matches, has_groups=True)
    assert text == (
        "a-1-one\na:2:two\na:3:three\na-4-four\na-5-five\na:6:six\na-7-seven\n"
        "--\na:9:nine\n--\nb:10:ten\n"
    )
    assert "--" not in grep._text_lines(["a", "b"], matches[3:], has_groups=False)


def test_paths_begin_with_the_operand() -> None:
    shown = grep._display_path
    assert shown(OPERAND, "a/b", is_directory=True) == "src/a/b"
    assert shown(OPERAND, "src", is_directory=False) == "src"
    here = Operand(cast(Any, None), ".", "box:")
    assert shown(here, "a/b", is_directory=True) == "a/b"
    slash = Operand(cast(Any, None), "src/", "box:src/")
    assert shown(slash, "a", is_directory=True) == "src/a"


def test_json() -> None:
    line = grep._json_line(OPERAND, GrepMatch("a", 1, 2, "t", ("b",)))
    assert json.loads(line) == {
        "operand": "box:src",
        "path": "a",
        "line": 1,
        "column": 2,
        "text": "t",
        "before": ["b"],
        "after": [],
    }


class Counts:
    """The counts of two files, and what was asked for."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    async def grep_count(self, pattern: str, path: str, **asked: Any) -> Found[GrepCount]:
        self.asked = asked
        found = [] if pattern == "none" else [GrepCount("a", 2), GrepCount("b\x1b", 1)]
        return Found(found, truncated=bool(found))

    async def stat(self, path: str) -> Stat:
        return Stat(True, False, False, 0, 0.0, None)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["-lw", "x"], 0, "src/a\nsrc/b\\x1b\n"),
        (["-cvi", "x"], 0, "src/a:2\nsrc/b\\x1b:1\n"),
        (["-c", "none"], 1, ""),
    ],
)
def test_counts(
    words: list[str],
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    files = Counts()
    operand = Operand(cast(Any, SimpleNamespace(files=files)), "src", "box:src")

    def for_each(arguments: Any, search: Any, *, needs_path: bool) -> int:
        asyncio.run(search(operand))
        return 0

    monkeypatch.setattr(operands, "for_each_operand", for_each)
    arguments = grep.build_parser().parse_words([*words, "box:src"])
    assert grep.run(arguments) == code
    shown = capfd.readouterr()
    assert shown.out == text
    assert ("further matches" in shown.err) == (code == 0)
    assert files.asked["word"] == ("w" in words[0])
    assert files.asked["invert"] == ("v" in words[0])
    grep.run(grep.build_parser().parse_words(["-l", "--json", "x", "box:src"]))
    first = json.loads(capfd.readouterr().out.splitlines()[0])
    assert first == {"operand": "box:src", "path": "a", "count": 2}
