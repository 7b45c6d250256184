"""Completion scripts, and the commands that they call."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from exec_server.cli import main
from exec_server.cli.completion import MAX_PATHS, SHELLS, matching, script
from exec_server.cli.table import COMMANDS
from exec_server.cli.targets import RemotePath
from exec_server.client.results import Entry


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_flag_is_there(shell: str) -> None:
    text = script(shell)
    for command in filter(lambda command: command.is_visible, COMMANDS.values()):
        assert command.name in text
        for action in command.build_parser()._actions:
            for name in action.option_strings if action.help != argparse.SUPPRESS else ():
                spelt = f"-l {name[2:]} " if shell == "fish" and name.startswith("--") else name
                if shell != "fish" or name.startswith("--"):
                    assert spelt in text, f"{command.name} {name}"


@pytest.mark.parametrize("shell", SHELLS)
def test_names_of_targets_are_listed_at_completion_time(shell: str) -> None:
    assert "exec-server targets --names" in script(shell)


@pytest.mark.parametrize("shell", SHELLS)
def test_remote_paths_are_asked_for_at_completion_time(shell: str) -> None:
    assert "exec-server complete-path" in script(shell)


def test_completion_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run_client("completion", ["bash"]) == 0
    assert "complete -F _exec_server_complete exec-server" in capfd.readouterr().out


ENTRIES = [
    Entry("/d/bin", True, False),
    Entry("/d/.hidden", False, True),
    Entry("/d/beta", False, True),
    Entry("/d/a\nb", False, True),
]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("", ["t:beta", "t:bin/"]),
        ("b", ["t:beta", "t:bin/"]),
        ("/d/bi", ["t:/d/bin/"]),
        ("x/.h", ["t:x/.hidden"]),
        ("~", ["t:~/beta", "t:~/bin/"]),
        ("~/be", ["t:~/beta"]),
        ("/d/zz", []),
    ],
)
def test_entries_continue_the_word(path: str, found: list[str]) -> None:
    assert matching(RemotePath("t", path), ENTRIES) == found
    on_default = [word.removeprefix("t") for word in found]
    assert matching(RemotePath(":", path), ENTRIES) == on_default


def test_the_number_of_paths_is_limited() -> None:
    entries = [Entry(f"/d/{number}", False, True) for number in range(MAX_PATHS + 1)]
    assert len(matching(RemotePath("t", ""), entries)) == MAX_PATHS


@pytest.mark.parametrize(
    "word",
    ["./local", "nobody:/etc", "ws://127.0.0.1:1", "ws://127.0.0.1:1:/etc", "stdio:cat:/etc"],
)
def test_errors_are_silent(
    word: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main.run_client("complete-path", [word]) == 1
    assert capfd.readouterr() == ("", "")
