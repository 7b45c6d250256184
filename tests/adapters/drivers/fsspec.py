"""fsspec: a file system, and its LocalFileSystem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from exec_server.adapters.fsspec import ExecServerFileSystem
from tests.adapters.drivers import Place

LOST = ConnectionError
LACKS = "commands"


class FileSystemDriver:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def open(self) -> None:
        self.files = self._make()

    def close(self) -> None:
        if isinstance(self.files, ExecServerFileSystem):
            self.files.close()

    def run(self, command: str) -> tuple[int, str]:
        raise NotImplementedError("a file system runs no commands")

    def read(self, path: str) -> bytes:
        return bytes(self.files.cat_file(path))

    def write(self, path: str, data: bytes) -> None:
        self.files.pipe_file(path, data)


def adapter(place: Place) -> FileSystemDriver:
    options = place.options() | {"skip_instance_cache": True}
    return FileSystemDriver(lambda: ExecServerFileSystem(**options))


def local(folder: str) -> FileSystemDriver:
    return FileSystemDriver(LocalFileSystem)
