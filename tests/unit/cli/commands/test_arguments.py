"""The arguments of the client commands."""

from __future__ import annotations

import re
import shlex

import pytest

from exec_server.cli.commands.arguments import PARSERS, SUMMARIES, access_options, parse
from exec_server.cli.commands.errors import UsageError
from exec_server.cli.commands.targets import parse_remote_path
from exec_server.cli.main import CLIENT_COMMANDS


def test_every_command_is_dispatched_and_summarised() -> None:
    assert set(PARSERS) == set(CLIENT_COMMANDS) == set(SUMMARIES)


def test_the_command_is_what_comes_after_the_first_dashes() -> None:
    arguments = parse("exec", ["-t", "--env", "A=b", "build", "--", "ls", "-l", "--", "x"])
    assert (arguments.target, arguments.argv) == ("build", ["ls", "-l", "--", "x"])
    assert (arguments.tty, arguments.env, arguments.escape) == (True, ["A=b"], "~")
    assert parse("exec", ["build", "-n", "-e", "none"]).escape is None


@pytest.mark.parametrize(
    ("command", "words", "code", "text"),
    [
        ("exec", [], 255, "the following arguments are required: TARGET\n"),
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
def test_usage_errors(
    command: str,
    words: list[str],
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(command, words)
    assert ended.value.code == code
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert text in error
    assert f"try 'exec-server {command} -h'" in error


def test_token_flags_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        access_options(parse("info", ["--token-file", "f", "--token-env", "E", "build"]))
    given = access_options(parse("info", ["--token-env", "E", "--ca-file", "c", "build"]))
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
        for path in getattr(arguments, "paths", ()) if command != "cp" else ():
            assert parse_remote_path(path) is not None
