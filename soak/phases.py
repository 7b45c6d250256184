"""Parts of a run around its traffic: pings, samples of memory, and commands that never end."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bench.client import uri

from soak import footprint
from soak.confined import covers_gone, writable
from soak.outcome import Outcome
from soak.raw import RawClient, start_params
from soak.world import World

_ROOT = Path(__file__).resolve().parent.parent
_SAMPLE_SECONDS = 0.5


@contextlib.asynccontextmanager
async def probing(world: World, outcome: Outcome) -> AsyncIterator[None]:
    """A process that times single requests during the block; not through a relay."""
    if not world.is_direct:
        yield
        return
    words = [sys.executable, "-m", "soak.probe", world.host, str(world.port)]
    pipe = asyncio.subprocess.PIPE
    probe = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, cwd=_ROOT)
    try:
        yield
        text, _ = await probe.communicate(b"end\n")
        report = json.loads(text)
        outcome.ping_seconds = report["seconds"]
        if report["error"]:
            outcome.violate("ping", report["error"])
    finally:
        if probe.returncode is None:
            probe.kill()
            await probe.wait()


@contextlib.asynccontextmanager
async def sampling(pid: int, outcome: Outcome) -> AsyncIterator[None]:
    """Record the largest resident memory of the server during the block."""

    async def sample() -> None:
        while True:
            outcome.peak_resident = max(outcome.peak_resident, footprint.resident(pid))
            await asyncio.sleep(_SAMPLE_SECONDS)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(sample())
        try:
            yield
        finally:
            task.cancel()


@contextlib.asynccontextmanager
async def busy(world: World) -> AsyncIterator[None]:
    """Commands of every kind that run while the server ends; raises Violation for their covers.

    Through a relay, whose clients would try to come back, the server ends idle.
    """
    if not world.is_direct:
        yield
        return
    with world.workspace() as folder:
        client = await RawClient.open(world)
        where = uri(str(folder))
        try:
            kinds: list[dict[str, Any]] = [
                {},
                {"tty": True},
                {"pipeStdin": True},
                {"sandbox": writable(folder)},
            ]
            for number, more in enumerate(kinds):
                argv = world.child("tree", world.name("busy"), "1", "3")
                params = start_params(f"busy-{number}", argv, where, **more)
                await client.call("process/start", params)
                await client.notification("process/output", processId=f"busy-{number}")
            noise = world.child("print", "1", "50000000", "65536", "0")
            await client.call("process/start", start_params("busy-noise", noise, where))
            yield
        finally:
            client.abort()
        await covers_gone(folder)
