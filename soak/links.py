"""Scenarios about links: cuts in mid message, resumed sessions, stalls, pollers, crowds, HTTP."""

import asyncio
from random import Random
from typing import Any

from bench.client import uri

from exec_server import ConnectionLost, ExecServerError
from soak.accounting import Account, seeded_bytes
from soak.commands import LARGE_BYTES, read_all
from soak.cutter import cutting
from soak.raw import RawClient, Refused, decoded, start_params
from soak.world import World, expect


async def cut_output(world: World, random: Random) -> None:
    """A client whose connections are reset while a command prints; it resumes each time."""
    argv, accounts = world.printing(
        random, random.randint(200_000, LARGE_BYTES), piece=8192, pause=random.choice([0, 0.001])
    )
    async with cutting(world.host, world.port, random, random.randint(1, 4)) as cutter:
        async with world.environment(cutter.url) as env, env.start(argv) as process:
            await read_all(process, accounts)
            expect(await process.wait() == 0, f"exit code {process.exit_code}")
        world.tally["connections cut"] += cutter.cuts
    world.settle(*accounts)


async def cut_input(world: World, random: Random) -> None:
    """Input through connections that are reset: each byte arrives once and in order."""
    data = seeded_bytes(random.getrandbits(32), random.randint(100_000, 900_000))
    async with cutting(world.host, world.port, random, random.randint(1, 3)) as cutter:
        async with world.environment(cutter.url) as env:
            result = await env.run(world.child("copy"), input=data)
        world.tally["connections cut"] += cutter.cuts
    world.tally["commands"] += 1
    world.tally["bytes printed"] += len(data)
    account = Account(data)
    if result.lost_bytes:  # the places of the gaps are not in the result
        account.received = len(result.stdout)
        account.lose(result.lost_bytes)
    else:
        account.add(result.stdout)
    world.settle(account)


async def cut_files(world: World, random: Random) -> None:
    """Files through connections that are reset: right content or ConnectionLost."""
    with world.workspace() as folder:
        data = seeded_bytes(random.getrandbits(32), 500_000)
        world.tally["bytes of files"] += len(data)
        async with cutting(world.host, world.port, random, random.randint(1, 3)) as cutter:
            async with world.environment(cutter.url) as env:
                for number in range(4):
                    path = folder / f"file-{number}"
                    try:
                        await env.files.write(path, data)
                        expect(await env.files.read(path) == data, "a file reads differently")
                    except ConnectionLost:
                        world.tally["calls lost with a connection"] += 1
            world.tally["connections cut"] += cutter.cuts
        whole = [path.read_bytes() == data for path in folder.iterdir() if path.suffix == ""]
        expect(all(whole), "a file was written differently")


async def resumed_session(world: World, random: Random) -> None:
    """A session that moves from connection to connection; its command goes on printing."""
    size = random.randint(50_000, 600_000)
    argv, (account,) = world.printing(random, size, piece=4096, pause=0.005)
    process_id = world.name("resumed")
    client = await RawClient.open(world)
    try:
        await client.call("process/start", start_params(process_id, argv, uri(str(world.folder))))
        after, closed = 0, False
        while not closed:
            for _ in range(random.randint(1, 10)):
                result = await _read(client, process_id, after, random)
                _enter(result, account)
                after, closed = result["nextSeq"] - 1, result["closed"] and not result["chunks"]
                if closed:
                    break
            else:
                session = client.session_id
                client.abort()
                world.tally["connections cut"] += 1
                client = await _resume(world, session)
    finally:
        client.abort()
    world.settle(account)


async def _resume(world: World, session: str) -> RawClient:
    """Resume a session; a server may notice the loss of the old connection a little later."""
    for attempt in range(50):
        try:
            client = await RawClient.open(world, session)
            world.tally["sessions resumed"] += 1
            return client
        except Refused as refused:
            if attempt == 49 or "unknown session" in refused.message:
                raise
            await asyncio.sleep(0.1)
    raise AssertionError


async def poller(world: World, random: Random) -> None:
    """A client that polls with process/read alone, too slowly for some commands."""
    size = random.choice([10_000, 300_000, LARGE_BYTES])
    argv, (account,) = world.printing(random, size, piece=random.choice([1000, 8192, 65_536]))
    process_id = world.name("polled")
    client = await RawClient.open(world)
    try:
        await client.call("process/start", start_params(process_id, argv, uri(str(world.folder))))
        after, closed = 0, False
        while not closed:
            result = await _read(client, process_id, after, random)
            _enter(result, account)
            after, closed = result["nextSeq"] - 1, result["closed"] and not result["chunks"]
            client.notifications.clear()
            if random.random() < 0.1:
                await asyncio.sleep(0.02)
    finally:
        await client.close()
    world.settle(account)


