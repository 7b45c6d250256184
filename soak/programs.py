"""Scenarios with whole programs: the blocking client, the command line, a server on pipes."""

import asyncio
import hashlib
import os
import signal
import sys
from contextlib import suppress
from random import Random

from exec_server import Environment, ExecServerError, sync
from soak import footprint
from soak.accounting import seeded_bytes
from soak.world import World, expect

_COMMAND = [sys.executable, "-m", "exec_server"]


async def blocking_client(world: World, random: Random) -> None:
    """The client without async, in a thread of its own."""
    argv, (account,) = world.printing(random, random.randint(0, 200_000))
    with world.workspace() as folder:

        def use() -> bytes:
            with sync.connect(world.url) as env:
                env.files.write(folder / "file", b"content")
                expect(env.files.read(folder / "file") == b"content", "a file reads differently")
                return env.run(argv).stdout

        world.tally["clients"] += 1
        account.add(await asyncio.to_thread(use))
    world.settle(account)


async def exec_command(world: World, random: Random) -> None:
    """`exec-server exec`, with input and output, or killed in the middle."""
    seed, size = random.getrandbits(32), random.randint(0, 1_000_000)
    is_killed = random.random() < 0.3
    argv = world.child("print", str(seed), str(size), "8192", "0.01" if is_killed else "0")
    command = [*_COMMAND, "exec", world.url, "--", *argv]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    world.tally["commands"] += 1
    world.tally["programs"] += 1
    assert process.stdout is not None
    try:
        if is_killed:
            await process.stdout.read(100)
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()  # asyncio sees the end of a process after its output
            world.tally["clients killed"] += 1
            return
        found = await process.stdout.read()
        expect(await process.wait() == 0, f"`exec-server exec` ended with {process.returncode}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    same = hashlib.sha256(found).digest() == hashlib.sha256(seeded_bytes(seed, size)).digest()
    world.tally["bytes printed"] += size
    world.tally["bytes received"] += len(found)
    expect(same, f"`exec-server exec` printed {len(found)} bytes of {size}")


async def copy_command(world: World, random: Random) -> None:
    """`exec-server cp` there and back, by checksum; some are killed and repeated."""
    with world.workspace() as folder:
        data = seeded_bytes(random.getrandbits(32), random.choice([10, 50_000, 5_000_000]))
        (folder / "here").write_bytes(data)
        world.tally["bytes of files"] += 2 * len(data)
        there = f"{world.url}:{folder}/there"
        if random.random() < 0.3:
            await _copy(world, str(folder / "here"), there, kill_after=random.uniform(0.1, 0.8))
        expect(await _copy(world, str(folder / "here"), there) == 0, "`exec-server cp` failed")
        expect(await _copy(world, there, str(folder / "back")) == 0, "`exec-server cp` failed")
        same = hashlib.sha256((folder / "back").read_bytes()).digest()
        expect(same == hashlib.sha256(data).digest(), "a copied file differs")


async def _copy(world: World, source: str, target: str, kill_after: float | None = None) -> int:
    process = await asyncio.create_subprocess_exec(*_COMMAND, "cp", "-q", source, target)
    world.tally["programs"] += 1
    try:
        async with asyncio.timeout(kill_after):
            return await process.wait()
    except TimeoutError:
        world.tally["clients killed"] += 1
        return -signal.SIGKILL
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def server_on_pipes(world: World, random: Random) -> None:
    """A server that a client has started on pipes; killed or not, nothing of it is left."""
    token = world.name("pipes")
    tree = world.child("tree", token, "1", "3")
    try:
        async with Environment.local(env={**os.environ, "SOAK_PIPES": token}) as env:
            argv, (account,) = world.printing(random, random.randint(0, 100_000))
            account.add((await env.run(argv)).stdout)
            world.settle(account)
            async with env.start(tree) as process:
                async for chunk in process:
                    if b"grown" in chunk.data:
                        break
                if random.random() < 0.5:
                    await _kill_server(token)
                    world.tally["servers killed"] += 1
    except ExecServerError:
        pass  # a killed server cannot say good-bye
    await world.gone(token, "a tree after its server has ended")


async def _kill_server(token: str) -> None:
    """SIGKILL for the server, which is the direct child of this program."""
    for process in await asyncio.to_thread(footprint.with_token, token):
        if process.parent == os.getpid() and process.name not in footprint.HELPERS:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
