"""Scenarios about commands: output, input, terminals, kills and trees of processes."""

import asyncio
import hashlib
from random import Random

from exec_server import Chunk, Process, Timeout
from soak.accounting import Account, seeded_bytes
from soak.world import World, expect

# The largest output of one command: several times what a server keeps of it (1 MiB).
LARGE_BYTES = 4 * 1024 * 1024


def add_output(chunk: Chunk, accounts: list[Account]) -> None:
    """Enter a chunk into the account of its stream."""
    accounts[chunk.stream == "stderr"].add(chunk.data, chunk.lost_before)


async def read_all(process: Process, accounts: list[Account]) -> None:
    """Read a process to the end of its output."""
    async for chunk in process:
        add_output(chunk, accounts)


async def small_output(world: World, random: Random) -> None:
    """Several short commands on one connection, on both streams, with an exit code."""
    async with world.environment() as env:
        for _ in range(random.randint(1, 6)):
            argv, accounts = world.printing(
                random, random.randint(0, 20_000), piece=random.choice([1000, 8192]), errors=500
            )
            result = await env.run(argv)
            accounts[0].add(result.stdout)
            accounts[1].add(result.stderr)
            expect(result.exit_code == 0, f"exit code {result.exit_code}")
            world.settle(*accounts)
        code = random.randint(0, 255)
        result = await env.run(["sh", "-c", f"exit {code}"])
        world.tally["commands"] += 1
        expect(result.exit_code == code, f"exit code {result.exit_code} instead of {code}")


async def parallel_output(world: World, random: Random) -> None:
    """Many commands at once on one connection, each with an account of its own."""
    async with world.environment() as env, asyncio.TaskGroup() as tasks:

        async def one() -> None:
            argv, accounts = world.printing(random, random.randint(1, 100_000), piece=4096)
            result = await env.run(argv)
            accounts[0].add(result.stdout)
            world.settle(*accounts)

        for _ in range(random.randint(2, 8)):
            tasks.create_task(one())


