"""OpenFallbacks: files in blocks on servers that cannot open them.

`fs/open`, `fs/readBlock`, `fs/writeBlock` and `fs/close` are replaced by a command for each block:
`tail` and `head` read it, `dd` writes it at its offset. Where a command cannot be confined, a file
is read as a whole, and cannot be written in blocks.
"""

from __future__ import annotations

from typing import Any, Final

import pybase64
from msgspec import Raw

from exec_server.client.engine.messages import decode_as
from exec_server.client.engine.session import ClientSession
from exec_server.client.file_errors import command_error
from exec_server.client.transfer.plan import HELPER_OUTPUT_BYTES, Commands
from exec_server.errors import InvalidRequest, NotFound
from exec_server.protocol import files as wire

# The largest block of dd: a divisor of every offset that the client's writers use.
DD_BYTES: Final = 524_288
# Messages of a command that cannot read its block.
ERROR_BYTES: Final = 4_096

# `tail` complains if `head` has enough and SIGPIPE is ignored.
_READ: Final = '{ tail -c "+$2" 2> /dev/null | head -c "$3"; } < "$1"'
_WRITE: Final = 'dd of="$1" bs="$2" seek="$3" conv=notrunc iflag=fullblock status=none'


class _OpenFile:
    """A file of a handle; `content` is all of it, if it was read as a whole."""

    def __init__(self, params: wire.OpenParams, content: bytes | None) -> None:
        self.path = params.path.native()
        self.sandbox = params.sandbox
        self.content = content


class OpenFallbacks:
    """The files that are open in this way; each is closed by its FileReader or FileWriter."""

    def __init__(self, session: ClientSession, commands: Commands) -> None:
        self._session = session
        self._commands = commands
        self._files: dict[wire.HandleId, _OpenFile] = {}

    async def open(self, params: wire.OpenParams) -> wire.OpenResult:
        features = self._session.features
        is_confined = params.sandbox is not None
        content = None
        if params.mode == "replace":
            write = wire.WriteFileParams(params.path, "", sandbox=params.sandbox)
            await self._session.call_server(wire.WRITE_FILE, write, is_retryable=True)
        elif features.opens_for_reading(is_confined=is_confined):
            return await self._session.call_server(wire.OPEN, params, is_retryable=True)
        else:
            await self._check_file(params)
            if not features.runs(is_confined=is_confined):
                read = wire.ReadFileParams(params.path, sandbox=params.sandbox)
                # Not retryable: an answer that is too large ends the connection each time.
                content = (await self._session.call_server(wire.READ_FILE, read)).data_base64
        self._files[params.handle_id] = _OpenFile(params, content)
        return wire.OpenResult(params.handle_id)

    async def _check_file(self, params: wire.OpenParams) -> None:
        metadata = wire.GetMetadataParams(params.path, sandbox=params.sandbox)
        found = await self._session.call_server(wire.GET_METADATA, metadata, is_retryable=True)
        if not found.is_file:
            raise InvalidRequest(f"path `{params.path.native()}` is not a file")

    async def read_block(self, params: wire.ReadBlockParams) -> Raw:
        """The answer to `fs/readBlock` as JSON text, which readers decode themselves."""
        file = self._files.get(params.handle_id)
        if file is None:
            call = wire.READ_BLOCK
            found = await self._session.call_server(call, params, is_retryable=True)
            return _block(found.chunk, is_last=found.eof)
        start, size = params.offset, params.len
        if file.content is not None:
            return _block(file.content[start : start + size], start + size >= len(file.content))
        done = await self._commands.run(
            ["/bin/sh", "-c", _READ, "sh", file.path, str(start + 1), str(size)],
            cwd="/",
            env={"LC_ALL": "C"},
            sandbox=file.sandbox,
            output_limit=size + ERROR_BYTES,
        )
        if done.stderr:
            raise command_error(done.error_text.strip().rpartition(": ")[2])
        if done.lost_bytes:
            # The answer for a handle that ended with its connection: the reader opens again.
            raise NotFound(f"unknown file handle `{params.handle_id}`")
        return _block(done.stdout, len(done.stdout) < size)

    async def write_block(self, text: Raw) -> wire.Done:
        params = decode_as(wire.WriteBlockParams, text, "block of a file")
        file = self._files[params.handle_id]
        size = _block_size(params.offset)
        words = [file.path, str(size), str(params.offset // size)]
        done = await self._commands.run(
            ["/bin/sh", "-c", _WRITE, "sh", *words],
            cwd="/",
            env={"LC_ALL": "C"},
            input=bytes(params.chunk),
            sandbox=file.sandbox,
            output_limit=HELPER_OUTPUT_BYTES,
        )
        if not done:
            reason = done.error_text.strip().rpartition(": ")[2]
            raise command_error(reason or f"dd has failed with exit code {done.exit_code}")
        return wire.Done()

    async def close(self, params: wire.CloseParams) -> wire.Done:
        if self._files.pop(params.handle_id, None) is None:
            return await self._session.call_server(wire.CLOSE, params)
        return wire.Done()

    def table(self) -> dict[str, Any]:
        """The methods that are replaced."""
        return {
            wire.OPEN.name: self.open,
            wire.READ_BLOCK.name: self.read_block,
            wire.WRITE_BLOCK.name: self.write_block,
            wire.CLOSE.name: self.close,
        }


def _block(data: bytes, is_last: bool) -> Raw:
    end = b"true" if is_last else b"false"
    return Raw(b'{"chunk":"%b","eof":%b}' % (pybase64.b64encode(data), end))


def _block_size(offset: int) -> int:
    """The largest power of two, up to DD_BYTES, that divides an offset."""
    return min(offset & -offset, DD_BYTES) or DD_BYTES
