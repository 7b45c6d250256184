"""The words and flags of `exec-server registry`."""

from __future__ import annotations

import pytest

from exec_server.cli.errors import UsageError
from exec_server.cli.registry import command


def test_flags_may_stand_before_between_and_after_the_words() -> None:
    parser = command.build_parser()
    words = ["--json", "token", "--data", "d", "revoke", "tok-1", "--tenant", "t"]
    arguments = parser.parse_words(words)
    assert arguments.words == ["token", "revoke", "tok-1"]
    assert (arguments.json, arguments.data, arguments.tenant) == (True, "d", "t")


@pytest.mark.parametrize("words", [["token"], ["fly"], ["token", "revoke"], ["tenant", "limit"]])
def test_unknown_words_are_explained(words: list[str]) -> None:
    arguments = command.build_parser().parse_words(words)
    with pytest.raises(UsageError, match="expected `init`, `token create`"):
        command.run(arguments)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--scope", "executor:x"], "--scope belongs to `exec-server registry token create`"),
        (["--watch"], "--watch belongs to `exec-server registry status`"),
        (["--unseen", "1d"], "--unseen belongs to .* environment remove"),
        (["--json"], "a node has --print-json"),
        (["--bytes-per-second", "5"], "--bytes-per-second belongs to .* tenant limit NAME`"),
    ],
)
def test_a_forgotten_verb_starts_no_node(words: list[str], text: str) -> None:
    arguments = command.build_parser().parse_words([*words, "--listen", "nowhere"])
    with pytest.raises(UsageError, match=text):
        command.run(arguments)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["status", "--print-json"], "`status` takes no --print-json, .* a node; use --json"),
        (["status", "--listen", "x"], "`status` takes no --listen, which is for running a node"),
        (["status", "--drain-seconds", "5"], "`status` takes no --drain-seconds"),
        (["status", "--tenant", "t"], "`status` takes no --tenant, which belongs to .*token list`"),
        (["token", "revoke", "t", "--scope", "connect:x"], "`token revoke` takes no --scope"),
    ],
)
def test_a_flag_that_a_verb_would_ignore_is_refused(words: list[str], text: str) -> None:
    arguments = command.build_parser().parse_words(words)
    with pytest.raises(UsageError, match=text):
        command.run(arguments)


def test_a_verb_has_a_help_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    parser = command.build_parser()
    for words in (["token", "create", "--help"], ["-h", "--data", "d", "token", "create"]):
        with pytest.raises(SystemExit, match="0"):
            parser.parse_words(words)
        text = capfd.readouterr().out
        assert text.startswith("usage: exec-server registry token create [flags]\n")
        assert "--scope S" in text
        assert "--watch" not in text
        assert "--listen" not in text
    with pytest.raises(SystemExit, match="0"):
        parser.parse_words(["token", "--help"])
    assert "--listen" in capfd.readouterr().out
