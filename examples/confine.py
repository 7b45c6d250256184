"""A command that may read everything and write nothing."""

import asyncio
import sys

from exec_server import Environment, connect

READ_ONLY = {
    "permissions": {
        "type": "managed",
        "network": "restricted",
        "file_system": {
            "type": "restricted",
            "entries": [
                {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"},
            ],
        },
    },
    "cwd": "file:///",
}


async def main(target: str | None) -> None:
    async with connect(target) if target else Environment.local() as env:
        looked = await env.run(["cat", "/etc/hostname"], sandbox=READ_ONLY)
        print("reading:", "allowed" if looked else "denied")
        wrote = await env.run(["touch", "/tmp/new"], sandbox=READ_ONLY)
        print("writing:", "allowed" if wrote else "denied", "by the sandbox" * wrote.sandbox_denied)


asyncio.run(main(*(sys.argv[1:2] or [None])))
