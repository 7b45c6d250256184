"""Scenarios with a sandbox: commands and file operations, with and without deny patterns.

A helper of the server may be killed or stopped at any moment (see `helpers`). A request may then
fail, but never succeed wrongly; such a failure is counted and the request made again.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from bench.client import uri

from exec_server import ExecServerError, RpcError, SandboxDenied
from soak.accounting import Account, seeded_bytes
from soak.world import World, expect

T = TypeVar("T")
Json = dict[str, Any]

# Times that a request is repeated which failed because a helper was killed.
_ATTEMPTS = 8
_INTERNAL_ERROR = -32603


def _special(kind: str, access: str) -> Json:
    return {"path": {"type": "special", "value": {"kind": kind}}, "access": access}


def _sandbox(workspace: Path, *entries: Json) -> Json:
    file_system = {"type": "restricted", "entries": list(entries)}
    return {
        "permissions": {"type": "managed", "file_system": file_system, "network": "restricted"},
        "windowsSandboxLevel": "disabled",
        "cwd": uri(str(workspace)),
        "workspaceRoots": [uri(str(workspace))],
    }


def writable(workspace: Path) -> Json:
    """Everything can be read, and the workspace written."""
    return _sandbox(workspace, _special("root", "read"), _special("project_roots", "write"))


def _with_pattern(workspace: Path) -> Json:
    pattern = {"type": "glob_pattern", "pattern": f"{workspace}/**/*.secret"}
    return _sandbox(
        workspace,
        _special("root", "read"),
        _special("project_roots", "write"),
        {"path": pattern, "access": "deny"},
    )


def _read_only(workspace: Path) -> Json:
    return _sandbox(workspace, _special("root", "read"))


async def _repeated(world: World, action: Callable[[], Awaitable[T]]) -> T:
    """Make a request again if it failed because a helper was killed meanwhile."""
    for attempt in range(_ATTEMPTS):
        try:
            return await action()
        except RpcError as error:
            if error.code != _INTERNAL_ERROR or attempt == _ATTEMPTS - 1:
                raise
            world.tally["confined requests repeated"] += 1
            await asyncio.sleep(0.2)
    raise AssertionError


def _outside(world: World) -> Path:
    return world.folder / world.name("outside")


async def confined_commands(world: World, random: Random) -> None:
    """Confined commands print every byte and write nothing outside of their workspace."""
    with world.workspace() as folder:
        sandbox = random.choice([writable, _with_pattern])(folder)
        (folder / "a.secret").write_text("secret")
        async with world.environment() as env:
            for _ in range(random.randint(1, 4)):
                size = random.randint(0, 200_000)
                argv, (account,) = world.printing(random, size, piece=8192)
                run = partial(env.run, argv, cwd=folder, sandbox=sandbox)
                result = await _repeated(world, run)
                account.add(result.stdout)
                world.settle(account)
                world.tally["confined requests"] += 1
            await _try_to_escape(world, env, folder, sandbox)


async def _try_to_escape(world: World, env: Any, folder: Path, sandbox: Json) -> None:
    outside = _outside(world)
    script = f"echo in > inside; echo out > {outside}; mkdir .git; cat a.secret; echo done"
    argv = ["sh", "-c", script]
    result = await _repeated(world, lambda: env.run(argv, cwd=folder, sandbox=sandbox))
    world.tally["confined requests"] += 1
    expect(result.stdout.endswith(b"done\n"), f"a confined shell failed: {result.stderr!r}")
    expect((folder / "inside").exists(), "a confined command could not write its workspace")
    expect(not outside.exists(), "a confined command wrote outside of its workspace")
    await covers_gone(folder)
    if "glob_pattern" in str(sandbox):
        expect(b"secret" not in result.stdout, "a confined command read a denied file")


async def read_only_commands(world: World, random: Random) -> None:
    """Commands that may write nothing, in terminals and on pipes, several at once."""
    with world.workspace() as folder:
        sandbox = _read_only(folder)
        data = seeded_bytes(random.getrandbits(32), 30_000)
        (folder / "data").write_bytes(data)

        async def one(env: Any, is_terminal: bool) -> None:
            script = "stty raw -echo; cat data" if is_terminal else "cat data; touch new"
            argv = ["sh", "-c", script]
            result = await _repeated(
                world, lambda: env.run(argv, cwd=folder, sandbox=sandbox, tty=is_terminal)
            )
            account = Account(data)
            world.tally["commands"] += 1
            world.tally["bytes printed"] += len(data)
            world.tally["confined requests"] += 1
            account.add(result.stdout)
            world.settle(account)

        async with world.environment() as env, asyncio.TaskGroup() as tasks:
            for _ in range(random.randint(1, 4)):
                tasks.create_task(one(env, random.random() < 0.3))
        expect(not (folder / "new").exists(), "a read-only command wrote a file")


async def confined_trees(world: World, random: Random) -> None:
    """Trees of processes in a sandbox end with their command, and the covers with them."""
    with world.workspace() as folder:
        sandbox = writable(folder)
        token = world.name("confined-tree")
        argv = world.child("tree", token, "1", "4")

        async def grow() -> None:
            async with env.start(argv, cwd=folder, sandbox=sandbox) as process:
                async for chunk in process:
                    if b"grown" in chunk.data:
                        break
                if random.random() < 0.5:
                    await process.kill()

        async with world.environment() as env:
            await _repeated(world, grow)
            await world.gone(token, "a confined tree after its end")
            world.tally["commands"] += 1
            world.tally["trees killed"] += 1
            world.tally["confined requests"] += 1
        await covers_gone(folder)


async def covers_gone(folder: Path) -> None:
    """Wait until the placeholders of ended commands are removed; .git itself was never made."""
    for _ in range(500):
        left = [name for name in os.listdir(folder) if name.startswith(".")]
        if not left:
            return
        await asyncio.sleep(0.02)
    expect(False, f"placeholders are left: {left}")


async def confined_files(world: World, random: Random) -> None:
    """Confined file operations: right inside, refused outside, patterns obeyed."""
    with world.workspace() as folder:
        has_pattern = random.random() < 0.5
        sandbox = (_with_pattern if has_pattern else writable)(folder)
        (folder / "a.secret").write_text("secret")
        async with world.environment() as env:
            files = env.files.sandboxed(sandbox)
            for number in range(random.randint(1, 6)):
                data = seeded_bytes(random.getrandbits(32), random.choice([0, 3_000, 300_000]))
                path = folder / "sub" / f"file-{number}"
                make = partial(files.mkdir, path.parent, parents=True, exist_ok=True)
                await _repeated(world, make)
                await _repeated(world, partial(files.write, path, data))
                found = await _repeated(world, partial(files.read, path))
                expect(found == data, "a confined file reads differently")
                world.tally["bytes of files"] += len(data)
                world.tally["confined requests"] += 3
            names = {entry.name for entry in await _repeated(world, lambda: files.list(folder))}
            expect({"sub"} <= names, f"a confined directory with {names}")
            outside = _outside(world)
            await _refused(lambda: files.write(outside, b"x"), "a write outside of the workspace")
            expect(not outside.exists(), "a confined write went outside of the workspace")
            await _refused(lambda: files.write(folder / ".git" / "config", b"x"), "a write to .git")
            if has_pattern:
                await _refused(lambda: files.read(folder / "a.secret"), "a read of a denied file")
            world.tally["confined requests"] += 3


async def _refused(action: Callable[[], Awaitable[object]], what: str) -> None:
    try:
        await action()
    except (SandboxDenied, ExecServerError):
        return
    expect(False, f"{what} succeeded")
