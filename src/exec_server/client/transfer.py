"""What uploads and downloads share: what they need of an environment, and how they count.

Content goes through the file methods of the protocol. They know neither modes nor links, so those
go through commands on the server's machine (`find`, `xargs`, `chmod`, `ln`, `mv`), a few for a
whole tree, with all paths on stdin and separated by NUL so that any name will do.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeVar, overload

from exec_server.client.open_file import FileReader, FileWriter
from exec_server.client.process import Process
from exec_server.client.results import Entry, Progress, Result, Stat, Transfer

T = TypeVar("T")

# What is larger goes block by block into a file of another name first.
SMALL_BYTES: Final = 2 * 1_048_576
# Files under way at a time, and of them large ones: they have several blocks under way each.
FILES_AT_ONCE: Final = 8
LARGE_AT_ONCE: Final = 2
# Of a tree, so that a list of it fits into memory with ease.
MAX_ENTRIES: Final = 1_000_000
# Longest name of a file on Linux, and what a name of ours adds.
_NAME_BYTES: Final = 255


class RemoteFiles(Protocol):
    """The files of an environment, as far as transfers use them; `files.Files` is one."""

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, data: bytes) -> None: ...

    @overload
    def open(self, path: str, mode: Literal["rb"] = "rb", *, offset: int = 0) -> FileReader: ...

    @overload
    def open(self, path: str, mode: Literal["wb"]) -> FileWriter: ...

    async def stat(self, path: str) -> Stat: ...

    def walk(self, path: str) -> AsyncIterator[Entry]: ...

    async def copy(self, source: str, target: str) -> None: ...

    async def remove(self, path: str, *, missing_ok: bool = False) -> None: ...

    async def mkdir(self, path: str, *, parents: bool = False, exist_ok: bool = False) -> None: ...


class Commands(Protocol):
    """What runs on the server's machine; `environment.Environment` is one."""

    def run(self, *args: Any, **kwargs: Any) -> Awaitable[Result]: ...

    def start(self, *args: Any, **kwargs: Any) -> Process: ...


@dataclass(frozen=True, slots=True)
class Item:
    """Something in a tree; `path` is relative to its top, and empty for the top itself."""

    path: str
    kind: str  # of `find -printf %y`: f, d, l or something else
    mode: int | None
    size: int
    modified: str  # anything that changes with the content
    target: str = ""  # of a link


class Tally:
    """Counts what is done, and tells whoever wants to know."""

    def __init__(self, progress: Callable[[Progress], None] | None) -> None:
        self._progress = progress
        self.total_bytes = 0
        self.total_files = 0
        self._done = 0
        self._resumed = 0
        self._files = 0
        self.left_out: list[str] = []

    def expect(self, items: Iterable[Item]) -> None:
        """All that is going to be copied."""
        for item in items:
            if item.kind == "f":
                self.total_bytes += item.size
                self.total_files += 1

    def advance(self, path: str, count: int) -> None:
        """So many bytes of a file are copied, or have to be copied again."""
        self._done += count
        self._tell(path)

    def resume(self, path: str, count: int) -> None:
        """So many bytes of a file are there already."""
        self._resumed += count
        self._done += count
        self._tell(path)

    def finish(self, path: str) -> None:
        """A file is complete."""
        self._files += 1
        self._tell(path)

    def _tell(self, path: str) -> None:
        if self._progress is not None:
            self._progress(
                Progress(
                    path,
                    self._done,
                    self.total_bytes,
                    self._resumed,
                    self._files,
                    self.total_files,
                )
            )

    def result(self, items: Iterable[Item]) -> Transfer:
        kinds = [item.kind for item in items]
        return Transfer(
            files=self._files,
            directories=kinds.count("d"),
            links=kinds.count("l"),
            copied_bytes=self._done - self._resumed,
            resumed_bytes=self._resumed,
            left_out=tuple(self.left_out),
        )


class TreeCopy:
    """What an upload and a download begin with."""

    def __init__(
        self,
        files: RemoteFiles,
        commands: Commands,
        progress: Callable[[Progress], None] | None,
        sandbox: Any,
    ) -> None:
        self._files = files
        self._commands = commands
        self._sandbox = sandbox
        self._tally = Tally(progress)
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)


async def each(
    items: Iterable[T], work: Callable[[T], Awaitable[None]], at_once: int = FILES_AT_ONCE
) -> None:
    """Do this to all, so many at a time; the first failure ends it and is raised."""
    waiting = iter(items)

    async def go_on() -> None:
        for item in waiting:
            await work(item)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(go_on())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def part_path(path: str, item: Item) -> str:
    """Where a file is until it is complete; the same for the same content."""
    directory, slash, name = path.rpartition("/")
    digest = hashlib.sha256(f"{item.size} {item.modified}".encode()).hexdigest()[:12]
    room = _NAME_BYTES - len(f"..{digest}.part")
    return f"{directory}{slash}.{os.fsdecode(os.fsencode(name)[:room])}.{digest}.part"


def below(top: str, path: str) -> str:
    """The path of an item whose tree has this top."""
    return f"{top.rstrip('/')}/{path}" if path else top


async def apply(
    commands: Commands, words: Sequence[str], paths: Iterable[str], sandbox: Any
) -> Result:
    """Run a command with all these words behind it, however many and whatever they are."""
    data = b"".join(os.fsencode(path) + b"\0" for path in paths)
    return await commands.run(["xargs", "-0", *words], input=data, sandbox=sandbox, cwd="/")
