"""The arguments of `exec-server shell`."""

from __future__ import annotations

import pytest

from exec_server.cli.commands.exec_command import build_parser as build_exec_parser
from exec_server.cli.commands.shell_command import build_parser


def test_it_is_exec_without_a_command() -> None:
    arguments = build_parser().parse_words(["--cwd", "/src", "build"])
    expected = build_exec_parser().parse_words(["--cwd", "/src", "build"])
    assert vars(arguments).items() <= vars(expected).items()
    detaching = vars(expected).keys() - vars(arguments).keys()
    assert detaching == {"detach", "name", "interactive", "max_lifetime", "idle_timeout"}


def test_it_takes_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_words(["build", "ls"])
    assert ended.value.code == 2
    assert "unrecognized arguments: ls" in capsys.readouterr().err
