"""What the suite of Pydantic AI does not ask: paths that are not absolute."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from exec_server.adapters.pydantic_ai import ExecServerWorkspace


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
