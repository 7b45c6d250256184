"""Real programs through the proxies of a process, with origins on loopback.

Each is denied its origin by the rules, allowed it by the rules, and allowed it by the client.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import Client, ProcessRun, Server
from tests.support.network import PATH, network_proxy

_ALLOWED = network_proxy(domains={"127.0.0.1": "allow"})
_DENIED = network_proxy(domains={"127.0.0.1": "deny"})
_REVIEWED = network_proxy(
    domains={"127.0.0.1": "allow"}, reviewDomains=["127.0.0.1"], timeout=60_000
)


def _needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program, path=PATH) is None, reason=f"no {program}")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A web server for the files of a folder."""
    root = tmp_path_factory.mktemp("origin")

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, directory=str(root), **kwargs)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", root
    server.shutdown()
    thread.join()
    server.server_close()


def _start(client: Client, folder: Path, argv: list[str], proxy: dict[str, Any]) -> str:
    env = {"PATH": f"{Path(sys.executable).parent}:{PATH}", "HOME": str(folder)}
    return client.start(argv, env=env, cwd=f"file://{folder}", networkProxy=proxy)


def _run(client: Client, folder: Path, argv: list[str], proxy: dict[str, Any]) -> ProcessRun:
    return client.collect(_start(client, folder, argv, proxy), timeout=30)


def _reviewed(
    client: Client, folder: Path, argv: list[str], decision: dict[str, str]
) -> ProcessRun:
    """Run a program whose every request the client is asked about, and answers so."""
    process_id = _start(client, folder, argv, _REVIEWED)
    answered = len(client.requests)
    asked = answered

    def has_closed() -> bool:
        return any(
            notice["method"] == "process/closed" and notice["params"]["processId"] == process_id
            for notice in client.notifications
        )

    while not has_closed():
        client.receive()
        for question in client.requests[answered:]:
            assert question["params"]["request"]["host"] == "127.0.0.1"
            client.send({"id": question["id"], "result": {"decision": decision}})
        answered = len(client.requests)
    assert answered > asked
    return client.collect(process_id)


def _in_all_ways(client: Client, folder: Path, argv: list[str], made: str | None = None) -> bytes:
    """Run a program in all three ways; `made` is the folder that it makes. Returns its output."""
    made_folder = folder / (made or "nothing")
    assert _run(client, folder, argv, _DENIED).exit_code != 0
    assert not made_folder.exists()
    reviewed = _reviewed(client, folder, argv, {"type": "allow"})
    assert (reviewed.exit_code, made_folder.exists()) == (0, made is not None), reviewed.stderr
    if made is not None:
        shutil.rmtree(made_folder)
    allowed = _run(client, folder, argv, _ALLOWED)
    assert (allowed.exit_code, made_folder.exists()) == (0, made is not None), allowed.stderr
    assert reviewed.stdout == allowed.stdout
    return allowed.stdout


@_needs("curl")
def test_curl(client: Client, files: tuple[str, Path], tmp_path: Path) -> None:
    url, root = files
    (root / "hello").write_text("hello")
    for more in ([], ["-p"], ["-x", "$SOCKS"]):
        script = f"SOCKS=$ALL_PROXY; curl -sSf -m 9 {' '.join(more)} {url}/hello"
        assert _in_all_ways(client, tmp_path, ["/bin/sh", "-c", script]) == b"hello"


@_needs("curl")
def test_curl_that_the_client_denies(
    client: Client, files: tuple[str, Path], tmp_path: Path
) -> None:
    url, root = files
    (root / "hello").write_text("hello")
    argv = ["/usr/bin/curl", "-s", "-m", "9", "-w", " %{http_code}", f"{url}/hello"]
    ended = _reviewed(client, tmp_path, argv, {"type": "deny", "reason": "not today"})
    assert b'"reason":"not today","decision":"deny","source":"decider"' in ended.stdout
    assert ended.stdout.endswith(b" 403")


@_needs("git")
def test_git(client: Client, files: tuple[str, Path], tmp_path: Path) -> None:
    url, root = files
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    work = tmp_path / "work"
    for argv in (
        ["git", "init", "-q", str(work)],
        ["git", "-C", str(work), *identity, "commit", "-q", "--allow-empty", "-m", "first"],
        ["git", "clone", "-q", "--bare", str(work), str(root / "repo.git")],
        ["git", "-C", str(root / "repo.git"), "update-server-info"],
    ):
        subprocess.run(argv, check=True, env={"PATH": PATH, "HOME": str(tmp_path)})
    argv = ["git", "clone", "-q", f"{url}/repo.git", "copy"]
    _in_all_ways(client, tmp_path, argv, made="copy")
    assert (tmp_path / "copy" / ".git").is_dir()


