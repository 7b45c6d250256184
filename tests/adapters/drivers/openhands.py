"""OpenHands SDK: a workspace, and its LocalWorkspace."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openhands.sdk.workspace.local import LocalWorkspace

from exec_server.adapters.openhands import ExecServerWorkspace
from tests.adapters.drivers import Place, Reported

LOST = Reported
LACKS = ""


class WorkspaceDriver:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def open(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="exec-server-openhands-")
        self.workspace = self._make()

    def close(self) -> None:
        if isinstance(self.workspace, ExecServerWorkspace):
            self.workspace.close()
        self._scratch.cleanup()

    def run(self, command: str) -> tuple[int, str]:
        done = self.workspace.execute_command(command, timeout=600)
        if done.exit_code == -1:
            raise Reported(done.stderr)
        return done.exit_code, f"{done.stdout}{done.stderr}"

    def read(self, path: str) -> bytes:
        copy = Path(self._scratch.name) / "copy"
        done = self.workspace.file_download(path, copy)
        if not done.success:
            raise Reported(done.error)
        return copy.read_bytes()

    def write(self, path: str, data: bytes) -> None:
        source = Path(self._scratch.name) / "source"
        source.write_bytes(data)
        done = self.workspace.file_upload(source, path)
        if not done.success:
            raise Reported(done.error)


def adapter(place: Place) -> WorkspaceDriver:
    options = place.options(stores_token=False)
    return WorkspaceDriver(lambda: ExecServerWorkspace(working_dir=place.folder, **options))


def local(folder: str) -> WorkspaceDriver:
    return WorkspaceDriver(lambda: LocalWorkspace(working_dir=folder))
