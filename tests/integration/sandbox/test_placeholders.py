"""Placeholders that other processes lock, forge, close in or leave behind: no start is stopped.

The stranger of a test is the test's own process, or a confined command that may only read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.barriers import User, start_server_as
from tests.support.client import Client, uri
from tests.support.sandbox import (
    NEEDS_ROOT,
    PROTECTED,
    USERS,
    Json,
    Stage,
    finish,
    interpreter,
    start_process,
    start_stage,
)
from tests.support.server_internals import eventually

from exec_server.filesystem.placeholder import MARK_NS

# Users that are neither root nor the ordinary user of the tests.
_OTHER, _THIRD = 61_234, 61_235
_FORGE = "mkdir -p .codex/x; echo x > .codex/f; rmdir .codex; mv .codex moved; ls -A; ls -A .codex"


@pytest.fixture(params=USERS)
def user(request: pytest.FixtureRequest) -> User:
    """The user of the servers."""
    name: User = request.param
    return name


def _left(ws: Path) -> list[str]:
    return [name for name in (*PROTECTED, ".env") if os.path.lexists(ws / name)]


def _leave_behind(stage: Stage, name: str = ".codex", owner: int | None = None) -> Path:
    """A placeholder without users, of the server's user or of another one."""
    path = stage.ws / name
    path.mkdir()
    path.chmod(0o555)
    os.utime(path, ns=(MARK_NS, MARK_NS))
    if os.geteuid() == 0:
        os.chown(path, *[stage.scratch.owner if owner is None else owner] * 2)
    return path


@contextlib.contextmanager
def _locked(path: Path, operation: int) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def _assert_protected(stage: Stage, client: Client) -> None:
    """A command starts, and the missing name stays missing for it."""
    outcome = stage.shell(client, "WW", f"({_FORGE}) 2>/dev/null; echo x > made")
    assert outcome.refusal is None, outcome.refusal
    assert outcome.exit_code == 0, outcome
    assert "moved" not in outcome.stdout
    assert not (stage.ws / ".codex/f").exists()
    assert not (stage.ws / ".codex/x").exists()
    assert (stage.ws / "made").read_text() == "x\n"


@pytest.mark.parametrize("operation", [fcntl.LOCK_EX, fcntl.LOCK_SH], ids=["exclusive", "shared"])
def test_a_lock_of_a_stranger_stops_no_start(stage: Stage, client: Client, operation: int) -> None:
    with _locked(_leave_behind(stage), operation):
        for _ in range(3):
            _assert_protected(stage, client)
        assert _left(stage.ws) == [".codex"]
    _assert_protected(stage, client)
    assert _left(stage.ws) == []


@pytest.mark.slow
def test_a_placeholder_is_removed_once_a_stranger_releases_its_lock(
    stage: Stage, client: Client
) -> None:
    with _locked(_leave_behind(stage), fcntl.LOCK_SH):
        _assert_protected(stage, client)
        assert _left(stage.ws) == [".codex"]
    eventually("the end of the placeholder", lambda: not _left(stage.ws), timeout=60)


