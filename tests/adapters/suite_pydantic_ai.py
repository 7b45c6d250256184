"""The conformance suite of Pydantic AI, unmodified, as an ordinary user."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from pydantic_ai.workspaces import WorkspaceRef, WorkspaceUnavailableError
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from exec_server.adapters.pydantic_ai import ExecServerWorkspace


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def made(anyio_backend: str) -> AsyncIterator[list[ExecServerWorkspace]]:
    workspaces: list[ExecServerWorkspace] = []
    yield workspaces
    for workspace in workspaces:
        with contextlib.suppress(WorkspaceUnavailableError):  # another one has removed it
            await workspace.destroy()
        await workspace.close()


class TestWorkspace(WorkspaceBackendSuite):
    @pytest.fixture
    async def backend(
        self, server_url: str, ordinary_user: str | None
    ) -> AsyncIterator[ExecServerWorkspace]:
        workspace = ExecServerWorkspace(server_url, user=ordinary_user)
        yield workspace
        await workspace.destroy()

    @pytest.fixture
    def fresh_backend(
        self, server_url: str, ordinary_user: str | None, made: list[ExecServerWorkspace]
    ) -> Callable[[], Any]:
        def make() -> ExecServerWorkspace:
            made.append(ExecServerWorkspace(server_url, user=ordinary_user))
            return made[-1]

        return make

    @pytest.fixture
    def attach_backend(
        self, server_url: str, ordinary_user: str | None, made: list[ExecServerWorkspace]
    ) -> Callable[[WorkspaceRef], Any]:
        def attach(ref: WorkspaceRef) -> ExecServerWorkspace:
            made.append(ExecServerWorkspace(server_url, ref=ref, user=ordinary_user))
            return made[-1]

        return attach

    @pytest.fixture
    def destroy_environment(self) -> Callable[[ExecServerWorkspace], Awaitable[None]]:
        return lambda backend: backend.destroy()
