"""`exec-server cp`: files and trees between here and targets, or between targets."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import posixpath
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from exec_server.client.environment import Environment
from exec_server.client.results import Progress, Transfer
from exec_server.commands.arguments import access
from exec_server.commands.connection import Connections, reason, run_to_end
from exec_server.commands.failures import FAILED, Failure, Mistake
from exec_server.commands.printing import say
from exec_server.commands.progress import ProgressBar
from exec_server.commands.targets import split_place
from exec_server.errors import NotFound, RpcError


@dataclass(frozen=True)
class _End:
    """A source or the destination; without a target it is here."""

    target: str | None
    path: str

    def __str__(self) -> str:
        return self.path if self.target is None else f"{self.target}:{self.path}"

    @property
    def name(self) -> str:
        """What it is called in another directory; empty if its content is meant."""
        last = self.path.rstrip("/").rpartition("/")[2]
        return "" if last in (".", "..") else last

    def below(self, name: str) -> _End:
        return _End(self.target, posixpath.join(self.path, name) if name else self.path)


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments say; returns the exit code."""
    *sources, destination = [_end(text) for text in arguments.paths]
    if not sources:
        raise Mistake("there is no destination: SOURCE... DESTINATION")
    if all(end.target is None for end in (*sources, destination)):
        raise Mistake("both sides are local; a path on a target is TARGET:PATH")
    shows_progress = not arguments.quiet and os.isatty(2)

    async def work() -> int:
        async with Connections(access(arguments)) as connections:
            copy = _Copy(connections, shows_progress=shows_progress)
            return await copy.all(sources, destination)

    return run_to_end(work)


def _end(text: str) -> _End:
    place = split_place(text)
    if place is None:
        if not text:
            raise Mistake("an empty path names nothing")
        return _End(None, text)
    if place.path is None:
        raise Mistake(f"`{text}` names no path; write {text}:/PATH")
    return _End(place.target, place.path or ".")


class _Copy:
    def __init__(self, connections: Connections, *, shows_progress: bool) -> None:
        self._connections = connections
        self._shows_progress = shows_progress

    async def all(self, sources: list[_End], destination: _End) -> int:
        """Copy every source, whatever becomes of the others; returns the exit code."""
        is_directory = await self._is_directory(destination)
        if not is_directory and (len(sources) > 1 or destination.path.endswith("/")):
            raise Failure(f"{destination} is not a directory")
        code = 0
        for source in sources:
            try:
                await self._one(source, destination.below(source.name if is_directory else ""))
            except (RpcError, OSError) as error:
                say(f"{source}: {_cause(error, source.path)}")
                code = FAILED
        return code

    async def _is_directory(self, end: _End) -> bool:
        if end.target is None:
            return await asyncio.to_thread(os.path.isdir, end.path)
        environment = await self._connections.get(end.target)
        try:
            return (await environment.files.stat(end.path)).is_directory
        except NotFound:
            return False

    async def _one(self, source: _End, destination: _End) -> None:
        if source.target is None and destination.target is None:
            raise Failure(f"{source} and {destination} are both local; use cp")
        if source.target is None:
            await self._upload(source, destination)
        elif destination.target is None:
            await self._download(source, destination)
        elif source.target == destination.target:
            environment = await self._connections.get(source.target)
            is_tree = (await environment.files.stat(source.path)).is_directory
            await environment.files.copy(source.path, destination.path, recursive=is_tree)
        else:
            await self._by_way_of_here(source, destination)

    async def _by_way_of_here(self, source: _End, destination: _End) -> None:
        """Two targets know nothing of each other: all of it passes through a directory of ours."""
        with tempfile.TemporaryDirectory(prefix="exec-server-cp-") as here:
            between = _End(None, os.path.join(here, source.name or "content"))
            await self._download(source, between)
            await self._upload(between, destination)

    async def _upload(self, source: _End, destination: _End) -> None:
        environment = await self._environment(destination)
        with self._progress(source) as update:
            done = await environment.files.upload(source.path, destination.path, progress=update)
        _report(done)

    async def _download(self, source: _End, destination: _End) -> None:
        environment = await self._environment(source)
        with self._progress(source) as update:
            done = await environment.files.download(source.path, destination.path, progress=update)
        _report(done)

    @contextlib.contextmanager
    def _progress(self, source: _End) -> Iterator[Callable[[Progress], None] | None]:
        """A bar while something is copied, or none."""
        if not self._shows_progress:
            yield None
            return
        bar = ProgressBar(2, source.name or source.path)
        try:
            yield bar.update
        finally:
            bar.end()

    async def _environment(self, end: _End) -> Environment:
        assert end.target is not None
        return await self._connections.get(end.target)


def _report(done: Transfer) -> None:
    for text in done.left_out:
        say(text)


def _cause(error: RpcError | OSError, path: str) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename in (None, path) else str(error)
    return reason(error, path)
