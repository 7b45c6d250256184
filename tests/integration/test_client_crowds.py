"""Far more calls at once than a server takes: all are answered, on both servers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.client import KINDS
from tests.support.client_targets import ClientTarget, machine

from exec_server import Environment

CALLS = 2_000
COMMANDS = 300
# More than a pipe or a queue of the server holds, if all commands print it.
LINES = 200


async def _ask(env: Environment, path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(env.files.stat(path)) for _ in range(CALLS)]
    assert all(task.result().is_directory for task in asked)


async def _print(env: Environment) -> None:
    argv = ["sh", "-c", f"seq {LINES}"]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(env.run(argv)) for _ in range(COMMANDS)]
    text = "".join(f"{number}\n" for number in range(1, LINES + 1))
    assert all((task.result().text, task.result().exit_code) == (text, 0) for task in running)


@pytest.mark.quick
def test_thousands_of_calls_at_once(there: ClientTarget, tmp_path: Path) -> None:
    there.play(lambda env: _ask(env, tmp_path))


def test_hundreds_of_commands_at_once(there: ClientTarget) -> None:
    there.play(_print)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["stdio", "relay"])
def test_a_crowd_on_other_transports(kind: str, transport: str, tmp_path: Path) -> None:
    with machine(kind, transport) as there:
        there.play(lambda env: _ask(env, tmp_path))
        there.play(_print)
