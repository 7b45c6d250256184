"""ArchiveUpload: writes the members of a tar archive to a directory of the server's machine.

A hostile archive changes nothing outside of the directory: `archive_reader` refuses members that
lead out of it, symlinks are created last, and nothing is written through a link that is in the
directory already. No symlink leads out through other ones either.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable, Container, Mapping
from typing import Final

from exec_server.client.engine.session import ClientSession
from exec_server.client.exceptions import SandboxDenied
from exec_server.client.paths import decoded
from exec_server.client.results import Progress, Transfer
from exec_server.client.transfer.archive_reader import ArchiveReader, Member
from exec_server.client.transfer.archive_source import AnyArchive, ArchiveSource
from exec_server.client.transfer.batches import batches_of, is_small
from exec_server.client.transfer.batches import write as write_batch
from exec_server.client.transfer.plan import (
    MAX_ENTRIES,
    Commands,
    Item,
    RemoteFiles,
    for_each,
    join,
)
from exec_server.client.transfer.upload import TreeUpload
from exec_server.errors import InvalidRequest, NotFound, RpcError, Unsupported
from exec_server.protocol.sandbox import Sandbox

# Of the list of symlinks that a directory has: those of about 50,000.
LINKS_BYTES: Final = 4 * 1_048_576
# Of all names, targets and directories that are kept until the end: 256 for each of the most
# members. A hostile archive of some hundred bytes has far more, in names of a thousand directories.
NAMES_CHARACTERS: Final = 256 * MAX_ENTRIES
# The kernel follows no more links in one path.
MAX_LINKS: Final = 40

_NEEDS_FIND: Final = "it exists, and its links cannot be listed: unpack into a new directory"


class ArchiveUpload(TreeUpload):
    """One archive to unpack into the directory `target`."""

    def __init__(
        self,
        files: RemoteFiles,
        commands: Commands,
        progress: Callable[[Progress], None] | None,
        sandbox: Sandbox | None,
        target: str,
        *,
        session: ClientSession | None = None,
    ) -> None:
        super().__init__(files, commands, progress, sandbox, session=session)
        self._target = target
        self._present_links: frozenset[str] = frozenset()  # that the directory has already
        self._seen: set[str] = set()  # the paths of files
        self._made: set[str] = set()  # the paths of directories
        self._symlinks: dict[str, Item] = {}
        self._without_mode: list[Item] = []
        self._names_left = NAMES_CHARACTERS

    async def unpack(self, archive: AnyArchive, limit: int) -> Transfer:
        """Write all members; raises InvalidRequest at the first one that is refused."""
        target = self._target
        source = ArchiveSource(archive)
        try:
            self._present_links = await self._links_of(target)
            await self._make({""})
            reader = ArchiveReader(source, limit)
            while group := await asyncio.to_thread(reader.next_group):
                await self._write_group(reader, group)
        finally:
            source.end()
        self._check_symlinks()
        links = list(self._not_failed(self._symlinks.values()))
        await self._link(links, target)
        await self._set_modes(list(self._not_failed(self._without_mode)), target)
        directories = [Item(path, "d", None, 0, "") for path in self._made]
        return self._tally.result([*self._not_failed(directories), *links])

    async def _links_of(self, target: str) -> frozenset[str]:
        """The symlinks below a directory that exists, relative to it."""
        try:
            await self._files.stat(target)
        except NotFound:
            return frozenset()
        top = f"{target.rstrip('/')}/"
        argv = ["find", top, "-type", "l", "-print0"]
        try:
            done = await self._commands.run(
                argv, cwd="/", sandbox=self._sandbox, output_limit=LINKS_BYTES
            )
        except (RpcError, Unsupported, UnicodeEncodeError):
            raise InvalidRequest(f"{target}: {_NEEDS_FIND}") from None
        if not done or done.lost_bytes:
            reason = done.error_text.strip().partition("\n")[0] or "it has too many links"
            raise InvalidRequest(f"{target}: {_NEEDS_FIND} ({reason})")
        return frozenset(decoded(path)[len(top) :] for path in done.stdout.split(b"\0") if path)

    # ---- members ----------------------------------------------------------------------

    async def _write_group(self, reader: ArchiveReader, group: list[Member]) -> None:
        for member in group:
            self._take(member.item)
        self._tally.expect(member.item for member in group)
        members = list({each.item.path: each for each in group}.values())  # the last of each name
        await self._make({posixpath.dirname(each.item.path) for each in members})
        await self._make({each.item.path for each in members if each.item.kind == "d"})
        for member in members:
            await self._make_room(member.item)
        await self._write_small([each for each in members if each.data is not None])
        last = group[-1]
        if last.item.kind == "f" and last.data is None:
            await self._write_large(reader, last.item)
        for member in members:
            if member.item.kind == "h":
                await self._copy(member.item)

    async def _make_room(self, item: Item) -> None:
        """Remove a symlink that a member replaces."""
        if item.path in self._present_links and not self._has_failed(item.path):
            try:
                await self._files.remove(join(self._target, item.path), missing_ok=True)
            except (RpcError, SandboxDenied) as error:
                self._fail(item.path, error)

    def _take(self, item: Item) -> None:
        """Note a member, unless it would be written through a symlink: then it is refused."""
        self._count_names(item.path, item.target)
        names = item.path.split("/")
        for depth in range(1, len(names) + (item.kind == "d")):
            above = "/".join(names[:depth])
            if above in self._symlinks or above in self._present_links:
                raise InvalidRequest(
                    f"member {item.path!r} of the archive is refused: {above!r} is a symlink"
                )
        if item.kind == "h" and item.target not in self._seen:
            raise InvalidRequest(
                f"member {item.path!r} of the archive is refused: it is a hard link to "
                f"{item.target!r}, which is no file of the archive before it"
            )
        self._seen.discard(item.path)
        self._symlinks.pop(item.path, None)
        if item.kind in "fh":
            self._seen.add(item.path)
        elif item.kind == "l":
            self._symlinks[item.path] = item

    def _check_symlinks(self) -> None:
        """Refuse a symlink that leads out of the directory through other symlinks."""
        targets = {path: item.target for path, item in self._symlinks.items()}
        for path in targets:
            if leads_out(path, targets, self._present_links):
                raise InvalidRequest(
                    f"member {path!r} of the archive is refused: "
                    "it leads out of the directory through another symlink"
                )

    def _count_names(self, *names: str) -> None:
        self._names_left -= sum(map(len, names))
        if self._names_left < 0:
            raise InvalidRequest(
                f"the names of the archive have more than {NAMES_CHARACTERS} characters"
            )

    async def _make(self, paths: set[str]) -> None:
        """Make directories that were not made so far."""
        new = {path for path in paths - self._made if not self._has_failed(path)}
        inner = {posixpath.dirname(path) for path in new if path}

        async def make(path: str) -> None:
            await self._make_directories(path, self._target)

        await for_each(sorted(new - inner), make)
        while new:
            self._count_names(*new)
            self._made |= new
            new = {posixpath.dirname(path) for path in new} - self._made

    async def _write_small(self, members: list[Member]) -> None:
        members = [each for each in members if not self._has_failed(each.item.path)]
        written: set[str] = set()
        if self._session is not None and len(members) > 1:
            contents = {each.item.path: each.data for each in members}
            items = [each.item for each in members if is_small(each.item)]
            for batch in batches_of(items, self._target):
                data = [contents[item.path] for item in batch.items]
                for position in await write_batch(self._session, batch, data):
                    item = batch.items[position]
                    written.add(item.path)
                    self._copied(item, item.size)

        async def write(member: Member) -> None:
            there = join(self._target, member.item.path)
            await self._attempt(member.item, self._write_one(member, there), there, there)

        await for_each((each for each in members if each.item.path not in written), write)

    async def _write_one(self, member: Member, there: str) -> None:
        assert member.data is not None
        await self._files.write(there, member.data)
        self._tally.advance(member.item.path, len(member.data))
        self._without_mode.append(member.item)

    async def _write_large(self, reader: ArchiveReader, item: Item) -> None:
        there = join(self._target, item.path)
        if not self._has_failed(item.path):
            await self._attempt(item, self._write_blocks(reader, item, there), there, there)
        await asyncio.to_thread(reader.skip_large)  # raises the error of the archive, if it has one

    async def _write_blocks(self, reader: ArchiveReader, item: Item, there: str) -> None:
        async with self._files.open(there, "wb") as writer:
            while block := await asyncio.to_thread(reader.next_block):
                await writer.write(block)
                self._tally.advance(item.path, len(block))
        self._without_mode.append(item)

    async def _copy(self, item: Item) -> None:
        """Copy the file that a hard link stands for."""
        if self._has_failed(item.path):
            return
        here, there = join(self._target, item.target), join(self._target, item.path)
        try:
            await self._files.copy(here, there)
        except (RpcError, SandboxDenied) as error:
            self._fail(item.path, error)
        else:
            self._tally.finish(item.path)
            self._without_mode.append(item._replace(kind="f"))


def leads_out(path: str, targets: Mapping[str, str], unknown: Container[str]) -> bool:
    """Whether a symlink leads out of the directory, or upwards from one with an unknown target.

    `targets` has the symlinks, relative to the directory. A loop leads nowhere.
    """
    position: list[str] = []
    is_unknown = False
    links = 0
    pending = path.split("/")[::-1]
    while pending:
        name = pending.pop()
        if name in ("", "."):
            continue
        if name == "..":
            if is_unknown or not position:
                return True
            position.pop()
            continue
        position.append(name)
        reached = "/".join(position)
        if reached in targets:
            links += 1
            if links > MAX_LINKS:
                return False
            position.pop()
            pending += targets[reached].split("/")[::-1]
        elif reached in unknown:
            is_unknown = True
    return False
