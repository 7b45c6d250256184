"""Runs parts as on another system: `python -m tests.support.elsewhere PART SYSTEM ...`.

`client SYSTEM URL DIR` prints one line for each part of the client that works; the test compares
the lines. `command SYSTEM WORDS` is an exec-server command. `imports SYSTEM NAMES` imports modules,
a package with all modules below it, and prints those that need another system. SYSTEM is `darwin`
or `win32`, URL that of a running server, DIR an empty directory.
"""

from __future__ import annotations

import asyncio
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path, PureWindowsPath
from typing import Any, NoReturn

from tests.support import other_system

_LISTEN = """exec python3 -c '
import socket
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
listening.accept()[0].sendall(b"page")
'"""
_ECHO = 'read a; echo "<$a>"; read a; echo "<$a>"; exec sleep 60'


async def _drive(connect: Any, url: str, directory: Path) -> None:
    async with connect(url) as env:
        result = await env.run(["sort"], input=b"b\na\n", check=True)
        print("run", result.text.split())
        await env.run(["echo", "kept"], stdout=directory / "output")
        print((directory / "output").read_bytes())
        async with env.start(["sh", "-c", _ECHO], stdin=True) as one:
            await one.write(b"x\n")
            async for chunk in one:
                print("chunk", chunk.data)
                break
            await one.write(b"y\n")
            print("until", await one.read_until(b">", timeout=30))
            await one.signal(1)
            print("exit code", await one.wait())
        files = env.files
        remote = str(directory / "remote")
        await files.mkdir(f"{remote}/sub", parents=True)
        await files.write(PureWindowsPath(remote) / "sub" / "f", b"\0\r\n")
        print("read", await files.read(f"{remote}/sub/f"))
        try:
            await files.remove(remote)
        except OSError as error:
            print("error", type(error).__name__, error.errno)
        await _search(env, remote)
        await _attach(env, directory.name)
        await _forward(env)
        await _copy(env, directory, remote)


async def _search(env: Any, remote: str) -> None:
    async with env.files.watch(remote, recursive=True) as changes:
        await env.files.write_text(f"{remote}/sub/g", "one\ntwo\n")
        async for change in changes:
            if change.path == "sub/g":
                print("changed", change.path)
                break
    print("found", [match.text for match in await env.files.grep("tw.", root=remote)])


async def _attach(env: Any, name: str) -> None:
    await env.start(["echo", "detached"], detach=True, name=name)
    async with env.attach(name) as process:
        print("attached", b"".join([chunk.data async for chunk in process]))


async def _forward(env: Any) -> None:
    async with env.start(["sh", "-c", _LISTEN]) as server:
        port = int((await server.wait_for_output(re.compile(rb"\d+\n"), timeout=30)).strip())
        async with env.forward_port(port) as local:
            reader, writer = await asyncio.open_connection("127.0.0.1", local.port)
            print("forwarded", await reader.read())
            writer.close()
            await writer.wait_closed()


async def _copy(env: Any, directory: Path, remote: str) -> None:
    here = directory / "here"
    (here / "below").mkdir(parents=True)
    (here / "below" / "small").write_bytes(b"line\r\n" * 3)
    (here / "large").write_bytes(bytes(range(256)) * 16_384)  # in blocks, beside a temporary file
    done = await env.files.upload(here, f"{remote}/tree")
    print("uploaded", done.files, done.directories, done.left_out, done.failed)
    for _ in range(2):  # the second one replaces all files
        done = await env.files.download(f"{remote}/tree", directory / "back")
        print("downloaded", done.files, done.directories, done.left_out, done.failed)
    for name in ("below/small", "large"):
        print(name, (directory / "back" / name).read_bytes() == (here / name).read_bytes())
    print("left over", sorted(path.name for path in (directory / "back").rglob(".*")))


def _drive_without_async(sync: Any, url: str, directory: Path) -> None:
    with sync.connect(url) as env:
        print("sync", env.run(["echo", "hello"]).text.strip())
        with env.start(["seq", "3"]) as process:
            print("sync", b"".join(chunk.data for chunk in process).split())
        env.files.write(f"{directory}/one", b"1")
        print("sync", env.files.read(f"{directory}/one"))
        env.files.download(f"{directory}/one", directory / "two")
        print("sync", (directory / "two").read_bytes())


async def _use_program(connect: Any) -> None:
    """A server over the standard streams of a program, as `stdio:ssh host exec-server`."""
    program = f"stdio:{sys.executable} -m exec_server --listen stdio"
    async with connect(program) as env:
        print("stdio", (await env.run(["echo", "there"])).text.strip())


def drive_client(url: str, where: str) -> None:
    import exec_server
    from exec_server import sync
    from exec_server.host import event_loop

    directory = Path(where)
    with asyncio.Runner(loop_factory=event_loop.new_event_loop) as runner:
        print("loop", type(runner.get_loop()).__name__)
        runner.run(_drive(exec_server.connect, url, directory))
        runner.run(_use_program(exec_server.connect))
    _drive_without_async(sync, url, directory)
    for start in (exec_server.Environment.local, exec_server.serve, sync.Environment.local):
        try:
            start()
        except exec_server.StartupError as error:
            print(error)
    import_module("exec_server.client.engine.relay")  # the last part that is imported on demand
    for name in exec_server.__all__:
        getattr(exec_server, name)
    other_system.check_no_linux_part()


def run_command(*words: str) -> None:
    from exec_server.cli.main import main as run

    genuine_exit = os._exit

    def checked_exit(status: int) -> NoReturn:
        other_system.check_no_linux_part()
        genuine_exit(status)

    os._exit = checked_exit
    sys.argv = ["exec-server", *words]
    run()


def import_modules(*names: str) -> None:
    for name in names:
        package = import_module(name)
        for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
            try:
                import_module(module.name)
            except (ImportError, AttributeError):
                print(module.name)
    other_system.check_no_linux_part()


def main() -> None:
    part, system, *arguments = sys.argv[1:]
    parts: dict[str, Callable[..., None]] = {
        "client": drive_client,
        "command": run_command,
        "imports": import_modules,
    }
    other_system.install(system)
    parts[part](*arguments)


if __name__ == "__main__":
    main()
