"""HelperCommand: a command of another machine, such as find; its output is read as it comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from exec_server.client.transfer.plan import Commands
from exec_server.errors import ConnectionLost


class HelperCommand:
    """One run of a command. Its messages and exit code are there when `stdout` has ended."""

    exit_code: int

    def __init__(self, commands: Commands, sandbox: Any, *, error_bytes: int) -> None:
        """`error_bytes` limits the messages that are kept, to within one piece of output."""
        self._commands = commands
        self._sandbox = sandbox
        self._error_bytes = error_bytes
        self.errors = bytearray()

    async def stdout(self, argv: list[str], what: str) -> AsyncGenerator[bytes, None]:
        """Run it; raises ConnectionLost, with the name of the output, if a part was lost."""
        async with self._commands.start(
            argv, cwd="/", env={"LC_ALL": "C"}, sandbox=self._sandbox
        ) as process:
            async for chunk in process:
                if chunk.lost_before:
                    raise ConnectionLost(f"{what} was lost")
                if chunk.stream != "stderr":
                    yield chunk.data
                elif len(self.errors) < self._error_bytes:
                    self.errors += chunk.data
            self.exit_code = await process.wait()
