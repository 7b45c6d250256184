"""Files for tests: trees of every kind, files of discovery, and file operations of a handler."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from exec_server.client.transfer.plan import SMALL_BYTES
from exec_server.errors import RpcError, rpc_error_from_os
from exec_server.filesystem import operations, walk
from exec_server.filesystem.operations import OPERATIONS
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri


def tree(top: Path) -> dict[str, tuple[str, object, object]]:
    """Everything below a directory: kind, permissions, and content or target."""
    found: dict[str, tuple[str, object, object]] = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        content: object = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        kind = stat.filemode(status.st_mode)[0]
        mode = None if kind == "l" else stat.S_IMODE(status.st_mode)
        found[str(path.relative_to(top))] = (kind, mode, content)
    return found


def make_tree(top: Path) -> None:
    """One of everything that a tree may have."""
    (top / "empty").mkdir(parents=True)
    (top / "deep" / "er" / "est").mkdir(parents=True)
    (top / "deep" / "er" / "est" / "file").write_bytes(b"deep")
    (top / "none").write_bytes(b"")
    (top / "script").write_text("#!/bin/sh\necho hi\n")
    (top / "script").chmod(0o755)
    (top / "secret").write_text("s")
    (top / "secret").chmod(0o600)
    (top / "ünï cödé \n'\"$").write_text("strange")
    (top / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"bytes")
    (top / "large").write_bytes(os.urandom(SMALL_BYTES + 12_345))
    (top / "link").symlink_to("script")
    (top / "nowhere").symlink_to("no/such/file")
    (top / "dirlink").symlink_to("deep")
    for number in range(50):
        (top / "deep" / f"{number}").write_text(str(number))
    (top / "closed").mkdir()
    (top / "closed" / "inside").write_text("x")
    (top / "closed").chmod(0o555)


# Looks of discovery at the disk of the test, without a sandbox, and files to look at.


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


# Runs file operations as a handler does, and compares their errors.


def os_error(number: int) -> RpcError:
    """The error on the wire for an error number."""
    return rpc_error_from_os(OSError(number, os.strerror(number)))


def uri(path: str) -> PathUri:
    """A path relative to the working directory."""
    return PathUri.from_wire(os.path.join(os.getcwd(), path))


def do(params: object) -> object:
    """Run the operation of these params; OSError becomes RpcError, as in the connection."""
    operation = next(f for call, f in OPERATIONS.items() if type(params) is call.params)
    try:
        return operation(params)
    except OSError as error:
        raise rpc_error_from_os(error) from None


def fails(params: object, expected: RpcError) -> None:
    """Run an operation that raises this error."""
    with pytest.raises(RpcError) as caught:
        do(params)
    assert (type(caught.value), caught.value.message) == (type(expected), expected.message)


def read(path: str, *, follow: bool | None = None) -> files.ReadFileParams:
    return files.ReadFileParams(uri(path), follow)


def write(path: str, data: bytes, *, follow: bool | None = None) -> files.WriteFileParams:
    return files.WriteFileParams(uri(path), base64.b64encode(data).decode(), follow)


def copy(source: str, destination: str, *, recursive: bool = True) -> files.CopyParams:
    return files.CopyParams(uri(source), uri(destination), recursive)


def remove(path: str, *flags: bool | None) -> files.RemoveParams:
    return files.RemoveParams(uri(path), *flags)  # type: ignore[arg-type]


def names(result: object) -> list[str]:
    """The sorted names of a directory listing."""
    assert isinstance(result, files.ReadDirectoryResult)
    return sorted(entry.file_name for entry in result.entries)


def metadata(path: str, *, follow: bool | None = None) -> files.GetMetadataResult:
    """The result of fs/getMetadata."""
    result = do(files.GetMetadataParams(uri(path), follow))
    assert isinstance(result, files.GetMetadataResult)
    return result
