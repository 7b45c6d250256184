"""Programs that a project puts first on the PATH of a server are not run by server and client.

A PATH often begins with `.venv/bin` or `node_modules/.bin`, where confined commands may write.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.client import KINDS, start_server
from tests.support.client_targets import ClientTarget
from tests.support.older_servers import answers, recorded
from tests.support.trees import make_tree, tree

from exec_server import Environment, connect
from exec_server.client.engine.server_features import judge
from exec_server.protocol.session import Capabilities

_NAMES = (
    *("base64", "bash", "cat", "chmod", "cmp", "cp", "cut", "dd", "env", "find", "grep", "head"),
    *("id", "ln", "ls", "mkdir", "mktemp", "mv", "od", "readlink", "realpath", "rg", "rm", "sed"),
    *("sh", "sha256sum", "sort", "stat", "stty", "tail", "tar", "test", "touch", "tr", "uname"),
    *("wc", "xargs"),
)
# An older server of the client's fallbacks, which are commands.
_OLD = "0.121.0"


class Project:
    """A directory of programs that leave a mark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "bin"
        self.mark = folder / "mark"
        self.folder.mkdir()
        for name in _NAMES:
            (self.folder / name).write_text(f"#!/bin/sh\necho {name} >> {self.mark}\nexit 1\n")
            (self.folder / name).chmod(0o755)

    @property
    def names(self) -> list[str]:
        return self.mark.read_text().split() if self.mark.exists() else []


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"))


@contextmanager
def _machine(kind: str, project: Project) -> Iterator[ClientTarget]:
    path = f"{project.folder}:{os.environ['PATH']}"
    with start_server(kind, env={"PATH": path}) as server:
        yield ClientTarget(kind, lambda: connect(server.url), server.url)


@pytest.fixture(scope="module", params=KINDS)
def there(request: pytest.FixtureRequest, project: Project) -> Iterator[ClientTarget]:
    with _machine(request.param, project) as running:
        yield running


@pytest.fixture(scope="module")
def ours(project: Project) -> Iterator[ClientTarget]:
    with _machine("ours", project) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_mark(project: Project) -> Iterator[None]:
    yield
    names = project.names
    project.mark.unlink(missing_ok=True)
    assert names == []


def test_the_programs_of_the_project_are_first_for_commands(
    there: ClientTarget, project: Project
) -> None:
    async def scene(env: Environment) -> None:
        assert (await env.run(["find", "/"])).exit_code == 1

    there.play(scene)
    assert project.names == ["find"]
    project.mark.unlink()


def test_transfers(there: ClientTarget, tmp_path: Path) -> None:
    make_tree(tmp_path / "a")

    async def scene(env: Environment) -> None:
        files = env.files
        await files.upload(tmp_path / "a", tmp_path / "b")
        await files.upload(tmp_path / "a", tmp_path / "b", sync="checksum")
        await files.download(tmp_path / "b", tmp_path / "c")
        archive = [piece async for piece in files.read_tar(tmp_path / "b")]
        await files.write_tar(b"".join(archive), tmp_path / "d")
        await files.write_tar(b"".join(archive), tmp_path / "d")

    there.play(scene)
    first = tree(tmp_path / "a")
    assert tree(tmp_path / "b") == tree(tmp_path / "c") == first
    assert tree(tmp_path / "d").keys() == first.keys()


async def _change_files(env: Environment, folder: Path) -> None:
    files, path = env.files, folder / "one"
    await files.write(path, b"first\n")
    await files.append(path, b"second\n")
    await files.chmod(path, 0o600)
    await files.touch(path, modified=1)
    await files.symlink("one", folder / "link")
    assert await files.realpath(folder / "link") == str(path)
    assert await files.realpath(folder / "missing", strict=False) == str(folder / "missing")
    await files.copy(path, folder / "copy")
    await files.rename(folder / "copy", folder / "two")
    assert (await files.disk_usage(folder)).total > 0
    assert [match.line for match in await files.grep("second", path, literal=True)]
    async with files.open(path, "rb") as reader:
        assert await reader.read() == b"first\nsecond\n"
    async with files.open(folder / "three", "wb") as writer:
        await writer.write(b"x" * 100_000)
    assert (await files.stat(folder / "three")).size == 100_000


def test_changes_of_files(there: ClientTarget, tmp_path: Path) -> None:
    there.play(lambda env: _change_files(env, tmp_path))


def test_searches(ours: ClientTarget, tmp_path: Path) -> None:
    """With ripgrep where the system has one."""
    (tmp_path / "one").write_text("first\n")

    async def scene(env: Environment) -> None:
        assert [match.path for match in await env.files.grep("first", tmp_path)] == ["one"]

    ours.play(scene)


def test_fallbacks_for_older_servers(ours: ClientTarget, tmp_path: Path) -> None:
    """Our server takes the part of one that leaves nearly everything to commands."""

    async def scene(env: Environment) -> None:
        env.session.features = judge(answers(recorded()[_OLD]), Capabilities(), has_sessions=True)
        env._adapt(env.session.features)
        await _change_files(env, tmp_path)
        done = await env.run(["/bin/cat"], input=b"text")
        assert done.stdout == b"text"
        await env.run(["/bin/true"], tty=True, merge_stderr=True)
        async with env.start(["/bin/true"], tty=True, size=(20, 70)) as process:
            assert await process.wait() == 0

    ours.play(scene)
