"""Signals before the command is started, commands that cannot be, and those that are detached.

Behaviour with a server is tested in integration, and so is what is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.detached_commands import TARGET, FakeEnvironment

from exec_server.cli.errors import CommandError
from exec_server.cli.exec import command, execution
from exec_server.cli.exec.command import build_parser
from exec_server.cli.exec.execution import command_code, start_failure
from exec_server.cli.targets import Target
from exec_server.client.exceptions import ProgramNotFound
from exec_server.errors import (
    ExecServerError,
    InternalError,
    InvalidRequest,
    SessionLost,
    Unsupported,
)


def test_a_signal_before_the_start_of_the_command_ends_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = command.build_parser().parse_words(["ws://h:1", "x"])
    running = execution._Execution(arguments, Target(label="x", url="ws://h:1"), None)

    @contextlib.asynccontextmanager
    async def never_open(*_: object) -> AsyncIterator[None]:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(execution, "open_environment", never_open)
    assert asyncio.run(running.run()) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "is_raw", "end"),
    [
        ([], True, "lost; to leave, type Enter ~."),
        (["-e", "%"], True, "lost; to leave, type Enter %."),
        (["-e", "none"], True, "lost"),
        ([], False, "lost"),
    ],
)
def test_a_terminal_is_told_the_way_out_of_a_lost_connection(
    words: list[str], is_raw: bool, end: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scene() -> None:
        arguments = command.build_parser().parse_words([*words, "ws://h:1", "x"])
        terminal: Any = SimpleNamespace(is_raw=is_raw)
        running = execution._Execution(arguments, Target(label="x", url="ws://h:1"), terminal)
        running._outcome = asyncio.get_running_loop().create_future()
        running._print_connection_status("lost")
        running._print_connection_status("reconnected")
        running._outcome.cancel()
        running._print_connection_status("lost again")

    asyncio.run(scene())
    lost, back = capfd.readouterr().err.splitlines()
    assert lost.endswith(end)
    assert back.endswith(": reconnected")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ProgramNotFound("cannot start x: No such file or directory (os error 2)"), 127),
        (InternalError("cannot start x: Permission denied (os error 13)"), 126),
        (InternalError("cannot start x: Exec format error (os error 8)"), 126),
        (InternalError("cannot start x: Cannot allocate memory (os error 12)"), 125),
        (InvalidRequest("the policy cannot be enforced"), 125),
        (Unsupported("processSignals", "do without"), 125),
    ],
)
def test_exit_codes_are_those_of_shells(error: ExecServerError, code: int) -> None:
    failure = start_failure(error, ["x"], "build")
    assert failure.exit_code == code
    assert str(failure).startswith("build: ")
    assert "os error" not in str(failure)


@pytest.mark.parametrize("word", ["ls -la", "a|b", "a>b", "a;b", "a&&b"])
def test_a_single_word_for_a_shell_gets_a_hint(word: str) -> None:
    failure = start_failure(ProgramNotFound("cannot start"), [word], "build")
    assert str(failure).endswith(f"sh -c '{word}'")


@pytest.mark.parametrize("argv", [["ls"], ["a b", "c"], []])
def test_other_commands_get_none(argv: list[str]) -> None:
    assert "\n" not in str(start_failure(ProgramNotFound("cannot start"), argv, "build"))


WORDS = ["-d", "-i", "--name", "new", "--cwd", "/w", "--env", "A=b", "--idle-timeout", "5", "box"]


def test_the_name_is_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = FakeEnvironment().open_in(monkeypatch, execution)
    arguments = build_parser().parse_words([*WORDS, "npm", "start"])
    assert execution.start_detached(arguments, TARGET) == 0
    assert capfd.readouterr().out == "new\n"
    [(argv, options)] = environment.started
    assert argv == ["npm", "start"]
    assert options == {
        "cwd": "/w",
        "env": {"A": "b"},
        "tty": False,
        "size": None,
        "stdin": True,
        "sandbox": None,
        "user": None,
        "detach": True,
        "name": "new",
        "max_lifetime": None,
        "idle_timeout": 5.0,
    }
    assert environment.opened[0].calls == ["aclose"]


def test_errors_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = FakeEnvironment().open_in(monkeypatch, execution)
    arguments = build_parser().parse_words(["-d", "box", "x"])
    environment.failure = InvalidRequest("the name new is in use")
    with pytest.raises(CommandError, match="box: the name new is in use"):
        execution.start_detached(arguments, TARGET)
    environment.failure = SessionLost("gone")
    with pytest.raises(SessionLost):
        execution.start_detached(arguments, TARGET)


@pytest.mark.parametrize(("reported", "code"), [(0, 0), (137, 137), (256, 0), (-1, 128)])
def test_a_signal_that_the_server_does_not_name_is_no_lost_connection(
    reported: int, code: int
) -> None:
    assert command_code(reported) == code
