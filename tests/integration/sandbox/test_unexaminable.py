"""Paths that the server cannot examine: requests are refused with the path and the reason.

Each test makes the server fail to look at something. A command and a file operation under a
policy that depends on it must be refused, or confined all the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.client import Client, RpcFailure, b64, uri
from tests.support.sandbox import NEEDS_ROOT, Json, Stage, interpreter
from tests.support.server_internals import open_descriptors

# A user that is neither root nor the ordinary user of the tests.
_OTHER = 61_234
# More descriptors than a start needs.
_DESCRIPTORS = 60


def _use_pointer(stage: Stage, content: str = "gitdir: real\n") -> Path:
    """A workspace whose repository is elsewhere in it."""
    steps: list[Json] = [{"mv": ["ws/.git", "ws/real"]}, {"write": ["ws/.git", content]}]
    stage.scratch.apply(steps)
    return stage.ws / ".git"


def _change_repository(stage: Stage, client: Client, name: str = "real") -> list[str]:
    """The refusals of a command and of a file operation that change the repository."""
    config = stage.ws / name / "config"
    before = config.read_text()
    refusals = []
    outcome = stage.shell(client, "WW", f"echo x > '{config}'; mv '{name}' moved")
    if outcome.refusal is not None:
        refusals.append(outcome.refusal.message)
    write = {"path": uri(config), "dataBase64": b64("x"), "sandbox": stage.policy("WW")}
    with contextlib.suppress(RpcFailure):
        client.call("fs/writeFile", write)
        raise AssertionError("the repository was written to")
    refusals.append(client.failure("fs/writeFile", write)[1])
    assert config.read_text() == before
    return refusals


def test_a_pointer_to_a_repository_is_followed(stage: Stage, client: Client) -> None:
    _use_pointer(stage)
    assert _change_repository(stage, client) == ["Read-only file system (os error 30)"]


@contextlib.contextmanager
def _leased(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        yield
    finally:
        os.close(descriptor)


def _refusal(path: Path, reason: str) -> str:
    return f"cannot lay out the sandbox: {path} cannot be examined: {reason}"


_NOT_NOW = "Resource temporarily unavailable (os error 11)"


@pytest.mark.quick
def test_a_lease_on_a_pointer_is_refused(stage: Stage, client: Client) -> None:
    pointer = _use_pointer(stage)
    with _leased(pointer):
        assert _change_repository(stage, client) == [_refusal(pointer, _NOT_NOW)] * 2
    assert _change_repository(stage, client) == ["Read-only file system (os error 30)"]


_LEASE = """
import fcntl, os, signal, sys
descriptor = os.open('.git', os.O_RDONLY)
fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
"""


@pytest.mark.parametrize("name", ["RO", "WW", "WWNET"])
def test_a_confined_command_gets_no_lease(stage: Stage, client: Client, name: str) -> None:
    """With a lease, later requests that need the file would be refused."""
    _use_pointer(stage)
    outcome = stage.run(client, name, [interpreter(), "-I", "-S", "-c", _LEASE])
    assert "PermissionError" in outcome.output
    assert outcome.exit_code == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("gitdir: real\0", "the repository that it names contains a null byte"),
        ("gitdir: real\0other\n", "the repository that it names contains a null byte"),
        ("gitdir: real" + "\n" * 5000, "the repository that it names is longer than a path can be"),
    ],
    ids=["null at the end", "null", "long"],
)
def test_a_pointer_that_only_git_understands_is_refused(
    stage: Stage, client: Client, content: str, reason: str
) -> None:
    pointer = _use_pointer(stage, content)
    assert _change_repository(stage, client) == [_refusal(pointer, reason)] * 2


@pytest.mark.parametrize("name", [" real", "real ", "\treal"])
def test_blanks_around_a_pointer_belong_to_it(stage: Stage, client: Client, name: str) -> None:
    _use_pointer(stage, f"gitdir: {name}\n")
    (stage.ws / "real").rename(stage.ws / name)
    assert _change_repository(stage, client, name) == ["Read-only file system (os error 30)"]


def _closed_by_name(stage: Stage) -> Path:
    """A file in a directory of another user that can be passed through, but not listed."""
    directory = stage.ws / "other"
    directory.mkdir()
    (directory / "a.key").write_text("secret")
    (directory / "a.key").chmod(0o644)
    os.chown(directory, _OTHER, _OTHER)
    directory.chmod(0o711)
    return directory / "a.key"


@pytest.mark.root
@NEEDS_ROOT
def test_a_denied_file_that_can_be_opened_only_by_name_is_not_read(
    stage: Stage, client: Client
) -> None:
    secret = _closed_by_name(stage)
    outcome = stage.shell(client, "GLOB", f"cat {secret}")
    assert "secret" not in outcome.stdout
    if stage.scratch.owner != 0:
        assert outcome.refusal is not None
        assert f"{secret.parent} cannot be searched: Permission denied" in outcome.refusal.message
    read = {"path": uri(secret), "sandbox": stage.policy("GLOB")}
    assert client.failure("fs/readFile", read)[0] == -32600


_LEVEL, _LEVELS = "d" * 250, 20
# Enters directories beyond the longest path, and does something with a file there.
_GO_DEEP = f"""
import contextlib, os, sys
for _ in range({_LEVELS}):
    with contextlib.suppress(FileExistsError):
        os.mkdir({_LEVEL!r})
    os.chdir({_LEVEL!r})
with open('a.key', sys.argv[1]) as stream:
    print(stream.read() if sys.argv[1] == 'r' else stream.write('secret'))
"""


def test_a_denied_file_beyond_the_longest_path_is_refused(stage: Stage, client: Client) -> None:
    deep = [interpreter(), "-I", "-S", "-c", _GO_DEEP]
    assert stage.run(client, "WW", [*deep, "w"]).stdout == "6\n"
    try:
        outcome = stage.run(client, "GLOB", [*deep, "r"])
        assert outcome.refusal is not None
        assert "cannot be searched: Filename too long (os error 36)" in outcome.refusal.message
        assert len(outcome.refusal.message) < 1000
    finally:
        shutil.rmtree(stage.ws / _LEVEL)


def _with_descriptors(stage: Stage, attempt: Callable[[], bool]) -> list[bool]:
    """The results of an attempt for every number of descriptors that the server has left."""
    pid = stage.server.process.pid
    try:
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    except PermissionError:
        pytest.skip("needs CAP_SYS_RESOURCE for a server of another user")
    used = open_descriptors(stage.server)
    results = []
    try:
        for spare in range(_DESCRIPTORS):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + spare, before[1]))
            results.append(attempt())
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    return results


@pytest.mark.root
@NEEDS_ROOT
def test_without_descriptors_nothing_denied_is_read(stage: Stage, client: Client) -> None:
    """The number of open descriptors is known to root only."""
    stage.scratch.apply([{"write": ["ws/sub/a.key", "secret"]}])
    _use_pointer(stage)

    def attempt() -> bool:
        outcome = stage.shell(client, "GLOB", "cat sub/a.key; echo x > real/config; echo end")
        assert "secret" not in outcome.stdout
        assert (stage.ws / "real/config").read_text() == "[core]\n"
        return outcome.stdout == "end\n"

    results = _with_descriptors(stage, attempt)
    assert not results[0]
    assert results[-1]
