"""MCP: the tools of `exec-server mcp` on stdio, called as a client of the protocol does."""

from __future__ import annotations

import sys
from typing import Any

from mcp import Client, StdioServerParameters

from tests.adapters.drivers import Place, Reported

LOST = Reported
LACKS = ""


class ToolsDriver:
    def __init__(self, place: Place) -> None:
        target = [] if place.target is None else [place.target]
        words = ["-m", "exec_server", "mcp", "--cwd", place.folder, *target]
        self._client = Client(StdioServerParameters(command=sys.executable, args=words))

    async def open(self) -> None:
        await self._client.__aenter__()

    async def close(self) -> None:
        await self._client.__aexit__(None, None, None)

    async def _call(self, tool: str, **arguments: Any) -> str:
        result = await self._client.call_tool(tool, arguments)
        text = "".join(part.text for part in result.content)
        if result.is_error:
            raise Reported(text)
        return text

    async def run(self, command: str) -> tuple[int, str]:
        text = await self._call("exec_command", cmd=command)
        status, _, output = text.partition("\n")
        return int(status.rpartition(" ")[2]), output

    async def read(self, path: str) -> bytes:
        return (await self._call("read_file", path=path)).encode()

    async def write(self, path: str, data: bytes) -> None:
        await self._call("write_file", path=path, content=data.decode())


def adapter(place: Place) -> ToolsDriver:
    return ToolsDriver(place)


def local(folder: str) -> None:
    return None
