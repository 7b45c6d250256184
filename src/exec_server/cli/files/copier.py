"""Copies files and trees to, from and between targets, and reports what could not be copied."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from exec_server.cli.connection import Connections, error_text, run_until_signal
from exec_server.cli.errors import EXIT_FAILURE, CommandError, UsageError
from exec_server.cli.files.operands import find_matches, is_pattern
from exec_server.cli.files.progress import ProgressBar
from exec_server.cli.streams import OutputWriter, StdinReader, print_status
from exec_server.cli.targets import parse_remote_path, remote_path_example
from exec_server.client.arguments import PathResolver
from exec_server.client.commands import SystemCommands
from exec_server.client.environment import Environment
from exec_server.client.files import Files
from exec_server.client.results import Progress, Stat, Transfer
from exec_server.client.targets import AccessOptions
from exec_server.client.transfer.plan import TIME_TOLERANCE, for_each, is_final
from exec_server.errors import ExecServerError, NotFound, RpcError, printable


def copy(
    paths: list[str],
    access: AccessOptions,
    *,
    is_quiet: bool,
    keep_times: bool = False,
    sync: Literal["time", "checksum"] | None = None,
) -> int:
    """Copy all paths but the last to the last; returns the exit code. Raises UsageError."""
    *sources, destination = [parse_endpoint(text) for text in paths]
    if not sources:
        raise UsageError("no destination; write SOURCE... DESTINATION")
    streams = [each for each in (*sources, destination) if each.is_stream]
    if streams and len(sources) > 1:
        raise UsageError("- is stdin or stdout of one copy; write ./- for a file of this name")
    if all(endpoint.target is None for endpoint in (*sources, destination)):
        raise UsageError("both sides are local; write a path on a target as TARGET:PATH")
    shows_progress = not is_quiet and os.isatty(2)

    async def work() -> int:
        async with Connections(access) as connections:
            if streams:
                return await copy_stream(connections, sources[0], destination)
            copier = _Copier(
                connections, shows_progress=shows_progress, keep_times=keep_times, sync=sync
            )
            expanded = await expand_patterns(connections, sources)
            return await copier.copy_all(expanded, destination)

    code = run_until_signal(work)
    if code > 128 and not streams:
        print_status("interrupted; run it again to resume")
    return code


class _Copier:
    def __init__(
        self,
        connections: Connections,
        *,
        shows_progress: bool,
        keep_times: bool,
        sync: Literal["time", "checksum"] | None,
    ) -> None:
        self._keep_times = keep_times
        self._sync = sync
        self._connections = connections
        self._shows_progress = shows_progress

    async def copy_all(self, sources: list[Endpoint], destination: Endpoint) -> int:
        """Copy every source, also after another one failed; returns the exit code."""
        is_directory = await self._is_directory(destination)
        if not is_directory and (len(sources) > 1 or destination.path.endswith("/")):
            raise _missing_directory(destination)
        if not is_directory:
            await self._check_parent(destination)
        code = 0
        for source in sources:
            # The dot is for a destination that is a symlink: the user wants it to be followed.
            name = source.name or ("." if destination.target is None else "")
            target = destination.joined(name if is_directory else "")
            if not await self._copy_one(source, target):
                code = EXIT_FAILURE
        return code

    async def _is_directory(self, endpoint: Endpoint) -> bool:
        if endpoint.target is None:
            return await asyncio.to_thread(os.path.isdir, endpoint.path)
        environment = await self._connections.get(endpoint.target)
        try:
            return (await environment.files.stat(endpoint.path)).is_directory
        except NotFound:
            return False
        except RpcError as error:
            raise CommandError(f"{endpoint}: {error_text(error, endpoint.path)}") from None

    async def _check_parent(self, destination: Endpoint) -> None:
        above = posixpath.dirname(destination.path.rstrip("/"))
        parent = Endpoint(destination.target, above)
        if above and not await self._is_directory(parent):
            raise _missing_directory(parent)

    async def _copy_one(self, source: Endpoint, destination: Endpoint) -> bool:
        if source.target is None and destination.target is None:
            raise CommandError(f"{source} and {destination} are both local; use cp")
        if source.target is None:
            return await self._upload(source, destination)
        if destination.target is None:
            return await self._download(source, destination)
        if source.target == destination.target:
            return await self._copy_on_target(source, destination)
        return await self._copy_between_targets(source, destination)

    async def _copy_on_target(self, source: Endpoint, destination: Endpoint) -> bool:
        files = (await self._environment(source)).files
        try:
            is_tree = (await files.stat(source.path)).is_directory
        except RpcError as error:
            print_status(f"{source}: {error_text(error, source.path)}")
            return False
        try:
            if self._keep_times:
                copy = TargetCopy(files, await self._environment(source), self._sync)
                await copy.copy(source.path, destination.path, is_tree=is_tree)
            else:
                await files.copy(source.path, destination.path, recursive=is_tree)
        except RpcError as error:
            text = error_text(error, f"{source.path} to {destination.path}")
            print_status(f"{source} to {destination}: {text}")
            return False
        return True

    async def _copy_between_targets(self, source: Endpoint, destination: Endpoint) -> bool:
        """Download to a temporary directory and upload: targets cannot reach each other."""
        with tempfile.TemporaryDirectory(prefix="exec-server-cp-") as directory:
            local = Endpoint(None, os.path.join(directory, source.name or "content"))
            is_complete = await self._download(source, local)
            if not await asyncio.to_thread(os.path.lexists, local.path):
                return False
            return await self._upload(local, destination, label=source) and is_complete

    async def _upload(
        self, source: Endpoint, destination: Endpoint, label: Endpoint | None = None
    ) -> bool:
        files = (await self._environment(destination)).files
        start = partial(files.upload, source.path, destination.path)
        return await self._transfer(start, label or source, source, destination)

    async def _download(self, source: Endpoint, destination: Endpoint) -> bool:
        files = (await self._environment(source)).files
        start = partial(files.download, source.path, destination.path)
        return await self._transfer(start, source, destination, source)

    async def _transfer(
        self,
        start: Callable[..., Awaitable[Transfer]],
        label: Endpoint,
        local: Endpoint,
        remote: Endpoint,
    ) -> bool:
        """Print the errors; whether all was copied. CommandError if all others would fail."""
        try:
            with self._progress(label) as update:
                transfer = await start(
                    progress=update, check=False, keep_times=self._keep_times, sync=self._sync
                )
        except (RpcError, OSError) as error:
            text = await self._describe_error(error, local, remote)
            if is_final(error):
                raise CommandError(text) from None
            print_status(text)
            return False
        for text in transfer.left_out:
            print_status(printable(text))
        for each in transfer.failed:
            print_status(await self._describe_error(each.error, local, remote))
        return not transfer.failed

    async def _describe_error(self, error: Exception, local: Endpoint, remote: Endpoint) -> str:
        """The text of an error, with the path in the form of an argument."""
        if isinstance(error, OSError) and error.strerror and not isinstance(error, ExecServerError):
            return printable(f"{error.filename or local}: {error.strerror}")
        text = error_text(error)
        top = PathResolver((await self._environment(remote)).info).absolute(remote.path)
        top = printable(top)
        if text.startswith((f"{top}: ", f"{top.rstrip('/')}/")):
            return f"{remote.target}:{remote.path}{text[len(top) :]}"
        return f"{remote}: {text}"

    @contextlib.contextmanager
    def _progress(self, source: Endpoint) -> Iterator[Callable[[Progress], None] | None]:
        if not self._shows_progress:
            yield None
            return
        bar = ProgressBar(2, source.name or source.path)
        try:
            yield bar.update
        finally:
            bar.finish()

    async def _environment(self, endpoint: Endpoint) -> Environment:
        assert endpoint.target is not None
        return await self._connections.get(endpoint.target)


def _missing_directory(endpoint: Endpoint) -> CommandError:
    command = "mkdir -p" if endpoint.target is None else f"exec-server mkdir -p {endpoint}"
    return CommandError(f"{endpoint} is not a directory; create it with {command}")


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
        if self._sync is None or await self._stat_or_none(target) is None:
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
        existing = {entry.name: entry for entry in await self._files.list(there)}
        for entry in await self._files.list(here):
            old = existing.get(entry.name)
            if entry.link_target is None or (old and old.link_target == entry.link_target):
                continue
            path = posixpath.join(there, entry.name)
            if old is not None:
                await self._files.remove(path)
            await self._files.symlink(entry.link_target, path)

    async def _stat_or_none(self, path: str) -> Stat | None:
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
        source, metadata = await self._files.stat(here), await self._stat_or_none(there)
        if metadata is None or not metadata.is_file or metadata.size != source.size:
            return False
        if self._sync == "time":
            return abs(metadata.modified - source.modified) < TIME_TOLERANCE
        resolved = [await self._files.realpath(path) for path in (here, there)]
        commands = SystemCommands(self._environment.run, self._environment.start)
        return bool(await commands.run(["cmp", "-s", "--", *resolved]))

    async def _copy_time(self, pair: tuple[str, str]) -> None:
        here, there = pair
        await self._files.touch(there, modified=(await self._files.stat(here)).modified)


@dataclass(frozen=True)
class Endpoint:
    """A source or the destination; local if `target` is None."""

    target: str | None
    path: str

    def __str__(self) -> str:
        return self.path if self.target is None else f"{self.target}:{self.path}"

    @property
    def name(self) -> str:
        """The last component of the path; empty for `.` and `..`, which mean the content."""
        last = self.path.rstrip("/").rpartition("/")[2]
        return "" if last in (".", "..") else last

    @property
    def is_stream(self) -> bool:
        """Whether it is stdin or stdout."""
        return self.target is None and self.path == "-"

    def joined(self, name: str) -> Endpoint:
        return Endpoint(self.target, posixpath.join(self.path, name) if name else self.path)


def parse_endpoint(text: str) -> Endpoint:
    """Parse a path of cp; raises UsageError."""
    remote = parse_remote_path(text)
    if remote is None:
        if not text:
            raise UsageError("a path is empty; write . for the current directory")
        return Endpoint(None, text)
    if remote.path is None:
        raise UsageError(f"`{text}` names no path; write {remote_path_example(remote.target)}")
    return Endpoint(remote.target, remote.path or ".")


async def expand_patterns(connections: Connections, sources: list[Endpoint]) -> list[Endpoint]:
    """Sources with patterns replaced by matching paths; an existing path is none. CommandError."""
    expanded: list[Endpoint] = []
    for source in sources:
        if source.target is None or not is_pattern(source.path):
            expanded.append(source)
            continue
        files = (await connections.get(source.target)).files
        try:
            matches = await find_matches(files, source.path)
        except (CommandError, RpcError) as error:
            raise CommandError(f"{source}: {error_text(error, source.path)}") from None
        if not matches:
            raise CommandError(f"{source}: no path matches")
        expanded += (Endpoint(source.target, path) for path in matches)
    return expanded


async def copy_stream(connections: Connections, source: Endpoint, destination: Endpoint) -> int:
    """Copy stdin to a file of a target, or a file to stdout; returns the exit code."""
    remote = destination if source.is_stream else source
    assert remote.target is not None
    files = (await connections.get(remote.target)).files
    try:
        if source.is_stream:
            reader = StdinReader(0)
            async with files.open(remote.path, "wb") as new:
                while block := await reader.read():
                    await new.write(block)
            return 0
        writer = OutputWriter()
        async with files.open(remote.path) as file:
            async for block in file:
                await writer.print(block)
        return 0
    except RpcError as error:
        print_status(f"{remote}: {error_text(error, remote.path)}")
        return EXIT_FAILURE
