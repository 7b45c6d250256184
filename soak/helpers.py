"""Scenarios that kill and stop the helper processes of the server, as an operator by mistake."""

import asyncio
import os
import signal
from contextlib import suppress
from random import Random

from soak import footprint
from soak.world import World

# Other scenarios get this much time between two faults, or no confined request would succeed.
_REST_SECONDS = 1.0
# Longer than the server waits for a stopped launcher before it starts another one.
_STOP_SECONDS = 3.0


async def killed_helper(world: World, random: Random) -> None:
    """SIGKILL for the launcher or a worker: the next request finds a new one."""
    async with world.helper_lock:
        helper = await _find(world, random)
        if helper is not None:
            with suppress(ProcessLookupError):
                os.kill(helper.pid, signal.SIGKILL)
            world.tally["helpers killed"] += 1
        await asyncio.sleep(_REST_SECONDS)


async def stopped_helper(world: World, random: Random) -> None:
    """SIGSTOP for the launcher or a worker, and SIGCONT later."""
    async with world.helper_lock:
        helper = await _find(world, random)
        if helper is not None:
            with suppress(ProcessLookupError):
                os.kill(helper.pid, signal.SIGSTOP)
            try:
                world.tally["helpers stopped"] += 1
                await asyncio.sleep(random.uniform(0.2, _STOP_SECONDS))
            finally:
                # A server may have given up on it meanwhile.
                if footprint.processes().get(helper.pid) == helper:
                    with suppress(ProcessLookupError):
                        os.kill(helper.pid, signal.SIGCONT)
        await asyncio.sleep(_REST_SECONDS)


async def _find(world: World, random: Random) -> footprint.Process | None:
    name = random.choice(["exec-launcher", "exec-worker"])
    family = await asyncio.to_thread(footprint.below, world.pid)
    found = [process for process in family if process.name == name]
    return random.choice(found) if found else None
