"""The OpenAI Agents SDK with a scripted model: a coding task in a sandbox, terminals, snapshots."""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, ApplyPatchTool, RunConfig, Runner, ShellTool, set_tracing_disabled
from agents.editor import ApplyPatchOperation
from agents.sandbox import SandboxAgent, SandboxRunConfig
from agents.sandbox.errors import (
    ExecTimeoutError,
    InvalidManifestPathError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.manifest import Manifest
from agents.sandbox.snapshot import LocalSnapshotSpec
from agents.testing import ModelStep, ScriptedModel, assistant_message, function_call
from agents.tool import ShellActionRequest, ShellCallData, ShellCommandRequest

from exec_server import Environment, connect
from exec_server.adapters.openai_agents import (
    ExecServerSandboxClient,
    ExecServerSandboxClientOptions,
)
from exec_server.adapters.openai_agents_tools import ExecServerEditor, ExecServerShell
from tests.adapters.coding_task import (
    COUNT_LEFT,
    EDIT,
    FIXED,
    NEVER_ENDS,
    READ,
    RUN_TESTS,
    make_repository,
)
from tests.adapters.interrupts import nothing_is_left
from tests.support.server_internals import eventually

set_tracing_disabled(True)
Session = Any


def command(number: int, text: str, **options: Any) -> list[Any]:
    arguments = {"cmd": text, "login": False, **options}
    return [function_call("exec_command", arguments, call_id=f"call-{number}")]


def _type_into_terminal(call: Any) -> list[Any]:
    (number,) = re.findall(r"session ID (\d+)", str(call.input))
    arguments = {"session_id": int(number), "chars": "print(6 * 7)\nexit(3)\n"}
    return [function_call("write_stdin", arguments | {"yield_time_ms": 5000}, call_id="typing")]


def test_an_agent_repairs_a_program(server_url: str, tmp_path: Path) -> None:
    folder = make_repository(tmp_path)
    model = ScriptedModel(
        [
            command(1, READ),
            command(2, RUN_TESTS),
            command(3, EDIT),
            command(4, RUN_TESTS),
            command(5, "python3 -q", tty=True, yield_time_ms=1000),
            ModelStep.respond(_type_into_terminal),
            [assistant_message("repaired")],
        ]
    )
    agent = SandboxAgent("engineer", model=model, default_manifest=Manifest(root=folder))
    config = RunConfig(
        sandbox=SandboxRunConfig(
            client=ExecServerSandboxClient(),
            options=ExecServerSandboxClientOptions(target=server_url),
        )
    )
    result = asyncio.run(Runner.run(agent, "Repair the program.", run_config=config))
    assert result.final_output == "repaired"
    model.assert_complete()
    assert model.last_call is not None
    seen = str(model.last_call.input)
    assert "AssertionError: -1" in seen
    assert "all tests pass" in seen
    assert "42" in seen
    assert "Process exited with code 3" in seen
    assert (tmp_path / "app.py").read_text() == FIXED


def test_a_cancelled_agent(server_url: str, tmp_path: Path) -> None:
    """Its run has a session of its own, whose command is killed with it."""
    text = f"touch begun; {NEVER_ENDS}"
    model = ScriptedModel([command(1, text, tty=True, yield_time_ms=30_000)])
    manifest = Manifest(root=make_repository(tmp_path))
    agent = SandboxAgent("engineer", model=model, default_manifest=manifest)
    config = RunConfig(
        sandbox=SandboxRunConfig(
            client=ExecServerSandboxClient(),
            options=ExecServerSandboxClientOptions(target=server_url),
        )
    )

    async def scene() -> None:
        work = Runner.run(agent, "Repair the program.", run_config=config)
        running = asyncio.get_running_loop().create_task(work)
        await asyncio.to_thread(eventually, "it begins", (tmp_path / "begun").exists)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scene())
    assert nothing_is_left(server_url)


def play(server_url: str, scene: Callable[[Session], Awaitable[None]], **options: Any) -> None:
    """Run a scene in a session of its own directory, which is deleted at the end."""

    async def with_session() -> None:
        client = ExecServerSandboxClient()
        settings = ExecServerSandboxClientOptions(target=server_url, **options)
        session = await client.create(options=settings)
        async with session:
            root = session.state.manifest.root
            async with asyncio.timeout(120):
                await scene(session)
        await client.delete(session)
        assert not Path(root).exists()

    asyncio.run(with_session())


