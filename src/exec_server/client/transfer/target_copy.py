"""TargetCopy: copies a file or a tree of the server's machine to another place of it."""

from __future__ import annotations

import posixpath
from collections.abc import Callable

from exec_server.client.commands import SystemCommands
from exec_server.client.engine.session import ClientSession
from exec_server.client.exceptions import NotADirectory
from exec_server.client.results import Progress, Transfer
from exec_server.client.transfer.mirror import Extra, Item, check_not_root, extra_entries
from exec_server.client.transfer.plan import (
    SPECIAL,
    TIME_TOLERANCE,
    CopyOptions,
    RemoteFiles,
    Tally,
    for_each,
    join,
)
from exec_server.client.transfer.remote_tree import RemoteTree
from exec_server.client.transfer.upload import TreeUpload, leaves
from exec_server.errors import InvalidRequest, NotFound
from exec_server.protocol.sandbox import Sandbox

_NESTED = "one of them contains the other: nothing is deleted there"


class TargetCopy(TreeUpload):
    """One copy; the server copies the contents of files."""

    def __init__(
        self,
        files: RemoteFiles,
        commands: SystemCommands,
        progress: Callable[[Progress], None] | None,
        sandbox: Sandbox | None,
        options: CopyOptions | None = None,
        *,
        session: ClientSession | None = None,
    ) -> None:
        super().__init__(files, commands, progress, sandbox, options, session=session)
        self._existing: dict[str, Item] = {}

    async def copy(self, source: str, target: str) -> Transfer:
        """Copy the tree; raises RpcError if its top cannot be copied."""
        is_directory = (await self._files.stat(source)).is_directory
        tree = RemoteTree(
            *(self._files, self._commands, self._sandbox, self._tally, self._fail),
            session=self._batch_session,
        )
        listing = await tree.scan(
            source, self._filter, is_directory=is_directory, needs_find=self._options.delete
        )
        items = list(listing)
        for item in items:
            if item.kind not in "fdl":
                self._fail(item.path, InvalidRequest(f"{join(source, item.path)}: {SPECIAL}"))
        extra = await self._find_extra(items, source, target)
        items = list(self._not_failed(items))

        async def is_unchanged(item: Item) -> bool:
            return await self._is_unchanged(item, join(source, item.path), join(target, item.path))

        if self._options.dry_run:
            return await self._plan(items, extra, is_unchanged)
        return await self._replace(items, extra, source, target, self._fill)

    async def _find_extra(self, items: list[Item], source: str, target: str) -> Extra:
        """Look at the target; what it has and the source has not, if that is to be deleted."""
        excluded = self._end_of_source()
        may_delete = self._may_delete(is_directory=items[0].kind == "d")
        try:
            metadata = await self._files.stat(target)
        except (NotFound, NotADirectory):
            return Extra.nothing(excluded)
        if self._options.sync is None or not (metadata.is_directory or metadata.is_file):
            return Extra.nothing(excluded)
        if may_delete:
            await self._check_places(source, target)
        tally = Tally(None)
        tree = RemoteTree(
            *(self._files, self._commands, self._sandbox, tally, tally.fail),
            session=self._batch_session,
        )
        existing = await tree.scan(target, self._filter, is_directory=metadata.is_directory)
        self._existing = {item.path: item for item in existing}
        if not may_delete:
            return Extra.nothing(excluded)
        self._tally.left_out += (f"deletions: {each.error}" for each in tally.failed)
        return extra_entries(items, existing, self._kept(tally), excluded)

    async def _check_places(self, source: str, target: str) -> None:
        """Refuse to delete where the source may be."""
        places = [await self._files.realpath(path) for path in (source, target)]
        check_not_root(places[1], target)
        if posixpath.commonpath(places) in places:
            raise InvalidRequest(f"{source} to {target}: {_NESTED}")

    async def _is_unchanged(self, item: Item, source: str, target: str) -> bool:
        existing = self._existing.get(item.path)
        if existing is None or existing.kind != item.kind:
            return False
        if item.kind == "d":
            return True
        if existing.size != item.size:
            return False
        if self._options.sync == "time":
            return abs(existing.time - item.time) < TIME_TOLERANCE
        argv = ["cmp", "-s", "--", source, target]
        return bool(await self._commands.run(argv, sandbox=self._sandbox))

    async def _fill(self, items: list[Item], source: str, target: str) -> None:
        async def make(path: str) -> None:
            await self._make_directories(path, target)

        async def copy(item: Item) -> None:
            here, there = join(source, item.path), join(target, item.path)
            await self._attempt(item, self._copy_if_changed(item, here, there), here, there)

        await for_each(leaves(items), make)
        await for_each((item for item in self._not_failed(items) if item.kind == "f"), copy)
        items = list(self._not_failed(items))
        await self._link(items, target)
        directories = [item for item in items if item.kind == "d"]
        await self._set_modes(directories, target)
        if self._options.keep_times:
            for item in reversed(directories):
                await self._set_time(item, join(target, item.path))

    async def _copy_if_changed(self, item: Item, source: str, target: str) -> None:
        if await self._is_unchanged(item, source, target):
            self._tally.skip(item.path, item.size)
            return
        await self._files.copy(source, target)
        self._tally.advance(item.path, item.size)
        if self._options.keep_times:
            await self._set_time(item, target)
