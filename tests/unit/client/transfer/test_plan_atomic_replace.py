"""Temporary files beside their targets: where they are, and how they take the place."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from exec_server.client.exceptions import (
    AlreadyExists,
    IsADirectory,
    NoSpace,
    NotFound,
    PermissionDenied,
)
from exec_server.client.results import Result, Stat
from exec_server.client.transfer import plan as module
from exec_server.client.transfer.plan import AtomicReplacement, replace
from exec_server.errors import InternalError, RpcError, Unsupported

FILE = Stat(is_directory=False, is_file=True, is_symlink=False, size=1, modified=1.0, created=None)
LINK = Stat(is_directory=False, is_file=True, is_symlink=True, size=1, modified=1.0, created=None)
FIFO = Stat(is_directory=False, is_file=False, is_symlink=False, size=0, modified=1.0, created=None)


class FakeMachine:
    """Files and commands that record their use."""

    def __init__(
        self,
        found: Stat | RpcError = FILE,
        results: tuple[Result | RpcError, ...] = (),
        rename_error: Exception | None = None,
    ) -> None:
        self._found = found
        self._results = list(results)
        self._rename_error = rename_error
        self.used: list[str] = []

    async def stat(self, path: str) -> Stat:
        if isinstance(self._found, RpcError):
            raise self._found
        return self._found

    async def realpath(self, path: str) -> str:
        return "/real/path"

    async def rename(self, old: str, new: str, *, replace: bool = True) -> None:
        if self._rename_error is not None:
            raise self._rename_error
        self.used.append(f"rename {old} {new}")

    async def copy(self, source: str, target: str) -> None:
        self.used.append(f"copy {source} {target}")

    async def remove(self, path: str, *, missing_ok: bool = False) -> None:
        self.used.append(f"remove {path}")

    async def run(self, argv: list[str], **_: Any) -> Result:
        self.used.append(argv[0])
        result = self._results.pop(0)
        if isinstance(result, RpcError):
            raise result
        return result

    def replacement(self) -> AtomicReplacement:
        def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
            return asyncio.ensure_future(work)  # noqa: TID251 - there is no session

        machine: Any = self
        return AtomicReplacement(machine, machine, None, "/d/name", spawn)


def ended(code: int = 0, stderr: bytes = b"") -> Result:
    return Result(("x",), b"", stderr, code, 0.0)


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scene())


@pytest.mark.parametrize(
    ("machine", "directory"),
    [
        (FakeMachine(NotFound("/d/name: gone")), "/d/.name."),
        (FakeMachine(FILE, (ended(),)), "/d/.name."),
        (FakeMachine(FILE, (ended(127),)), "/d/.name."),
        (FakeMachine(FILE, (InternalError("no shell"),)), "/d/.name."),
        (FakeMachine(LINK, (ended(),)), "/real/.path."),
        (FakeMachine(FILE, (ended(1),)), None),
        (FakeMachine(FIFO), None),
        (FakeMachine(InternalError("Not a directory")), None),
    ],
)
def test_the_temporary_file_is_beside_the_target(
    machine: FakeMachine, directory: str | None
) -> None:
    part = asyncio.run(machine.replacement().begin())
    if directory is None:
        assert part is None
    else:
        assert part is not None
        assert part.startswith(directory)
        assert part.endswith(".part")


def test_only_a_missing_right_is_a_reason_to_write_in_place() -> None:
    replacement = FakeMachine().replacement()
    assert replacement.may_write_in_place(PermissionDenied("x"))
    assert not replacement.may_write_in_place(NoSpace("x"))
    assert not replacement.may_write_in_place(InternalError("x"))


def test_a_new_file_is_renamed_without_a_command() -> None:
    async def scene() -> None:
        machine = FakeMachine(NotFound("x"))
        replacement = machine.replacement()
        part = await replacement.begin()
        await replacement.commit()
        assert machine.used == [f"rename {part} /d/name"]

    play(scene)


@pytest.mark.parametrize("error", [AlreadyExists("x"), Unsupported("fsRename", "x")])
def test_otherwise_a_command_puts_it_in_place(error: Exception) -> None:
    async def scene() -> None:
        machine = FakeMachine(NotFound("x"), (ended(),), error)
        replacement = machine.replacement()
        await replacement.begin()
        await replacement.commit()
        assert machine.used == ["xargs"]

    play(scene)


def test_a_failure_removes_the_temporary_file() -> None:
    async def scene() -> None:
        machine = FakeMachine(FILE, (ended(), ended(123, b"cat: /d/name: Permission denied\n")))
        replacement = machine.replacement()
        part = await replacement.begin()
        with pytest.raises(PermissionDenied, match="/d/name: Permission denied"):
            await replacement.commit()
        assert machine.used == ["/bin/sh", "xargs", f"remove {part}"]

    play(scene)


def test_without_commands_the_server_copies() -> None:
    async def scene() -> None:
        for answer in (InternalError("none"), ended(127)):
            machine = FakeMachine(results=(answer,))
            files: Any = machine
            assert not await replace(files, files, None, ("/d/p", "/d/name"), mode=0o600)
            assert machine.used == ["xargs", "copy /d/p /d/name", "remove /d/p"]

    play(scene)


def test_a_cancellation_waits_for_the_last_step() -> None:
    async def scene() -> None:
        entered, proceed = asyncio.Event(), asyncio.Event()

        class Slow(FakeMachine):
            async def rename(self, old: str, new: str, *, replace: bool = True) -> None:
                entered.set()
                await proceed.wait()
                await super().rename(old, new)

        machine = Slow(NotFound("x"))
        replacement = machine.replacement()
        await replacement.begin()
        async with asyncio.TaskGroup() as tasks:
            committing = tasks.create_task(replacement.commit())
            await entered.wait()
            committing.cancel()
            await asyncio.sleep(0)
            proceed.set()
            with pytest.raises(asyncio.CancelledError):
                await committing
        assert len(machine.used) == 1

    play(scene)


# ---- the command ----------------------------------------------------------------------


def run_place(part: Path, target: Path, mode: str = "") -> subprocess.CompletedProcess[str]:
    words = ["sh", "-c", module._REPLACE, "sh", str(part), str(target), mode]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.fixture
def part(tmp_path: Path) -> Path:
    path = tmp_path / "a b\n.part"
    path.write_bytes(b"new")
    return path


@pytest.mark.parametrize("mode", ["", "600"])
def test_the_command_keeps_the_mode_or_sets_it(tmp_path: Path, part: Path, mode: str) -> None:
    target = tmp_path / "-target 'x'\n"
    target.write_bytes(b"old content")
    target.chmod(0o751)
    inode = part.stat().st_ino
    done = run_place(part, target, mode)
    assert (done.returncode, done.stderr) == (0, "")
    assert (target.read_bytes(), target.stat().st_ino) == (b"new", inode)
    assert target.stat().st_mode & 0o777 == (0o600 if mode else 0o751)
    assert not part.exists()


def test_the_command_creates_a_target(tmp_path: Path, part: Path) -> None:
    assert run_place(part, tmp_path / "target", "640").returncode == 0
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("kind", ["hard link", "symlink", "dangling"])
def test_the_command_keeps_links(tmp_path: Path, part: Path, kind: str) -> None:
    target, other = tmp_path / "target", tmp_path / "other"
    if kind != "dangling":
        other.write_bytes(b"old content")
    if kind == "hard link":
        target.hardlink_to(other)
    else:
        target.symlink_to("other")
    assert run_place(part, target).returncode == 0
    assert other.read_bytes() == b"new"
    assert target.is_symlink() == (kind != "hard link")
    assert target.samefile(other)
    assert not part.exists()


def test_the_command_refuses_a_directory(tmp_path: Path, part: Path) -> None:
    (tmp_path / "target").mkdir()
    done = run_place(part, tmp_path / "target")
    assert (done.returncode, done.stderr.endswith("Is a directory\n")) == (1, True)
    assert part.exists()
    assert isinstance(IsADirectory("x"), IsADirectoryError)
