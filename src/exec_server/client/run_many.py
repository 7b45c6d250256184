"""run_many: several commands, some of them at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypedDict, TypeVar

from exec_server.client.arguments import AnyNetworkProxy, AnySandbox
from exec_server.client.collected_output import OutputLimit
from exec_server.client.output_delivery import OnOutput, Target
from exec_server.client.paths import AnyPath
from exec_server.client.results import Result, RunProgress

T = TypeVar("T")

# Enough to hide the latency of a connection, without starting more than a small machine bears.
CONCURRENCY: Final = 8


class RunOptions(TypedDict, total=False):
    """The options of Environment.run, for the methods that pass them on."""

    cwd: AnyPath | None
    env: Mapping[str, AnyPath] | None
    clean_env: bool
    timeout: float | None
    input: bytes | None
    sandbox: AnySandbox | None
    tty: bool
    merge_stderr: bool
    user: str | int | None
    network_proxy: AnyNetworkProxy | None
    check: bool
    output_limit: int | OutputLimit
    leave_running: bool
    on_output: OnOutput | None
    stdout: Target | None
    stderr: Target | None


async def run_many(
    run: Callable[[T], Awaitable[Result]],
    commands: Sequence[T],
    *,
    concurrency: int,
    progress: Callable[[RunProgress], None] | None,
) -> list[Result]:
    """Run all commands, at most `concurrency` at a time; see Environment.run_many."""
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    results: dict[int, Result] = {}
    waiting = iter(enumerate(commands))
    failures: list[Exception] = []

    async def work() -> None:
        for index, command in waiting:
            try:
                result = results[index] = await run(command)
                if progress is not None:
                    progress(RunProgress(len(results), len(commands), index, result))
            except Exception as error:
                failures.append(error)
                raise

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(commands))):
                tasks.create_task(work())
    except BaseExceptionGroup:
        if not failures:
            raise
        raise failures[0] from None  # the others were cancelled, or failed after it
    return [results[index] for index in range(len(commands))]
