"""Our client and its commands against the server of a version: what works.

Each check has a connection of its own, so that one that fails spoils no other.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from exec_server import Environment, connect
from exec_server.errors import ExecServerError, Unsupported
from tests.support.cli import run_client
from tests.support.client import scaled
from tests.versions import places

_SECONDS = 20.0
_FILE_BYTES = 3_000_000


async def _connect(env: Environment, folder: Path) -> None:
    assert env.info.shell.path


async def _run(env: Environment, folder: Path) -> None:
    result = await env.run(["sh", "-c", "cat; echo err >&2; exit 3"], input=b"in")
    assert (result.stdout, result.stderr, result.exit_code) == (b"in", b"err\n", 3)
    large = await env.run(["head", "-c", str(_FILE_BYTES), "/dev/zero"])
    assert (len(large.stdout), large.lost_bytes) == (_FILE_BYTES, 0)


async def _start(env: Environment, folder: Path) -> None:
    words = ["sh", "-c", 'read a; echo "<$a>"; exec sleep 60']
    async with env.start(words, stdin=True) as process:
        await process.write(b"one\n")
        assert await process.read_until(b">\n") == b"<one>\n"
        await process.kill()
        await process.wait()  # the code of a killed process is not the same in all versions


async def _terminal(env: Environment, folder: Path) -> None:
    words = ["sh", "-c", "test -t 0 && stty size; read a; echo hi $a"]
    async with env.start(words, tty=True, size=(40, 120)) as process:
        await process.read_until(b"40 120\r\n")
        await process.write(b"Ann\n")
        await process.read_until(b"hi Ann\r\n")
        assert await process.wait() == 0


async def _files(env: Environment, folder: Path) -> None:
    place = folder / "files"
    await env.files.write(place / "sub" / "a.txt", b"hello", parents=True)
    assert await env.files.read(place / "sub" / "a.txt") == b"hello"
    assert [entry.name for entry in await env.files.list(place)] == ["sub"]
    assert (await env.files.stat(place / "sub" / "a.txt")).size == 5
    await env.files.remove(place, recursive=True)
    assert not await env.files.exists(place)


async def _upload(env: Environment, folder: Path) -> None:
    data = os.urandom(_FILE_BYTES)
    (folder / "here").mkdir()
    (folder / "here" / "large").write_bytes(data)
    await env.files.upload(folder / "here", folder / "there")
    assert (folder / "there" / "large").read_bytes() == data


async def _download(env: Environment, folder: Path) -> None:
    data = os.urandom(_FILE_BYTES)
    (folder / "remote").mkdir()
    (folder / "remote" / "large").write_bytes(data)
    await env.files.download(folder / "remote", folder / "local")
    assert (folder / "local" / "large").read_bytes() == data


_CHECKS: dict[str, Callable[[Environment, Path], Awaitable[None]]] = {
    "connect": _connect,
    "run": _run,
    "start": _start,
    "terminal": _terminal,
    "files": _files,
    "upload": _upload,
    "download": _download,
}


def _exec_command(url: str, folder: Path) -> None:
    ended = run_client("exec", url, "--", "sh", "-c", "echo out; exit 3")
    assert (ended.returncode, ended.stdout) == (3, b"out\n"), ended.stderr.decode()


def _cp_command(url: str, folder: Path) -> None:
    (folder / "from").write_bytes(b"copied")
    ended = run_client("cp", str(folder / "from"), f"{url}:{folder}/to")
    assert ended.returncode == 0, ended.stderr.decode()
    assert (folder / "to").read_bytes() == b"copied"


def _info_command(url: str, folder: Path) -> None:
    ended = run_client("info", url)
    assert ended.returncode == 0, ended.stderr.decode()


_COMMANDS: dict[str, Callable[[str, Path], None]] = {
    "exec": _exec_command,
    "cp": _cp_command,
    "info": _info_command,
}
NAMES = (*_CHECKS, *_COMMANDS)


def check(kind: str) -> tuple[dict[str, str], dict[str, str]]:
    """Check a server; returns why something failed, and what the server is said to lack."""
    failures, lacks = {}, {}
    for name in NAMES:
        with places.folder() as folder, places.server(kind, folder) as server:
            try:
                if name in _CHECKS:
                    asyncio.run(_use(server.url, folder, name))
                else:
                    _COMMANDS[name](server.url, folder)
            except Unsupported as lack:
                lacks[name] = str(lack)
            except (AssertionError, ExecServerError, OSError, TimeoutError) as problem:
                failures[name] = " ".join(str(problem).split())[:300] or repr(problem)
    return failures, lacks


async def _use(url: str, folder: Path, name: str) -> None:
    async with asyncio.timeout(scaled(_SECONDS)), connect(url) as env:
        await _CHECKS[name](env, folder)