async def large_output(world: World, random: Random) -> None:
    """Megabytes on stdout and stderr at once, read as fast as possible."""
    argv, accounts = world.printing(
        random, random.randint(LARGE_BYTES // 8, LARGE_BYTES), errors=random.randint(0, 300_000)
    )
    async with world.environment() as env, env.start(argv) as process:
        await read_all(process, accounts)
        expect(await process.wait() == 0, f"exit code {process.exit_code}")
    world.settle(*accounts)


async def slow_reader(world: World, random: Random) -> None:
    """Megabytes for a client that pauses while it reads: the command has to wait."""
    argv, accounts = world.printing(random, random.randint(LARGE_BYTES // 4, LARGE_BYTES))
    async with world.environment() as env, env.start(argv) as process:
        pauses = 10
        async for chunk in process:
            add_output(chunk, accounts)
            if pauses and random.random() < 0.05:
                pauses -= 1
                await asyncio.sleep(random.uniform(0.01, 0.2))
    world.settle(*accounts)


async def trickle(world: World, random: Random) -> None:
    """Many small writes with pauses."""
    size = random.randint(1_000, 5_000)
    argv, accounts = world.printing(random, size, piece=random.randint(50, 200), pause=0.02)
    async with world.environment() as env, env.start(argv) as process:
        await read_all(process, accounts)
    world.settle(*accounts)


async def killed_output(world: World, random: Random) -> None:
    """A command that is killed while it prints: every byte up to that moment is right."""
    argv, accounts = world.printing(random, LARGE_BYTES, piece=8192, pause=0.002)
    way = random.choice(["terminate", "signal", "leave", "timeout"])
    async with world.environment() as env:
        if way == "timeout":
            try:
                await env.run(argv, timeout=random.uniform(0.05, 0.4))
                expect(False, "a command with a timeout was not killed")
            except Timeout as late:
                accounts[0].add(late.result.stdout)
        else:
            async with env.start(argv) as process:
                async for chunk in process:
                    add_output(chunk, accounts)
                    if accounts[0].received > 50_000:
                        break
                if way == "terminate":
                    await process.kill()
                elif way == "signal":
                    await process.signal("KILL")
                if way != "leave":
                    await read_all(process, accounts)
                    expect(process.exit_code == 137, f"exit code {process.exit_code} after a kill")
    world.tally["commands killed"] += 1
    world.settle(*accounts, abandoned=True)


async def stdin(world: World, random: Random) -> None:
    """Input of any size through a command, which prints it: compared by checksum."""
    data = seeded_bytes(random.getrandbits(32), random.choice([0, 1, 5_000, 300_000, 1_500_000]))
    async with world.environment() as env:
        result = await env.run(world.child("copy"), input=data)
    world.tally["commands"] += 1
    world.tally["bytes printed"] += len(data)
    world.tally["bytes received"] += len(result.stdout)
    same = hashlib.sha256(result.stdout).digest() == hashlib.sha256(data).digest()
    expect(same, f"{len(result.stdout)} bytes came back of {len(data)}")


async def unread_stdin(world: World, random: Random) -> None:
    """Input for a command that reads only its beginning: the writer stops or is told."""
    wanted = random.randint(0, 60_000)
    data = seeded_bytes(random.getrandbits(32), 900_000)
    async with world.environment() as env:
        result = await env.run(world.child("count", str(wanted)), input=data)
        expect(result.stdout == data[:wanted], "the beginning of the input is wrong")
    world.tally["commands"] += 1
    world.tally["bytes printed"] += wanted
    world.tally["bytes received"] += wanted


async def terminal(world: World, random: Random) -> None:
    """A terminal without line editing carries every byte; its size changes meanwhile."""
    argv, accounts = world.printing(random, random.randint(1_000, 400_000), piece=4096)
    shell = ["sh", "-c", 'stty raw -echo; exec "$@"', "sh", *argv]
    async with world.environment() as env, env.start(shell, tty=True, size=(24, 80)) as process:
        async for chunk in process:
            add_output(chunk, accounts)
            if env.capabilities.process_resize and random.random() < 0.1:
                await process.resize(random.randint(1, 300), random.randint(1, 300))
    world.settle(*accounts)


async def terminal_session(world: World, random: Random) -> None:
    """A shell in a terminal: lines in, output out, Ctrl-D."""
    async with world.environment() as env, env.start(["sh"], tty=True) as process:
        await process.write(b"stty -echo; PS1=; echo ready$((1+1))\n")
        await _read_until(process, b"ready2")
        for _ in range(random.randint(1, 5)):
            number = random.randint(0, 10**9)
            await process.write(f"echo =$(({number}+1))=\n".encode())
            await _read_until(process, f"={number + 1}=".encode())
        await process.close_stdin()
        expect(await process.wait() == 0, f"the shell ended with {process.exit_code}")
    world.tally["commands"] += 1


async def _read_until(process: Process, mark: bytes) -> None:
    seen = b""
    async for chunk in process:
        seen += chunk.data
        if mark in seen:
            return
    expect(False, f"the output ended before {mark!r}: {seen[-200:]!r}")


async def tree(world: World, random: Random) -> None:
    """A tree of processes with daemons in sessions of their own: a kill ends all of them."""
    token = world.name("tree")
    depth, width = random.choice([(1, 3), (1, 6), (2, 3)])
    way = random.choice(["terminate", "leave", "disconnect"])
    argv = world.child("tree", token, str(depth), str(width))
    async with world.environment() as env:
        async with env.start(argv) as process:
            await _read_until(process, b"grown")
            if way == "terminate":
                await process.kill()
                await world.gone(token, "a tree after process/terminate")
        if way == "leave":
            await world.gone(token, "a tree after its process was left")
    await world.gone(token, "a tree after its client has left")
    world.tally["commands"] += 1
    world.tally["trees killed"] += 1


async def stubborn(world: World, random: Random) -> None:
    """A command that ignores polite signals is killed too."""
    token = world.name("stubborn")
    async with world.environment() as env, env.start(world.child("stubborn", token)) as process:
        await _read_until(process, b"grown")
        if env.capabilities.process_signals:
            await process.signal(random.choice(["TERM", "HUP", "INT"]))
        await process.kill()
        await world.gone(token, "a stubborn command after process/terminate")
    world.tally["commands"] += 1
    world.tally["commands killed"] += 1
