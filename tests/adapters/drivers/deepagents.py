"""deepagents: a sandbox backend, and its LocalShellBackend."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from deepagents.backends.local_shell import LocalShellBackend

from exec_server.adapters.deepagents import ExecServerSandbox
from exec_server.errors import ExecServerError
from tests.adapters.drivers import Place, Reported

# deepagents has no error of its own: an exception of a backend ends the run of the agent.
# Transfers of files report theirs.
LOST = (ExecServerError, Reported)
LACKS = ""


class SandboxDriver:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def open(self) -> None:
        self.sandbox = self._make()

    def close(self) -> None:
        if isinstance(self.sandbox, ExecServerSandbox):
            self.sandbox.close()

    def run(self, command: str) -> tuple[int | None, str]:
        done = self.sandbox.execute(command)
        return done.exit_code, done.output

    def read(self, path: str) -> bytes:
        (got,) = self.sandbox.download_files([path])
        if got.error is not None:
            raise Reported(got.error)
        return bytes(got.content)

    def write(self, path: str, data: bytes) -> None:
        (done,) = self.sandbox.upload_files([(path, data)])
        if done.error is not None:
            raise Reported(done.error)


def adapter(place: Place) -> SandboxDriver:
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return SandboxDriver(
        lambda: ExecServerSandbox(cwd=place.folder, env={"PATH": path}, **place.options())
    )


def local(folder: str) -> SandboxDriver:
    return SandboxDriver(
        lambda: LocalShellBackend(root_dir=folder, virtual_mode=False, inherit_env=True)
    )
