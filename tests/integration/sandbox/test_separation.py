"""Attempts of confined commands to reach the files of other commands with another policy.

Two ways lead there: descriptors that a command with network receives from another one, and the
files of other processes in /proc, where the kernel offers no /proc of one's own.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.barriers import User, behind_barrier, user_id
from tests.support.client import Client, uri
from tests.support.protections import FIXED_ROOT, before_launcher, with_landlock
from tests.support.sandbox import (
    BASE_STEPS,
    MARKER,
    USERS,
    Scratch,
    Stage,
    finish,
)
from tests.support.sandbox_attacks import (
    PEEK,
    VICTIM,
    pass_descriptor,
    prepare_attacks,
    run_attempts,
    start_attempts,
    successes,
    verdicts,
)
from tests.support.server_internals import start_prepared

from exec_server.sandbox.runtime import kernel

# Policies of sender and receiver, the directory whose descriptor is sent, and attempts that neither
# of the two can make alone.
_PASSED: dict[str, tuple[str, str, str, str]] = {
    "repository": ("WWNET", "RONET", "ws", "attempt('use', os.rename, '.git', 'moved')"),
    "repository-exchanged": ("WWNET", "RONET", "ws", "attempt('use', exchange, '.git', 'sub')"),
    "repository-from-elsewhere": (
        "WWNET",
        "ELSEWHERENET",
        "ws",
        "attempt('use', os.rename, '.git', 'moved')",
    ),
    "repository-from-an-empty-root": (
        "MINWNET",
        "MINELSEWHERENET",
        "ws",
        "attempt('use', os.rename, '.git', 'moved')",
    ),
    "missing-name": ("WWNET", "RONET", "ws", "attempt('use', os.rmdir, '.codex')"),
    "missing-name-moved": ("WWNET", "RONET", "ws", "attempt('use', os.rename, '.codex', 'x')"),
    "denied-folder": ("DENYSUBNET", "RONET", "ws", "attempt('use', os.rename, 'sub', 'moved')"),
    "denied-file": ("DENYFILENET", "RONET", "ws", "attempt('use', os.rename, 'a.txt', 'moved')"),
    "denied-file-replaced": (
        "DENYFILENET",
        "RONET",
        "ws",
        "attempt('use', os.rename, 'out', 'a.txt')",
    ),
    "denied-pattern": ("GLOBNET", "RONET", "ws/sub", "attempt('use', os.rename, 'a.key', 'x')"),
    "denied-pattern-removed": ("GLOBNET", "RONET", "ws/sub", "attempt('use', os.unlink, 'a.key')"),
    "pinned-parent": ("RODEEPNET", "RONET", "ws", "attempt('use', os.rename, 'sub', 'moved')"),
    "pinned-parent-from-above": (
        "RODEEPNET",
        "RONET",
        "ws/sub",
        "attempt('use', os.rename, '../sub', '../moved')",
    ),
    # The receiver may write the workspace too, but not this part of it.
    "hooks": ("HOOKSNET", "WWNET", "ws/.git", "attempt('use', os.rename, 'hooks', 'moved')"),
    "denied-in-read-only": (
        "DENYDEEPNET",
        "ROSUBNET",
        "ws/sub",
        "attempt('use', os.rename, 'deep', 'x')",
    ),
}


def _inodes(base: Path) -> dict[Path, int]:
    return {path: path.lstat().st_ino for path in base.rglob("*")}


@pytest.mark.parametrize("name", _PASSED)
def test_a_descriptor_of_another_command_changes_nothing(
    stage: Stage, client: Client, name: str
) -> None:
    prepare_attacks(stage)
    before = _inodes(stage.base)
    outcome = pass_descriptor(stage, client, _PASSED[name])
    assert verdicts(outcome) == {"use": "refused"}
    assert _inodes(stage.base) == before


def test_a_descriptor_of_another_command_unmasks_nothing(stage: Stage, client: Client) -> None:
    code = """
attempt('see the workspace', content, 'a.txt')
attempt('read below the mask', content, 'sub/s.txt')
attempt('read by the parent', content, '../ws/sub/s.txt')
"""
    outcome = pass_descriptor(stage, client, ("DENYSUBNET", "MINELSEWHERENET", "ws", code))
    assert verdicts(outcome) == {
        "see the workspace": "DONE",  # as the sender could send its content
        "read below the mask": "refused",
        "read by the parent": "refused",
    }


# ---- a shared /proc -------------------------------------------------------------------


@contextlib.contextmanager
def _start_in_container(user: User, landlock: int) -> Iterator[Stage]:
    """A server that can create neither user namespaces nor a private /proc."""
    with (
        Scratch(user_id(user)) as scratch,
        start_prepared(
            with_landlock(landlock),
            env={MARKER: MARKER, "TMPDIR": None},
            prefix=behind_barrier(user, "container"),
        ) as server,
    ):
        scratch.reset(BASE_STEPS)
        yield Stage(server, scratch)


@pytest.mark.parametrize("landlock", [1, 5, 7])
@pytest.mark.parametrize("user", USERS)
def test_other_commands_in_a_shared_proc_are_out_of_reach(user: User, landlock: int) -> None:
    if kernel.landlock_version() < landlock:
        pytest.skip("this kernel has an older Landlock")
    name = f"exec-server-{uuid.uuid4()}"
    with (
        _start_in_container(user, landlock) as stage,
        stage.server.connect() as client,
        stage.server.connect() as other,
    ):
        victims = [
            (client, start_attempts(stage, client, "WWNET", VICTIM, name)),
            (other, start_attempts(stage, other, "NONE", VICTIM, f"{name}-unconfined")),
        ]
        params = {"path": uri(stage.ws / "new"), "sandbox": stage.policy("WW"), "dataBase64": ""}
        assert client.call("fs/writeFile", params) == {}  # by a worker, another target
        for policy in ("MINELSEWHERENET", "READERS"):
            assert successes(run_attempts(stage, client, policy, PEEK, name)) == []
        for owner, victim in victims:
            owner.call("process/terminate", {"processId": victim["processId"]})
            finish(owner, victim)


def test_descriptors_change_nothing_where_the_root_cannot_be_moved() -> None:
    with (
        Scratch(os.geteuid()) as scratch,
        start_prepared(before_launcher(FIXED_ROOT), env={MARKER: MARKER}) as server,
        server.connect() as client,
    ):
        stage = Stage(server, scratch)
        for name in ("repository", "hooks", "denied-folder"):
            scratch.reset(BASE_STEPS)
            assert verdicts(pass_descriptor(stage, client, _PASSED[name])) == {"use": "refused"}
        assert stage.shell(client, "WW", "echo x > sub/new; mv sub/new a.txt").exit_code == 0
        outcome = stage.shell(client, "WW", "ls /proc/self/fd /dev/null")
        assert outcome.stdout.split() == ["/dev/null", "/proc/self/fd:", "0", "1", "2", "3"]
