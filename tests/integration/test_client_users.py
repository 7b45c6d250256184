"""Commands and files of other users, on a server with the rights of root."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.client_targets import ClientTarget

from exec_server import Environment, InvalidParams, ProgramNotFound, RpcError, Unsupported
from exec_server.host.libc import can_switch

NAME = pwd.getpwuid(65534).pw_name
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root rights")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user may write to, with a file that root alone may read."""
    # Not below the directory of pytest, which other users cannot enter.
    with tempfile.TemporaryDirectory(prefix="exec-server-users-") as name:
        directory = Path(name)
        directory.chmod(0o777)
        (directory / "secret").write_bytes(b"x")
        (directory / "secret").chmod(0o600)
        (directory / "closed").mkdir(mode=0o700)
        (directory / "closed/program").write_text("#!/bin/sh\n")
        (directory / "closed/program").chmod(0o755)
        yield directory


@NEEDS_ROOT
@pytest.mark.quick
def test_a_command_has_the_rights_of_its_user(ours: ClientTarget, shared: Path) -> None:
    async def scene(env: Environment) -> None:
        text = "id -u; id -ur; id -G; echo $HOME $USER; cat secret"
        done = await env.shell(text, user=NAME, cwd=shared, env={"USER": "chosen"})
        entry = pwd.getpwnam(NAME)
        groups = " ".join(map(str, os.getgrouplist(NAME, entry.pw_gid)))
        assert done.text == f"65534\n65534\n{groups}\n{entry.pw_dir} chosen\n"
        assert "Permission denied" in done.error_text
        assert (await env.run(["cat"], user="65534", cwd="/", input=b"in")).stdout == b"in"
        with pytest.raises(ProgramNotFound):
            await env.run(["no-such-program"], user=NAME, cwd="/")
        for argv, cwd in (([f"{shared}/closed/program"], "/"), (["true"], shared / "closed")):
            with pytest.raises(RpcError, match="Permission denied"):
                await env.run(argv, user=NAME, cwd=cwd)
        with pytest.raises(InvalidParams, match="unknown user no-such-user"):
            await env.run(["true"], user="no-such-user", cwd="/")
        with pytest.raises(InvalidParams, match="user and sandbox exclude each other"):
            await env.run(["true"], user=NAME, cwd="/", sandbox="read-only")

    ours.play(scene)


@NEEDS_ROOT
def test_a_terminal_belongs_to_its_user(ours: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        text = "stat -c %u $(tty); echo x > /dev/tty"
        for user in (NAME, 65534):
            done = await env.run(["sh", "-c", text], user=user, cwd="/", tty=True)
            assert done.stdout == b"65534\r\nx\r\n"
        assert await env.files.as_user(65534).exists("/")

    ours.play(scene)


@NEEDS_ROOT
def test_a_command_is_killed_with_its_descendants(ours: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        async with env.start(["sh", "-c", "setsid sleep 60 & wait"], user=NAME, cwd="/") as process:
            await process.kill()
            assert await process.wait(60) == 137
        left = await env.shell(f"ps -o comm= -u {NAME} | grep -c sleep")
        assert left.text == "0\n"

    ours.play(scene)


@NEEDS_ROOT
@pytest.mark.quick
def test_files_have_the_rights_of_their_user(ours: ClientTarget, shared: Path) -> None:
    async def scene(env: Environment) -> None:
        files = env.files.as_user(NAME)
        large = bytes(5 * 1_048_576)
        await files.write(shared / "a/small", b"abc", parents=True)
        await files.write(shared / "large", large)
        for name in ("a", "a/small", "large"):
            assert (shared / name).stat().st_uid == 65534
        assert await files.read(shared / "large") == large
        assert [entry.name for entry in await files.list(shared / "a")] == ["small"]
        assert [match.line for match in await files.grep("abc", shared / "a", literal=True)] == [1]
        for refused in (
            files.read(shared / "secret"),
            files.write(shared / "secret", b"y"),
            files.chmod(shared / "secret", 0o644),
            files.list(shared / "closed"),
            files.write(shared / "closed/new", b"", exclusive=True),
            files.copy(shared / "secret", shared / "copy"),
        ):
            with pytest.raises(PermissionError):
                await refused
        with pytest.raises(Unsupported):
            files.watch(shared)
        assert await env.files.read(shared / "secret") == b"x"

    ours.play(scene)


@NEEDS_ROOT
def test_a_link_of_a_user_leads_to_no_right_of_root(ours: ClientTarget, shared: Path) -> None:
    setting = Path("/proc/sys/vm/stat_interval")
    (shared / "out").symlink_to(setting)

    async def scene(env: Environment) -> None:
        files = env.files.as_user(NAME)
        for refused in (
            files.write(shared / "out", setting.read_bytes()),
            files.append(shared / "out", setting.read_bytes()),
            files.read(f"/proc/{os.getpid()}/maps"),
        ):
            with pytest.raises(PermissionError):
                await refused
        # The first use of a module: the user need not have the right to read it.
        assert "secret" in await files.glob("*", shared)

    ours.play(scene)


@pytest.mark.reference
def test_other_servers_cannot(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        has_users = there.kind == "ours" and can_switch()
        assert env.capabilities.other_users == has_users
        if not has_users:
            with pytest.raises(Unsupported, match="otherUsers"):
                await env.run(["true"], user=NAME)
            with pytest.raises(Unsupported, match="otherUsers"):
                env.files.as_user(NAME)

    there.play(scene)


@NEEDS_ROOT
def test_exec_as_a_user(ours: ClientTarget) -> None:
    argv = [sys.executable, "-m", "exec_server", "exec", "-u", NAME, "--cwd", "/"]
    done = subprocess.run(
        [*argv, ours.url, "--", "id", "-un"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{NAME}\n"
