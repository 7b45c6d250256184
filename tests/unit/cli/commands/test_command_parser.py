"""Errors of the parser that the client commands share."""

from __future__ import annotations

import pytest

from exec_server.cli.commands.table import COMMANDS, load


@pytest.mark.parametrize(
    ("command", "words", "text"),
    [
        ("ls", [], "TARGET:PATH"),
        ("completion", ["tcsh"], "tcsh"),
        ("info", ["a", "b"], "unrecognized arguments: b"),
    ],
)
def test_usage_errors(
    command: str, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(COMMANDS[command]).build_parser().parse_words(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert text in error
    assert f"try 'exec-server {command} -h'" in error
