"""SandboxedFiles: the looks of discovery at the disk, which its sandbox decides."""

from __future__ import annotations

import os

from exec_server.filesystem import operations, walk
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Sandbox
from exec_server.sandbox.sandboxes import Sandboxes
from exec_server.server.file_access import FileOpening, FileOperation, choose_access

_METADATA = FileOperation(files.GET_METADATA, operations.get_metadata)
_WALK = FileOperation(files.WALK, walk.walk)
_READ = FileOpening(files.READ_FILE, lambda params: operations.open_for_read(params)[0])


class SandboxedFiles:
    """A `codex.capability_files.Files`: each look is an fs request with the client's sandbox."""

    def __init__(self, sandboxes: Sandboxes, sandbox: Sandbox | None) -> None:
        self._access = choose_access(sandboxes, sandbox, reading=True)

    def metadata(self, path: PathUri) -> files.GetMetadataResult:
        return self._access.perform(_METADATA, files.GetMetadataParams(path))

    def walk(self, path: PathUri, options: files.WalkOptions) -> files.WalkResult:
        return self._access.perform(_WALK, files.WalkParams(path, options))

    def read(self, path: PathUri, limit: int) -> bytes:
        descriptor = self._access.open(_READ, files.ReadFileParams(path))
        with os.fdopen(descriptor, "rb") as file:
            return file.read(limit)
