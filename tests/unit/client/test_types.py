"""What a type checker of a user knows about the client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Unpack, assert_type

import exec_server
from exec_server import CommandDenied, CommandFailed, Process, Result, Timeout, connect, sync
from exec_server.client.transfer.open_file import FileReader, FileWriter
from exec_server.protocol.sandbox import Denial


async def work() -> None:
    async with connect("ws://127.0.0.1:1") as env:
        result = await env.run(["ls", Path("/")], env={"A": "b"}, timeout=3)
        assert_type(result, Result)
        assert_type(result.sandbox_denial, Denial | None)
        async with env.start(["cat"], tty=True, size=(24, 80)) as process:
            assert_type(process, Process)
            async for chunk in process:
                assert_type(chunk.data, bytes)
        assert_type(env.files.open("a"), FileReader)
        assert_type(env.files.open("a", "wb"), FileWriter)
        mode = input()
        assert_type(env.files.open("a", "r", newline=""), exec_server.TextReader)
        async with env.files.open("a", mode, encoding="latin-1") as file:
            await file.write("x")
        assert_type((await env.files.download("a", "b")).failed, tuple[exec_server.NotCopied, ...])
        assert_type((await env.http("GET", "http://x", headers={"a": "b"})).status, int)


async def helper(
    env: exec_server.Environment, /, *argv: str, **options: Unpack[exec_server.RunOptions]
) -> Result:
    return await env.run(argv, **options)


async def pass_options() -> None:
    await helper(connect("ws://127.0.0.1:1"), "make", env={"A": "b"}, timeout=3)


def fail(late: Timeout, failed: CommandFailed, denied: CommandDenied) -> list[Result]:
    assert_type(denied.denial, Denial | None)
    return [late.result, failed.result, denied.result]


def block() -> None:
    sync.connect("ws://127.0.0.1:1", tokne="t")  # type: ignore[call-arg]
    sync.connect("ws://127.0.0.1:1", token=1)  # type: ignore[arg-type]
    sync.serve(token=1)  # type: ignore[arg-type]
    sync.connect("ws://127.0.0.1:1", pin=["ab"], reconnect=True).close()
    with sync.connect("ws://127.0.0.1:1") as env, env.start(["cat"], tty=True) as process:
        assert_type(process, sync.Process)
        assert_type(env.run(["ls"], check=True), Result)
        assert_type(env.files.read("a"), bytes)
        with env.files.open("a", input()) as file:
            file.write("x")
        process.write("text")
        process.write(["text"])  # type: ignore[arg-type]
        env.start(["cat"], ttyy=True)  # type: ignore[call-arg]
"""


def test_a_script_of_a_user_is_understood(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    flags = ["--strict", "--config-file=", "--cache-dir", str(tmp_path / "cache")]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (checked.returncode, checked.stdout[:3000]) == (0, SUCCESS)


SUCCESS = "Success: no issues found in 1 source file\n"
