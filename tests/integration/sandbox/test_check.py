"""`exec-server sandbox check`: the report on a machine, with and without its features."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.barriers import User, user_id
from tests.support.client import DEFAULT_TIMEOUT, scaled, server_command
from tests.support.sandbox import (
    BASE_STEPS,
    NEEDS_ROOT,
    NOT_RUN,
    USERS,
    SandboxCommand,
    Scratch,
    environment,
    run_to_end,
)

_AS_ROOT = pytest.param("root", marks=[pytest.mark.root, NEEDS_ROOT])
# Becomes an ordinary user that may create no user namespaces, by a limit of the kernel.
_WITHOUT_USER_NAMESPACES = """
import ctypes, os, sys
from pathlib import Path
uid, gid = os.geteuid(), os.getegid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"20000 {uid} 1")
Path("/proc/self/gid_map").write_text(f"20000 {gid} 1")
Path("/proc/sys/user/max_user_namespaces").write_text("0")
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(params=USERS)
def command(request: pytest.FixtureRequest) -> Iterator[SandboxCommand]:
    """The command of root, or of an ordinary user, with its own tree."""
    with Scratch(user_id(request.param)) as scratch:
        scratch.reset(BASE_STEPS)
        yield SandboxCommand(request.param, scratch)


def test_everything_is_enforced_here(command: SandboxCommand) -> None:
    ended = command("check")
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = dict(
        line.strip().split("  ", 1) for line in ended.stdout.splitlines() if "  " in line[2:]
    )
    for part in ("user", "mount", "pid", "ipc", "network"):
        assert rows[f"{part} namespaces"].strip() == "yes"
    assert rows["private /proc"].strip() == rows["seccomp"].strip() == "yes"
    assert os.uname().release in rows["kernel"]
    assert rows["nested namespaces"].strip().startswith("refused with network")
    assert ended.stdout.endswith("Refused requests\n  none\n")
    assert max(map(len, ended.stdout.splitlines())) <= 120


def test_check_for_programs(command: SandboxCommand) -> None:
    ended = command("check", "--json")
    value = json.loads(ended.stdout)
    assert ended.returncode == 0
    assert value["uid"] == user_id(command.user)
    assert value["offers"]["user namespaces"] == {"works": True, "reason": None}
    assert value["enforced"] == {
        "fileOperations": True,
        "commands": True,
        "userNamespace": True,
        "privateProc": True,
    }
    assert (value["refused"], value["gaps"]) == ([], [])


@pytest.mark.parametrize("barrier", ["no-namespaces", "no-namespaces-no-landlock"])
def test_check_without_namespaces_says_why_and_what_to_do(
    command: SandboxCommand, barrier: str
) -> None:
    ended = command("check", barrier=barrier)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "user namespaces     no: Operation not permitted (os error 1)" in ended.stdout
    assert "seccomp             yes" in ended.stdout
    assert ("Landlock            no" in ended.stdout) == (barrier != "no-namespaces")
    refused = ended.stdout.partition("Refused requests\n")[2]
    assert "commands whose policy limits files" in refused
    assert "--security-opt seccomp=unconfined" in refused
    value = json.loads(command("check", "--json", barrier=barrier).stdout)
    assert value["enforced"]["commands"] is False
    assert [gap["part"] for gap in value["gaps"]] == ["user namespaces"]


def test_nothing_runs_where_nothing_can_be_confined(command: SandboxCommand) -> None:
    words = ("run", "--policy", "workspace-write", "--", "touch", "new")
    ended = command(*words, barrier="no-namespaces")
    assert ended.returncode == NOT_RUN
    assert "cannot create namespaces: Operation not permitted" in ended.stderr
    assert "exec-server sandbox check" in ended.stderr
    assert not (command.ws / "new").exists()


def test_check_with_a_masked_proc(command: SandboxCommand) -> None:
    ended = command("check", barrier="masked-proc")
    assert ended.returncode == 1
    assert "mount namespaces    yes" in ended.stdout
    assert "private /proc       no: " in ended.stdout
    assert "--security-opt systempaths=unconfined" in ended.stdout
    assert "policy denies files by a pattern" in ended.stdout
    assert command.run("read-only", "true", barrier="masked-proc").returncode == 0


def test_check_in_a_container_without_landlock(command: SandboxCommand) -> None:
    """Root in a container with neither user namespaces nor a private /proc."""
    barrier = "container-no-landlock"
    ended = command("check", barrier=barrier)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "user                root\n" in ended.stdout
    assert "commands            refused if the policy limits files\n" in ended.stdout
    assert "none of user namespaces, private /proc and Landlock is available" in ended.stdout
    ended = command("run", "--policy", "workspace-write", "--", "touch", "new", barrier=barrier)
    assert ended.returncode == NOT_RUN
    assert "so commands would reach each other's files through /proc" in ended.stderr
    assert not (command.ws / "new").exists()
    with_landlock = command("check", barrier="container")
    assert "; commands see the host's /proc\n" in with_landlock.stdout
    assert command.run("workspace-write", "touch", "new", barrier="container").returncode == 0


@pytest.mark.parametrize("user", [_AS_ROOT])
def test_root_does_without_user_namespaces(user: User) -> None:
    with Scratch(user_id(user)) as scratch:
        scratch.reset(BASE_STEPS)
        ended = SandboxCommand(user, scratch)("check", barrier="no-user-namespaces")
    assert ended.returncode == 0
    assert "user namespaces     no, and not needed by root" in ended.stdout


def test_limit_of_the_kernel_is_named(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _WITHOUT_USER_NAMESPACES, *server_command("ours")]
    ended = run_to_end([*words, "sandbox", "check"], cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "user namespaces     no: No space left on device (os error 28)" in ended.stdout
    assert "mount namespaces    no: not without user namespaces" in ended.stdout
    assert "sysctl -w user.max_user_namespaces=15000   (it is 0)" in ended.stdout


def test_reader_of_the_report_may_leave() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [*server_command("ours"), "sandbox", "check"]
    process = subprocess.Popen(words, env=environment(), stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    _, stderr = process.communicate(timeout=scaled(DEFAULT_TIMEOUT))
    assert (process.returncode, stderr) == (0, b"")
