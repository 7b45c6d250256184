"""Input for a program in a terminal."""

import asyncio
import sys

from exec_server import Environment, connect


async def main(target: str | None) -> None:
    async with connect(target) if target else Environment.local() as env:  # noqa: SIM117
        async with env.start(["sh"], tty=True, size=(24, 80), env={"PS1": "> "}) as shell:
            await shell.write(b"stty size\n")
            await shell.write(b"echo $((6 * 7))\n")
            await shell.write(b"exit 5\n")
            screen = b""
            async for chunk in shell:
                screen += chunk.data
            print("24 80" in screen.decode(), "42\r\n" in screen.decode())
            print("exit code", await shell.wait())


asyncio.run(main(*(sys.argv[1:2] or [None])))
