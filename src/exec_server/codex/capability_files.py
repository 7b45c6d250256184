"""CapabilityFiles: bounded looks at files of skills and plugins, through a sandbox or without one.

A look that fails is a warning, never an error: one broken file must not hide the others.
"""

from __future__ import annotations

import threading
from typing import Final, Protocol

import msgspec

from exec_server.errors import (
    InvalidRequest,
    NotFound,
    RpcError,
    decode_error_text,
    os_error_text,
)
from exec_server.protocol.codex import CapabilityFile
from exec_server.protocol.files import GetMetadataResult, WalkOptions, WalkResult
from exec_server.protocol.paths import PathUri

# The reference's limits of one file, and of all files of a root. A file beyond one of them is left
# out with a warning.
FILE_BYTES: Final = 1_048_576
ROOT_BYTES: Final = 16 * 1_048_576
# All roots of a request together, as JSON, with paths and warnings: the message stays below 64 MiB,
# and the memory for it bounded. A file beyond it is left out; the root has one warning for all.
RESPONSE_BYTES: Final = 40 * 1_048_576
# The reference's limits of a scan. Beyond them it ends, with a warning.
WALK: Final = WalkOptions(
    max_depth=6, max_directories=2000, max_entries=20_000, follow_directory_symlinks=True
)

_ENOENT: Final = 2


class Files(Protocol):
    """A route to the disk. Every method blocks, and raises OSError or RpcError."""

    def metadata(self, path: PathUri) -> GetMetadataResult: ...

    def walk(self, path: PathUri, options: WalkOptions) -> WalkResult: ...

    def read(self, path: PathUri, limit: int) -> bytes:
        """At most `limit` bytes of a regular file."""
        ...


class ResponseBudget:
    """The bytes of JSON that the files of one response may take, of all its roots."""

    def __init__(self) -> None:
        self._left = RESPONSE_BYTES
        self._lock = threading.Lock()  # threads read roots at the same time

    def spend(self, *texts: str) -> bool:
        """Take texts in, if they fit."""
        size = sum(len(msgspec.json.encode(text)) for text in texts)
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True


class CapabilityFiles:
    """The files of one root, as far as they fit; `warnings` gathers what is left out."""

    def __init__(self, files: Files, budget: ResponseBudget) -> None:
        self.warnings: list[str] = []
        self._files = files
        self._budget = budget
        self._left = ROOT_BYTES
        self._has_overflowed = False

    def warn(self, text: str) -> None:
        """Add a warning, if it fits into the response."""
        if self._budget.spend(text):
            self.warnings.append(text)
        else:
            self._overflow()

    def _overflow(self) -> None:
        """Say once that the response is full."""
        if not self._has_overflowed:
            self._has_overflowed = True
            text = f"capability discovery exceeds the {RESPONSE_BYTES}-byte limit of a response"
            self.warnings.append(text)

    def scan(self, root: PathUri) -> list[str]:
        """The URIs of all files below a directory."""
        try:
            result = self._files.walk(root, WALK)
        except (OSError, RpcError) as error:
            self.warn(f"failed to scan capability path {root}: {error_text(error)}")
            return []
        for fault in result.errors:
            self.warn(f"failed to scan capability path {fault.path}: {fault.message}")
        if result.truncated:
            self.warn(f"capability scan reached its traversal limit (root: {root})")
        return [entry.path for entry in result.entries if entry.kind == "file"]

    def read(self, uri: str) -> CapabilityFile | None:
        """A text file; None if there is none, or it is left out."""
        if self._has_overflowed:
            return None
        path = PathUri.from_text(uri)
        try:
            if not self._files.metadata(path).is_file:
                return None
        except (OSError, RpcError) as error:
            if not is_missing(error):
                self.warn(f"failed to inspect capability file {uri}: {error_text(error)}")
            return None
        try:
            data = self._files.read(path, FILE_BYTES + 1)
        except (OSError, RpcError) as error:
            self.warn(f"failed to read capability file {uri}: {error_text(error)}")
            return None
        return self._checked(uri, data)

    def _checked(self, uri: str, data: bytes) -> CapabilityFile | None:
        if len(data) > FILE_BYTES:
            self.warn(f"capability file {uri} exceeds the {FILE_BYTES}-byte limit")
            return None
        if len(data) > self._left:
            self.warn(f"capability root bundle exceeds the {ROOT_BYTES}-byte limit")
            return None
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            self.warn(f"capability file {uri} is not UTF-8: {decode_error_text(error)}")
            return None
        if not self._budget.spend(text, uri):
            self._overflow()
            return None
        self._left -= len(data)
        return CapabilityFile(uri, text)


def is_missing(error: OSError | RpcError) -> bool:
    """Whether an error says that there is no such file."""
    if isinstance(error, OSError):
        return error.errno == _ENOENT
    return error.code == NotFound.code


def is_denied(error: OSError | RpcError) -> bool:
    """Whether an error says that the file may not be read."""
    if isinstance(error, OSError):
        return isinstance(error, PermissionError)
    return error.code == InvalidRequest.code


def error_text(error: OSError | RpcError) -> str:
    return os_error_text(error) if isinstance(error, OSError) else error.message