async def _read(client: RawClient, process_id: str, after: int, random: Random) -> dict[str, Any]:
    params = {"processId": process_id, "afterSeq": after, "waitMs": random.choice([0, 50, 500])}
    if random.random() < 0.3:
        params["maxBytes"] = random.choice([1, 5_000, 100_000])
    found: dict[str, Any] = await client.call("process/read", params)
    return found


def _enter(result: dict[str, Any], account: Account) -> None:
    lost = result.get("lostBytes") or 0
    for chunk in result["chunks"]:
        account.add(decoded(chunk["chunk"]), lost)
        lost = 0
    account.lose(lost)


async def stalled_client(world: World, random: Random) -> None:
    """A client that does not read for a while, with a command that prints megabytes.

    Afterwards it reads everything, or is gone.
    """
    argv, (account,) = world.printing(random, random.randint(LARGE_BYTES // 2, LARGE_BYTES))
    process_id = world.name("stalled")
    client = await RawClient.open(world)
    try:
        params = start_params(process_id, argv, uri(str(world.folder)))
        await client.call("process/start", params)
        # Requests pile up as well, and their answers with them.
        for _ in range(random.choice([0, 0, 200])):
            client.request("environment/info", {})
        await asyncio.sleep(random.uniform(0.2, 3.0))
        if random.random() < 0.4:
            world.tally["connections cut"] += 1
            world.settle(account, abandoned=True)
            return
        while True:
            found = await client.receive()
            if found.get("method") == "process/output":
                account.add(decoded(found["params"]["chunk"]))
            elif found.get("method") == "process/closed":
                break
    finally:
        client.abort()
    world.settle(account)


async def vanished_client(world: World, random: Random) -> None:
    """A client with running commands whose connection is reset in the middle of a message."""
    token = world.name("vanished")
    folder = uri(str(world.folder))
    client = await RawClient.open(world)
    try:
        argv = world.child("tree", token, "1", "3")
        await client.call("process/start", start_params(f"{token}-tree", argv, folder))
        argv, (account,) = world.printing(random, LARGE_BYTES, pause=0.001)
        await client.call("process/start", start_params(f"{token}-noise", argv, folder))
        half = b'{"id":99,"method":"fs/writeFile","params":{"path":"file:///'
        client.send_bytes(b"\x81\xfe\x40\x00" + bytes(4) + half)
        await asyncio.sleep(random.uniform(0, 0.1))
    finally:
        client.abort()
    world.tally["connections cut"] += 1
    world.tally["commands"] += 1
    world.settle(account, abandoned=True)


async def crowd(world: World, random: Random) -> None:
    """Many connections at once; most of them leave without a word."""
    clients = []
    try:
        for _ in range(random.randint(10, 40)):
            opening = RawClient.open if random.random() < 0.7 else RawClient.connect
            clients.append(await opening(world))
        for client in random.sample(clients, len(clients) // 3):
            if client.session_id:
                await client.call("environment/status", {})
    finally:
        for client in clients:
            client.abort()


async def garbage(world: World, random: Random) -> None:
    """Bytes that are no message, or not the right one; the server refuses or closes."""
    client = await RawClient.open(world)
    try:
        for _ in range(random.randint(1, 20)):
            choice = random.randrange(4)
            if choice == 0:
                client.send_bytes(b"\x81\x85" + bytes(4) + b'{"id"')
            elif choice == 1:
                client.send({"id": random.randint(-5, 5), "method": "no/such", "params": None})
            elif choice == 2:
                client.send({"id": "x", "method": "process/start", "params": {"processId": 7}})
            else:
                client.send_bytes(random.randbytes(random.randint(1, 200)))
        try:
            async with asyncio.timeout(0.2):
                while True:
                    await client.receive()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
    finally:
        client.abort()


async def http(world: World, random: Random) -> None:
    """HTTP requests through the server: whole, streamed, cut by their origin, abandoned."""
    async with world.environment() as env:
        for _ in range(random.randint(1, 4)):
            seed, size = random.getrandbits(32), random.choice([0, 500, 60_000, 900_000])
            form = random.choice(["length", "chunked", "cut"])
            url = f"{world.origin}/{form}/{seed}/{size}"
            body, found = seeded_bytes(seed, size), b""
            world.tally["HTTP requests"] += 1
            try:
                if random.random() < 0.5:
                    found = (await env.http("GET", url)).body
                else:
                    async with env.http_stream("GET", url) as response:
                        async for piece in response:
                            found += piece
                            if random.random() < 0.02:
                                break
                        else:
                            expect(form == "cut" or found == body, "a streamed body differs")
                    found = body if body.startswith(found) else found
                expect(found == body, "an HTTP body differs")
            except ExecServerError as error:
                expect(form == "cut", f"an HTTP request failed: {error}")
