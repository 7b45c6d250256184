"""The lines of the magics."""

from __future__ import annotations

import pytest

from exec_server.cli.errors import UsageError
from exec_server.notebook import magic_line
from exec_server.notebook.magic_line import HelpShown, parse_cell_line, parse_command_line


def test_a_cell_has_options_and_a_target() -> None:
    line = "--cwd '/a b' --env A=1 --env=B=\"x y\" -u me --timeout 2.5 -o r -q build"
    found = parse_cell_line(line)
    assert (found.target, found.cwd, found.env) == ("build", "/a b", ["A=1", "B=x y"])
    assert (found.user, found.timeout, found.out, found.quiet) == ("me", 2.5, "r", True)
    assert (found.shell, found.no_raise, found.background, found.tty) == ("bash",) + (False,) * 3
    assert parse_cell_line("build --no-raise-error --bg -o p").background
    assert parse_cell_line("-q").target is None


@pytest.mark.parametrize(
    ("line", "target", "text"),
    [
        ("build make  test", "build", "make  test"),
        (": make test", ":", "make test"),
        ("--cwd /x build ls -l --cwd 'y'", "build", "ls -l --cwd 'y'"),
        ("build grep -h -- x", "build", "grep -h -- x"),
        ("'stdio:ssh host' echo \"it's\" | tr a b", "stdio:ssh host", 'echo "it\'s" | tr a b'),
        ("build echo don't \\", "build", "echo don't \\"),
        ("build echo $HOME > 'a b'  # end", "build", "echo $HOME > 'a b'  # end"),
        ("build -x", "build", "-x"),
    ],
)
def test_a_line_has_a_command_as_it_was_written(line: str, target: str, text: str) -> None:
    found = parse_command_line(line)
    assert (found.target, found.text) == (target, text)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--cwd", "expected one argument"),
        ("--timeout x build", "invalid number of seconds value: 'x'"),
        ("--unknown build", "unrecognized arguments: --unknown"),
        ("build more", "unrecognized arguments: more"),
        ("-o 1x build", "-o 1x: not a name of a variable"),
        ("-o class build", "-o class: not a name"),
        ("--background build", "--background needs -o NAME"),
        ("--bg -o p --timeout 1 build", "exclude each other"),
        ("--tim 1 build", "unrecognized arguments: --tim"),
    ],
)
def test_wrong_lines_are_explained(line: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        parse_cell_line(line)


def test_a_line_needs_a_command() -> None:
    with pytest.raises(UsageError, match="no command behind TARGET"):
        parse_command_line("--cwd /x build")


def test_options_of_a_line_belong_before_its_target() -> None:
    with pytest.raises(UsageError, match="options belong before TARGET: --cwd"):
        parse_command_line("build --cwd /x make -k")
    assert parse_command_line("--cwd /x build make -k").text == "make -k"
    assert parse_command_line("--cwd /x build -- make -k").text == "make -k"


@pytest.mark.parametrize("parse", [parse_cell_line, parse_command_line])
def test_help_is_shown_and_nothing_ends(parse: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(parse)
    with pytest.raises(HelpShown):
        parse("--help")
    assert "--sandbox POLICY" in capsys.readouterr().out
    assert "--sandbox POLICY" in magic_line.usage()


def test_words_without_their_quotes() -> None:
    assert magic_line.split_words("a 'b c' \"d\"e f\\ g 'x") == ["a", "b c", "de", "f g", "'x"]
