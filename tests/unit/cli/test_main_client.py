"""Exit codes and error texts of the client commands."""

from __future__ import annotations

import signal

import pytest

from exec_server.cli import main
from exec_server.cli.errors import CommandError, LostConnection, UsageError
from exec_server.cli.table import CommandRow
from exec_server.errors import NotFound, SessionLost


@pytest.mark.parametrize(
    ("error", "codes", "text"),
    [
        (UsageError("use X"), (2, 2), "Error: use X\n\nFor more information, try 'exec"),
        (CommandError("it failed"), (1, 125), "Error: it failed\n"),
        (CommandError("not found", 127), (127, 127), "Error: not found\n"),
        (LostConnection("refused"), (1, 255), "Error: refused\n"),
        (NotFound("no such file"), (1, 125), "Error: no such file\n"),
        (SessionLost("expired"), (1, 255), "Error: expired\n"),
        (FileNotFoundError(2, "No such file", "a"), (1, 125), "Error: a: No such file\n"),
        (OSError("unknown"), (1, 125), "Error: unknown\n"),
        (BrokenPipeError(32, "Broken pipe"), (128 + signal.SIGPIPE,) * 2, ""),
        (KeyboardInterrupt(), (128 + signal.SIGINT,) * 2, ""),
        (SystemExit(7), (7, 7), ""),
        (SystemExit("text"), (1, 1), ""),
    ],
)
def test_errors_become_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: BaseException,
    codes: tuple[int, int],
    text: str,
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(CommandRow, "build_parser", fail)
    for command, code in zip(("info", "exec"), codes, strict=True):
        assert main.run_client(command, ["x"]) == code
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith(text)
        assert bool(err) == bool(text)


def test_a_defect_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its traceback may quote a server."""

    def fail(*_: object) -> int:
        raise ZeroDivisionError("\x1b[2J")

    monkeypatch.setattr(CommandRow, "build_parser", fail)
    assert main.run_client("info", ["x"]) == 1
    assert main.run_client("exec", ["x"]) == 125
    text = capfd.readouterr().err
    assert text.startswith("Error: this is a defect of exec-server\nTraceback (most recent")
    assert text.endswith("ZeroDivisionError: \\x1b[2J\n\n")
    assert "\x1b" not in text


def test_an_unknown_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run_client("exce", []) == 2
    assert capfd.readouterr().err == (
        "Error: unknown command `exce`; did you mean `exec`?\n\n"
        "For more information, try 'exec-server --help'.\n"
    )
