"""What the suite of Pydantic AI does not ask: paths, and the end of a workspace."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from pydantic_ai.workspaces import WorkspaceRef, WorkspaceUnavailableError

from exec_server.adapters.pydantic_ai import PROVIDER, ExecServerWorkspace


def play(
    workspace: ExecServerWorkspace, scene: Callable[[ExecServerWorkspace], Awaitable[None]]
) -> None:
    """Run a scene with a workspace, whose connection is ended."""

    async def run() -> None:
        try:
            await scene(workspace)
        finally:
            await workspace.close()

    asyncio.run(run())


def attached(server_url: str, folder: Path) -> ExecServerWorkspace:
    return ExecServerWorkspace(server_url, ref=WorkspaceRef(provider=PROVIDER, id=str(folder)))


def test_a_relative_path_starts_where_commands_start(server_url: str) -> None:
    async def scene() -> None:
        workspace = ExecServerWorkspace(server_url)
        try:
            folder = Path(await workspace.working_dir())
            await workspace.write_bytes("sub/file", b"1")
            assert (folder / "sub/file").read_bytes() == b"1"
            assert (await workspace.run(["cat", "sub/file"])).stdout == "1"
            assert await workspace.read_bytes("sub/file") == b"1"
            assert [entry.path for entry in await workspace.list_dir("sub")] == [
                str(folder / "sub/file")
            ]
            assert await workspace.realpath("sub/../sub") == str(folder / "sub")
            await workspace.make_dir("other")
            assert await workspace.exists("other")
            await workspace.remove("other")
            assert not (folder / "other").exists()
            with pytest.raises(ValueError, match="working directory"):
                await workspace.remove(".")
        finally:
            await workspace.destroy()

    asyncio.run(scene())


def test_dotdot_behind_a_link_goes_up_from_its_target(server_url: str, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "workspace", tmp_path / "elsewhere"
    (elsewhere / "x/y/z").mkdir(parents=True)
    folder.mkdir()
    (folder / "out").symlink_to(elsewhere / "x/y/z")
    (elsewhere / "x/y/file").write_text("theirs")
    (folder / "file").write_text("ours")

    async def scene(workspace: ExecServerWorkspace) -> None:
        assert await workspace.read_bytes(f"{folder}/out/../file") == b"theirs"
        await workspace.write_bytes("out/../new", b"1")
        assert (await workspace.stat("out/../new")).path == str(elsewhere / "x/y/new")
        await workspace.remove(f"{folder}/out/..")

    play(attached(server_url, folder), scene)
    assert (folder / "file").read_text() == "ours"
    assert not (elsewhere / "x/y").exists()
    assert (elsewhere / "x").exists()


def test_the_working_directory_is_not_removed_by_any_name(server_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    (folder / "a/b").mkdir(parents=True)
    (folder / "down").symlink_to("a/b")
    (folder / "up").symlink_to(tmp_path)

    async def scene(workspace: ExecServerWorkspace) -> None:
        for path in (f"{folder}/", f"file://{folder}", "up/.", "down/../../..", "../workspace"):
            with pytest.raises(ValueError, match="working directory"):
                await workspace.remove(path)

    play(attached(server_url, folder), scene)


def test_a_deleted_workspace_is_not_made_anew(server_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    folder.mkdir()

    async def scene(workspace: ExecServerWorkspace) -> None:
        await workspace.write_bytes("new/file", b"1")
        with pytest.raises(FileNotFoundError):
            await workspace.read_bytes("missing")
        assert not await workspace.exists("missing")
        shutil.rmtree(folder)
        for call in (
            workspace.write_bytes("file", b"1"),
            workspace.write_bytes(f"{folder}/sub/file", b"1"),
            workspace.make_dir("sub"),
            workspace.read_bytes("new/file"),
            workspace.stat("new/file"),
            workspace.list_dir("."),
            workspace.exists("new/file"),
            workspace.remove("new/file"),
            workspace.run("true", shell=True),
        ):
            with pytest.raises(WorkspaceUnavailableError):
                await call

    play(attached(server_url, folder), scene)
    assert not folder.exists()
