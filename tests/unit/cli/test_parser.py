"""The argument parser of all commands."""

from __future__ import annotations

import os

import pytest

from exec_server.cli.parser import (
    ArgumentParser,
    HelpFormatter,
    positive_number,
    positive_seconds,
    utf8_text,
)
from exec_server.cli.table import COMMANDS


@pytest.mark.parametrize(
    ("variable", "terminal", "width"),
    [("60", 50, 58), ("0", 50, 78), ("x", 50, 48), (None, 50, 48), (None, 0, 78), (None, -1, 78)],
)
def test_the_width_is_that_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, terminal: int, width: int
) -> None:
    def size(_: int) -> os.terminal_size:
        if terminal < 0:
            raise OSError("not a terminal")
        return os.terminal_size((terminal, 24))

    monkeypatch.setattr(os, "get_terminal_size", size)
    monkeypatch.delenv("COLUMNS", raising=False)
    if variable is not None:
        monkeypatch.setenv("COLUMNS", variable)
    assert HelpFormatter("x")._width == width
    assert HelpFormatter("x", width=30)._width == 30


def test_errors_have_the_format_of_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ArgumentParser("x").parse_words(["--no-such"])
    assert ended.value.code == 2
    text = "Error: unrecognized arguments: --no-such\n\nFor more information, try '--help'.\n"
    assert capsys.readouterr().err == text


def test_errors_show_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = [f"{kind}Ab3dEf6hIj9l-Ab3dEf6" for kind in ("esr_", "ghp_", "sk-", "eyJ")]
    with pytest.raises(SystemExit):
        ArgumentParser("x").parse_words(
            [*tokens, f"--token={tokens[0]}", "task-ab3def6hij9lab3def6"]
        )
    [line, *_] = capsys.readouterr().err.splitlines()
    assert line == (
        "Error: unrecognized arguments: esr_… ghp_… sk-… eyJ… --token=esr_… "
        "task-ab3def6hij9lab3def6"
    )


def test_types_of_values() -> None:
    assert (positive_number("1"), positive_seconds("0.5")) == (1, 0.5)
    for wrong in ("0", "-1", "x"):
        with pytest.raises(ValueError, match=wrong):
            positive_number(wrong)
    for wrong in ("0", "nan", "1e10"):
        with pytest.raises(ValueError, match=wrong):
            positive_seconds(wrong)
    assert utf8_text("größe") == "größe"
    with pytest.raises(ValueError, match="surrogates"):
        utf8_text(os.fsdecode(b"\xff"))


@pytest.mark.parametrize(
    ("command", "words", "text"),
    [
        ("cat", [], "TARGET:PATH"),
        ("completion", ["tcsh"], "tcsh"),
        ("info", ["a", "b"], "unrecognized arguments: b"),
    ],
)
def test_usage_errors(
    command: str, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMANDS[command].build_parser().parse_words(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert text in error
    assert f"try 'exec-server {command} -h'" in error
