"""Prints the retained output of a detached command, and the output that follows."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from exec_server.cli.commands.connection import open_environment
from exec_server.cli.commands.detached_commands import END, attached
from exec_server.cli.commands.printing import describe_stdout_errors, print_status
from exec_server.cli.commands.streams import OutputWriter
from exec_server.cli.commands.targets import Target
from exec_server.client.detached import DetachedProcess
from exec_server.client.environment import Environment
from exec_server.protocol.process import READ, ReadParams

# Output that is requested at a time.
READ_BYTES: Final = 262_144


async def print_output(target: Target, name: str, *, is_following: bool) -> int:
    """Print the output of a command; returns the exit code of `logs`, not of the command."""
    writer = OutputWriter()
    async with open_environment(target) as environment:
        if is_following:
            async with attached(environment, target, name) as process:
                lost = await _follow(process, writer)
        else:
            async with attached(environment, target, name, after=END) as process:
                lost = await _print_retained(environment, process, writer)
    if lost:
        print_status(f"{lost} bytes of older output are not retained any more")
    return 0


async def _follow(process: DetachedProcess, writer: OutputWriter) -> int:
    """Print to the end of the command; returns the number of bytes that are lost."""
    while chunks := await process.read_some():
        await _write(writer, ((chunk.stream, chunk.data) for chunk in chunks))
    return process.lost_bytes


async def _print_retained(
    environment: Environment, process: DetachedProcess, writer: OutputWriter
) -> int:
    """Print the output up to now; returns the number of bytes that are lost."""
    listed = await environment.detached_processes()
    last = max((each.next_seq - 1 for each in listed if each.name == process.name), default=0)
    after = lost = 0
    while after < last:
        params = ReadParams(process.id, after, READ_BYTES, 0)
        answer = await environment.call(READ, params, is_retryable=True)
        lost += answer.lost_bytes or 0
        if not answer.chunks:
            break
        await _write(writer, ((chunk.stream, chunk.chunk) for chunk in answer.chunks))
        after = answer.chunks[-1].seq
    return lost


async def _write(writer: OutputWriter, chunks: Iterable[tuple[str, bytes]]) -> None:
    for is_error, run in groupby(chunks, lambda chunk: chunk[0] == "stderr"):
        data = b"".join(data for _, data in run)
        with describe_stdout_errors():
            await writer.write(2 if is_error else 1, data)
