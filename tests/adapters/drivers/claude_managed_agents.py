"""Claude Managed Agents: the tools of one session, and the package's own."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from typing import Any

from anthropic.lib.tools import ToolError
from anthropic.lib.tools.agent_toolset import AgentToolContext, beta_agent_toolset_20260401

from exec_server.adapters.claude_managed_agents import ExecServerTools
from tests.adapters.drivers import Place

LOST = ToolError
LACKS = ""


class ToolsDriver:
    """The tools as the package calls them."""

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self._make = make

    async def open(self) -> None:
        self._tools = {tool.name: tool for tool in self._make()}

    async def close(self) -> None:
        if (end := self._tools["bash"].close) is not None:
            await end()

    async def run(self, command: str) -> tuple[int, str]:
        bash = self._tools["bash"]
        try:
            return 0, await bash.call({"command": command})
        except ToolError as error:
            text = str(error)
            if failed := re.fullmatch(r"(?s)(.*)\[exit code (\d+)\]", text):
                return int(failed[2]), failed[1]
            raise

    async def read(self, path: str) -> bytes:
        text: str = await self._tools["read"].call({"file_path": path})
        return text.encode()

    async def write(self, path: str, data: bytes) -> None:
        await self._tools["write"].call({"file_path": path, "content": data.decode()})


def adapter(place: Place) -> ToolsDriver:
    root, name = posixpath.split(place.folder)
    return ToolsDriver(
        lambda: ExecServerTools(root=root, **place.options())(AgentToolContext(session_id=name))
    )


def local(folder: str) -> ToolsDriver:
    return ToolsDriver(lambda: beta_agent_toolset_20260401(AgentToolContext(workdir=folder)))
