"""Copies a file or a tree within one target, with modification times, and only what has changed."""

from __future__ import annotations

import posixpath
from typing import Literal

from exec_server.client.commands import SystemCommands
from exec_server.client.environment import Environment
from exec_server.client.files import Files
from exec_server.client.results import Stat
from exec_server.client.transfer.plan import TIME_TOLERANCE, for_each
from exec_server.errors import NotFound


class TargetCopy:
    """One copy; entries that exist at the destination and not at the source are kept."""

    def __init__(
        self, files: Files, environment: Environment, sync: Literal["time", "checksum"] | None
    ) -> None:
        self._files = files
        self._environment = environment
        self._sync = sync

    async def copy(self, source: str, target: str, *, is_tree: bool) -> None:
        """Copy `source` to `target`; raises RpcError."""
        if not is_tree:
            await self._copy_file((source, target))
            return
        if self._sync is None or await self._found(target) is None:
            # The server copies links too, in one request.
            await self._files.copy(source, target, recursive=True)
            files, directories = await self._pairs(source, target)
            await for_each(files, self._copy_time)
        else:
            files, directories = await self._pairs(source, target)
            for here, there in directories:
                await self._files.mkdir(there, exist_ok=True)
                await self._copy_links(here, there)
            await for_each(files, self._copy_file)
        for pair in reversed(directories):
            await self._copy_time(pair)

    async def _pairs(
        self, source: str, target: str
    ) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """The files of a tree and its directories, each with its path at the destination."""
        top = await self._files.realpath(source)
        files: list[tuple[str, str]] = []
        directories = [(source, target)]
        async for entry in self._files.walk(top):
            there = posixpath.join(target, posixpath.relpath(entry.path, top))
            (directories if entry.is_directory else files).append((entry.path, there))
        return files, directories

    async def _copy_links(self, here: str, there: str) -> None:
        """Copy the links of a directory, which a walk leaves out."""
        found = {entry.name: entry for entry in await self._files.list(there)}
        for entry in await self._files.list(here):
            old = found.get(entry.name)
            if entry.link_target is None or (old and old.link_target == entry.link_target):
                continue
            path = posixpath.join(there, entry.name)
            if old is not None:
                await self._files.remove(path)
            await self._files.symlink(entry.link_target, path)

    async def _found(self, path: str) -> Stat | None:
        try:
            return await self._files.stat(path)
        except NotFound:
            return None

    async def _copy_file(self, pair: tuple[str, str]) -> None:
        here, there = pair
        if self._sync is not None and await self._is_equal(here, there):
            return
        await self._files.copy(here, there)
        await self._copy_time(pair)

    async def _is_equal(self, here: str, there: str) -> bool:
        source, found = await self._files.stat(here), await self._found(there)
        if found is None or not found.is_file or found.size != source.size:
            return False
        if self._sync == "time":
            return abs(found.modified - source.modified) < TIME_TOLERANCE
        resolved = [await self._files.realpath(path) for path in (here, there)]
        commands = SystemCommands(self._environment)
        return bool(await commands.run(["cmp", "-s", "--", *resolved]))

    async def _copy_time(self, pair: tuple[str, str]) -> None:
        here, there = pair
        await self._files.touch(there, modified=(await self._files.stat(here)).modified)
