"""Exit codes and error texts of the client commands."""

from __future__ import annotations

import signal
from pathlib import Path

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


def test_a_target_or_a_program_is_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exec-server").mkdir(mode=0o700)
    targets = tmp_path / "exec-server/targets.toml"
    targets.write_text("[build]\nurl = 'ws://h:1'\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main.run_client("build", []) == 2
    assert "`build` is a target, not a command; did you mean `exec-server shell build`?" in (
        capfd.readouterr().err
    )
    assert main.run_client("build", ["ls", "a b"]) == 2
    assert "did you mean `exec-server exec build ls 'a b'`?" in capfd.readouterr().err
    assert main.run_client("ws://u:secret@h:1", ["ls"]) == 2
    errors = capfd.readouterr().err
    assert "did you mean `exec-server exec 'ws://***@h:1' ls`?" in errors
    assert "secret" not in errors
    for address in ("http://h:1", "h:1"):
        assert main.run_client(address, []) == 2
        assert f"`{address}` is not a target; did you mean ws://h:1?" in capfd.readouterr().err
    targets.write_text("[")
    assert main.run_client("env", []) == 2
    text = "unknown command `env`; to run it on a target: exec-server exec TARGET env …"
    assert text in capfd.readouterr().err


def test_an_unknown_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run_client("exce", []) == 2
    assert capfd.readouterr().err == (
        "Error: unknown command `exce`; did you mean `exec`?\n\n"
        "For more information, try 'exec-server --help'.\n"
    )
