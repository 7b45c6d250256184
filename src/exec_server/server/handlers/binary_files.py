"""fs/* with binary messages: blocks of open files, and many small files at once."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import cast

from exec_server.filesystem import operations
from exec_server.protocol.decoding import Base64
from exec_server.protocol.files import (
    Done,
    ReadBinaryResult,
    ReadBlockParams,
    ReadFilesParams,
    WriteBinaryParams,
    WriteBlockParams,
    WriteFilesParams,
    WriteFilesResult,
)
from exec_server.protocol.jsonrpc import Attached
from exec_server.server.context import ConnectionContext, WithData


def read_binary(context: ConnectionContext, params: ReadBlockParams) -> Awaitable[WithData]:
    handles = context.handles

    def read() -> WithData:
        block = handles.read_block(params)
        return WithData(ReadBinaryResult(block.eof), block.chunk)

    return context.in_thread(read)


def write_binary(
    context: ConnectionContext, request: Attached[WriteBinaryParams]
) -> Awaitable[Done]:
    params, data = request
    # A view of the message: the bytes of a block are not copied.
    block = WriteBlockParams(params.handle_id, params.offset, cast(Base64, data))
    return context.in_thread(context.handles.write_block, block)


def read_files(context: ConnectionContext, params: ReadFilesParams) -> Awaitable[WithData]:
    return context.in_thread(lambda: WithData(*operations.read_files(params)))


def write_files(
    context: ConnectionContext, request: Attached[WriteFilesParams]
) -> Awaitable[WriteFilesResult]:
    return context.in_thread(operations.write_files, *request)
