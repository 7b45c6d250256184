"""fs/* extensions whose file contents travel as the data of binary messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from exec_server.errors import InvalidParams
from exec_server.protocol.decoding import U16, U64, Params, Result
from exec_server.protocol.files import Done, HandleId, ReadBlockParams
from exec_server.protocol.method import Call
from exec_server.protocol.paths import PathUri


class ReadBinaryResult(Result, frozen=True):
    """The data is the block."""

    eof: bool


class WriteBinaryParams(Params, frozen=True):
    """The data is the block."""

    wire_name: ClassVar[str] = "FsWriteBinaryParams"
    handle_id: HandleId
    offset: U64


def _without_limits(params: dict[str, Any], _server_cwd: str | None) -> dict[str, Any]:
    """Refuse members that other methods enforce, instead of ignoring them."""
    for member in ("sandbox", "sandboxPolicy", "user"):
        if params.get(member) is not None:
            raise InvalidParams(
                f"a request for many files takes no `{member}`: send one for each file"
            )
    return params


class ReadFilesParams(Params, frozen=True):
    prepare: ClassVar[Callable[[dict[str, Any], str | None], dict[str, Any]]] = staticmethod(
        _without_limits
    )
    wire_name: ClassVar[str] = "FsReadFilesParams"
    paths: list[PathUri]


class ReadFilesResult(Result, frozen=True):
    """The data is the contents one after another; the size is null for a file that was not read."""

    sizes: list[int | None]


class NewFile(Params, frozen=True):
    wire_name: ClassVar[str] = "FsNewFile"
    omissible: ClassVar[tuple[str, ...]] = ("mode",)
    path: PathUri
    size: U64
    mode: U16 | None = None  # the permission bits to set


class WriteFilesParams(Params, frozen=True):
    """The data is the contents one after another."""

    prepare: ClassVar[Callable[[dict[str, Any], str | None], dict[str, Any]]] = staticmethod(
        _without_limits
    )
    wire_name: ClassVar[str] = "FsWriteFilesParams"
    files: list[NewFile]


class WriteFilesResult(Result, frozen=True):
    """The positions of files that were not written."""

    failed: list[int]


READ_BINARY = Call("fs/readBinary", ReadBlockParams, ReadBinaryResult)
WRITE_BINARY = Call("fs/writeBinary", WriteBinaryParams, Done)
READ_FILES = Call("fs/readFiles", ReadFilesParams, ReadFilesResult)
WRITE_FILES = Call("fs/writeFiles", WriteFilesParams, WriteFilesResult)
