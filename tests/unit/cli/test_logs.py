"""Log lines: one event is one line, whatever it quotes."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from exec_server.cli import logs
from exec_server.cli.serve.arguments import LOG_LEVELS

_HOSTILE = [
    "two\nlines",
    "carriage\rreturn",
    "crlf\r\nx",
    "tab\tbell\x07",
    "paint \x1b[31mred",
    "next line \x85 csi \x9b31m",
    "separators \u2028 \u2029",
    "right to left \u202e and isolate \u2066",
    "null \x00 delete \x7f",
]


def _record(message: str, *arguments: object, failed: bool = False) -> logging.LogRecord:
    information = None
    if failed:
        try:
            raise ValueError(message)
        except ValueError:
            information = sys.exc_info()
    return logging.LogRecord(
        "exec_server.x", logging.WARNING, "file.py", 1, message, arguments, information
    )


def test_human_line() -> None:
    line = logs.HumanFormatter().format(_record("client %s left", "ü"))
    time, rest = line.split(" ", 1)
    assert rest == "warning exec_server.x: client ü left"
    age = datetime.now(UTC) - datetime.fromisoformat(time)
    assert 0 <= age.total_seconds() < 60


@pytest.mark.parametrize("text", _HOSTILE)
@pytest.mark.parametrize("failed", [False, True])
def test_human_line_cannot_be_forged(text: str, failed: bool) -> None:
    line = logs.HumanFormatter().format(_record(text, failed=failed))
    assert line.splitlines() == [line]
    assert all(char == " " or char.isprintable() for char in line)
    assert text.split(" ", maxsplit=1)[0][:3] in line


def test_human_line_carries_the_traceback() -> None:
    line = logs.HumanFormatter().format(_record("it broke", failed=True))
    assert "Traceback (most recent call last):\\n" in line
    assert line.endswith("ValueError: it broke")


def test_json_line() -> None:
    event = json.loads(logs.JsonFormatter().format(_record("client %s left", "ü")))
    assert datetime.fromisoformat(event.pop("time")).tzinfo is not None
    assert event == {"level": "warning", "logger": "exec_server.x", "message": "client ü left"}


@pytest.mark.parametrize("text", [*_HOSTILE, 'quote " and \\', "half a character \udcff"])
def test_json_line_is_one_line_and_lossless(text: str) -> None:
    line = logs.JsonFormatter().format(_record("%s", text))
    assert line.splitlines() == [line]
    line.encode()
    assert json.loads(line)["message"] == text


def test_json_line_carries_the_traceback() -> None:
    event = json.loads(logs.JsonFormatter().format(_record("it broke", failed=True)))
    assert event["exception"].endswith("ValueError: it broke")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back as it was."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    root.handlers.clear()
    yield root
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.mark.parametrize("level", LOG_LEVELS)
def test_configure(root: logging.Logger, level: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(level, "human")
    for name in LOG_LEVELS:
        getattr(logging.getLogger("exec_server.test"), name)("at %s", name)
    out, err = capsys.readouterr()
    assert out == ""
    seen = [line.rpartition(" ")[2] for line in err.splitlines()]
    assert seen == list(LOG_LEVELS[: LOG_LEVELS.index(level) + 1])


def test_configure_json(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("error", "json")
    logging.getLogger("x").error("said")
    assert json.loads(capsys.readouterr().err)["message"] == "said"