def test_commands_and_files(server_url: str) -> None:
    async def scene(session: Session) -> None:
        root = session.state.manifest.root
        await session.write(Path("a/b.txt"), io.BytesIO(b"text"))
        assert (await session.read(Path("a/b.txt"))).read() == b"text"
        assert await session.read_bounded(Path("a/b.txt"), max_bytes=2) == b"te"
        await session.mkdir("a/c", parents=True)
        kinds = {Path(entry.path).name: entry.kind.value for entry in await session.ls("a")}
        assert kinds == {"b.txt": "file", "c": "directory"}
        await session.mv("a/b.txt", "a/d.txt")
        await session.rm("a/c", recursive=True)
        with pytest.raises(WorkspaceReadNotFoundError):
            await session.read(Path("a/b.txt"))
        done = await session.exec("echo $0; pwd; echo err >&2; exit 3", shell=True)
        assert (done.stdout.decode().splitlines()[1:], done.exit_code) == ([root], 3)
        missing = await session.exec("no-such-program", shell=False)
        assert missing.exit_code == 127
        with pytest.raises(ExecTimeoutError):
            await session.exec(NEVER_ENDS, timeout=0.5)
        left = await session.exec(COUNT_LEFT)
        assert left.stdout == b"0\n"
        await session.exec(f"ln -s /etc {root}/out", shell=True)
        for path in ("out/passwd", "../x"):
            with pytest.raises(InvalidManifestPathError):
                await session.read(Path(path))

    play(server_url, scene)


def test_a_cancelled_command_is_killed(server_url: str) -> None:
    async def scene(session: Session) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await session.exec(NEVER_ENDS)
        left = await session.exec(COUNT_LEFT)
        assert left.stdout == b"0\n"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await session.pty_exec_start(NEVER_ENDS, tty=True, yield_time_s=30)
        left = await session.exec(COUNT_LEFT)
        assert left.stdout == b"0\n"

    play(server_url, scene)


def test_as_a_user_and_confined(server_url: str, ordinary_user: str | None) -> None:
    async def as_user(session: Session) -> None:
        assert (await session.exec("id -un")).stdout.decode().strip() == ordinary_user

    async def confined(session: Session) -> None:
        await session.write(Path("inside"), io.BytesIO(b""))
        assert (await session.exec("touch inside")).exit_code == 0
        assert (await session.exec("touch /etc/outside")).exit_code != 0

    if ordinary_user is not None:
        play(server_url, as_user, user=ordinary_user)
    play(server_url, confined, sandbox="workspace-write")


def test_a_session_is_resumed_from_its_snapshot(server_url: str, tmp_path: Path) -> None:
    async def scene() -> None:
        client = ExecServerSandboxClient()
        options = ExecServerSandboxClientOptions(target=server_url)
        spec = LocalSnapshotSpec(base_path=tmp_path / "snapshots")
        session = await client.create(snapshot=spec, options=options)
        async with session:
            await session.write(Path("kept"), io.BytesIO(b"content"))
        payload = client.serialize_session_state(session.state)
        await client.delete(session)
        resumed = await client.resume(client.deserialize_session_state(payload))
        async with resumed:
            assert (await resumed.read(Path("kept"))).read() == b"content"
        await client.delete(resumed)

    asyncio.run(scene())


def test_a_snapshot_has_links_and_no_special_files(server_url: str, tmp_path: Path) -> None:
    """And what is in the directory gives way to it, a link that leads out of it too."""

    async def scene() -> None:
        client = ExecServerSandboxClient()
        options = ExecServerSandboxClientOptions(target=server_url)
        spec = LocalSnapshotSpec(base_path=tmp_path / "snapshots")
        session = await client.create(snapshot=spec, options=options)
        root = Path(session.state.manifest.root)
        async with session:
            await session.write(Path("kept"), io.BytesIO(b"content"))
            await session.exec("mkfifo pipe; ln -s kept link", shell=True)
        (root / "out").symlink_to(tmp_path)
        (root / "kept").write_text("changed")
        async with await client.resume(session.state) as resumed:
            assert (await resumed.read(Path("kept"))).read() == b"content"
            assert sorted(os.listdir(root)) == ["kept", "link"]
            assert os.readlink(root / "link") == "kept"
        await client.delete(resumed)

    asyncio.run(scene())
    assert tmp_path.exists()


