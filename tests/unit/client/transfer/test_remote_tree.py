"""What the other machine lists, with find and without, as a whole or level by level."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Self

import pytest

from exec_server.client.results import Chunk, Entry, Result, Stat
from exec_server.client.transfer import exclusion
from exec_server.client.transfer import remote_tree as module
from exec_server.client.transfer.exclusion import TreeFilter
from exec_server.client.transfer.mirror import Item
from exec_server.client.transfer.plan import Tally
from exec_server.client.transfer.remote_tree import RemoteTree
from exec_server.errors import (
    ConnectionLost,
    InternalError,
    InvalidRequest,
    MalformedAnswer,
    RpcError,
    Unsupported,
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

    def tree(self) -> tuple[RemoteTree, Tally]:
        def fail(path: str, error: Exception) -> None:
            if not path:
                raise error
            tally.fail(path, error)

        machine: Any = self
        tally = Tally(None)
        return RemoteTree(machine, machine, None, tally, fail), tally


def scanned(machine: FakeMachine, *, is_directory: bool = True) -> list[Item]:
    return list(asyncio.run(machine.tree()[0].scan("/s", is_directory=is_directory)))


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
    remote, tally = machine.tree()
    asyncio.run(remote.scan("/s", is_directory=True))
    assert [(each.path, str(each.error)) for each in tally.failed] == [
        ("a", "/s/a: Permission denied"),
        ("", "/s: Input/output error"),
    ]
    with pytest.raises(RpcError, match="/s: Input/output error"):
        scanned(FakeMachine(out(TOP), Chunk("stderr", errors), code=1))


@pytest.mark.parametrize("errors", [b"", b"find: '/s/a': Permission denied\n"])
def test_a_find_that_was_killed_is_an_error(errors: bytes) -> None:
    """Else a mirror would delete what find has not listed any more."""
    chunks = [out(TOP), *([Chunk("stderr", errors)] if errors else [])]
    for code in (137, *(() if errors else (1,))):
        with pytest.raises(InternalError, match=f"/s: find has failed with exit code {code}"):
            scanned(FakeMachine(*chunks, code=code))


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


# ---- level by level -------------------------------------------------------------------


def entry(path: str, kind: str = "f", size: int = 1) -> bytes:
    target = "t" if kind == "l" else ""
    return f"{kind}\000644\0{size}\0001\0{path}\0{target}\0".encode()


class Levels(FakeMachine):
    """Its find prints the top, and then one output for each level."""

    def __init__(self, *levels: bytes, errors: bytes = b"", code: int = 0, **lost: Any) -> None:
        super().__init__(out(TOP))
        self._levels = list(levels)
        self._result = (errors, code, lost)
        self.inputs: list[bytes] = []
        self.read_files: list[str] = []

    async def run(self, argv: list[str], *, input: bytes, **_: Any) -> Result:  # noqa: A002
        self.inputs.append(input)
        errors, code, lost = self._result
        return Result(tuple(argv), self._levels.pop(0), errors, code, 0.0, **lost)

    async def read(self, path: str, *, limit: int) -> bytes:
        self.read_files.append(path)
        if self.content == b"error":
            raise InternalError(f"{path}: broken")
        return self.content


def filtered(
    machine: FakeMachine, *patterns: str, source: str = "/s", gitignore: bool = False
) -> tuple[list[str], list[str]]:
    """The paths that are listed, and those that failed."""
    remote, tally = machine.tree()
    rules = TreeFilter(patterns, gitignore=gitignore)
    listing = asyncio.run(remote.scan(source, rules, is_directory=True))
    return [item.path for item in listing], [each.path for each in tally.failed]


def test_nothing_below_an_excluded_directory_is_listed() -> None:
    machine = Levels(
        entry("/s/a") + entry("/s/node_modules", "d") + entry("/s/d", "d"),
        entry("/s/d/b") + entry("/s/d/x.o"),
    )
    assert filtered(machine, "node_modules", "*.o") == (["", "a", "d", "d/b"], [])
    assert machine.inputs == [b"/s\0", b"/s/d\0"]


def test_the_root_directory_by_levels() -> None:
    machine = Levels(entry("//a") + entry("//d", "d"), entry("/d/b"))
    assert filtered(machine, "x", source="/") == (["", "a", "d", "d/b"], [])
    assert machine.inputs == [b"/\0", b"/d\0"]


def test_a_directory_with_too_many_patterns_above_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusion, "ENTRY_WORK", 4)
    machine = Levels(
        entry("/s/d", "d") + entry("/s/e", "d"), entry("/s/d/a") + entry("/s/e/b"), b""
    )
    # An entry of `d` may be at any of the four names, one of `e` at the first two.
    assert filtered(machine, "**/d/**/x") == (["", "d", "e", "e/b"], ["d"])


def test_an_ignore_file_that_cannot_be_read_or_is_hostile_fails_its_directory() -> None:
    for content in (b"error", b"a/" * 100 + b"a"):
        levels = (
            entry("/s/d", "d") + entry("/s/.gitignore", "l") + entry("/s/x"),
            entry("/s/d/.gitignore") + entry("/s/d/y"),
        )
        machine = Levels(*levels)
        machine.content = content
        assert filtered(machine, gitignore=True) == (["", ".gitignore", "d", "x"], ["d"])
        assert machine.read_files == ["/s/d/.gitignore"]
    machine = Levels(entry("/s/.gitignore"))
    machine.content = b"error"
    with pytest.raises(InternalError, match="broken"):
        filtered(machine, gitignore=True)


@pytest.mark.parametrize(
    "level",
    [
        *(entry("/elsewhere/x"), entry("/s/none/x"), entry("/s/.."), entry("/s/"), b"garbage"),
        entry("/s/a") + b"f\0",
    ],
)
def test_levels_are_checked(level: bytes) -> None:
    with pytest.raises(MalformedAnswer, match="/s: "):
        filtered(Levels(level), "x")


def test_levels_that_are_incomplete() -> None:
    errors = b"find: '/s/a': Permission denied\n"
    paths = ["", "a"], ["a"]
    assert filtered(Levels(entry("/s/a"), errors=errors, code=123), "x") == paths
    with pytest.raises(InvalidRequest, match="/s: Input/output error"):
        filtered(Levels(b"", errors=b"find: '/s': Input/output error\n", code=123), "x")
    for code, text in ((123, b""), (125, errors)):
        with pytest.raises(InternalError, match=f"find has failed with exit code {code}"):
            filtered(Levels(entry("/s/a"), errors=text, code=code), "x")
    with pytest.raises(ConnectionLost, match="a part of the list of files was lost"):
        filtered(Levels(entry("/s/a"), lost_bytes=3), "x")
    with pytest.raises(InvalidRequest, match="more than"):
        filtered(Levels(entry("/s/a"), lost_bytes=3, lost_stdout=3), "x")


def test_ignore_files_are_read_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IGNORE_FILES", 2)
    names = [f"d{number}" for number in range(5)]
    directories = b"".join(entry(f"/s/{name}", "d") for name in names)
    machine = Levels(
        directories,
        b"".join(entry(f"/s/{name}/.gitignore") + entry(f"/s/{name}/x") for name in names),
    )
    machine.content = b"x"
    paths, _ = filtered(machine, gitignore=True)
    assert paths == ["", *(path for name in names for path in (name, f"{name}/.gitignore"))]
    assert sorted(machine.read_files) == [f"/s/{name}/.gitignore" for name in names]


def test_levels_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 2)
    level = b"".join(entry(f"/s/{number}") for number in range(3))
    with pytest.raises(InvalidRequest, match="/s: more than 3 entries"):
        filtered(Levels(level), "x")


def test_levels_without_find() -> None:
    machine = FakeMachine(entries=("/s/a", "/s/b"))
    assert filtered(machine, "b") == (["", "a"], [])
    with pytest.raises(MalformedAnswer, match="entries outside of ''"):
        filtered(FakeMachine(entries=("/s/d/", "/s/d/a")), "b")


def test_a_complete_list_needs_find() -> None:
    remote, _ = FakeMachine().tree()
    with pytest.raises(Unsupported, match="GNU find"):
        asyncio.run(remote.scan("/s", is_directory=True, needs_find=True))
