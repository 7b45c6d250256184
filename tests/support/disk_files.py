"""Looks of discovery at the disk of the test, without a sandbox, and files to look at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from exec_server.filesystem import operations, walk
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri


class DiskFiles:
    """`codex.capability_files.Files` without limits; `denied` raises PermissionError."""

    def __init__(self, *denied: str) -> None:
        self.denied = set(denied)

    def _check(self, path: PathUri) -> None:
        if path.native() in self.denied:
            raise PermissionError(13, "Permission denied")

    def metadata(self, path: PathUri) -> files.GetMetadataResult:
        return operations.get_metadata(files.GetMetadataParams(path))

    def walk(self, path: PathUri, options: files.WalkOptions) -> files.WalkResult:
        self._check(path)
        return walk.walk(files.WalkParams(path, options))

    def read(self, path: PathUri, limit: int) -> bytes:
        self._check(path)
        return operations.read_file(files.ReadFileParams(path)).data_base64[:limit]


def write_files(root: Path, contents: Mapping[str, str | bytes]) -> None:
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
