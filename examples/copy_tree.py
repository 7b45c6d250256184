"""Upload and download of a directory, with progress."""

import asyncio
import sys
import tempfile
from pathlib import Path

from exec_server import Environment, Progress, connect


def show(progress: Progress) -> None:
    """Called for every block and file; a real program would draw a bar."""
    if progress.done_files == progress.total_files:
        print(f"all {progress.total_files} files are there")


async def main(target: str | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        local = Path(name)
        for number in range(3):
            (local / "project" / f"part-{number}").mkdir(parents=True)
            (local / "project" / f"part-{number}" / "data").write_bytes(b"x" * 10_000)
        async with connect(target) if target else Environment.local() as env:
            remote = (await env.run(["mktemp", "-d"], check=True)).text.strip()
            try:
                await env.files.upload(local / "project", f"{remote}/project", progress=show)
                done = await env.files.download(f"{remote}/project", local / "back")
                print(done.files, "files,", done.copied_bytes, "bytes back")
            finally:
                await env.files.remove(remote, recursive=True)


asyncio.run(main(*(sys.argv[1:2] or [None])))
