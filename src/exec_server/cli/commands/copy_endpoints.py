"""The sources and the destination of cp: paths, patterns on a target, and the standard streams."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from exec_server.cli.commands.connection import Connections, error_text
from exec_server.cli.commands.errors import EXIT_FAILURE, CommandError, UsageError
from exec_server.cli.commands.patterns import find_matches, is_pattern
from exec_server.cli.commands.printing import describe_stdout_errors, print_status
from exec_server.cli.commands.streams import OutputWriter, StdinReader
from exec_server.cli.commands.targets import parse_remote_path, remote_path_example
from exec_server.errors import RpcError


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
    """The sources with patterns on targets replaced by the paths that match; raises CommandError.

    A path that exists is none, whatever characters it has.
    """
    expanded: list[Endpoint] = []
    for source in sources:
        if source.target is None or not is_pattern(source.path):
            expanded.append(source)
            continue
        files = (await connections.get(source.target)).files
        try:
            found = await find_matches(files, source.path)
        except (CommandError, RpcError) as error:
            raise CommandError(f"{source}: {error_text(error, source.path)}") from None
        if not found:
            raise CommandError(f"{source}: no path matches")
        expanded += (Endpoint(source.target, path) for path in found)
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
                with describe_stdout_errors():
                    await writer.write(1, block)
        return 0
    except RpcError as error:
        print_status(f"{remote}: {error_text(error, remote.path)}")
        return EXIT_FAILURE