_LOCK = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print('locked', flush=True)
sys.stdin.read()
"""


def test_a_lock_of_a_confined_command_stops_no_start(stage: Stage, client: Client) -> None:
    path = _leave_behind(stage)
    argv = [interpreter(), "-I", "-S", "-c", _LOCK, str(path)]
    start = start_process(client, stage.policy("ELSEWHERE"), argv, pipeStdin=True)
    eventually(
        "the lock", lambda: client.call("process/read", {"processId": start["processId"]})["chunks"]
    )
    _assert_protected(stage, client)
    client.call("process/terminate", {"processId": start["processId"]})
    finish(client, start)
    _assert_protected(stage, client)
    assert _left(stage.ws) == []


def test_a_command_that_locks_its_own_placeholders_leaves_none(
    stage: Stage, client: Client
) -> None:
    names = " ".join(PROTECTED)
    script = f"for name in {names}; do exec 9<$name; flock -s 9; sleep 60 & done; echo started"
    outcome = stage.shell(client, "WW", script)
    assert outcome.stdout == "started\n"
    assert _left(stage.ws) == []


@pytest.mark.root
@NEEDS_ROOT
@pytest.mark.parametrize("mode", [0o1777, 0o777], ids=["sticky", "shared"])
@pytest.mark.parametrize("forgery", ["locked", "closed", "filled"])
def test_a_forged_placeholder_of_another_user_stops_no_start(
    stage: Stage, client: Client, mode: int, forgery: str
) -> None:
    os.chown(stage.ws, _THIRD, _THIRD)
    stage.ws.chmod(mode)
    path = _leave_behind(stage, owner=_OTHER)
    if forgery == "filled":
        (path / "config").write_text("other")
        os.utime(path, ns=(MARK_NS, MARK_NS))
    with _locked(path, fcntl.LOCK_EX) if forgery == "locked" else contextlib.nullcontext():
        if forgery == "closed":
            path.chmod(0)
        _assert_protected(stage, client)
        assert path.stat().st_uid == _OTHER


@pytest.mark.root
@NEEDS_ROOT
@pytest.mark.parametrize("kind", ["link", "pointer", "unreadable pointer"])
def test_an_entry_of_another_user_in_a_sticky_directory_stops_no_start(
    stage: Stage, client: Client, kind: str
) -> None:
    """It neither stops commands nor makes a directory of its choice read-only."""
    name = ".codex" if kind == "link" else ".git"
    path = stage.ws / name
    if kind == "link":
        path.symlink_to("sub")
    else:
        stage.scratch.apply([{"rm": "ws/.git"}])
        path.write_text("gitdir: sub")
        path.chmod(0o600 if kind == "unreadable pointer" else 0o644)
    os.chown(path, _OTHER, _OTHER, follow_symlinks=False)
    os.chown(stage.ws, _THIRD, _THIRD)
    stage.ws.chmod(0o1777)
    outcome = stage.shell(client, "WW", f"rm -f {name}; mv {name} moved; echo x > sub/made")
    assert outcome.refusal is None, outcome.refusal
    assert outcome.exit_code == 0, outcome
    assert path.lstat().st_uid == _OTHER
    assert not (stage.ws / "moved").exists()
    write = {"path": uri(stage.ws / "sub/new"), "dataBase64": "", "sandbox": stage.policy("WW")}
    client.call("fs/writeFile", write)


@pytest.mark.root
@NEEDS_ROOT
def test_a_link_of_another_user_that_could_be_replaced_is_refused_with_its_owner(
    stage: Stage, client: Client
) -> None:
    (stage.ws / ".codex").symlink_to("sub")
    os.chown(stage.ws / ".codex", _OTHER, _OTHER, follow_symlinks=False)
    stage.ws.chmod(0o777)
    text = f"symlink {stage.ws}/.codex, which belongs to uid {_OTHER}"
    outcome = stage.shell(client, "WW", "true")
    assert outcome.refusal is not None
    assert text in outcome.refusal.message
    write = {"path": uri(stage.ws / "new"), "dataBase64": "", "sandbox": stage.policy("WW")}
    assert text in client.failure("fs/writeFile", write)[1]


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["500", "0"])
@pytest.mark.parametrize(
    ("policy", "script"),
    [("DENYMISSING", "chmod {} ."), ("DENYLATER", "chmod {} sub . 2>/dev/null; exit 0")],
    ids=["workspace", "workspace and folder"],
)
def test_no_placeholder_is_left_in_a_directory_that_its_command_closed(
    stage: Stage, client: Client, policy: str, script: str, mode: str
) -> None:
    outcome = stage.shell(client, policy, script.format(mode))
    assert outcome.exit_code == 0, outcome
    assert stat.S_IMODE(stage.ws.stat().st_mode) == int(mode, 8)
    stage.ws.chmod(0o755)
    (stage.ws / "sub").chmod(0o755)
    assert _left(stage.ws) == []
    assert not (stage.ws / "sub/later").exists()


def test_no_placeholder_is_left_in_a_closed_directory_by_a_killed_server(user: User) -> None:
    with start_stage(user) as stage, stage.server.connect() as client:
        argv = ["/bin/sh", "-c", "chmod 0 .; echo closed; read line"]
        params: Json = {"cwd": uri(stage.ws), "pipeStdin": True}
        start_process(client, stage.policy("DENYMISSING"), argv, **params)
        eventually("the closed directory", lambda: not stage.ws.stat().st_mode & 0o777)
        stage.server.process.send_signal(signal.SIGKILL)
        stage.server.process.wait()

        def left() -> list[str]:
            return [entry for entry in _names(stage.ws) if entry in (*PROTECTED, ".env")]

        eventually("the end of the placeholders", lambda: not left())
        eventually("the mode of the directory", lambda: not stage.ws.stat().st_mode & 0o777)
        stage.ws.chmod(0o755)


def _names(directory: Path) -> list[str]:
    """The entries of a directory, which is opened meanwhile unless root looks."""
    if os.geteuid() == 0:
        return os.listdir(directory)
    mode = stat.S_IMODE(directory.stat().st_mode)
    directory.chmod(0o700)
    found = os.listdir(directory)
    directory.chmod(mode)
    return found


def test_many_commands_at_once_are_all_protected(stage: Stage, client: Client) -> None:
    """Each ends at another time; no command removes the placeholders of another one."""
    script = "sleep 0.0$1; mkdir .codex 2>/dev/null && echo made; test -d .codex || echo gone"
    starts = [
        start_process(
            client,
            stage.policy("WW"),
            ["/bin/sh", "-c", script, "sh", str(number % 10)],
            cwd=uri(stage.ws),
        )
        for number in range(40)
    ]
    assert [finish(client, start).stdout for start in starts] == [""] * 40
    assert _left(stage.ws) == []


def test_a_server_takes_over_the_placeholders_that_another_one_cannot_lock(user: User) -> None:
    """The first server uses a locked placeholder; the second one must not remove it."""
    with (
        start_stage(user) as stage,
        start_server_as("ours", user) as neighbour,
        stage.server.connect() as client,
        neighbour.connect() as other,
    ):
        argv = ["/bin/sh", "-c", "read line; mkdir .codex && echo made; rmdir .codex; echo end"]
        with _locked(_leave_behind(stage), fcntl.LOCK_EX):
            start = start_process(
                client, stage.policy("WW"), argv, cwd=uri(stage.ws), pipeStdin=True
            )
        _assert_protected(Stage(neighbour, stage.scratch), other)
        assert client.write(start["processId"], b"\n", "line") == "accepted"
        assert finish(client, start).stdout == "end\n"
        assert _left(stage.ws) == []
