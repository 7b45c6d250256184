"""Starting a detached command: its arguments, its name, and errors of the start."""

from __future__ import annotations

import pytest
from tests.support.client_targets import TARGET, FakeEnvironment

from exec_server.cli.commands import detaching
from exec_server.cli.commands.errors import CommandError
from exec_server.cli.commands.exec_command import build_parser
from exec_server.errors import InvalidRequest, SessionLost

WORDS = ["-d", "-i", "--name", "new", "--cwd", "/w", "--env", "A=b", "--idle-timeout", "5", "box"]


def test_the_name_is_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = FakeEnvironment().open_in(monkeypatch, detaching)
    arguments = build_parser().parse_words([*WORDS, "npm", "start"])
    assert detaching.start_detached(arguments, TARGET) == 0
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
    environment = FakeEnvironment().open_in(monkeypatch, detaching)
    arguments = build_parser().parse_words(["-d", "box", "x"])
    environment.failure = InvalidRequest("the name new is in use")
    with pytest.raises(CommandError, match="box: the name new is in use"):
        detaching.start_detached(arguments, TARGET)
    environment.failure = SessionLost("gone")
    with pytest.raises(SessionLost):
        detaching.start_detached(arguments, TARGET)
