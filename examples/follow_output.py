"""Streamed output, and stopping an endless command."""

import asyncio
import sys

from exec_server import Environment, connect

ENDLESS = "n=0; while :; do n=$((n+1)); echo line $n; sleep 0.01; done"


async def main(target: str | None) -> None:
    async with connect(target) if target else Environment.local() as env:  # noqa: SIM117
        # Leaving the block kills the command with all its descendants.
        async with env.start(["sh", "-c", ENDLESS]) as process:
            seen = b""
            async for chunk in process:
                seen += chunk.data
                if b"line 5\n" in seen:
                    break
            print(seen.decode().splitlines()[:5])
            await process.kill()
            print("ended:", await process.wait() != 0)


asyncio.run(main(*(sys.argv[1:2] or [None])))
