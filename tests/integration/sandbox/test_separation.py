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
from tests.support.sandbox import BASE_STEPS, MARKER, USERS, Scratch, Stage, finish, start_process
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


# ---- helper processes of the server ---------------------------------------------------

# Another program of the user of the server; the argument is the pid of the server.
_TRACE = """
_ATTACH, _DETACH = 16, 17
getfd = 438
def attach(pid):
    lib('ptrace', _ATTACH, pid, 0, 0)
    os.waitpid(pid, 0x40000000)
    lib('ptrace', _DETACH, pid, 0, 0)
def copy(pid):
    os.close(call(getfd, os.pidfd_open(pid), 0, 0))
def names():
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            fields = open(f'/proc/{pid}/stat').read()
        except OSError:
            continue
        name, parent = fields.partition('(')[2].rpartition(')')[::2]
        if pid == extra[0] or (name.startswith('exec-') and parent.split()[1] == extra[0]):
            yield int(pid), name
for pid, name in names():
    attempt(f'{name} {pid} attach', attach, pid)
    attempt(f'{name} {pid} environ', content, f'/proc/{pid}/environ')
    attempt(f'{name} {pid} memory', opens, f'/proc/{pid}/mem', os.O_RDONLY)
    attempt(f'{name} {pid} descriptors', os.listdir, f'/proc/{pid}/fd')
    attempt(f'{name} {pid} directory', os.readlink, f'/proc/{pid}/cwd')
    attempt(f'{name} {pid} copy', copy, pid)
"""


_VISIBLE = "from exec_server.host import libc\nlibc.hide_memory = lambda: None"
_FORKED = {"exec-launcher", "exec-worker", "exec-init"}


@pytest.mark.parametrize(
    ("preparation", "reached"),
    [("", set()), (before_launcher(_VISIBLE), _FORKED)],
    ids=["hidden", "visible"],
)
def test_an_unconfined_command_reaches_no_process_of_the_server(
    preparation: str, reached: set[str]
) -> None:
    """Root can; an ordinary user has no rights over processes that are not dumpable."""
    with (
        Scratch(user_id("ordinary")) as scratch,
        start_prepared(preparation, prefix=behind_barrier("ordinary", "none")) as server,
        server.connect() as client,
    ):
        scratch.reset(BASE_STEPS)
        stage = Stage(server, scratch)
        written = {"path": uri(stage.ws / "new"), "sandbox": stage.policy("WW"), "dataBase64": ""}
        assert client.call("fs/writeFile", written) == {}  # by a worker
        confined = start_process(client, stage.policy("RO"), ["sleep", "600"])
        outcome = run_attempts(stage, client, "NONE", _TRACE, str(server.process.pid))
        client.call("process/terminate", {"processId": confined["processId"]})
        finish(client, confined)
    assert {name.split()[0] for name in successes(outcome)} == reached
    helpers = {name.split()[0] for name in verdicts(outcome)}
    assert helpers >= _FORKED | {"exec-guardian"}
    assert len(helpers) == 5  # and the server itself


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
