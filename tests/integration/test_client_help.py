"""What `help` shows of the package: programs that work, and names that exist."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from tests.support.client import DEFAULT_TIMEOUT, scaled, server_environment

import exec_server
from exec_server import sync
from exec_server.cli.table import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


def program(module: ModuleType) -> str:
    """The indented lines of the docstring from the first import to the next text."""
    lines = inspect.getdoc(module).split("\n")  # type: ignore[union-attr]
    first = next(number for number, line in enumerate(lines) if line.startswith("    "))
    last = next(
        number for number, line in enumerate(lines) if number > first and re.match(r"\S", line)
    )
    return textwrap.dedent("\n".join(lines[first:last]))


@pytest.mark.parametrize("module", [exec_server, sync])
def test_the_program_of_the_help_works(module: ModuleType, tmp_path: Path) -> None:
    text = program(module).replace("/tmp/", f"{tmp_path}/")
    assert 5 <= len([line for line in text.split("\n") if line.strip()]) <= 15
    ended = subprocess.run(
        [sys.executable, "-c", text],
        env=server_environment("ours", {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(DEFAULT_TIMEOUT),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "Linux\n 0\nb'hello'\n"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.quick
def test_the_help_leads_on() -> None:
    document = inspect.getdoc(exec_server) or ""
    summary, _, rest = document.partition("\n\n")
    text = pydoc.plain(pydoc.render_doc(exec_server))
    assert f"exec_server - {summary}" in text
    assert textwrap.indent(rest.partition("\n\n")[0], "    ") in text
    for path in re.findall(r"docs/\S+\.md", document):
        assert (ROOT / path).exists()
    for name in re.findall(r"^    ([A-Z]\w+)", document, re.MULTILINE):
        assert name in exec_server.__all__
    commands = re.search(r"the command line: (.*) and others", document)
    assert commands is not None
    assert set(commands[1].split(", ")) <= set(COMMANDS)


@pytest.mark.quick
@pytest.mark.parametrize("kind", [exec_server.Environment, sync.Environment])
def test_the_help_of_an_environment_names_its_methods(kind: type) -> None:
    document = inspect.getdoc(exec_server.Environment) or ""
    named = set(re.findall(r"`(\w+)`", document.partition("\n\nCommands:")[2]))
    assert len(named) >= 15
    assert named <= set(dir(kind))
    text = pydoc.plain(pydoc.render_doc(kind))
    assert "The path of the server's directory, where relative paths start." in text
