"""Download: copies a file or a tree of the server's machine to this one.

A malicious server can change nothing but the entries of the target: `listing` checks the tree that
it describes, and `local_tree` follows no symlink. Symlinks are created last.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
import stat
import time
from contextlib import aclosing
from typing import Final

from exec_server.client.results import Transfer
from exec_server.client.transfer.batches import BATCHES_AT_ONCE, Batch, batches_of, is_small
from exec_server.client.transfer.batches import read as read_batch
from exec_server.client.transfer.helper_command import HelperCommand
from exec_server.client.transfer.listing import FIND_FORMAT, LISTING_BYTES, Listing
from exec_server.client.transfer.local_tree import LocalTree, Part
from exec_server.client.transfer.plan import (
    CHANGED,
    SMALL_BYTES,
    SPECIAL,
    Item,
    TreeCopy,
    for_each,
    join,
)
from exec_server.errors import InvalidRequest, MalformedAnswer, RpcError, Unsupported

# A small file may have grown since it was listed. Its content is one answer.
MAX_GROWN_BYTES: Final = 2 * SMALL_BYTES
# Of the messages of find: those of about 10,000 entries that it cannot read.
ERROR_BYTES: Final = 1_048_576

# The memory that an Item takes beside its path.
_ITEM_BYTES: Final = 256
# The message of find about an entry that it cannot read.
_FIND_ERROR: Final = re.compile(r"[^:]*find: ['\u2018](.*)['\u2019]: (.*)")


class Download(TreeCopy):
    """One download."""

    async def copy(self, source: str, target: str) -> Transfer:
        """Copy the tree; raises OSError if its top cannot be written."""
        found = await self._files.stat(source)  # raises NotFound, the clearest error
        listing = await self._scan(source, is_directory=found.is_directory)
        top = next(iter(listing))
        if top.kind == "l":  # the server has followed it before
            raise InvalidRequest(f"{source}: {CHANGED}")
        for item in listing.of_kind("".join(set(listing.kinds) - set("fdl"))):
            error = InvalidRequest(f"{join(source, item.path)}: {SPECIAL}")
            self._fail(item.path, error)
        self._tally.expect(self._not_failed(listing.of_kind("f")))
        tree = LocalTree(target, is_directory=top.kind == "d", is_ambiguous=listing.is_ambiguous)
        try:
            await asyncio.to_thread(tree.open)
            await self._fill(tree, listing, source, target)
        finally:
            tree.close()
        return self._tally.result(self._not_failed(listing.of_kind("dl")))

    async def _fill(self, tree: LocalTree, listing: Listing, source: str, target: str) -> None:
        """Create all entries: directories, then files, then symlinks."""
        directories = self._not_failed(listing.of_kind("d"))
        await asyncio.to_thread(tree.make_directories, directories, self._fail)

        async def fetch(item: Item) -> None:
            there, here = join(source, item.path), join(target, item.path)
            await self._attempt(item, self._fetch_if_changed(tree, item, here, there), here, there)

        copied = await self._fetch_batches(tree, listing, source)
        if len(copied) < self._tally.total_files:
            files = self._not_failed(listing.of_kind("f"))
            await for_each((item for item in files if item.path not in copied), fetch)
        links = self._not_failed(listing.of_kind("l"))
        await asyncio.to_thread(tree.make_symlinks, links, self._fail)
        # Deepest first: the new mode of a directory may deny access to its entries.
        directories = self._not_failed(listing.of_kind("d", deepest_first=True))
        self._tally.left_out += await asyncio.to_thread(tree.set_modes, directories)
        if self._options.keep_times:
            for item in self._not_failed(listing.of_kind("d", deepest_first=True)):
                await asyncio.to_thread(_set_time, join(target, item.path), item.time_ns)

    # ---- the remote tree --------------------------------------------------------------

    async def _scan(self, source: str, *, is_directory: bool) -> Listing:
        listing = Listing(source)
        try:
            await self._scan_with_find(source, listing)
        except (RpcError, UnicodeEncodeError, Unsupported):
            if not listing.is_empty:
                raise
        if listing.is_empty:
            items = await self._scan_without_find(source, is_directory=is_directory)
            listing.add(sorted(items, key=lambda item: item.path.split("/")))
        listing.finish()
        return listing

    async def _scan_with_find(self, source: str, listing: Listing) -> None:
        """List the tree; the listing stays empty if the machine has no GNU find."""
        argv = ["find", "-H", source, "-printf", FIND_FORMAT]
        find = HelperCommand(self._commands, self._sandbox, error_bytes=ERROR_BYTES)
        async with aclosing(find.stdout(argv, f"{source}: a part of the list of files")) as output:
            async for data in output:
                listing.feed(data)
        if find.exit_code and not listing.is_empty:
            if len(find.errors) >= ERROR_BYTES:
                raise InvalidRequest(f"{source}: too many entries cannot be read")
            self._record_find_errors(source, listing, bytes(find.errors))

    def _record_find_errors(self, source: str, listing: Listing, text: bytes) -> None:
        """Record the entries that find could not read; all entries it has found are copied."""
        for line in text.decode("utf-8", "surrogateescape").splitlines():
            match = _FIND_ERROR.fullmatch(line)
            path, reason = match.groups() if match else (source, line)
            error = InvalidRequest(f"{path}: {reason}")
            if path == source and len(listing) <= 1:
                raise error  # find has found nothing but the top
            self._tally.fail(path.removeprefix(source).lstrip("/"), error)

    async def _scan_without_find(self, source: str, *, is_directory: bool) -> list[Item]:
        """Scan with file methods alone, without modes and symlinks."""
        if not is_directory:
            return [await self._item(source, "")]
        self._tally.left_out.append("modes and symlinks: the machine has no GNU find")
        items = [Item("", "d", None, 0, "0")]
        prefix = posixpath.normpath(source).rstrip("/") + "/"  # as servers normalise it
        size = 0

        def record(error: RpcError) -> None:
            path = error.message.partition(": ")[0]
            self._tally.fail(path.removeprefix(prefix), error)

        async for entry in self._files.walk(source, on_error=record):
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
        found = await self._files.stat(source)
        kind = "f" if found.is_file else "?"
        return Item(path, kind, None, found.size, f"{found.modified:.3f}")

    # ---- content ----------------------------------------------------------------------

    async def _fetch_batches(self, tree: LocalTree, listing: Listing, source: str) -> set[str]:
        """Fetch small files together; returns the paths of those that were fetched."""
        copied: set[str] = set()
        session = self._session
        if session is None:
            return copied

        # One thread writes: several would wait for the interpreter more than for the disk.
        writing = asyncio.Lock()

        async def fetch(batch: Batch) -> None:
            contents = await read_batch(session, batch)
            read = zip(batch.items, contents, strict=True)
            files = [(item, content) for item, content in read if content is not None]
            sizes = {item.path: len(content) for item, content in files}
            async with writing:
                written = await asyncio.to_thread(tree.write_files, files)
            for item in written:
                copied.add(item.path)
                self._copied(item, sizes[item.path])

        small = [item for item in self._not_failed(listing.of_kind("f")) if is_small(item)]
        if len(small) > 1:
            await for_each(batches_of(small, source), fetch, BATCHES_AT_ONCE)
        return copied

    async def _fetch_if_changed(
        self, tree: LocalTree, item: Item, target: str, source: str
    ) -> None:
        if self._options.sync is not None:
            found = await asyncio.to_thread(_found, target)
            if await self._is_equal(item, found, target, source):
                self._tally.resume(item.path, item.size)
                return
        await self._fetch(tree, item, source)
        if self._options.keep_times:
            await asyncio.to_thread(_set_time, target, item.time_ns)

    async def _fetch(self, tree: LocalTree, item: Item, source: str) -> None:
        if item.size > SMALL_BYTES:
            async with self._large:
                await self._fetch_large(tree, item, source)
            await asyncio.to_thread(tree.place_part, item)
            return
        data = await self._files.read(source, limit=MAX_GROWN_BYTES)
        await asyncio.to_thread(tree.write_file, item, data)
        self._tally.advance(item.path, len(data))

    async def _fetch_large(self, tree: LocalTree, item: Item, source: str) -> None:
        part = Part(tree, item)
        try:
            await asyncio.to_thread(part.open)
            offset = await self._resumable(part.descriptor, source, item)
            self._tally.resume(item.path, offset)
            async with self._files.open(source, offset=offset) as reader:
                async for block in reader:
                    offset += len(block)
                    if offset > item.size:
                        break
                    await asyncio.to_thread(part.write, block, offset - len(block))
                    self._tally.advance(item.path, len(block))
                is_same = offset == item.size and not await reader.is_changed()
        finally:
            part.close()
        if not is_same:
            await asyncio.to_thread(tree.remove_part, item)
            raise InvalidRequest(f"{source}: {CHANGED}")

    async def _resumable(self, descriptor: int, source: str, item: Item) -> int:
        """The number of correct bytes of an earlier attempt; a wrong file is truncated."""
        size = os.fstat(descriptor).st_size
        if 0 < size <= item.size and await self._has_same_start(source, descriptor, size):
            return size
        os.ftruncate(descriptor, 0)
        return 0


def _found(path: str) -> tuple[int, float] | None:
    """The size and time of a regular file of this machine; None if there is none."""
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return (info.st_size, info.st_mtime) if stat.S_ISREG(info.st_mode) else None


def _set_time(path: str, modified_ns: int) -> None:
    """Set the modification time of an entry that was copied, and not of a link's target."""
    follow = os.utime not in os.supports_follow_symlinks
    os.utime(path, ns=(time.time_ns(), modified_ns), follow_symlinks=follow)
