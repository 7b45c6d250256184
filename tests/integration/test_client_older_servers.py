"""The client and its commands against older servers: each installed version of the reference, and
our server without the features that recorded versions lacked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.cli import run_client
from tests.support.client import start_server
from tests.support.client_targets import ClientTarget, Proxy, Run, Scene, bounded, until_lost
from tests.support.older_servers import answers, installed_versions, recorded, start_older_server
from tests.support.trees import make_tree, tree, write_files

from exec_server import Environment, IsADirectory, connect
from exec_server.client.engine.server_features import judge
from exec_server.client.exceptions import ProgramNotFound, SandboxDenied, Timeout
from exec_server.errors import InvalidRequest, NotFound, SessionLost, Unsupported
from exec_server.protocol.session import Capabilities

MIB = 1_048_576
INSTALLED = installed_versions()
# The first generation, and the last one that runs commands unconfined.
PRETENDED = ["0.121.0", "0.141.0"]
# Counts to 3000 little by little, after it was told to go.
COUNT = """
import sys, time
sys.stdin.readline()
for number in range(3000):
    print(number, flush=number % 10 == 0)
    if number % 10 == 0: time.sleep(0.001)
"""


class Pretended(ClientTarget):
    """Our server, of which the client thinks as of an older one."""

    def play(self, scene: Scene, run: Run = asyncio.run) -> None:
        recording = recorded()[self.kind.removeprefix("ours as ")]

        async def adapted(env: Environment) -> None:
            env.session.features = judge(answers(recording), Capabilities(), has_sessions=True)
            env._adapt(env.session.features)
            await scene(env)

        super().play(adapted, run)


@pytest.fixture(
    scope="module",
    params=[
        *(f"ours as {version}" for version in PRETENDED),
        *(pytest.param(version, marks=pytest.mark.flaky(reruns=1)) for version in INSTALLED),
    ],
)
def older(request: pytest.FixtureRequest) -> Iterator[ClientTarget]:
    """An older server, or ours as the client would use an older one."""
    kind: str = request.param
    with ExitStack() as stack:
        if not kind.startswith("ours"):
            url = stack.enter_context(start_older_server(kind))
            yield ClientTarget(kind, lambda: connect(url), url)
            return
        server = stack.enter_context(start_server("ours"))
        yield Pretended(kind, lambda: connect(server.url), server.url)


def test_commands(older: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        script = "pwd; echo $A; echo e >&2; exit 3"
        result = await env.run(["/bin/sh", "-c", script], cwd="/", env={"A": "ü"})
        assert result.text == "/\nü\n"
        assert (result.stderr, result.exit_code) == (b"e\n", 3)
        assert (await env.run(["sh", "-c", "echo $HOME"])).text.strip().startswith("/")
        data = os.urandom(300_000)
        assert (await env.run(["cat"], input=data)).stdout == data
        assert (await env.run(["wc", "-c"], input=b"")).text.strip() == "0"
        lines = await env.run(["seq", "200000"], output_limit=4 * MIB)
        assert lines.stdout == b"".join(b"%d\n" % number for number in range(1, 200_001))
        with pytest.raises(ProgramNotFound):
            await env.run(["no-such-program"])
        with pytest.raises(Timeout) as expired:
            await env.run(["sleep", "60"], timeout=0.1)
        assert expired.value.result.exit_code == 137
        own = await env.run(["sh", "-c", "kill -9 $$"])
        assert own.exit_code in (137, -1)  # the latter before 0.140

    older.play(scene)


def test_terminals(older: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        script = 'stty size; read line; echo "got $line"; exec sleep 60'
        async with env.start(["sh", "-c", script], tty=True, size=(30, 100)) as process:
            await process.write(b"words\n")
            shown = b""
            async for chunk in process:
                shown += chunk.data
                if b"got words" in shown:
                    break
            assert b"30 100" in shown
            await process.interrupt()
            assert await process.wait() != 0

    older.play(scene)


def test_standard_input(older: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        if not env.session.features.has_stdin_pipes:
            with pytest.raises(Unsupported, match="pipeStdin in process/start"):
                env.start(["cat"], stdin=True)
            return
        async with env.start(["cat"], stdin=True) as process:
            await process.write(b"one\n")
            assert (await anext(aiter(process))).data == b"one\n"
            await process.terminate()

    older.play(scene)


def test_files(older: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        files = env.files
        path = tmp_path / "a b ü"
        await files.write(path, b"hello")
        assert await files.read(path) == b"hello"
        assert (await files.stat(path)).size == 5
        (tmp_path / "link").symlink_to(path)
        (tmp_path / "d" / "e").mkdir(parents=True)
        (tmp_path / "d" / "e" / "f").write_bytes(b"")
        (tmp_path / "dl").symlink_to(tmp_path / "d")
        assert (await files.stat(tmp_path / "link")).is_symlink
        assert (await files.stat(path, follow_links=False)).size == 5
        with pytest.raises(InvalidRequest, match="symbolic link"):
            await files.stat(tmp_path / "link", follow_links=False)
        assert await files.realpath(tmp_path / "dl" / "e") == str(tmp_path / "d" / "e")
        for missing in (files.realpath(tmp_path / "no"), files.read(tmp_path / "no")):
            with pytest.raises(NotFound):
                await missing
        walked = [entry.path async for entry in files.walk(tmp_path)]
        names = ("a b ü", "d", "d/e", "d/e/f")
        assert sorted(walked) == sorted(str(tmp_path / each) for each in names)
        assert {entry.path for entry in await files.list(tmp_path)} == {
            str(tmp_path / each) for each in ("a b ü", "d", "dl", "link")
        }
        await files.copy(path, tmp_path / "copy")
        with pytest.raises(InvalidRequest, match="the same file"):
            await files.copy(path, tmp_path / "link")
        await files.rename(tmp_path / "copy", tmp_path / "moved")
        await files.append(tmp_path / "moved", b" you")
        assert (tmp_path / "moved").read_bytes() == b"hello you"
        await files.remove(tmp_path / "moved")
        assert not await files.exists(tmp_path / "moved")

    older.play(scene)


def test_files_in_blocks(older: ClientTarget, tmp_path: Path) -> None:
    async def scene(env: Environment) -> None:
        data = os.urandom(5 * MIB + 17)
        path = tmp_path / "large"
        async with env.files.open(path, "wb") as writer:
            await writer.write(data[:100_000])
            await writer.flush()
            await writer.write(data[100_000:])
        assert path.read_bytes() == data
        assert await env.files.read(path) == data
        async with env.files.open(path, offset=MIB + 1) as reader:
            assert await reader.read() == data[MIB + 1 :]
        with pytest.raises(IsADirectory):
            async with env.files.open(tmp_path) as reader:
                await reader.read(1)

    older.play(scene)


def test_uploads_and_downloads(older: ClientTarget, tmp_path: Path) -> None:
    here = tmp_path / "here"
    make_tree(here)
    (here / "large").write_bytes(os.urandom(5 * MIB))

    async def scene(env: Environment) -> None:
        done = await env.files.upload(here, tmp_path / "there", check=False)
        if not env.session.features.sends_uris:  # then names are texts on the wire
            [failed] = done.failed
            assert "text that is not UTF-8 cannot be sent" in str(failed.error)
            (here / failed.path).unlink()
        assert done.left_out == ()
        assert tree(tmp_path / "there") == tree(here)
        await env.files.download(tmp_path / "there", tmp_path / "back")
        assert tree(tmp_path / "back") == tree(here)

    older.play(scene)


def test_a_sandbox_confines_or_is_refused(older: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(3 * MIB))

    async def scene(env: Environment) -> None:
        features = env.session.features
        command = ["touch", str(tmp_path / "made")]
        if features.confines_commands:
            assert (await env.run(command, sandbox="read-only")).exit_code != 0
        else:
            with pytest.raises(Unsupported, match="without the sandbox"):
                await env.run(command, sandbox="read-only")
        if not features.confines_files:
            with pytest.raises(Unsupported, match="without the sandbox"):
                env.files.sandboxed("read-only")
        else:
            files = env.files.sandboxed("read-only")
            assert len(await files.read(tmp_path / "f")) == 3 * MIB
            async with files.open(tmp_path / "f") as reader:
                assert len(await reader.read()) == 3 * MIB
            with pytest.raises(SandboxDenied):
                await files.write(tmp_path / "made", b"x")
        assert not (tmp_path / "made").exists()

    older.play(scene)


def test_a_session_is_resumed(older: ClientTarget) -> None:
    """A terminal, which every version has, goes on through cuts, and no output is lost."""

    async def scene() -> None:
        async with Proxy(older.url).running() as proxy, connect(proxy.url) as env:
            argv = ["python3", "-c", COUNT]
            async with env.start(argv, tty=True) as process:
                await process.write(b"go\n")
                shown, cuts = bytearray(), 0
                async for chunk in process:
                    assert not chunk.lost_before
                    shown += chunk.data
                    if len(shown) > 4000 * (cuts + 1) and cuts < 3:
                        cuts += 1
                        proxy.cut()
            assert cuts == 3
            assert shown.split()[1:] == [b"%d" % number for number in range(3000)]
            assert (await env.run(["echo", "still"])).text == "still\n"

    bounded(scene())


def test_a_session_that_the_server_does_not_know_is_lost(older: ClientTarget) -> None:
    if older.kind.startswith("ours"):
        pytest.skip("the features do not matter")

    async def scene() -> None:
        async with Proxy(older.url).running() as proxy, connect(proxy.url) as env:
            with start_older_server(older.kind) as other:
                proxy.target = other
                proxy.cut()
                with pytest.raises(SessionLost, match="could not be resumed: unknown session"):
                    await until_lost(env.session)

    bounded(scene())


def test_commands_for_people(older: ClientTarget, tmp_path: Path) -> None:
    if older.kind.startswith("ours"):
        pytest.skip("commands find out the features themselves")
    (tmp_path / "f").write_bytes(os.urandom(3 * MIB))
    there = f"{older.url}:{tmp_path}"
    for arguments, shown in (
        (["exec", older.url, "--", "echo", "hi"], b"hi\n"),
        (["info", older.url], b"directory    /\n"),
        (["cp", str(tmp_path / "f"), f"{there}/g"], b""),
        (["ls", there], b"g"),
        (["rm", f"{there}/f"], b""),
    ):
        done = run_client(*arguments)
        assert (done.returncode, done.stderr) == (0, b""), arguments
        assert shown in done.stdout
    assert (tmp_path / "g").stat().st_size == 3 * MIB
    assert not (tmp_path / "f").exists()


def test_mirrors(older: ClientTarget, tmp_path: Path) -> None:
    write_files(tmp_path / "a", {"x": "x", "d/y.o": "", ".gitignore": "*.o\n", "n/z": ""})
    write_files(tmp_path / "b", {"old/f": "", "n/kept": ""})
    write_files(tmp_path / "c", {"old/f": "", "n/kept": ""})

    async def scene(env: Environment) -> None:
        options: dict[str, Any] = {"exclude": ["n/"], "gitignore": True}
        options |= {"sync": "checksum", "delete": True}
        sent = await env.files.upload(tmp_path / "a", tmp_path / "b", **options)
        got = await env.files.download(tmp_path / "a", tmp_path / "c", **options)
        assert sent.deleted == got.deleted == ("old/f", "old")

    older.play(scene)
    kept = {".gitignore", "x", "d", "n", "n/kept"}
    assert set(tree(tmp_path / "b")) == set(tree(tmp_path / "c")) == kept