def test_files_and_links_are_moved_and_nothing_else(server_url: str, tmp_path: Path) -> None:
    async def scene(session: Session) -> None:
        root = Path(session.state.manifest.root)
        (root / "folder").mkdir()
        os.mkfifo(root / "pipe")
        links = {"dangling": "nowhere", "directory": "folder", "out": str(tmp_path), "self": "self"}
        for name, target in links.items():
            (root / name).symlink_to(target)
            await session.mv(name, f"folder/{name}")
            assert os.readlink(root / "folder" / name) == target
        for name in ("folder", "pipe", "missing"):
            with pytest.raises(WorkspaceArchiveWriteError):
                await session.mv(name, "new")
        with pytest.raises(InvalidManifestPathError):
            await session.mv("folder/self", f"folder/out/{tmp_path.name}")
        assert sorted(os.listdir(root)) == ["folder", "pipe"]
        with pytest.raises(WorkspaceArchiveWriteError):
            await session.mkdir("folder")
        await session.mkdir("folder", parents=True)

    play(server_url, scene)
    assert os.listdir(tmp_path) == []


def test_light_tools(server_url: str, tmp_path: Path, ordinary_user: str | None) -> None:
    folder = make_repository(tmp_path)

    async def scene(env: Environment) -> None:
        shell = ExecServerShell(env, cwd=folder)
        action = ShellActionRequest(commands=[RUN_TESTS, "sleep 600", "never"], timeout_ms=5000)
        request = ShellCommandRequest(ctx_wrapper=None, data=ShellCallData("1", action))
        first, second = (await shell(request)).output
        assert (first.exit_code, "AssertionError" in first.stderr) == (1, True)
        assert second.outcome.type == "timeout"
        editor = ExecServerEditor(env, folder)
        diff = "@@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
        change = ApplyPatchOperation(type="update_file", path="app.py", diff=diff)
        assert (await editor.update_file(change)).status == "completed"
        created = ApplyPatchOperation(type="create_file", path="new/file", diff="+text\n")
        await editor.create_file(created)
        await editor.delete_file(ApplyPatchOperation(type="delete_file", path="test_app.py"))
        with pytest.raises(ValueError, match="is not below"):
            await editor.delete_file(ApplyPatchOperation(type="delete_file", path="../x"))
        if ordinary_user is not None:
            as_user = ExecServerShell(env, user=ordinary_user)
            action = ShellActionRequest(commands=["id -un"])
            request = ShellCommandRequest(ctx_wrapper=None, data=ShellCallData("2", action))
            (third,) = (await as_user(request)).output
            assert third.stdout.strip() == ordinary_user
            denied = ExecServerEditor(env, folder, user=ordinary_user)
            with pytest.raises(PermissionError):
                await denied.create_file(ApplyPatchOperation("create_file", "theirs", "+text\n"))
        Agent("a", tools=[ShellTool(executor=shell), ApplyPatchTool(editor=editor)])

    async def connected() -> None:
        async with connect(server_url) as env:
            await scene(env)

    asyncio.run(connected())
    assert (tmp_path / "app.py").read_text() == FIXED
    assert (tmp_path / "new/file").read_text().strip() == "text"
    assert not (tmp_path / "test_app.py").exists()


def test_the_editor_stays_below_its_root(server_url: str, tmp_path: Path) -> None:
    """Also if the last component is a link; and a file that exists is not created."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.write_text("theirs\n")
    (root / "inside").write_text("ours\n")
    (root / "out").symlink_to(outside)
    (root / "nowhere").symlink_to(tmp_path / "new")
    (root / "alias").symlink_to("inside")
    diff = "@@\n-theirs\n+changed\n"

    async def scene(env: Environment) -> None:
        editor = ExecServerEditor(env, str(root))
        for path in ("out", "nowhere", "../x", "alias/../../x"):
            for change in (
                editor.create_file(ApplyPatchOperation("create_file", path, "+text\n")),
                editor.update_file(ApplyPatchOperation("update_file", path, diff)),
                editor.update_file(
                    ApplyPatchOperation("update_file", "inside", "@@\n-ours\n+1\n", move_to=path)
                ),
            ):
                with pytest.raises(ValueError, match="is not below"):
                    await change
        with pytest.raises(FileExistsError):
            await editor.create_file(ApplyPatchOperation("create_file", "inside", "+text\n"))
        with pytest.raises(ValueError, match="not the name of a file"):
            await editor.delete_file(ApplyPatchOperation("delete_file", ".."))
        alias = ApplyPatchOperation("update_file", "alias", "@@\n-ours\n+changed\n")
        await editor.update_file(alias)
        for path in ("out", "nowhere", "alias"):
            await editor.delete_file(ApplyPatchOperation("delete_file", path))

    async def connected() -> None:
        async with connect(server_url) as env:
            await scene(env)

    asyncio.run(connected())
    assert outside.read_text() == "theirs\n"
    assert [(each.name, each.read_text()) for each in root.iterdir()] == [("inside", "changed\n")]
    assert sorted(os.listdir(tmp_path)) == ["outside", "root"]
