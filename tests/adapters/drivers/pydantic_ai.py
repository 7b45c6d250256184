"""Pydantic AI: a workspace backend, and its LocalWorkspaceBackend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic_ai.workspaces import WorkspaceRef, WorkspaceUnavailableError
from pydantic_ai.workspaces.local import LocalWorkspaceBackend

from exec_server.adapters.pydantic_ai import PROVIDER, ExecServerWorkspace
from tests.adapters.drivers import Place

LOST = WorkspaceUnavailableError
LACKS = ""


class BackendDriver:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    async def open(self) -> None:
        self.workspace = self._make()

    async def close(self) -> None:
        if isinstance(self.workspace, ExecServerWorkspace):
            await self.workspace.close()

    async def run(self, command: str) -> tuple[int, str]:
        done = await self.workspace.run(command, shell=True)
        return done.exit_code, f"{done.stdout}{done.stderr}"

    async def read(self, path: str) -> bytes:
        return bytes(await self.workspace.read_bytes(path))

    async def write(self, path: str, data: bytes) -> None:
        await self.workspace.write_bytes(path, data)


def adapter(place: Place) -> BackendDriver:
    ref = WorkspaceRef(provider=PROVIDER, id=place.folder)
    return BackendDriver(lambda: ExecServerWorkspace(ref=ref, **place.options()))


def local(folder: str) -> BackendDriver:
    return BackendDriver(lambda: LocalWorkspaceBackend(folder))
