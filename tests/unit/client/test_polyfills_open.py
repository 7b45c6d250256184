"""Files in blocks without open files, on a machine that is a dictionary."""

from __future__ import annotations

import asyncio
import base64
import os
from typing import Any, TypeVar

import pytest
from msgspec import Raw
from tests.support.older_servers import OlderMachine

from exec_server.client.engine.server_features import ServerFeatures
from exec_server.client.exceptions import command_error
from exec_server.client.polyfills import DD_BYTES
from exec_server.errors import InvalidRequest, NotFound, RpcError
from exec_server.protocol import files as wire
from exec_server.protocol.decoding import Call
from exec_server.protocol.paths import PathUri
from exec_server.protocol.session import Capabilities

DATA = os.urandom(1000)
_READ = Call(wire.READ_BLOCK.name, wire.ReadBlockParams, Raw)
HANDLE = wire.HandleId("h")
OLD = ServerFeatures(has_open_files=False)
R = TypeVar("R")
SANDBOX: Any = {"permissions": {}}


class Blocks:
    """A machine and its polyfills, called without await."""

    def __init__(self, features: ServerFeatures = OLD) -> None:
        self.machine = OlderMachine(features, {"/f": DATA, "/d/x": b""})
        self._table = self.machine.polyfills

    def _call(self, call: Call[Any, R], params: Any) -> R:
        result: R = asyncio.run(self._table[call.name](params))
        return result

    def open(self, path: str, mode: Any = "read", sandbox: Any = None) -> wire.OpenResult:
        params = wire.OpenParams(HANDLE, PathUri.from_text(path), mode, sandbox)
        return self._call(wire.OPEN, params)

    def read(self, offset: int, size: int) -> bytes:
        params = wire.ReadBlockParams(HANDLE, offset, size)
        return bytes(self._call(_READ, params))

    def write(self, offset: int, data: bytes) -> wire.Done:
        chunk = base64.b64encode(data)
        text = b'{"handleId":"h","offset":%d,"chunk":"%b"}' % (offset, chunk)
        return self._call(wire.WRITE_BLOCK, Raw(text))

    def close(self) -> wire.Done:
        return self._call(wire.CLOSE, wire.CloseParams(HANDLE))


def block(data: bytes, *, is_last: bool) -> bytes:
    end = b"true" if is_last else b"false"
    return b'{"chunk":"%b","eof":%b}' % (base64.b64encode(data), end)


def test_a_file_is_read_by_commands() -> None:
    blocks = Blocks()
    assert blocks.open("/f") == wire.OpenResult(HANDLE)
    assert blocks.read(0, 600) == block(DATA[:600], is_last=False)
    assert blocks.read(600, 600) == block(DATA[600:], is_last=True)
    assert blocks.read(600, 400) == block(DATA[600:], is_last=False)
    assert blocks.read(1000, 400) == block(b"", is_last=True)
    assert blocks.close() == wire.Done()
    assert blocks.machine.asked == ["fs/getMetadata"]


@pytest.mark.parametrize(
    ("path", "kind"), [("/none", NotFound), ("/d", InvalidRequest)], ids=["missing", "directory"]
)
def test_what_is_no_file_is_not_opened(path: str, kind: type[RpcError]) -> None:
    with pytest.raises(kind):
        Blocks().open(path)


def test_a_file_is_read_as_a_whole_if_a_command_cannot_be_confined() -> None:
    blocks = Blocks(ServerFeatures(has_open_files=False, confines_commands=False))
    blocks.open("/f", sandbox=SANDBOX)
    assert blocks.read(0, 600) == block(DATA[:600], is_last=False)
    assert blocks.read(600, 400) == block(DATA[600:], is_last=True)
    assert blocks.machine.asked == ["fs/getMetadata", "fs/readFile"]
    assert blocks.machine.ran == []


def test_a_block_that_was_lost_makes_the_reader_open_again() -> None:
    blocks = Blocks()
    blocks.open("/f")
    blocks.machine.lost_bytes = 1
    with pytest.raises(NotFound, match="unknown file handle `h`"):
        blocks.read(0, 10)


def test_the_error_of_a_command_has_its_number() -> None:
    blocks = Blocks()
    blocks.open("/f")
    del blocks.machine.contents["/f"]
    with pytest.raises(RpcError, match=r"No such file or directory \(os error 2\)"):
        blocks.read(0, 10)
    blocks.open("/g", "replace")
    blocks.machine.failure = "dd: failed to open '/g': Permission denied"
    with pytest.raises(RpcError, match=r"Permission denied \(os error 13\)"):
        blocks.write(0, b"x")
    blocks.machine.failure = ""
    blocks.machine.exit_code = 127
    with pytest.raises(RpcError, match="dd has failed with exit code 127"):
        blocks.write(0, b"x")


def test_blocks_are_written_in_any_order() -> None:
    blocks = Blocks()
    blocks.open("/f", "replace")
    assert blocks.machine.contents["/f"] == b""
    data = os.urandom(2 * DD_BYTES + 10)
    blocks.write(DD_BYTES, data[DD_BYTES : 2 * DD_BYTES])
    blocks.write(2 * DD_BYTES, data[2 * DD_BYTES :])
    blocks.write(0, data[:DD_BYTES])
    assert blocks.machine.contents["/f"] == data
    blocks.write(6, b"abc")  # after a flush blocks begin anywhere
    assert blocks.machine.contents["/f"] == data[:6] + b"abc" + data[9:]
    blocks.close()


def test_files_that_the_server_can_open_are_left_to_it() -> None:
    """It can open for reading, not for writing."""
    blocks = Blocks(ServerFeatures())
    blocks.open("/f")
    assert blocks.read(0, 10) == block(DATA[:10], is_last=False)
    blocks.close()
    assert blocks.machine.asked == ["fs/open", "fs/readBlock", "fs/close"]
    assert blocks.machine.ran == []


def test_confined_files_need_their_capability() -> None:
    blocks = Blocks(ServerFeatures())
    blocks.open("/f", sandbox=SANDBOX)
    blocks.read(0, 10)
    assert blocks.machine.sandboxes == [SANDBOX]
    streams = Capabilities(sandboxed_file_streaming=True)
    blocks = Blocks(ServerFeatures(capabilities=streams))
    blocks.open("/f", sandbox=SANDBOX)
    assert blocks.machine.asked == ["fs/open"]


def test_the_machine_of_these_tests_reports_texts_of_the_kernel() -> None:
    assert "(os error 13)" in str(command_error("Permission denied"))
