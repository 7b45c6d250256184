"""The arguments of `exec-server logs`."""

from __future__ import annotations

import pytest
from tests.support.client_targets import TARGET, FakeEnvironment, listed

from exec_server.cli.commands import log_output, logs_command
from exec_server.client.results import Chunk


def test_following(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    environment = FakeEnvironment(listed()).open_in(monkeypatch, log_output)
    environment.chunks = [Chunk("stdout", b"x")]
    monkeypatch.setattr(logs_command, "find_target", lambda *_: TARGET)
    assert logs_command.run(logs_command.build_parser().parse_words(["-f", "box", "web"])) == 0
    assert capfd.readouterr().out == "x"


@pytest.mark.parametrize("words", [[], ["box"], ["box", "a", "b"]])
def test_one_target_and_one_name(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        logs_command.build_parser().parse_words(words)
