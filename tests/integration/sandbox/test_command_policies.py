"""`exec-server sandbox run`: policies from files, and the views that `--show` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.barriers import user_id
from tests.support.client import run_command
from tests.support.sandbox import (
    BASE_STEPS,
    NOT_RUN,
    USERS,
    Json,
    SandboxCommand,
    Scratch,
    entry,
    glob,
    policy,
    special,
    workspace_write,
)


@pytest.fixture(params=USERS)
def command(request: pytest.FixtureRequest) -> Iterator[SandboxCommand]:
    """The command of root, or of an ordinary user, with its own tree."""
    with Scratch(user_id(request.param)) as scratch:
        scratch.reset(BASE_STEPS)
        yield SandboxCommand(request.param, scratch)


def test_file_with_a_whole_object(command: SandboxCommand) -> None:
    path = command.file(workspace_write(command.ws, entry(command.ws / "sub", "deny")))
    ended = command.run(path, "/bin/sh", "-c", "touch new; cat sub/s.txt")
    assert (command.ws / "new").exists()
    assert f"denied: read {command.ws}/sub/s.txt" in ended.stderr
    assert f"deny entry {command.ws}/sub" in ended.stderr


def test_file_with_permissions_is_completed(command: SandboxCommand) -> None:
    permissions = policy(special("root", "read"), special("project_roots", "write"))["permissions"]
    path = command.file(permissions)
    assert command.run(path, "touch", "new").returncode == 0
    words = ("run", "--policy", path, "--root", "sub", "--")
    assert command(*words, "touch", "sub/new").returncode == 0
    assert command(*words, "touch", "other").returncode == 1


def test_file_with_a_request(command: SandboxCommand) -> None:
    path = command.file({"argv": ["x"], "sandbox": policy(special("root", "read"))})
    assert "denied" in command.run(path, "touch", "new").stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("{", "Input data was truncated"),
        ("[1 2", "JSON is malformed: expected ',' or ']'"),
        ({}, "missing field `permissions`"),
        ('"x"', 'invalid type: string "x", expected struct WireFileSystemSandboxContext'),
        ({"permissions": {"type": "disabled"}}, "missing field `windowsSandboxLevel`"),
        ({"type": "zz"}, "unknown variant `zz`, expected one of `managed`, `disabled`, `external`"),
        (
            policy({"path": {"type": "path", "path": "tmp"}, "access": "read"}),
            "invalid URI: relative URL without a base",
        ),
        (policy(special("root", "zz")), "unknown variant `zz`, expected one of `read`, `write`"),
        (policy(glob("/*.key")), "unreadable glob `/*.key` cannot be safely expanded"),
        (policy(useLegacyLandlock=True), "useLegacyLandlock is not supported"),
        (policy(windowsSandboxLevel="mxc"), "native MXC is unavailable on this executor"),
        (policy(cwd="file:///C:/x"), "invalid sandbox policy cwd: 'file:///C:/x' is invalid on"),
    ],
)
def test_file_with_a_mistake(tmp_path: Path, value: Json | str, text: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    ended = run_command("ours", "sandbox", "run", "--policy", str(path), "--", "echo", "x")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"Error: {path}: ")
    assert text in ended.stderr


@pytest.mark.parametrize("flags", [("--network",), ("--root", "/")])
def test_flags_that_a_file_decides(tmp_path: Path, flags: tuple[str, ...]) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(policy(special("root", "read"))))
    ended = run_command("ours", "sandbox", "run", "--policy", str(path), *flags, "--", "true")
    assert ended.returncode == 2
    assert flags[0] in ended.stderr


def test_policy_that_cannot_be_enforced_runs_nothing(command: SandboxCommand) -> None:
    command.scratch.apply([{"symlink": ["../outside", "ws/link"]}])
    path = command.file(workspace_write(command.ws, entry(command.ws / "link" / "dir", "deny")))
    ended = command.run(path, "touch", "new")
    assert ended.returncode == NOT_RUN
    assert "crosses writable symlink" in ended.stderr
    assert not (command.ws / "new").exists()


def test_view_is_shown(command: SandboxCommand) -> None:
    entries = (entry(command.ws / "sub" / "deep", "deny"), glob(f"{command.ws}/**/*.txt"))
    path = command.file(workspace_write(command.ws, *entries))
    ended = command("run", "--policy", path, "--show", "--", "touch", "new")
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [tuple(line.split(maxsplit=1)) for line in ended.stdout.splitlines()]
    assert lines[0] == ("files", "everything read-only, except (/dev and /proc are private)")
    for line in (
        ("write", f"{command.ws}"),
        ("read", f"{command.ws}/.git"),
        ("pin", f"{command.ws}/sub"),
        ("mask", f"{command.ws}/sub/deep"),
        ("mask", f"{command.ws}/a.txt"),
        ("missing", f"{command.ws}/.codex"),
        ("deny", f"glob  {command.ws}/**/*.txt"),
        ("network", "restricted"),
    ):
        assert line in lines
    assert not (command.ws / "new").exists()


@pytest.mark.parametrize(
    ("value", "first"),
    [
        (policy(special("minimal", "read")), "files      only the following"),
        ({"type": "disabled"}, "files      no limits\nnetwork    no limits\n"),
        ({"type": "external", "network": "restricted"}, "files      no limits\nnetwork    restr"),
    ],
)
def test_other_views_are_shown(tmp_path: Path, value: Json, first: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(value))
    ended = run_command("ours", "sandbox", "run", "--policy", str(path), "--show")
    assert ended.returncode == 0
    assert ended.stdout.startswith(first)
