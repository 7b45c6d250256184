"""Scenarios about files: whole, in blocks, as trees, with watches, and of cut clients."""

import asyncio
import os
from pathlib import Path
from random import Random

from bench.client import uri

from exec_server import RpcError
from soak.accounting import seeded_bytes
from soak.raw import RawClient
from soak.world import World, expect


def _content(world: World, random: Random, largest: int) -> bytes:
    data = seeded_bytes(random.getrandbits(32), random.choice([0, 1, 1_000, 70_000, largest]))
    world.tally["bytes of files"] += len(data)
    return data


async def whole_files(world: World, random: Random) -> None:
    """Write, overwrite, read, copy, list and remove."""
    with world.workspace() as folder:
        async with world.environment() as env:
            data = b""
            for _ in range(random.randint(1, 4)):
                data = _content(world, random, 2_000_000)
                await env.files.write(folder / "file", data)
                expect(await env.files.read(folder / "file") == data, "a file reads differently")
            expect((folder / "file").read_bytes() == data, "a file was written differently")
            await env.files.copy(folder / "file", folder / "copy")
            expect((await env.files.stat(folder / "copy")).size == len(data), "a wrong size")
            names = {entry.name for entry in await env.files.list(folder)}
            expect(names == {"file", "copy"}, f"a directory with {names}")
            await env.files.remove(folder / "copy")
            expect(not await env.files.exists(folder / "copy"), "a removed file exists")
        expect(os.listdir(folder) == ["file"], f"left beside the file: {os.listdir(folder)}")


async def file_blocks(world: World, random: Random) -> None:
    """Files that are open, with several blocks in flight; some are never closed."""
    with world.workspace() as folder:
        data = _content(world, random, 5_000_000)
        (folder / "source").write_bytes(data)
        async with world.environment() as env:
            async with env.files.open(folder / "source") as source:
                found = b"".join([block async for block in source])
            expect(found == data, "a file in blocks reads differently")
            if env.capabilities.file_write_streaming:
                async with env.files.open(folder / "target", "wb") as target:
                    for start in range(0, len(data), 400_000):
                        await target.write(data[start : start + 400_000])
                expect((folder / "target").read_bytes() == data, "blocks were written differently")
            abandoned = env.files.open(folder / "source")
            await abandoned.__aenter__()
            await abandoned.read(10)


def _plant(folder: Path, random: Random, count: int) -> None:
    for number in range(count):
        place = folder / f"d{number % 4}" / f"e{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"f{number}").write_bytes(random.randbytes(random.randint(0, 2_000)))


def _walked(folder: Path) -> set[str]:
    return {str(Path(where, name)) for where, _, names in os.walk(folder) for name in names}


async def walks(world: World, random: Random) -> None:
    """Walk a tree while another client changes a part of it."""
    with world.workspace() as folder:
        _plant(folder / "calm", random, 120)
        (folder / "busy").mkdir()
        expected = _walked(folder / "calm")

        async def disturb() -> None:
            async with world.environment() as other:
                for number in range(30):
                    await other.files.mkdir(folder / "busy" / str(number))
                    await other.files.write(folder / "busy" / str(number) / "x", b"x")
                    await other.files.remove(folder / "busy" / str(number), recursive=True)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(disturb())
            async with world.environment() as env:
                for _ in range(random.randint(1, 5)):
                    found = {
                        entry.path
                        async for entry in env.files.walk(folder, on_error=lambda error: None)
                        if entry.is_file
                    }
                    expect(expected <= found, f"{len(expected - found)} files are missing")


async def transfers(world: World, random: Random) -> None:
    """Upload a tree, download it, compare."""
    with world.workspace() as folder:
        _plant(folder / "here", random, 25)
        (folder / "here" / "large").write_bytes(_content(world, random, 3_000_000))
        async with world.environment() as env:
            await env.files.upload(folder / "here", folder / "there")
            await env.files.download(folder / "there", folder / "back")
        for path in (folder / "here").rglob("*"):
            twin = folder / "back" / path.relative_to(folder / "here")
            same = path.is_dir() or path.read_bytes() == twin.read_bytes()
            expect(same, f"{path.name} has changed on its way")
        names = {path.name for path in folder.rglob("*.part")}
        expect(not names, f"temporary files are left: {names}")


async def half_written(world: World, random: Random) -> None:
    """A client that vanishes while it writes a whole file: the old content or the new one."""
    with world.workspace() as folder:
        old, new = b"o" * 100_000, b"n" * 600_000
        (folder / "file").write_bytes(old)
        client = await RawClient.open(world)
        text = "bm5u" * (len(new) // 3)
        client.request("fs/writeFile", {"path": uri(str(folder / "file")), "dataBase64": text})
        await asyncio.sleep(random.uniform(0, 0.03))
        client.abort()
        world.tally["connections cut"] += 1
        async with world.environment() as env:
            # The server performs or drops the request; afterwards nothing else may be there.
            for _ in range(100):
                found = await env.files.read(folder / "file")
                expect(found in (old, new), f"{len(found)} bytes are neither old nor new")
                if os.listdir(folder) == ["file"]:
                    break
                await asyncio.sleep(0.05)
        expect(os.listdir(folder) == ["file"], f"left beside the file: {os.listdir(folder)}")


async def watches(world: World, random: Random) -> None:
    """Watches of missing paths: each reports once; others are left with their connection."""
    with world.workspace() as folder:
        client = await RawClient.open(world)
        try:
            for number in range(1, random.randint(3, 6)):
                path = folder / f"missing-{number}"
                params = {"watchId": number, "missing": [uri(str(path))]}
                await client.call("fs/watchMissing", params)
                world.tally["watches"] += 1
                if random.random() < 0.6:
                    path.write_text("here")
                    await client.notification("fs/missingChanged", watchId=number)
        finally:
            client.abort()


async def errors(world: World, random: Random) -> None:
    """Requests that must fail do so, and the connection goes on."""
    with world.workspace() as folder:
        async with world.environment() as env:
            for path in (folder / "missing", folder / "missing" / "deep"):
                try:
                    await env.files.read(path)
                    expect(False, "a missing file was read")
                except RpcError:
                    pass
            try:
                await env.run(["no-such-program-anywhere"])
                expect(False, "a missing program was started")
            except RpcError:
                pass
            expect((await env.run(["true"])).exit_code == 0, "`true` failed after errors")
