"""`exec-server cp`: files and trees between here and targets, or between targets."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import posixpath
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from exec_server.client.environment import Environment
from exec_server.client.places import Places
from exec_server.client.results import Progress, Transfer
from exec_server.client.transfer import is_final
from exec_server.commands.arguments import access
from exec_server.commands.connection import Connections, reason, run_to_end
from exec_server.commands.failures import FAILED, Failure, Mistake
from exec_server.commands.printing import say
from exec_server.commands.progress import ProgressBar, printable
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
            below = destination.below(source.name if is_directory else "")
            if not await self._one(source, below):
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
        except RpcError as error:
            raise Failure(f"{end}: {reason(error, end.path)}") from None

    async def _one(self, source: _End, destination: _End) -> bool:
        """Copy a source; whether all of it was."""
        if source.target is None and destination.target is None:
            raise Failure(f"{source} and {destination} are both local; use cp")
        if source.target is None:
            return await self._upload(source, destination)
        if destination.target is None:
            return await self._download(source, destination)
        if source.target == destination.target:
            return await self._copy_there(source, destination)
        return await self._by_way_of_here(source, destination)

    async def _copy_there(self, source: _End, destination: _End) -> bool:
        files = (await self._environment(source)).files
        try:
            is_tree = (await files.stat(source.path)).is_directory
        except RpcError as error:
            _say(f"{source}: {reason(error, source.path)}")
            return False
        try:
            await files.copy(source.path, destination.path, recursive=is_tree)
        except RpcError as error:
            text = reason(error, f"{source.path} to {destination.path}")
            _say(f"{source} to {destination}: {text}")
            return False
        return True

    async def _by_way_of_here(self, source: _End, destination: _End) -> bool:
        """Two targets know nothing of each other: all of it passes through a directory of ours."""
        with tempfile.TemporaryDirectory(prefix="exec-server-cp-") as here:
            between = _End(None, os.path.join(here, source.name or "content"))
            is_complete = await self._download(source, between)
            if not await asyncio.to_thread(os.path.lexists, between.path):
                return False
            return await self._upload(between, destination, shown=source) and is_complete

    async def _upload(self, source: _End, destination: _End, shown: _End | None = None) -> bool:
        environment = await self._environment(destination)
        with self._progress(shown or source) as update:
            copy = environment.files.upload(
                source.path, destination.path, progress=update, check=False
            )
            outcome = await self._outcome(copy, source, destination)
        return await self._report(outcome, source, destination)

    async def _download(self, source: _End, destination: _End) -> bool:
        environment = await self._environment(source)
        with self._progress(source) as update:
            copy = environment.files.download(
                source.path, destination.path, progress=update, check=False
            )
            outcome = await self._outcome(copy, destination, source)
        return await self._report(outcome, destination, source)

    async def _outcome(
        self, copy: Awaitable[Transfer], here: _End, there: _End
    ) -> Transfer | RpcError | OSError:
        """What becomes of a transfer; raises Failure if there is no use in any other."""
        try:
            return await copy
        except (RpcError, OSError) as error:
            if is_final(error):
                raise Failure(await self._words(error, here, there)) from None
            return error

    async def _report(self, done: Transfer | RpcError | OSError, here: _End, there: _End) -> bool:
        """Say what there is to say of a transfer; whether all was copied."""
        if not isinstance(done, Transfer):
            _say(await self._words(done, here, there))
            return False
        for text in done.left_out:
            _say(text)
        for each in done.failed:
            _say(await self._words(each.error, here, there))
        return not done.failed

    async def _words(self, error: Exception, here: _End, there: _End) -> str:
        """An error of a transfer, with the path as the user would write it, on whichever side."""
        if isinstance(error, OSError) and error.strerror:
            return f"{error.filename or here}: {error.strerror}"
        text = reason(error)
        top = Places((await self._environment(there)).info).absolute(there.path)
        if text.startswith((f"{top}: ", f"{top.rstrip('/')}/")):
            return f"{there.target}:{there.path}{text[len(top) :]}"
        return f"{there}: {text}"

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


def _say(text: str) -> None:
    """Names may be anything, and a terminal would obey them."""
    say(printable(text) if os.isatty(2) else text)
