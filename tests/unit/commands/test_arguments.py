"""The arguments of the commands for people."""

from __future__ import annotations

import re
import shlex

import pytest

from exec_server.cli import CLIENT_COMMANDS
from exec_server.commands.arguments import PARSERS, SUMMARIES, access, parse
from exec_server.commands.failures import Mistake
from exec_server.commands.targets import split_place


def test_every_command_is_dispatched_and_summarised() -> None:
    assert set(PARSERS) == set(CLIENT_COMMANDS) == set(SUMMARIES)


def test_the_command_is_what_comes_after_the_first_dashes() -> None:
    arguments = parse("exec", ["-t", "--env", "A=b", "build", "--", "ls", "-l", "--", "x"])
    assert (arguments.target, arguments.argv) == ("build", ["ls", "-l", "--", "x"])
    assert (arguments.tty, arguments.env, arguments.escape) == (True, ["A=b"], "~")
    assert parse("exec", ["build", "-n", "-e", "none"]).escape is None


@pytest.mark.parametrize(
    ("command", "words", "code", "complaint"),
    [
        ("exec", [], 255, "TARGET"),
        ("exec", ["build", "ls"], 255, "`ls`; the command comes after `--`"),
        ("exec", ["build", "--"], 255, "no command after `--`"),
        ("exec", ["--timeout", "0", "build", "--", "x"], 255, "invalid number of seconds"),
        ("exec", ["--timeout", "nan", "build", "--", "x"], 255, "invalid number of seconds"),
        ("exec", ["-e", "ab", "build"], 255, "invalid escape character"),
        ("exec", ["-e", "\x01", "build"], 255, "invalid escape character"),
        ("exec", ["--tt", "build"], 255, "--tt"),
        ("ls", [], 2, "TARGET:PATH"),
        ("completion", ["tcsh"], 2, "tcsh"),
        ("info", ["a", "b"], 2, "unrecognized arguments: b"),
    ],
)
def test_mistakes(
    command: str,
    words: list[str],
    code: int,
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(command, words)
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert said.startswith("Error: ")
    assert complaint in said
    assert f"try 'exec-server {command} -h'" in said


def test_one_token_is_enough() -> None:
    with pytest.raises(Mistake, match="exclude each other"):
        access(parse("info", ["--token-file", "f", "--token-env", "E", "build"]))
    given = access(parse("info", ["--token-env", "E", "--ca-file", "c", "build"]))
    assert (given.token_env, given.ca_file) == ("E", "c")


@pytest.mark.parametrize("command", sorted(PARSERS))
def test_help_teaches_by_examples_that_parse(command: str) -> None:
    text = PARSERS[command]().format_help()
    assert max(map(len, text.splitlines())) <= 100
    examples = re.findall(rf"exec-server {command} (.*)$", text.partition("examples:")[2], re.M)
    if command not in ("targets", "completion"):
        assert len(examples) >= 2
    for example in examples:
        words = shlex.split(re.split(r"   +|\|", example)[0])
        arguments = parse(command, words)
        for place in getattr(arguments, "places", ()):
            assert split_place(place) is not None
