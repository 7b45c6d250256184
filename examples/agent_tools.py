"""The three tools of a coding agent, as plain functions that a model can call."""

import asyncio
import sys

from exec_server import Environment, ExecServerError, Timeout, connect

# Bytes of output for the model: the beginning and the end.
MAX_OUTPUT = 4000


class Tools:
    """Commands and files on one machine; results and errors are texts."""

    def __init__(self, env: Environment) -> None:
        self._env = env

    async def shell(self, command: str, seconds: float = 60) -> str:
        try:
            result = await self._env.shell(f"exec 2>&1\n{command}", timeout=seconds)
        except Timeout as error:
            return f"{error.result.head_and_tail(MAX_OUTPUT)}\n(killed after {seconds:g} s)"
        return f"{result.head_and_tail(MAX_OUTPUT)}\n(exit code {result.exit_code})"

    async def read(self, path: str) -> str:
        try:
            return (await self._env.files.read(path)).decode(errors="replace")
        except ExecServerError as error:
            return f"(cannot read it: {error})"

    async def write(self, path: str, text: str) -> str:
        try:
            await self._env.files.write(path, text.encode())
        except ExecServerError as error:
            return f"(cannot write it: {error})"
        return f"(wrote {len(text.encode())} bytes)"


async def main(target: str | None) -> None:
    async with connect(target) if target else Environment.local() as env:
        tools = Tools(env)
        folder = (await env.run(["mktemp", "-d"], check=True)).text.strip()
        print(await tools.write(f"{folder}/answer.py", "print(6 * 7)\n"))
        print(await tools.shell(f"cd {folder} && {sys.executable} answer.py"))
        print((await tools.read(f"{folder}/missing.py")).replace(f"{folder}/", ""))
        await env.files.remove(folder, recursive=True)


asyncio.run(main(*(sys.argv[1:2] or [None])))
