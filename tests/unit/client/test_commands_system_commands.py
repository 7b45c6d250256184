"""Commands that the client runs for itself find programs of the system first."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exec_server.client.commands import SystemCommands, with_system_programs
from exec_server.client.exceptions import ProgramNotFound


@pytest.fixture
def project(tmp_path: Path) -> str:
    """A PATH with a program of the system's name, and one that the system lacks."""
    for name in ("uname", "only-here"):
        (tmp_path / name).write_text("#!/bin/sh\necho from the project\n")
        (tmp_path / name).chmod(0o755)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("argv", "output"),
    [
        (["uname"], "Linux\n"),
        (["only-here"], "from the project\n"),
        (["/bin/sh", "-c", 'uname; only-here; echo "$1"', "sh", "a b"], None),
    ],
)
def test_programs_of_the_system_are_first(
    project: str, argv: list[str], output: str | None
) -> None:
    done = subprocess.run(
        with_system_programs(argv), env={"PATH": project}, capture_output=True, check=True
    )
    assert done.stdout.decode() == (output or "Linux\nfrom the project\na b\n")


def test_without_a_path() -> None:
    words = with_system_programs(["/bin/sh", "-c", 'echo "$PATH"'])
    done = subprocess.run(words, env={"PATH": ""}, capture_output=True, check=True)
    assert done.stdout == b"/usr/sbin:/usr/bin:/sbin:/bin\n"


def test_a_missing_program_is_an_error() -> None:
    async def run(argv: list[str], **_: Any) -> SimpleNamespace:
        done = subprocess.run(argv, stderr=subprocess.DEVNULL, check=False)
        return SimpleNamespace(exit_code=done.returncode)

    commands = SystemCommands(cast(Any, run), cast(Any, None))
    with pytest.raises(
        ProgramNotFound, match=r"^no-such: cannot start .*\(os error 2\)$"
    ) as raised:
        asyncio.run(cast(Any, commands.run(["no-such"])))
    assert raised.value.filename == "no-such"
    done: Any = asyncio.run(cast(Any, commands.run(["/bin/sh", "-c", "no-such"])))
    assert done.exit_code == 127  # of a script, which says what is missing
