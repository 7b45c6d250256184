"""What uploads and downloads share: what they need of an environment, and how they count.

Content goes through the file methods of the protocol. They know neither modes nor links, so those
go through commands on the server's machine (`find`, `xargs`, `chmod`, `ln`, `mv`), a few for a
whole tree, with all paths on stdin and separated by NUL so that any name will do.

What cannot be copied is noted, and the rest of the tree goes on. It ends at once if that is the
top, if a disk is full, or if there is no connection any more.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeVar, overload

from exec_server.client.failures import SandboxDenied
from exec_server.client.open_file import BLOCK_BYTES, FileReader, FileWriter
from exec_server.client.process import Process
from exec_server.client.results import Entry, NotCopied, Progress, Result, Stat, Transfer
from exec_server.errors import ExecServerError, RpcError, Unsupported

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

SPECIAL: Final = "neither file, directory nor link"
CHANGED: Final = "it was changed while it was copied"

# A full disk fails for all: there is no use in going on.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_FULL_THERE: Final = tuple(f"(os error {number})" for number in _FULL)
_DIGEST: Final = 'head -c "$2" < "$1" | sha256sum'


class RemoteFiles(Protocol):
    """The files of an environment, as far as transfers use them; `files.Files` is one."""

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, data: bytes) -> None: ...

    @overload
    def open(self, path: str, mode: Literal["rb"] = "rb", *, offset: int = 0) -> FileReader: ...

    @overload
    def open(self, path: str, mode: Literal["wb"]) -> FileWriter: ...

    async def stat(self, path: str) -> Stat: ...

    def walk(
        self, path: str, *, on_error: Callable[[RpcError], None] | None = None
    ) -> AsyncIterator[Entry]: ...

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
        self.failed: list[NotCopied] = []

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

    def fail(self, path: str, error: Exception) -> None:
        """Something in the tree cannot be copied."""
        error.__context__ = None  # its frames may hold the content of a file
        self.failed.append(NotCopied(path, error.with_traceback(None)))

    def result(self, items: Iterable[Item]) -> Transfer:
        """What there is to say about all this; `items` are those that were copied."""
        kinds = [item.kind for item in items]
        return Transfer(
            files=self._files,
            directories=kinds.count("d"),
            links=kinds.count("l"),
            copied_bytes=self._done - self._resumed,
            resumed_bytes=self._resumed,
            left_out=tuple(self.left_out),
            failed=tuple(self.failed),
        )


class TreeCopy:
    """What an upload and a download have in common."""

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
        self._missing: set[str] = set()  # paths of items that do not get where they should

    def _fail(self, path: str, error: Exception) -> None:
        """An item cannot be copied, nor what is below it; raises the error if all is in vain."""
        if not path or is_final(error):
            raise error from None
        if path not in self._missing:
            self._missing.add(path)
            self._tally.fail(path, error)

    async def _attempt(self, item: Item, work: Awaitable[None], here: str, there: str) -> None:
        """Await what copies a file, which is `here` and `there`."""
        try:
            await work
        except (RpcError, SandboxDenied, Unsupported, OSError) as error:
            self._fail(item.path, _plain(error, item, here, there))
        else:
            self._tally.finish(item.path)

    def _left(self, items: list[Item]) -> list[Item]:
        """Those that nothing is known against yet."""
        if not self._missing:
            return items
        gone = set(self._missing)
        left = []
        for item in items:
            if item.path in gone or os.path.dirname(item.path) in gone:
                gone.add(item.path)
            else:
                left.append(item)
        return left

    async def _is_same(self, path: str, descriptor: int, size: int) -> bool:
        """Whether a file there begins with as many bytes of one here, by their digests."""
        words = ["/bin/sh", "-c", _DIGEST, "sh", path, str(size)]
        try:
            result = await self._commands.run(words, cwd="/", sandbox=self._sandbox)
        except (RpcError, UnicodeEncodeError):
            return False
        theirs = result.text.split()[0] if result and result.stdout.strip() else ""
        return theirs == await asyncio.to_thread(_digest, descriptor, size)


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


def is_final(error: Exception) -> bool:
    """Whether whatever else is copied will fail in the same way."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return isinstance(error, RpcError) and error.message.endswith(_FULL_THERE)


def _plain(error: Exception, item: Item, here: str, there: str) -> Exception:
    """The same error about the path that was asked for, not the one it has until it is complete."""
    if isinstance(error, OSError):
        is_ours = error.filename in (None, part_path(here, item))
        if isinstance(error, ExecServerError) or not is_ours:
            return error
        return OSError(error.errno, error.strerror, here)
    part = part_path(there, item)
    for name in (f"{part} to {there}: ", f"{part}: "):
        if isinstance(error, RpcError) and error.message.startswith(name):
            return error.explained(f"{there}: {error.message.removeprefix(name)}")
        if isinstance(error, SandboxDenied) and str(error).startswith(name):
            return SandboxDenied(f"{there}: {str(error).removeprefix(name)}", error.denial)
    return error


def _digest(descriptor: int, size: int) -> str:
    digest = hashlib.sha256()
    offset = 0
    while offset < size:
        block = os.pread(descriptor, min(size - offset, BLOCK_BYTES), offset)
        if not block:
            return "shorter than it was"
        digest.update(block)
        offset += len(block)
    return digest.hexdigest()
