"""The variables of `--env`, and those of a terminal."""

from __future__ import annotations

import pytest

from exec_server.cli.commands.errors import UsageError
from exec_server.cli.commands.variables import command_variables


def test_values_are_given_or_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "local")
    assert command_variables(["A=1=2", "B=", "HERE"], tty=False) == {
        "A": "1=2",
        "B": "",
        "HERE": "local",
    }


def test_a_terminal_has_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLORTERM", raising=False)
    monkeypatch.setenv("TERM", "vt100")
    assert command_variables([], tty=True) == {"TERM": "vt100"}
    monkeypatch.delenv("TERM")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert command_variables(["TERM=x"], tty=True) == {"TERM": "x", "COLORTERM": "truecolor"}


@pytest.mark.parametrize("word", ["=1", "", "NO_SUCH_VARIABLE"])
def test_wrong_variables_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="--env"):
        command_variables([word], tty=False)
