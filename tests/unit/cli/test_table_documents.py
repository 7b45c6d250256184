"""docs/commands.md names every command, and its examples parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from exec_server.cli.serve import arguments
from exec_server.cli.table import COMMANDS, route

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "commands.md"


def _examples() -> list[str]:
    """Each call of exec-server in a code block, without comments, pipes and redirections."""
    blocks = DOCUMENT.read_text().split("\n```")[1::2]
    shell = [block for block in blocks[1:] if block.startswith(("\n", "sh\n"))]
    lines = [line for block in shell for line in block.split("\n")]
    calls = [call for line in lines for call in re.findall(r"exec-server [^#|<>()]*", line)]
    return [call.strip() for call in calls]


def test_the_overview_lists_every_command() -> None:
    overview = DOCUMENT.read_text().split("\n```")[1]
    listed = re.findall(r"^exec-server ([a-z|-]+)", overview, re.MULTILINE)
    names = {name for words in listed for name in words.split("|")}
    assert names == {name for name, command in COMMANDS.items() if command.is_visible}


@pytest.mark.parametrize("example", _examples())
def test_examples_parse(example: str) -> None:
    name, words = route(shlex.split(example)[1:])
    assert name in COMMANDS
    if name in ("serve", "forward"):
        arguments.parse(words)
    else:
        COMMANDS[name].build_parser().parse_words(words)


def test_there_are_examples() -> None:
    assert len(_examples()) >= 10
