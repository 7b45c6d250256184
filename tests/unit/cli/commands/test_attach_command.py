"""The arguments of `exec-server attach`."""

from __future__ import annotations

import pytest
from tests.support.client_targets import TARGET, FakeEnvironment, listed

from exec_server.cli.commands import attach_command, attaching


def test_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEnvironment(listed()).open_in(monkeypatch, attaching)
    monkeypatch.setattr(attach_command, "find_target", lambda *_: TARGET)
    arguments = attach_command.build_parser().parse_words(["-n", "-e", "none", "box", "web"])
    assert (arguments.name, arguments.no_stdin, arguments.escape) == ("web", True, None)
    assert attach_command.run(arguments) == 3
