"""Exit codes of commands that could not be started."""

from __future__ import annotations

import pytest

from exec_server.cli.commands.start_failure import start_failure
from exec_server.client.exceptions import ProgramNotFound
from exec_server.errors import ExecServerError, InternalError, InvalidRequest, Unsupported


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
