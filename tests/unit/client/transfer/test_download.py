"""The remote side of a download: what the machine lists, with find and without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import pytest

from exec_server.client.results import Chunk, Entry, Stat
from exec_server.client.transfer import remote_tree as module
from exec_server.client.transfer.download import Download
from exec_server.client.transfer.mirror import Item
from exec_server.errors import (
    ConnectionLost,
    InternalError,
    InvalidRequest,
    MalformedAnswer,
    RpcError,
)

TOP = b"d\x00755\x004096\x001\0\0\0"
FILE = Stat(is_directory=False, is_file=True, is_symlink=False, size=3, modified=1.5, created=None)


class FakeProcess:
    def __init__(self, chunks: list[Chunk], code: int) -> None:
        self._chunks = chunks
        self._code = code

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        for chunk in self._chunks:
            yield chunk

    async def wait(self) -> int:
        return self._code


class FakeMachine:
    """The files and commands of a machine whose find prints these chunks."""

    def __init__(self, *chunks: Chunk, code: int = 0, entries: tuple[str, ...] = ()) -> None:
        self._chunks = list(chunks)
        self._code = code
        self._entries = entries
        self.content = b""

    def start(self, argv: list[str], **_: Any) -> Any:
        if not self._chunks:
            raise InternalError("No such file or directory (os error 2)")
        return FakeProcess(self._chunks, self._code)

    async def walk(self, path: str, **_: Any) -> AsyncIterator[Entry]:
        for entry in self._entries:
            yield Entry(entry.rstrip("/"), entry.endswith("/"), not entry.endswith("/"))

    async def stat(self, path: str) -> Stat:
        return FILE

    async def read(self, path: str, *, limit: int) -> bytes:
        return self.content

    def copying(self) -> Download:
        machine: Any = self
        return Download(machine, machine, None, None)


def scanned(machine: FakeMachine, *, is_directory: bool = True) -> list[Item]:
    return list(asyncio.run(machine.copying()._tree.scan("/s", is_directory=is_directory)))


def out(data: bytes, lost: int = 0) -> Chunk:
    return Chunk("stdout", data, lost)


def test_what_find_prints_is_the_tree() -> None:
    assert scanned(FakeMachine(out(TOP[:5]), out(TOP[5:]))) == [Item("", "d", 0o755, 4096, "1")]


def test_malformed_output_is_an_error_at_once() -> None:
    """The flood that follows is not read."""

    class Endless(FakeMachine):
        def start(self, argv: list[str], **_: Any) -> Any:
            process = FakeProcess([], 0)

            async def chunks() -> AsyncIterator[Chunk]:
                while True:
                    yield out(b"garbage\n" * 1000)

            process.__class__ = type("P", (FakeProcess,), {"__aiter__": lambda self: chunks()})
            return process

    with pytest.raises(MalformedAnswer, match="/s: the list of files is malformed at b'garbage"):
        scanned(Endless())


def test_lost_output_is_an_error() -> None:
    with pytest.raises(ConnectionLost, match="/s: a part of the list of files was lost"):
        scanned(FakeMachine(out(TOP), out(TOP, lost=5)))


def test_errors_of_find_are_recorded() -> None:
    errors = b"find: '/s/a': Permission denied\nfind: '/s': Input/output error\n"
    file = b"f\x00644\x001\x001\0x\0\0"
    machine = FakeMachine(out(TOP + file), Chunk("stderr", errors), code=1)
    copying = machine.copying()
    asyncio.run(copying._tree.scan("/s", is_directory=True))
    assert [(each.path, str(each.error)) for each in copying._tally.failed] == [
        ("a", "/s/a: Permission denied"),
        ("", "/s: Input/output error"),
    ]
    with pytest.raises(RpcError, match="/s: Input/output error"):
        scanned(FakeMachine(out(TOP), Chunk("stderr", errors), code=1))


def test_errors_of_find_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ERROR_BYTES", 10)
    chunks = [out(TOP), *[Chunk("stderr", b"find: error\n")] * 5]
    with pytest.raises(InvalidRequest, match="/s: too many entries cannot be read"):
        scanned(FakeMachine(*chunks, code=1))


def test_without_find_the_tree_is_walked() -> None:
    machine = FakeMachine(entries=("/s/b/", "/s/a", "/s/b/c"))
    assert [(item.path, item.kind, item.mode) for item in scanned(machine)] == [
        ("", "d", None),
        ("a", "f", None),
        ("b", "d", None),
        ("b/c", "f", None),
    ]
    assert scanned(FakeMachine(), is_directory=False) == [Item("", "f", None, 3, "1.500")]


@pytest.mark.parametrize("path", ["/elsewhere", "/s/../x", "/s/a\0b", "/s//x", "/s/none/x", "/s/"])
def test_entries_outside_of_a_walked_tree_are_refused(path: str) -> None:
    with pytest.raises(MalformedAnswer, match="the server lists"):
        scanned(FakeMachine(entries=(path,)))


def test_a_walked_tree_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LISTING_BYTES", 1000)
    with pytest.raises(InvalidRequest, match=r"/s: more than \d entries"):
        scanned(FakeMachine(entries=tuple(f"/s/{number}" for number in range(9))))


def test_a_top_that_is_called_a_symlink_is_refused(tmp_path: Path) -> None:
    """The server has followed it before; the next download would write through it."""
    machine = FakeMachine(out(b"l\x00777\x001\x001\0\0/etc\0"))
    target = tmp_path / "x"
    with pytest.raises(InvalidRequest, match="/s: the file was changed"):
        asyncio.run(machine.copying().copy("/s", str(target)))
    assert not target.is_symlink()
