"""The lines that `exec-server grep` prints."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from exec_server.cli.commands import grep_command
from exec_server.cli.commands.remote_operands import Operand
from exec_server.client.results import GrepMatch

pytestmark = pytest.mark.quick

OPERAND = Operand(cast(Any, None), "src", "box:src")


def test_lines_like_those_of_grep() -> None:
    plain = GrepMatch("a.py", 7, 1, "x\ty\x1b")
    assert grep_command._text_lines(OPERAND, plain) == "a.py:7:x\ty\\x1b\n"
    around = GrepMatch("a.py", 7, 1, "x", ("p", "q"), ("r",))
    assert grep_command._text_lines(OPERAND, around) == (
        "a.py-5-p\na.py-6-q\na.py:7:x\na.py-8-r\n--\n"
    )


def test_json() -> None:
    line = grep_command._json_line(OPERAND, GrepMatch("a", 1, 2, "t", ("b",)))
    assert json.loads(line) == {
        "operand": "box:src",
        "path": "a",
        "line": 1,
        "column": 2,
        "text": "t",
        "before": ["b"],
        "after": [],
    }
