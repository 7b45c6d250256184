"""docs/commands.md names every command, and its examples parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from exec_server.cli.serve import arguments
from exec_server.cli.table import COMMANDS, route

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "commands.md"
# The flags of the server are in docs/operations.md, sandboxes in docs/security.md.
ELSEWHERE = {"forward", "sandbox"}


def _examples() -> list[str]:
    """Each call of exec-server in a code block, without comments, pipes and redirections."""
    blocks = DOCUMENT.read_text().split("\n```")[1::2]
    shell = [block for block in blocks[1:] if block.startswith(("\n", "sh\n"))]
    lines = [line for block in shell for line in block.split("\n")]
    calls = [call for line in lines for call in re.findall(r"exec-server [^#|<>()]*", line)]
    return [call.strip() for call in calls]


def test_every_command_is_named() -> None:
    text = DOCUMENT.read_text()
    visible = {name for name, command in COMMANDS.items() if command.is_visible}
    missing = {name for name in visible - ELSEWHERE if not re.search(rf"[ `|]{name}\b", text)}
    assert missing == set()


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
