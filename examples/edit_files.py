"""Reading, writing and searching files; a large file in blocks."""

import asyncio
import sys

from exec_server import Environment, NotFound, connect


async def main(target: str | None) -> None:
    async with connect(target) if target else Environment.local() as env:
        folder = (await env.run(["mktemp", "-d"], check=True)).text.strip()
        try:
            await env.files.mkdir(f"{folder}/src/deep", parents=True)
            await env.files.write(f"{folder}/src/main.py", b"print('hello')\n")
            await env.files.copy(f"{folder}/src/main.py", f"{folder}/src/deep/copy.py")
            print((await env.files.read(f"{folder}/src/deep/copy.py")).decode().strip())

            names = [entry.path async for entry in env.files.walk(folder)]
            print(len(names), "entries below the folder")

            try:
                await env.files.stat(f"{folder}/missing")
            except NotFound:
                print("there is no such file")

            # In blocks, so that the memory does not grow with the file.
            async with env.files.open(f"{folder}/large", "wb") as file:
                for _ in range(64):
                    await file.write(b"x" * 65_536)
            size = 0
            async with env.files.open(f"{folder}/large") as reader:
                async for block in reader:
                    size += len(block)
            print(size, "bytes read back")
        finally:
            await env.files.remove(folder, recursive=True)


asyncio.run(main(*(sys.argv[1:2] or [None])))
