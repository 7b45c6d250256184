"""SWE-ReX: a deployment with a session, and its LocalDeployment."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swerex.deployment.local import LocalDeployment
from swerex.exceptions import SwerexException
from swerex.runtime.abstract import (
    BashAction,
    CreateBashSessionRequest,
    ReadFileRequest,
    WriteFileRequest,
)

from exec_server.adapters.swe_rex import ExecServerDeployment
from tests.adapters.drivers import Place

LOST = SwerexException
LACKS = ""


class DeploymentDriver:
    """Its commands are those of a session, as SWE-agent has them."""

    def __init__(self, make: Callable[[], Any], folder: str) -> None:
        self._make = make
        self._folder = folder
        self._sessions = 0

    async def open(self) -> None:
        self.deployment = self._make()
        await self.deployment.start()
        self._session = ""

    async def close(self) -> None:
        await self.deployment.stop()

    async def run(self, command: str) -> tuple[int, str]:
        runtime = self.deployment.runtime
        if not self._session:
            self._sessions += 1
            name = f"session-{self._sessions}"
            await runtime.create_session(CreateBashSessionRequest(session=name))
            self._session = name
            await self._act(f"cd {shlex.quote(self._folder)}")
        try:
            done = await self._act(command)
        except SwerexException:
            self._session = ""  # the next command gets a new one
            raise
        return done.exit_code, done.output

    async def _act(self, command: str) -> Any:
        action = BashAction(command=command, session=self._session, check="silent", timeout=600)
        return await self.deployment.runtime.run_in_session(action)

    async def read(self, path: str) -> bytes:
        got = await self.deployment.runtime.read_file(ReadFileRequest(path=path))
        return str(got.content).encode()

    async def write(self, path: str, data: bytes) -> None:
        request = WriteFileRequest(path=path, content=data.decode())
        await self.deployment.runtime.write_file(request)


def adapter(place: Place) -> DeploymentDriver:
    return DeploymentDriver(lambda: ExecServerDeployment(**place.options()), place.folder)


def local(folder: str) -> DeploymentDriver:
    Path(folder).mkdir(exist_ok=True)
    return DeploymentDriver(LocalDeployment, folder)
