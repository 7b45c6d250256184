"""The local side of an upload: the scanned tree, and files opened in threads."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from exec_server.client.transfer import local_scan
from exec_server.client.transfer import upload as module
from exec_server.client.transfer.open_file import WRITE_BYTES


def test_a_tree_is_scanned_from_the_top_down(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "f").write_bytes(b"abc")
    (tmp_path / "d" / "f").chmod(0o4640)
    (tmp_path / "l").symlink_to("nowhere")
    os.mkfifo(tmp_path / "p")
    items = local_scan.scan(str(tmp_path), lambda path, error: pytest.fail(path))
    kinds = {item.path: (item.kind, item.target) for item in items}
    assert kinds == {
        "": ("d", ""),
        "d": ("d", ""),
        "d/e": ("d", ""),
        "d/f": ("f", ""),
        "l": ("l", "nowhere"),
        "p": ("?", ""),
    }
    paths = [item.path for item in items]
    assert all(os.path.dirname(path) in paths[:number] for number, path in enumerate(paths) if path)
    [file] = [item for item in items if item.kind == "f"]
    assert (file.size, file.mode) == (3, 0o640)
    assert module.leaves(items) == ["d/e"]


def test_a_missing_top_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        local_scan.scan(str(tmp_path / "none"), lambda path, error: pytest.fail(path))


def test_a_file_that_is_opened_too_late_is_closed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def scene() -> None:
        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(module._open_in_thread(str(pipe)))
            await asyncio.sleep(0)  # the thread waits for the other end of the pipe
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            writer = await asyncio.to_thread(os.open, pipe, os.O_WRONLY)
            try:
                while True:  # until the reading end is closed
                    os.write(writer, b"x")
                    await asyncio.sleep(0)
            except BrokenPipeError:
                pass
            finally:
                os.close(writer)

    asyncio.run(scene())


def test_an_open_file_is_read_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(WRITE_BYTES + 5))

    async def sizes(offset: int) -> list[int]:
        with await module._open_in_thread(str(path)) as file:
            return [len(block) async for block in module._blocks(file, offset)]

    assert asyncio.run(sizes(0)) == [WRITE_BYTES, 5]
    assert asyncio.run(sizes(WRITE_BYTES + 1)) == [4]
