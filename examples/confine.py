"""A sandbox that allows reading and denies writing."""

import asyncio
import sys

from exec_server import Environment, connect


async def main(target: str | None) -> None:
    async with connect(target) if target else Environment.local() as env:
        reading = await env.run(["cat", "/etc/hostname"], sandbox="read-only")
        print("reading:", "allowed" if reading else "denied")
        writing = await env.run(["touch", "/tmp/new"], sandbox="read-only")
        reason = "by the sandbox" if writing.sandbox_denied else ""
        print("writing:", "allowed" if writing else "denied", reason)


asyncio.run(main(*(sys.argv[1:2] or [None])))
