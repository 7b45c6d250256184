"""Harbor's environment from a job's configuration: commands, users, output, transfers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from harbor.environments.factory import EnvironmentFactory
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.config import EnvironmentConfig as TrialEnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from exec_server import NotAllCopied
from tests.adapters.coding_task import (
    COUNT_LEFT,
    EDIT,
    FIXED,
    NEVER_ENDS,
    READ,
    RUN_TESTS,
    make_repository,
)


def play(server_url: str, folder: Path, scene: Callable[[Any], Awaitable[None]]) -> None:
    """Run a scene in a started environment, whose commands begin in `folder/project`."""
    definition = folder / "definition"
    definition.mkdir()
    config = TrialEnvironmentConfig(
        import_path="exec_server.adapters.harbor:ExecServerEnvironment",
        kwargs={"target": server_url, "workdir": str(folder / "project")},
        env={"WORD": "of the job"},
    )
    environment = EnvironmentFactory.create_environment_from_config(
        config=config,
        environment_dir=definition,
        environment_name="task",
        session_id="task__1__env",
        trial_paths=TrialPaths(trial_dir=folder / "trial"),
        task_env_config=EnvironmentConfig(),
    )

    async def run() -> None:
        await environment.start(force_build=False)
        try:
            async with asyncio.timeout(120):
                await scene(environment)
        finally:
            await environment.stop(delete=True)
        with pytest.raises(RuntimeError, match="not started"):
            await environment.exec("true")

    asyncio.run(run())


def test_a_coding_task(server_url: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    make_repository(source)

    async def scene(environment: Any) -> None:
        await environment.upload_dir(source, str(tmp_path / "project"))
        assert "return a - b" in (await environment.exec(READ)).stdout
        failed = await environment.exec(RUN_TESTS)
        assert (failed.return_code, "AssertionError: -1" in failed.stderr) == (1, True)
        assert (await environment.exec(EDIT)).return_code == 0
        assert (await environment.exec(RUN_TESTS)).stdout == "all tests pass\n"
        await environment.download_file(f"{tmp_path}/project/app.py", tmp_path / "got/app.py")

    play(server_url, tmp_path, scene)
    assert (tmp_path / "got/app.py").read_text() == FIXED


def test_commands(server_url: str, tmp_path: Path, ordinary_user: str | None) -> None:
    async def scene(environment: Any) -> None:
        shown = await environment.exec("pwd; echo $WORD $MORE", cwd="/", env={"MORE": "more"})
        assert shown.stdout == "/\nof the job more\n"
        seen: list[tuple[str, str]] = []

        async def receive(text: str, stream: str) -> None:
            seen.append((text, stream))

        with environment.scoped_output_callback(receive):
            await environment.exec("echo out; echo err >&2")
        assert sorted(seen) == [("err\n", "stderr"), ("out\n", "stdout")]
        with pytest.raises(RuntimeError, match="begun"):
            await environment.exec(NEVER_ENDS, timeout_sec=1)
        assert (await environment.exec(COUNT_LEFT)).stdout == "0\n"
        for own in (pwd.getpwuid(os.geteuid()).pw_name, os.geteuid()):
            assert (await environment.exec("id -u", user=own)).stdout == f"{os.geteuid()}\n"
            assert await environment.is_dir("/etc", user=own)
            assert await environment.is_file("/etc/passwd", user=own)
        if ordinary_user is not None:
            with environment.with_default_user(ordinary_user):
                assert (await environment.exec("id -un", cwd="/")).stdout.strip() == ordinary_user

    play(server_url, tmp_path, scene)


def test_transfers_leave_out_special_files(server_url: str, tmp_path: Path) -> None:
    async def scene(environment: Any) -> None:
        tree = tmp_path / "tree"
        (tree / "deep").mkdir(parents=True)
        (tree / "deep/file").write_bytes(bytes(100_000))
        os.mkfifo(tree / "pipe")
        await environment.download_dir(str(tree), tmp_path / "copy")
        assert sorted(os.listdir(tmp_path / "copy")) == ["deep"]
        assert (tmp_path / "copy/deep/file").stat().st_size == 100_000
        await environment.upload_file(tmp_path / "copy/deep/file", f"{tmp_path}/a/b/file")
        assert await environment.is_file(f"{tmp_path}/a/b/file")
        assert await environment.is_dir(f"{tmp_path}/a/b")
        assert not await environment.is_file(f"{tmp_path}/missing")
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
            listening.bind(f"{tree}/socket")
            await environment.upload_dir(tree, f"{tmp_path}/uploaded")
        assert sorted(os.listdir(tmp_path / "uploaded")) == ["deep"]
        assert (tmp_path / "uploaded/deep/file").stat().st_size == 100_000
        (tmp_path / "uploaded/deep/file").unlink()
        (tmp_path / "uploaded/deep/file").mkdir()
        with pytest.raises(NotAllCopied, match="deep/file"):
            await environment.upload_dir(tree, f"{tmp_path}/uploaded")

    play(server_url, tmp_path, scene)
