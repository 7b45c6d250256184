"""Copies files and trees to, from and between targets, and reports what could not be copied."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from exec_server.cli.connection import Connections, error_text, run_until_signal
from exec_server.cli.errors import EXIT_FAILURE, CommandError, LostConnection, UsageError
from exec_server.cli.files.operands import find_matches, is_pattern
from exec_server.cli.files.progress import ProgressBar
from exec_server.cli.streams import OutputWriter, StdinReader, print_status, print_text
from exec_server.cli.targets import join_path, parse_remote_path, remote_path_example
from exec_server.client.arguments import PathResolver
from exec_server.client.commands import SystemCommands
from exec_server.client.environment import Environment
from exec_server.client.results import Progress, Transfer
from exec_server.client.targets import AccessOptions
from exec_server.client.transfer.plan import CopyOptions, is_final
from exec_server.client.transfer.target_copy import TargetCopy
from exec_server.errors import (
    ConnectionLost,
    ExecServerError,
    NotFound,
    RpcError,
    SessionLost,
    Unsupported,
    printable,
)


@dataclass(frozen=True)
class CopyFlags:
    """`options` are those of `Files.upload`."""

    options: Mapping[str, Any]
    is_quiet: bool = False
    is_verbose: bool = False

    @property
    def only_copies(self) -> bool:
        """Whether a plain copy is wanted, which a server makes in one request."""
        return not any(self.options.values())


def copy(paths: list[str], access: AccessOptions, flags: CopyFlags) -> int:
    """Copy all paths but the last to the last; returns the exit code. Raises UsageError."""
    *sources, destination = [parse_endpoint(text) for text in paths]
    if not sources:
        raise UsageError("no destination; write SOURCE... DESTINATION")
    streams = [each for each in (*sources, destination) if each.is_stream]
    if streams and len(sources) > 1:
        raise UsageError("- is stdin or stdout of one copy; write ./- for a file of this name")
    if streams and (flags.options["delete"] or flags.options["dry_run"]):
        raise UsageError("--delete and --dry-run are for files and directories, not for -")
    if all(endpoint.target is None for endpoint in (*sources, destination)):
        raise UsageError("both sides are local; write a path on a target as TARGET:PATH")

    is_resumable = not streams and not flags.options["dry_run"]
    was_lost = False

    async def work() -> int:
        nonlocal was_lost
        async with Connections(access) as connections:
            if streams:
                return await copy_stream(connections, sources[0], destination)
            expanded = await expand_patterns(connections, sources)
            try:
                return await _Copier(connections, flags).copy_all(expanded, destination)
            except (ConnectionLost, SessionLost):
                was_lost = True
                raise

    try:
        code = run_until_signal(work)
    except LostConnection as error:
        if was_lost and is_resumable:
            raise LostConnection(f"{error}\nRun it again to resume.") from None
        raise
    if code > 128 and is_resumable:
        print_status("interrupted; run it again to resume")
    return code


class _Copier:
    def __init__(self, connections: Connections, flags: CopyFlags) -> None:
        self._connections = connections
        self._flags = flags
        self._options = flags.options
        self._shows_progress = not flags.is_quiet and not flags.is_verbose and os.isatty(2)

    async def copy_all(self, sources: list[Endpoint], destination: Endpoint) -> int:
        """Copy every source, also after another one failed; returns the exit code."""
        is_directory = await self._is_directory(destination)
        if not is_directory and (len(sources) > 1 or destination.path.endswith("/")):
            raise await self._no_directory(destination)
        if not is_directory:
            await self._check_parent(destination)
        # The dot is for a destination that is a symlink: the user wants it to be followed.
        content = "." if destination.target is None else ""
        targets = [
            destination.joined((source.name or content) if is_directory else "")
            for source in sources
        ]
        if self._options["delete"]:
            check_apart(targets)
        code = 0
        for source, target in zip(sources, targets, strict=True):
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

    async def _no_directory(self, endpoint: Endpoint) -> CommandError:
        """The error for a place that is missing, or is something else than a directory."""
        path = endpoint.path.rstrip("/")
        if endpoint.target is None:
            exists = await asyncio.to_thread(os.path.lexists, path)
            command = "mkdir -p"
        else:
            exists = await (await self._environment(endpoint)).files.exists(path)
            command = f"exec-server mkdir -p {endpoint}"
        proposal = "" if exists else f"; create it with {command}"
        return CommandError(f"{endpoint} is not a directory{proposal}")

    async def _check_parent(self, destination: Endpoint) -> None:
        above = posixpath.dirname(destination.path.rstrip("/"))
        parent = Endpoint(destination.target, above)
        if above and not await self._is_directory(parent):
            raise await self._no_directory(parent)

    async def _copy_one(self, source: Endpoint, destination: Endpoint) -> bool:
        if source.target is None and destination.target is None:
            raise CommandError(f"{source} and {destination} are both local; use cp")
        if source.target is None:
            return await self._upload(source, destination)
        if destination.target is None:
            return await self._download(source, destination)
        if await self._environment(source) is await self._environment(destination):
            return await self._copy_on_target(source, destination)
        return await self._copy_between_targets(source, destination)

    async def _copy_on_target(self, source: Endpoint, destination: Endpoint) -> bool:
        environment = await self._environment(source)
        files = environment.files
        if not self._flags.only_copies:
            options = CopyOptions(**self._options)
            commands = SystemCommands(environment.run, environment.start)

            async def start(progress: Callable[[Progress], None] | None) -> Transfer:
                resolver = PathResolver(environment.info)
                paths = [resolver.absolute(each.path) for each in (source, destination)]
                transfer = TargetCopy(files, commands, progress, None, options)
                return await transfer.copy(*paths)

            return await self._transfer(start, source, destination, source)
        try:
            is_tree = (await files.stat(source.path)).is_directory
        except RpcError as error:
            print_status(f"{source}: {error_text(error, source.path)}")
            return False
        try:
            await files.copy(source.path, destination.path, recursive=is_tree)
        except RpcError as error:
            text = error_text(error, f"{source.path} to {destination.path}")
            print_status(f"{source} to {destination}: {text}")
            return False
        if self._flags.is_verbose:
            _print_action("copy", destination, "")
        return True

    async def _copy_between_targets(self, source: Endpoint, destination: Endpoint) -> bool:
        """Download to a temporary directory and upload: targets cannot reach each other."""
        # With `delete`, which finds nothing there, a source that cannot be listed is refused.
        quiet = CopyFlags({**self._options, "dry_run": False}, is_quiet=self._flags.is_quiet)
        with tempfile.TemporaryDirectory(prefix="exec-server-cp-") as directory:
            local = Endpoint(None, os.path.join(directory, source.name or "content"))
            is_complete = await _Copier(self._connections, quiet)._download(source, local)
            if not await asyncio.to_thread(os.path.lexists, local.path):
                return False
            flags = self._flags
            if not is_complete and self._options["delete"]:
                print_status(f"{destination}: nothing is deleted: not everything was copied")
                flags = replace(flags, options={**self._options, "delete": False})
            copier = _Copier(self._connections, flags)
            return await copier._upload(local, destination, label=source) and is_complete

    async def _upload(
        self, source: Endpoint, destination: Endpoint, label: Endpoint | None = None
    ) -> bool:
        files = (await self._environment(destination)).files
        start = partial(files.upload, source.path, destination.path, check=False, **self._options)
        return await self._transfer(start, label or source, destination, destination)

    async def _download(self, source: Endpoint, destination: Endpoint) -> bool:
        files = (await self._environment(source)).files
        start = partial(files.download, source.path, destination.path, check=False, **self._options)
        return await self._transfer(start, source, destination, source)

    async def _transfer(
        self,
        start: Callable[..., Awaitable[Transfer]],
        label: Endpoint,
        destination: Endpoint,
        remote: Endpoint,
    ) -> bool:
        """Print the errors; whether all was copied. CommandError if all others would fail."""
        local = label if label.target is None else destination
        try:
            with self._progress(label, destination) as update:
                transfer = await start(progress=update)
        except (RpcError, Unsupported, OSError) as error:
            text = await self._describe_error(error, local, remote)
            if is_final(error):
                raise CommandError(text) from None
            print_status(text)
            return False
        self._print_actions(transfer, label, destination)
        for text in transfer.left_out:
            print_status(printable(text))
        for each in transfer.failed:
            print_status(await self._describe_error(each.error, local, remote))
        return not transfer.failed

    def _print_actions(self, transfer: Transfer, source: Endpoint, destination: Endpoint) -> None:
        for each in transfer.planned:
            _print_action(
                each.action, source if each.action == "exclude" else destination, each.path
            )
        if self._flags.is_verbose:
            for path in transfer.deleted:
                _print_action("delete", destination, path)

    async def _describe_error(self, error: Exception, local: Endpoint, remote: Endpoint) -> str:
        """The text of an error, with the path in the form of an argument."""
        if isinstance(error, OSError) and error.strerror and not isinstance(error, ExecServerError):
            return printable(f"{error.filename or local}: {error.strerror}")
        text = error_text(error)
        top = PathResolver((await self._environment(remote)).info).absolute(remote.path)
        top = printable(top)
        if text.startswith((f"{top}: ", f"{top.rstrip('/')}/")):
            return f"{remote}{text[len(top) :]}"
        return f"{remote}: {text}"

    @contextlib.contextmanager
    def _progress(
        self, source: Endpoint, destination: Endpoint
    ) -> Iterator[Callable[[Progress], None] | None]:
        if self._flags.is_verbose:
            yield NamePrinter(destination).update
        elif not self._shows_progress:
            yield None
        else:
            bar = ProgressBar(2, source.name or source.path)
            try:
                yield bar.update
            finally:
                bar.finish()

    async def _environment(self, endpoint: Endpoint) -> Environment:
        assert endpoint.target is not None
        return await self._connections.get(endpoint.target)


class NamePrinter:
    """Prints each file that was copied."""

    def __init__(self, destination: Endpoint) -> None:
        self._destination = destination
        self._files = self._skipped = 0

    def update(self, state: Progress) -> None:
        """Print the file that is complete since the last call, unless it was skipped."""
        if state.done_files > self._files and state.skipped_files == self._skipped:
            _print_action("copy", self._destination, state.path)
        if state.done_files > self._files:
            self._skipped = state.skipped_files
        self._files = state.done_files


def _print_action(action: str, place: Endpoint, path: str) -> None:
    if path and place.path.endswith("/."):  # the content of a directory
        place = Endpoint(place.target, place.path[:-1])
    print_text(f"{action:<8}{printable(str(place.joined(path)))}\n")


@dataclass(frozen=True)
class Endpoint:
    """A source or the destination; local if `target` is None."""

    target: str | None
    path: str

    def __str__(self) -> str:
        return self.path if self.target is None else join_path(self.target, self.path)

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


def check_apart(targets: list[Endpoint]) -> None:
    """Refuse destinations of which one is in another; raises UsageError.

    The copy of one source would delete that of the other.
    """
    places = sorted(posixpath.normpath(each.path).rstrip("/") + "/" for each in targets)
    for first, second in pairwise(places):
        if second.startswith(first):
            raise UsageError(
                f"--delete: two sources are copied to {first}, and each would delete the other; "
                "copy them one by one, to directories of their own"
            )


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
