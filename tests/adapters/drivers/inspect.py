"""Inspect AI: the sandbox of a sample, found by its name, and the sandbox `local`."""

from __future__ import annotations

from typing import Any

from inspect_ai.util import SandboxUnavailableError
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

from tests.adapters.drivers import Place

LOST = SandboxUnavailableError
LACKS = ""


class SampleDriver:
    def __init__(self, kind: str, folder: str, options: dict[str, Any] | None) -> None:
        self._kind = registry_find_sandboxenv(kind)
        self._config = None if options is None else self._kind.config_deserialize(options)
        self._folder = folder

    async def open(self) -> None:
        self._made = await self._kind.sample_init("task", self._config, {})
        self.sandbox = self._made["default"]

    async def close(self) -> None:
        await self._kind.sample_cleanup("task", self._config, self._made, False)

    async def run(self, command: str) -> tuple[int, str]:
        done = await self.sandbox.exec(["sh", "-c", command], cwd=self._folder)
        return done.returncode, f"{done.stdout}{done.stderr}"

    async def read(self, path: str) -> bytes:
        return bytes(await self.sandbox.read_file(path, text=False))

    async def write(self, path: str, data: bytes) -> None:
        await self.sandbox.write_file(path, data)


def adapter(place: Place) -> SampleDriver:
    return SampleDriver("exec-server", place.folder, place.options(stores_token=False))


def local(folder: str) -> SampleDriver:
    return SampleDriver("local", folder, None)
