"""The arguments of `exec-server exec`."""

from __future__ import annotations

import pytest

from exec_server.cli.errors import UsageError
from exec_server.cli.exec.command import (
    DETACHED_NAME,
    _check_detach,
    build_parser,
    build_shell_parser,
    run,
)
from exec_server.cli.exec.command import build_parser as build_exec_parser
from exec_server.server import detached


def test_names_are_those_of_the_server() -> None:
    assert DETACHED_NAME.pattern == detached._is_name.args[0]


def test_the_command_is_what_comes_after_the_first_dashes() -> None:
    words = ["-t", "--env", "A=b", "build", "--", "ls", "-l", "--", "x"]
    arguments = build_parser().parse_words(words)
    assert (arguments.target, arguments.argv) == ("build", ["ls", "-l", "--", "x"])
    assert (arguments.tty, arguments.env, arguments.escape) == (True, ["A=b"], "~")
    assert build_parser().parse_words(["build", "-n", "-e", "none"]).escape is None


@pytest.mark.parametrize(
    ("words", "argv", "cwd"),
    [
        ("build ls -la", ["ls", "-la"], None),
        ("--cwd /src build ls --cwd x", ["ls", "--cwd", "x"], "/src"),
        ("--cwd=/src build ls", ["ls"], "/src"),
        ("build -t --cwd /src ls -t", ["ls", "-t"], "/src"),
        ("build -t --cwd /src -- ls", ["ls"], "/src"),
        ("-te ! build ls", ["ls"], None),
        ("-te! build ls", ["ls"], None),
        ("build git log -- file", ["git", "log", "--", "file"], None),
        ("build", [], None),
    ],
)
def test_the_command_begins_at_the_first_word_after_the_target(
    words: str, argv: list[str], cwd: str | None
) -> None:
    arguments = build_parser().parse_words(words.split())
    assert (arguments.target, arguments.argv, arguments.cwd) == ("build", argv, cwd)


@pytest.mark.parametrize(
    ("words", "target", "argv"),
    [
        ("-- make test", None, ["make", "test"]),
        ("-t --cwd /src -- bash", None, ["bash"]),
        ("", None, []),
        ("-t", None, []),
        (": make test", ":", ["make", "test"]),
        (": -t -- make", ":", ["make"]),
        ("make test", "make", ["test"]),  # not guessed: the first word is the target
    ],
)
def test_the_target_is_empty_before_dashes_only(
    words: str, target: str | None, argv: list[str]
) -> None:
    arguments = build_parser().parse_words(words.split())
    assert (arguments.target, arguments.argv) == (target, argv)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--"], "no command after `--`"),
        (["build", "--"], "no command after `--`"),
        (["build", "--", "", "x"], "the name of the program is empty"),
        (["build", "-x", "ls"], "unrecognized arguments: -x"),
        (["build", "--cwd"], "argument -w/--cwd/--workdir: expected one argument"),
        (["--timeout", "0", "build", "--", "x"], "invalid number of seconds"),
        (["--timeout", "nan", "build", "--", "x"], "invalid number of seconds"),
        (["-e", "ab", "build"], "invalid escape character"),
        (["-e", "\x01", "build"], "invalid escape character"),
        (["--tt", "build"], "--tt"),
        (["-d", "--name", "a b", "build", "x"], "argument --name: `a b` is not a name"),
        (["-d", "--name", "", "build", "x"], "argument --name: `` is not a name"),
        (["-d", "--name", "\x1b", "build", "x"], "argument --name: `\\x1b` is not a name"),
    ],
)
def test_usage_errors(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_words(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert text in error
    assert "try 'exec-server exec -h'" in error


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--name", "web", "build", "x"], "--name needs --detach"),
        (["--max-lifetime", "3", "build", "x"], "--max-lifetime needs --detach"),
        (["-d", "build"], "--detach needs a COMMAND"),
        (["-d", "stdio:ssh lab x", "y"], "the server of a stdio target ends with the connection"),
        (["-d", "--timeout", "3", "build", "x"], "use --max-lifetime instead of --timeout"),
    ],
)
def test_flags_that_do_not_fit_together(words: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        run(build_parser().parse_words(words))


def test_a_variable_in_place_of_the_escape_character(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_words(["-e", "A=b", "build", "x"])
    assert "variables are given with --env" in capsys.readouterr().err


def test_interactive_is_the_default() -> None:
    arguments = build_parser().parse_words(["-it", "build", "x"])
    assert (arguments.tty, arguments.argv) == (True, ["x"])
    _check_detach(arguments)


def test_it_is_exec_without_a_command() -> None:
    arguments = build_shell_parser().parse_words(["--cwd", "/src", "build"])
    expected = build_exec_parser().parse_words(["--cwd", "/src", "build"])
    assert vars(arguments) == vars(expected)


def test_it_takes_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_shell_parser().parse_words(["build", "ls"])
    assert ended.value.code == 2
    assert "unrecognized arguments: ls" in capsys.readouterr().err
