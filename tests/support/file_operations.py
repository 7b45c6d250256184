"""Runs file operations as a handler does, and compares their errors."""

from __future__ import annotations

import base64
import os

import pytest

from exec_server.errors import RpcError, rpc_error_from_os
from exec_server.filesystem.operation_table import OPERATIONS
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri


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
