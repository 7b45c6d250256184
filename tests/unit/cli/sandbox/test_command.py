"""Arguments, exit codes and policies of `exec-server sandbox`; nothing is confined here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exec_server.cli import start_options
from exec_server.cli.sandbox import command, run
from exec_server.cli.sandbox.command import build_parser
from exec_server.cli.sandbox.run import ConfinedCommand, describe_view, prepare_command
from exec_server.errors import InternalError
from exec_server.sandbox.policy.model import Policy


class _NoSignals:
    """Stands in for the ForegroundSignals, which replaces the handlers of the test runner."""


@pytest.fixture(autouse=True)
def no_signals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "ForegroundSignals", _NoSignals)
    monkeypatch.chdir(tmp_path)


def _run(*words: str) -> int:
    return command.run(list(words), lambda path, exists: None)


def _prepare(*words: str, argv: tuple[str, ...] = ("true",)) -> ConfinedCommand:
    arguments = build_parser().parse_args(["run", "--policy", *words])
    return prepare_command(arguments, list(argv))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("check", "extra"), "unexpected argument `extra`\n"),
        (("check", "--", "true"), "`check` takes no command"),
        (("run", "--policy", "read-only", "true"), "`true`; the command comes after `--`"),
        (("run", "--policy", "read-only"), "no command; write `exec-server sandbox run"),
        (("run", "--policy", "read-only", "--cwd", "none", "--", "x"), "--cwd: none is not a dir"),
        (("run", "--policy", "read-only", "--root", ".", "--", "x"), "--root has no effect"),
        (("run", "--policy", "none", "--", "x"), "--policy: none does not exist; the named"),
        (("run", "--policy", "p.json", "--network", "--", "x"), "set `network` in the file"),
        (("run", "--policy", "whole.json", "--root", ".", "--", "x"), "--root has no effect"),
        (("run", "--policy", "large.json", "--", "x"), "large.json has more than 1048576 bytes"),
        (("run", "--policy", "broken.json", "--", "x"), "broken.json: "),
    ],
)
def test_usage_errors_name_the_argument(
    words: tuple[str, ...], text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.json").write_text('{"type": "disabled"}')
    (tmp_path / "whole.json").write_text('{"permissions": {"type": "disabled"}}')
    (tmp_path / "large.json").write_bytes(b" " * (start_options.MAX_POLICY_BYTES + 1))
    (tmp_path / "broken.json").write_text("{")
    assert _run(*words) == 2
    out, err = capfd.readouterr()
    assert (out, err[:7]) == ("", "Error: ")
    assert text in err
    assert err.endswith(f"For more information, try 'exec-server sandbox {words[0]} --help'.\n")


@pytest.mark.parametrize(("words", "command"), [((), "sandbox"), (("run",), "sandbox run")])
def test_missing_arguments_name_the_command(
    words: tuple[str, ...], command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _run(*words) == 2
    assert capfd.readouterr().err.endswith(f"try 'exec-server {command} --help'.\n")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (InternalError("cannot create namespaces"), 125, "Error: cannot create namespaces\n"),
        (OSError(28, "No space left on device"), 125, "Error: No space left on device"),
        (SystemExit(143), 143, ""),
        (SystemExit("text"), 1, ""),
    ],
)
def test_a_command_that_cannot_run_has_exit_code_125(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    text: str,
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(run, "run_confined", fail)
    assert _run("run", "--policy", "read-only", "--", "true") == code
    assert capfd.readouterr().err.startswith(text)


def test_the_command_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[ConfinedCommand] = []

    def record(confined: ConfinedCommand, *_: object) -> int:
        ran.append(confined)
        return 42

    monkeypatch.setattr(run, "run_confined", record)
    monkeypatch.setenv("NODE_REPL_AUTH_TOKEN", "secret")
    assert _run("run", "--policy", "workspace-write", "--", "ls", "--", "-l") == 42
    confined = ran[0].command
    assert (confined.argv, confined.cwd) == (["ls", "--", "-l"], str(tmp_path))
    assert confined.env["PWD"] == str(tmp_path)
    assert "NODE_REPL_AUTH_TOKEN" not in confined.env


_READ_ALL: dict[str, Any] = {
    "type": "managed",
    "network": "restricted",
    "file_system": {
        "type": "restricted",
        "entries": [{"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}],
    },
}


@pytest.mark.parametrize("wrap", [False, True])
def test_a_file_holds_permissions_or_request_params(tmp_path: Path, wrap: bool) -> None:
    expected = _prepare("read-only").policy
    value: dict[str, Any] = _READ_ALL
    if wrap:
        whole = {"cwd": tmp_path.as_uri(), "permissions": _READ_ALL}
        value = {"argv": ["x"], "sandbox": whole | {"windowsSandboxLevel": "disabled"}}
    (tmp_path / "policy.json").write_text(json.dumps(value))
    assert _prepare("policy.json").policy == expected


def test_a_policy_without_limits_is_none(tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text('{"type": "disabled"}')
    assert _prepare("policy.json").policy is None
    assert describe_view(None) == "files      no limits\nnetwork    no limits\n"


def test_a_policy_for_the_network_alone() -> None:
    text = describe_view(Policy(None, (), "restricted"))
    assert text == "files      no limits\nnetwork    restricted\n"


def test_show_needs_no_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _run("run", "--policy", "workspace-write", "--show") == 0
    out = capfd.readouterr().out
    assert out.startswith("files      everything read-only, except (/dev and /proc are private)\n")
    assert f"write      {tmp_path}\n" in out
    assert out.endswith("network    restricted\n")