def test_pip(client: Client, files: tuple[str, Path], tmp_path: Path) -> None:
    url, root = files
    index = root / "simple" / "demo-package"
    index.mkdir(parents=True)
    name = "demo_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(index / name, "w") as wheel:
        wheel.writestr("demo_package.py", "VALUE = 1\n")
        info = "demo_package-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: demo-package\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    (index / "index.html").write_text(f'<a href="{name}">{name}</a>')
    options = ["--no-cache-dir", "--disable-pip-version-check", "--retries", "0", "-q"]
    flags = ["--index-url", f"{url}/simple/", "--trusted-host", "127.0.0.1", "--target", "out"]
    argv = [sys.executable, "-m", "pip", "install", *options, *flags, "demo-package"]
    _in_all_ways(client, tmp_path, argv, made="out")
    assert (tmp_path / "out" / "demo_package.py").is_file()


@_needs("npm")
def test_npm(client: Client, files: tuple[str, Path], tmp_path: Path) -> None:
    url, root = files
    source = tmp_path / "package"
    source.mkdir()
    (source / "package.json").write_text('{"name": "demo", "version": "1.0.0"}')
    with tarfile.open(root / "demo-1.0.0.tgz", "w:gz") as archive:
        archive.add(source, "package")
    digest = hashlib.sha512((root / "demo-1.0.0.tgz").read_bytes()).digest()
    dist = {
        "tarball": f"{url}/demo-1.0.0.tgz",
        "integrity": f"sha512-{base64.b64encode(digest).decode()}",
    }
    version = {"name": "demo", "version": "1.0.0", "dist": dist}
    listing = {"name": "demo", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
    (root / "demo").write_text(json.dumps(listing))
    flags = ["--registry", f"{url}/", "--no-audit", "--no-fund", "--fetch-retries", "0"]
    argv = ["npm", "install", "--silent", *flags, "demo"]
    _in_all_ways(client, tmp_path, argv, made="node_modules")
    assert (tmp_path / "node_modules" / "demo" / "package.json").is_file()


@_needs("node")
def test_node(client: Client, files: tuple[str, Path], tmp_path: Path) -> None:
    """A client that asks the proxy itself: not every version of Node reads the variables."""
    url, root = files
    (root / "hello").write_text("hello")
    script = f"""
        const http = require("http");
        const proxy = new URL(process.env.HTTP_PROXY);
        const request = http.request({{ host: proxy.hostname, port: proxy.port,
                                        path: "{url}/hello", headers: {{ host: "{url[7:]}" }} }});
        request.on("response", (response) => {{
            response.pipe(process.stdout);
            response.on("end", () => process.exit(response.statusCode === 200 ? 0 : 1));
        }});
        request.end();
    """
    assert _in_all_ways(client, tmp_path, ["node", "-e", script]) == b"hello"


_WEBSOCKET_CLIENT = """
import asyncio, sys
from websockets.asyncio.client import connect
async def main():
    # `proxy=True` reads the variables; a ws:// URL uses CONNECT, too.
    async with connect(sys.argv[1], proxy=True) as link:
        await link.send("over a tunnel")
        print(await link.recv())
asyncio.run(main())
"""


def test_websocket(client: Client, server: Server, tmp_path: Path) -> None:
    """A WebSocket through CONNECT, to an echo server."""
    from websockets.asyncio.server import ServerConnection, serve

    async def echo(link: ServerConnection) -> None:
        async for message in link:
            await link.send(message)

    ready, stop = threading.Event(), threading.Event()
    ports: list[int] = []

    def run() -> None:
        async def main() -> None:
            async with serve(echo, "127.0.0.1", 0) as running:
                ports.append(next(iter(running.sockets)).getsockname()[1])
                ready.set()
                await asyncio.to_thread(stop.wait)

        asyncio.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        argv = [sys.executable, "-c", _WEBSOCKET_CLIENT, f"ws://127.0.0.1:{ports[0]}"]
        assert _in_all_ways(client, tmp_path, argv) == b"over a tunnel\n"
    finally:
        stop.set()
        thread.join()
