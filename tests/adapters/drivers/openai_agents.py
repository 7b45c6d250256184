"""OpenAI Agents SDK: a sandbox session, and the SDK's own for this machine."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from agents import set_tracing_disabled
from agents.sandbox.errors import ExecTransportError
from agents.sandbox.manifest import Manifest
from agents.sandbox.sandboxes.unix_local import (
    UnixLocalSandboxClient,
    UnixLocalSandboxClientOptions,
)

from exec_server.adapters.openai_agents import (
    ExecServerSandboxClient,
    ExecServerSandboxClientOptions,
)
from tests.adapters.drivers import Place

LOST = ExecTransportError
LACKS = ""

set_tracing_disabled(True)


class SessionDriver:
    def __init__(self, client: Any, options: Any, folder: str) -> None:
        self._client = client
        self._options = options
        self._manifest = Manifest(root=folder)

    async def open(self) -> None:
        self.session = await self._client.create(options=self._options, manifest=self._manifest)
        await self.session.start()

    async def close(self) -> None:
        await self.session.aclose()
        if isinstance(self._client, ExecServerSandboxClient):
            await self._client.delete(self.session)

    async def run(self, command: str) -> tuple[int, str]:
        done = await self.session.exec("sh", "-c", command, shell=False)
        return done.exit_code, (done.stdout + done.stderr).decode()

    async def read(self, path: str) -> bytes:
        return bytes((await self.session.read(Path(path))).read())

    async def write(self, path: str, data: bytes) -> None:
        await self.session.write(Path(path), io.BytesIO(data))


def adapter(place: Place) -> SessionDriver:
    options = ExecServerSandboxClientOptions(**place.options(stores_token=False))
    return SessionDriver(ExecServerSandboxClient(), options, place.folder)


def local(folder: str) -> SessionDriver:
    return SessionDriver(UnixLocalSandboxClient(), UnixLocalSandboxClientOptions(), folder)
