"""RemoteTree: lists a tree of the server's machine; Listing checks what the server says about it.

A whole tree takes one `find`. With a filter it takes one for each level, so that nothing below an
excluded directory is looked at. Without GNU find, file methods list it.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
import unicodedata
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import Final

from exec_server.client.commands import SystemCommands
from exec_server.client.engine.session import ClientSession
from exec_server.client.exceptions import SandboxDenied
from exec_server.client.results import Result
from exec_server.client.transfer.batches import read_many
from exec_server.client.transfer.exclusion import IGNORE_FILE, IGNORE_FILE_BYTES, TreeFilter
from exec_server.client.transfer.mirror import Item
from exec_server.client.transfer.plan import (
    MAX_ENTRIES,
    HelperCommand,
    RemoteFiles,
    Tally,
    for_each,
    join,
    run_xargs,
)
from exec_server.errors import (
    ConnectionLost,
    InternalError,
    InvalidRequest,
    MalformedAnswer,
    RpcError,
    Unsupported,
)
from exec_server.protocol.sandbox import Sandbox

# The argument of -printf: kind, mode, size, time, path and symlink target.
FIND_FORMAT: Final = "%y\\0%m\\0%s\\0%T@\\0%P\\0%l\\0"
# The bytes of a listing: those of about 700,000 files. They stay in memory during a download.
LISTING_BYTES: Final = 64 * 1_048_576
# Of one entry: the path and the target of a symlink have up to 4096 bytes each on Linux.
ENTRY_BYTES: Final = 16_384
# Ignore files that are read together, each of at most 256 KiB.
IGNORE_FILES: Final = 128
# Of the messages of find: those of about 10,000 entries that it cannot read.
ERROR_BYTES: Final = 1_048_576

_FIELDS: Final = 6
# A time has at most 18 digits of seconds: more do not fit into the 64 bits of the system's calls.
_ENTRY: Final = re.compile(
    rb"([a-zA-Z?])\0([0-7]{0,6})\0(\d{1,19})\0(-?\d{1,18}(?:\.\d{1,20})?)\0([^\0]*)\0([^\0]*)\0"
)
_MAX_SIZE: Final = 2**63 - 1
_PERMISSIONS: Final = 0o777
# Separators of this platform beside the slash: a server has them in names.
_SEPARATORS: Final = tuple({os.sep, os.altsep or os.sep} - {"/"})

# The memory that an Item takes beside its path.
_ITEM_BYTES: Final = 256
# The message of find about an entry that it cannot read.
_FIND_ERROR: Final = re.compile(r"[^:]*find: ['\u2018](.*)['\u2019]: (.*)")
# The entries of directories, each with the path of its directory; the top may be a symlink.
_FIND_ENTRIES: Final = (
    "exec find {} \"$@\" -mindepth 1 -maxdepth 1 -printf '%y\\0%m\\0%s\\0%T@\\0%H/%P\\0%l\\0'"
)
# find ends so if it could not read an entry.
_FIND_FAILED: Final = 1
# xargs ends so if one of its commands has ended with an error.
_XARGS_FAILED: Final = 123


class Listing:
    """The entries of a tree in the order of `find`; iterating gives Items.

    Nothing in the description is trusted: it is parsed while it is received, so that the first
    wrong field ends the download, and kept in its own bytes, which take a third of the memory of
    objects. An entry is six fields, each terminated by NUL. `find` lists a directory before its
    entries, so the open directories form a stack, which must have the parent of each entry.
    """

    def __init__(self, source: str) -> None:
        """`source` is the path of the top, for error texts."""
        self._source = source
        self._data = bytearray()
        self._starts = array("Q")
        self._kinds = bytearray()  # of the entries in `_starts`, so that a kind is found quickly
        self._parsed = 0
        self._open_directories: list[str] = []
        # Hashes of the paths as they are, and without regard to case and Unicode form. Python's
        # hashes are salted, so no server can make two of them equal.
        self._hashes = array("q")
        self._folded_hashes = array("q")
        self._ambiguous: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was received, not even a part of an entry."""
        return not self._data

    def __iter__(self) -> Iterator[Item]:
        return (self._item(start) for start in self._starts)

    @property
    def kinds(self) -> str:
        """The letters of the kinds that occur, each once."""
        return bytes(sorted(set(self._kinds))).decode()

    def of_kind(self, kinds: str, *, deepest_first: bool = False) -> Iterator[Item]:
        """The entries of these kinds; a directory comes before its entries, or after them."""
        wanted = kinds.encode()
        pairs: Iterable[tuple[int, int]] = zip(self._starts, self._kinds, strict=True)
        if deepest_first:
            pairs = zip(reversed(self._starts), reversed(self._kinds), strict=True)
        return (self._item(start) for start, kind in pairs if kind in wanted)

    def is_ambiguous(self, path: str) -> bool:
        """Whether another path differs in case or Unicode form only: here it may be the same."""
        return bool(self._ambiguous) and hash(folded(path)) in self._ambiguous

    def feed(self, data: bytes) -> None:
        """Take a part of the output; raises MalformedAnswer, InvalidRequest for a huge tree."""
        self._data += data
        if len(self._data) > LISTING_BYTES:
            raise InvalidRequest(f"{self._source}: {_too_many(len(self))}")
        while (match := _ENTRY.match(self._data, self._parsed)) is not None:
            self._take(_item(match), match.start())
            self._parsed = match.end()
        unparsed = len(self._data) - self._parsed
        if unparsed > ENTRY_BYTES or self._data.count(b"\0", self._parsed) >= _FIELDS:
            raise self._malformed(self._data[self._parsed : self._parsed + 64])

    def add(self, items: Iterable[Item]) -> None:
        """Take items that were not listed by `find`, but are in its order."""
        for item in items:
            mode = "" if item.mode is None else f"{item.mode:o}"
            fields = (item.kind, mode, str(item.size), item.modified, item.path, item.target)
            self.feed("".join(f"{field}\0" for field in fields).encode(errors="surrogateescape"))

    def finish(self) -> None:
        """Check the end of the output, and that no path occurs twice."""
        if self._parsed < len(self._data) or not self._starts:
            raise self._malformed(self._data[self._parsed : self._parsed + 64])
        if repeated := _repeated(self._hashes):
            path = next(item.path for item in self if hash(item.path) in repeated)
            raise self._refused(path, "it occurs twice")
        self._ambiguous = _repeated(self._folded_hashes)
        self._hashes = self._folded_hashes = array("q")
        self._open_directories = []

    def _take(self, item: Item, start: int) -> None:
        if len(self._starts) >= MAX_ENTRIES:
            raise InvalidRequest(f"{self._source}: {_too_many(MAX_ENTRIES)}")
        if not item.path:
            if self._starts:
                raise self._refused(item.path, "the top occurs twice")
        else:
            self._check_path(item.path)
        if item.kind == "l" and not item.target:
            raise self._refused(item.path, "a symlink without a target")
        if item.size > _MAX_SIZE:
            raise self._refused(item.path, "an impossible size")
        if item.kind == "d":
            self._open_directories.append(item.path)
        self._starts.append(start)
        self._kinds += item.kind.encode()
        self._hashes.append(hash(item.path))
        self._folded_hashes.append(hash(folded(item.path)))

    def _check_path(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        if (
            name in ("", ".", "..")
            or path.startswith("/")
            or any(each in name for each in _SEPARATORS)
        ):
            raise self._refused(path, "it is not a name")
        stack = self._open_directories
        while stack and stack[-1] != parent:
            stack.pop()
        if not stack:
            raise self._refused(path, "it is outside of the tree")

    def _item(self, start: int) -> Item:
        match = _ENTRY.match(self._data, start)
        assert match is not None
        return _item(match)

    def _malformed(self, text: bytes | bytearray) -> MalformedAnswer:
        return MalformedAnswer(f"{self._source}: the list of files is malformed at {bytes(text)!r}")

    def _refused(self, path: str, reason: str) -> MalformedAnswer:
        return MalformedAnswer(f"{self._source}: the server lists {path!r}: {reason}")


def _item(match: re.Match[bytes]) -> Item:
    kind, mode, size, modified, path, target = match.groups()
    return Item(
        path.decode("utf-8", "surrogateescape"),
        kind.decode(),
        int(mode, 8) & _PERMISSIONS if mode else None,
        int(size),
        modified.decode(),
        target.decode("utf-8", "surrogateescape") if target else "",
    )


def folded(path: str) -> str:
    """A path as file systems compare it that ignore case or Unicode forms."""
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", path).casefold()


def _repeated(hashes: array[int]) -> frozenset[int]:
    ordered = sorted(hashes)
    return frozenset(one for one, other in pairwise(ordered) if one == other)


def _too_many(count: int) -> str:
    return f"more than {count} entries: copy the directories in it one by one"


class RemoteTree:
    """The trees that one copy lists."""

    def __init__(
        self,
        files: RemoteFiles,
        commands: SystemCommands,
        sandbox: Sandbox | None,
        tally: Tally,
        fail: Callable[[str, Exception], None],
        *,
        session: ClientSession | None = None,
    ) -> None:
        """`fail` records an entry, or raises; with a `session`, many files are read at once."""
        self._files = files
        self._commands = commands
        self._sandbox = sandbox
        self._tally = tally
        self._fail = fail
        self._session = session

    async def scan(
        self,
        source: str,
        tree_filter: TreeFilter | None = None,
        *,
        is_directory: bool,
        needs_find: bool = False,
    ) -> Listing:
        """List a tree without the entries that the filter excludes.

        If it `needs_find`, because nothing may be missing, and there is none, raises Unsupported.
        """
        listing = Listing(source)
        levels = tree_filter if is_directory else None
        try:
            await self._scan_with_find(source, listing, *(["-maxdepth", "0"] if levels else []))
        except (RpcError, UnicodeEncodeError, Unsupported):
            if not listing.is_empty:
                raise
        has_find = not listing.is_empty
        if needs_find and not has_find:
            raise Unsupported("GNU find", "delete by hand what the source has not")
        if not has_find and is_directory:
            self._tally.left_out.append("modes and symlinks: the machine has no GNU find")
        if levels is not None:
            if not has_find:
                listing.add([Item("", "d", None, 0, "0")])
            list_level = self._find_level if has_find else self._walk_level
            await self._scan_levels(source, listing, levels, list_level)
        elif not has_find:
            items = await self._scan_without_find(source, is_directory=is_directory)
            listing.add(sorted(items, key=lambda item: item.path.split("/")))
        listing.finish()
        return listing

    async def _scan_with_find(self, source: str, listing: Listing, *options: str) -> None:
        """List the tree; the listing stays empty if the machine has no GNU find."""
        argv = ["find", "-H", source, *options, "-printf", FIND_FORMAT]
        find = HelperCommand(self._commands, self._sandbox, error_bytes=ERROR_BYTES)
        async with aclosing(find.stdout(argv, f"{source}: a part of the list of files")) as output:
            async for data in output:
                listing.feed(data)
        if find.exit_code and not listing.is_empty:
            if len(find.errors) >= ERROR_BYTES:
                raise InvalidRequest(f"{source}: too many entries cannot be read")
            self._record_find_errors(source, bytes(find.errors), is_top=len(listing) <= 1)
            _check_end(source, find.exit_code, bytes(find.errors), _FIND_FAILED)

    def _record_find_errors(self, source: str, text: bytes, *, is_top: bool) -> None:
        """Record the entries that find could not read; all entries it has found are copied."""
        for line in text.decode("utf-8", "surrogateescape").splitlines():
            match = _FIND_ERROR.fullmatch(line)
            path, reason = match.groups() if match else (source, line)
            error = InvalidRequest(f"{path}: {reason}")
            if path == source and is_top:
                raise error  # find has found nothing but the top
            self._tally.fail(path.removeprefix(source).lstrip("/"), error)

    # ---- level by level ---------------------------------------------------------------

    async def _scan_levels(
        self,
        source: str,
        listing: Listing,
        tree_filter: TreeFilter,
        list_level: Callable[[str, list[str]], Awaitable[list[Item]]],
    ) -> None:
        """List the directories of one level after those above them, unless they are excluded."""
        included: list[Item] = []
        level = [""]
        size = 0
        while level:
            entries = await list_level(source, level)
            entered = await self._enter(source, level, entries, tree_filter)
            found = await asyncio.to_thread(_included, entries, entered, tree_filter)
            included += found
            size += sum(len(item.path) + _ITEM_BYTES for item in found)
            if len(included) > MAX_ENTRIES or size > MAX_ENTRIES * _ITEM_BYTES:
                raise InvalidRequest(f"{source}: {_too_many(len(included))}")
            level = [item.path for item in found if item.kind == "d"]
        listing.add(sorted(included, key=lambda item: item.path.split("/")))

    async def _enter(
        self, source: str, level: Sequence[str], entries: list[Item], tree_filter: TreeFilter
    ) -> set[str]:
        """Read the ignore files of directories; returns those whose entries can be judged."""
        names = {
            join(source, item.path): item.path.rpartition("/")[0]
            for item in entries
            if item.kind == "f"
            and item.path.rpartition("/")[2] == IGNORE_FILE
            and tree_filter.reads_ignore_file(item.path.rpartition("/")[0])
        }
        entered: set[str] = set()
        for directory in set(level) - set(names.values()):
            try:
                tree_filter.enter(directory)
            except InvalidRequest as error:
                self._fail(directory, InvalidRequest(f"{join(source, directory)}: {error}"))
            else:
                entered.add(directory)
        paths = list(names)
        for start in range(0, len(paths), IGNORE_FILES):
            some = paths[start : start + IGNORE_FILES]
            contents, errors = await read_many(
                *(self._files, self._session, {path: path for path in some}, IGNORE_FILE_BYTES),
                check=False,
            )
            for path in some:
                try:
                    if path in errors:
                        raise errors[path]
                    tree_filter.enter(names[path], contents[path])
                except (RpcError, SandboxDenied) as error:
                    self._fail(names[path], error)
                else:
                    entered.add(names[path])
        return entered

    async def _find_level(self, source: str, level: list[str]) -> list[Item]:
        script = _FIND_ENTRIES.format("-P" if level[0] else "-H")
        paths = [join(source.rstrip("/") or "/", directory) for directory in level]
        argv = ["sh", "-c", script, "sh"]
        done = await run_xargs(
            self._commands, argv, paths, self._sandbox, output_limit=LISTING_BYTES
        )
        self._check(source, done, is_top=not level[0])
        items = await asyncio.to_thread(lambda: list(_items_below(source, done.stdout)))
        directories = set(level)
        for item in items:
            parent, _, name = item.path.rpartition("/")
            if parent not in directories or name in ("", ".", ".."):
                raise MalformedAnswer(f"{source}: the server lists {item.path!r}")
        return items

    def _check(self, source: str, done: Result, *, is_top: bool) -> None:
        if done.lost_stdout or done.lost_stderr:
            raise InvalidRequest(f"{source}: {_too_many(MAX_ENTRIES)}")
        if done.lost_bytes:
            raise ConnectionLost(f"{source}: a part of the list of files was lost")
        if done.exit_code:
            self._record_find_errors(source, done.stderr, is_top=is_top and not done.stdout)
        _check_end(source, done.exit_code, done.stderr, _XARGS_FAILED)

    async def _walk_level(self, source: str, level: list[str]) -> list[Item]:
        items: list[Item] = []

        async def walk(directory: str) -> None:
            found = await self._walked(source, join(source, directory), depth=1)
            if not all(item.path.rpartition("/")[0] == directory for item in found):
                raise MalformedAnswer(
                    f"{source}: the server lists entries outside of {directory!r}"
                )
            items.extend(found)

        await for_each(level, walk)
        return items

    # ---- without find -----------------------------------------------------------------

    async def _scan_without_find(self, source: str, *, is_directory: bool) -> list[Item]:
        """Scan with file methods alone, without modes and symlinks."""
        if not is_directory:
            return [await self._item(source, "")]
        return [Item("", "d", None, 0, "0"), *await self._walked(source, source)]

    async def _walked(self, source: str, top: str, depth: int | None = None) -> list[Item]:
        """The entries below `top`, with paths relative to `source`."""
        items: list[Item] = []
        prefix = posixpath.normpath(source).rstrip("/") + "/"  # as servers normalise it
        size = 0

        def record(error: RpcError) -> None:
            path = error.message.partition(": ")[0]
            self._tally.fail(path.removeprefix(prefix), error)

        async for entry in self._files.walk(top, on_error=record, depth=depth):
            path = entry.path.removeprefix(prefix)
            if "\0" in path or path == entry.path:
                raise MalformedAnswer(f"{source}: the server lists {entry.path!r}")
            if entry.is_directory:
                items.append(Item(path, "d", None, 0, "0"))
            else:
                try:
                    items.append(await self._item(entry.path, path))
                except RpcError as error:
                    self._fail(path, error)
            size += len(path) + _ITEM_BYTES
            if size > LISTING_BYTES:
                raise InvalidRequest(f"{source}: more than {len(items)} entries")
        return items

    async def _item(self, source: str, path: str) -> Item:
        metadata = await self._files.stat(source)
        kind = "f" if metadata.is_file else "?"
        return Item(path, kind, None, metadata.size, f"{metadata.modified:.3f}")


def _check_end(source: str, code: int, errors: bytes, failed: int) -> None:
    """Refuse a list that ended in another way than with errors of entries: find was killed."""
    if code not in (0, failed) or (code and not errors):
        raise InternalError(f"{source}: find has failed with exit code {code}")


def _items_below(source: str, output: bytes) -> Iterator[Item]:
    """The items of find's output, which has whole paths; raises MalformedAnswer."""
    prefix = source.rstrip("/") + "/"
    position = 0
    while position < len(output):
        match = _ENTRY.match(output, position)
        item = _item(match) if match else None
        if item is None or match is None or not item.path.startswith(prefix):
            text = output[position : position + 64]
            raise MalformedAnswer(f"{source}: the list of files is malformed at {text!r}")
        yield item._replace(path=item.path.removeprefix(prefix).removeprefix("/"))
        position = match.end()


def _included(entries: list[Item], entered: set[str], tree_filter: TreeFilter) -> list[Item]:
    return [
        item
        for item in entries
        if item.path.rpartition("/")[0] in entered
        and not tree_filter.excludes(item.path, is_directory=item.kind == "d")
    ]
