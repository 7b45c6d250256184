"""Which command a command line names."""

from __future__ import annotations

import pytest

from exec_server.cli.table import COMMANDS, CommandRow, route, unknown_command


@pytest.mark.parametrize(
    ("words", "routed"),
    [
        ([], ("serve", [])),
        (["--listen", "stdio"], ("serve", ["--listen", "stdio"])),
        (["serve", "--listen", "stdio"], ("serve", ["--listen", "stdio"])),
        (["forward", "--connect", "u"], ("forward", ["--connect", "u"])),
        (["-h"], ("help", [])),
        (["--help", "exec"], ("help", ["exec"])),
        (["--version"], ("version", [])),
        (["-V", "x"], ("version", [])),
        (["--listen", "stdio", "--help"], ("help", ["serve", "--listen", "stdio"])),
        (["sandbox", "run", "-h"], ("help", ["sandbox", "run"])),
        (["sandbox", "run", "--", "ls", "-h"], ("sandbox", ["run", "--", "ls", "-h"])),
        (["exec", "-h"], ("exec", ["-h"])),
        (["no-such", "-h"], ("no-such", ["-h"])),
        ([""], ("", [])),
    ],
)
def test_the_first_word_names_the_command(words: list[str], routed: tuple[str, list[str]]) -> None:
    assert route(words) == routed


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("exce", "unknown command `exce`; did you mean `exec`?"),
        ("scp", "unknown command `scp`; did you mean `cp`?"),
        ("copy", "unknown command `copy`; did you mean `cp`?"),
        ("run", "unknown command `run`; did you mean `exec`?"),
        ("port-forward", "unknown command `port-forward`; did you mean `port`?"),
        ("zzzzzz", "unknown command `zzzzzz`"),
        ("", "unknown command ``"),
    ],
)
def test_unknown_commands(name: str, text: str) -> None:
    assert unknown_command(name) == text


def test_hidden_commands_are_not_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "zzzzzz", CommandRow("zzzzzz", "", "a secret", "none"))
    assert unknown_command("zzzzzy") == "unknown command `zzzzzy`"
