"""The arguments of `exec-server kill`."""

from __future__ import annotations

import pytest
from tests.support.client_targets import TARGET, FakeEnvironment, listed

from exec_server.cli.commands import kill_command, killing


def test_several_names(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = FakeEnvironment(listed("a"), listed("b")).open_in(monkeypatch, killing)
    monkeypatch.setattr(kill_command, "find_target", lambda *_: TARGET)
    words = ["-s", "HUP", "box", "a", "b"]
    assert kill_command.run(kill_command.build_parser().parse_words(words)) == 0
    assert [each.calls[0] for each in environment.opened] == ["HUP", "HUP"]


@pytest.mark.parametrize("words", [[], ["box"]])
def test_a_name_is_needed(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        kill_command.build_parser().parse_words(words)


@pytest.mark.parametrize(
    ("word", "signal"), [("-9", "9"), ("-HUP", "HUP"), ("-SIGUSR1", "SIGUSR1")]
)
def test_the_short_form_of_a_signal(word: str, signal: str) -> None:
    arguments = kill_command.build_parser().parse_words([word, "box", "a"])
    assert (arguments.signal, arguments.target, arguments.names) == (signal, "box", ["a"])


@pytest.mark.parametrize("words", [["-s", "FOO"], ["-s", ""], ["-FOO"], ["-99"], ["-s", "0"]])
def test_an_unknown_signal(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        kill_command.build_parser().parse_words([*words, "box", "a"])
    assert end.value.code == 2
    assert "unknown signal `" in capsys.readouterr().err
