"""A command that may read everything and write nothing."""

import asyncio
import sys

from exec_server import Environment, connect


async def main(target: str | None) -> None:
    async with connect(target) if target else Environment.local() as env:
        looked = await env.run(["cat", "/etc/hostname"], sandbox="read-only")
        print("reading:", "allowed" if looked else "denied")
        wrote = await env.run(["touch", "/tmp/new"], sandbox="read-only")
        print("writing:", "allowed" if wrote else "denied", "by the sandbox" * wrote.sandbox_denied)


asyncio.run(main(*(sys.argv[1:2] or [None])))
