"""The end of a file, and what is appended to it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from exec_server.cli.files import read
from exec_server.cli.files.operands import Operand
from exec_server.cli.files.read import Tail, last_lines, skip_lines
from exec_server.errors import InvalidRequest, NotFound

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("data", "count", "end"),
    [
        (b"", 3, b""),
        (b"a", 1, b"a"),
        (b"a\nb\n", 1, b"b\n"),
        (b"a\nb", 1, b"b"),
        (b"a\nb\n", 5, b"a\nb\n"),
        (b"a\n\n", 1, b"\n"),
        (b"a\n", 0, b""),
    ],
)
def test_last_lines(data: bytes, count: int, end: bytes) -> None:
    assert last_lines(data, count) == end


class Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def read(self, size: int) -> bytes:
        return self._data[:size]

    async def __aiter__(self) -> Any:
        yield self._data


class File:
    """A file whose content and age the test sets; None: it is missing."""

    def __init__(self, data: bytes | None) -> None:
        self.data: bytes | None = data
        self.created = 1.0
        self.modified = 0.0
        self.is_link = False
        self.has_link_entries = True  # the server tells links by listing their directory

    async def realpath(self, path: str) -> str:
        if self.data is None:
            raise NotFound("missing")
        return f"/{path}"

    async def stat(self, path: str, *, follow_links: bool = True) -> Any:
        is_link = self.is_link and not follow_links
        if is_link and not self.has_link_entries:
            raise InvalidRequest("path contains a symbolic link")
        self.modified += 1.0
        size = 1 if is_link else len(self.data or b"")
        return SimpleNamespace(
            size=size, created=self.created, modified=self.modified, is_symlink=is_link
        )

    async def read(self, path: str) -> bytes:
        return self.data or b""

    def open(self, path: str, *, offset: int) -> Reader:
        return Reader((self.data or b"")[offset:])


def _tail(file: File, monkeypatch: pytest.MonkeyPatch) -> tuple[Tail, list[bytes]]:
    tail = Tail(Operand(cast(Any, SimpleNamespace(files=file)), "f", "box:f"))
    written: list[bytes] = []

    async def write(data: bytes) -> None:
        written.append(data)

    monkeypatch.setattr(tail._writer, "print", write)
    return tail, written


def test_the_end_is_read_in_growing_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "FIRST_BYTES", 4)
    tail, written = _tail(File(b"one\ntwo\nthree\n"), monkeypatch)
    asyncio.run(tail.print_end(2))
    assert (written, tail.position) == ([b"two\nthree\n"], 14)
    empty, written = _tail(File(b""), monkeypatch)
    asyncio.run(empty.print_end(2))
    assert written == [b""]


@pytest.mark.parametrize(
    ("data", "count", "missing", "rest"),
    [
        (b"a\nb\n", 0, 0, b"a\nb\n"),
        (b"a\nb\nc", 2, 0, b"c"),
        (b"a\nb\n", 2, 0, b""),
        (b"a\nb", 3, 2, b""),
        (b"", 1, 1, b""),
    ],
)
def test_skipped_lines(data: bytes, count: int, missing: int, rest: bytes) -> None:
    assert skip_lines(data, count) == (missing, rest)


def test_lines_from_a_number_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tail, written = _tail(File(b"one\ntwo\nthree\n"), monkeypatch)
    asyncio.run(tail.print_from(2, b"heading\n"))
    assert (b"".join(written), tail.position) == (b"heading\ntwo\nthree\n", 14)


Step = tuple[bytes | None, float]


def _follow(file: File, steps: list[Step], monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The data that is printed while the file has these contents and ages, one after the other."""
    tail, written = _tail(file, monkeypatch)

    async def sleep(seconds: float) -> None:
        if not steps:
            raise asyncio.CancelledError
        file.data, file.created = steps.pop(0)

    async def scene() -> None:
        if file.data is not None:
            await tail.print_end(10)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await tail.follow()

    asyncio.run(scene())
    return written


def test_appended_and_replaced_data(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    steps: list[Step] = [
        (b"a\nb\n", 1.0),
        (b"a\nb\n", 1.0),
        (None, 1.0),
        (b"new and longer\n", 2.0),
        (b"x", 2.0),
    ]
    written = _follow(File(b"a\n"), steps, monkeypatch)
    assert written == [b"a\n", b"b\n", b"new and longer\n", b"x"]
    assert capfd.readouterr().err.count("replaced or truncated") == 2


def test_a_file_that_appears_is_followed_from_its_beginning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = File(None)
    steps: list[Step] = [(None, 1.0), (b"1\n", 1.0), (b"1\n2\n", 1.0)]
    vanishing = iter([True, False, False])

    def open_file(path: str, *, offset: int) -> Reader:
        if next(vanishing):
            raise NotFound("it was there for a moment")
        return Reader((file.data or b"")[offset:])

    monkeypatch.setattr(file, "open", open_file)
    assert _follow(file, steps, monkeypatch) == [b"1\n2\n"]
    assert capfd.readouterr().err == "exec-server: box:f: the file is there\n"


@pytest.mark.parametrize("has_link_entries", [True, False])
def test_another_file_or_content_of_the_same_size_or_a_greater_one(
    has_link_entries: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    steps: list[Step] = [
        (b"a\n", 2.0),  # replaced by an equal file
        (b"b\n", 2.0),  # overwritten
        (b"longer\n", 2.0),
        (b"longer\nend\n", 2.0),  # appended to
    ]
    file = File(b"a\n")
    file.is_link = True
    file.has_link_entries = has_link_entries
    written = _follow(file, steps, monkeypatch)
    assert written == [b"a\n", b"a\n", b"b\n", b"longer\n", b"end\n"]
    assert capfd.readouterr().err.count("replaced or truncated") == 3
