"""A directory there and back, with progress."""

import asyncio
import sys
import tempfile
from pathlib import Path

from exec_server import Environment, Progress, connect


def show(progress: Progress) -> None:
    """Called now and then, and at the end; a real program would draw a bar."""
    if progress.done_files == progress.total_files:
        print(f"all {progress.total_files} files are there")


async def main(target: str | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        for number in range(3):
            (here / "project" / f"part-{number}").mkdir(parents=True)
            (here / "project" / f"part-{number}" / "data").write_bytes(b"x" * 10_000)
        async with connect(target) if target else Environment.local() as env:
            there = (await env.run(["mktemp", "-d"], check=True)).text.strip()
            try:
                await env.files.upload(here / "project", f"{there}/project", progress=show)
                done = await env.files.download(f"{there}/project", here / "back")
                print(done.files, "files,", done.copied_bytes, "bytes back")
            finally:
                await env.files.remove(there, recursive=True)


asyncio.run(main(*(sys.argv[1:2] or [None])))
