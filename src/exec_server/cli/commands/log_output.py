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
from exec_server.client.environment import Environment
from exec_server.client.process import DetachedProcess
from exec_server.protocol.process import READ, ReadParams

# Output that is requested at a time.
READ_BYTES: Final = 262_144


Output = list[tuple[str, bytes]]  # the stream and the bytes of each chunk


async def print_output(
    target: Target, name: str, *, is_following: bool, lines: int | None = None
) -> int:
    """Print the output of a command, or its last lines; returns the exit code of `logs`."""
    writer = OutputWriter()
    async with open_environment(target) as environment:
        after = lost = 0
        if lines is not None or not is_following:
            async with attached(environment, target, name, after=END) as process:
                output, lost, after = await _retained(environment, process)
            await _write(writer, output if lines is None else last_lines(output, lines))
            lost = 0 if lines is not None else lost
        if is_following:
            async with attached(environment, target, name, after=after) as process:
                lost += await _follow(process, writer)
    if lost:
        print_status(f"{lost} bytes of older output are not retained any more")
    return 0


def last_lines(output: Output, count: int) -> Output:
    """The last lines of an output, of both streams together."""
    kept: Output = []
    missing = count
    is_last = True  # of all: the newline at its end begins no line
    for stream, data in reversed(output):
        end = len(data)
        while missing and (end := data.rfind(b"\n", 0, end)) >= 0:
            missing -= not (is_last and end == len(data) - 1)
        is_last = is_last and not data
        if not missing:
            kept.append((stream, data[end + 1 :] if count else b""))
            break
        kept.append((stream, data))
    return kept[::-1]


async def _follow(process: DetachedProcess, writer: OutputWriter) -> int:
    """Print to the end of the command; returns the number of bytes that are lost."""
    while chunks := await process.read_some():
        await _write(writer, ((chunk.stream, chunk.data) for chunk in chunks))
    return process.lost_bytes


async def _retained(environment: Environment, process: DetachedProcess) -> tuple[Output, int, int]:
    """The output up to now, at most the MiB that servers retain; lost bytes; the last event."""
    listed = await environment.detached_processes()
    last = max((each.next_seq - 1 for each in listed if each.name == process.name), default=0)
    output: Output = []
    after = lost = 0
    while after < last:
        params = ReadParams(process.id, after, READ_BYTES, 0)
        answer = await environment.call(READ, params, is_retryable=True)
        lost += answer.lost_bytes or 0
        if not answer.chunks:
            break
        output += ((chunk.stream, chunk.chunk) for chunk in answer.chunks)
        after = answer.chunks[-1].seq
    return output, lost, after


async def _write(writer: OutputWriter, chunks: Iterable[tuple[str, bytes]]) -> None:
    for is_error, run in groupby(chunks, lambda chunk: chunk[0] == "stderr"):
        data = b"".join(data for _, data in run)
        with describe_stdout_errors():
            await writer.write(2 if is_error else 1, data)
