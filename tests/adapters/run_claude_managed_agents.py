"""Claude Managed Agents: the package's own worker with a double of the API, and real servers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anthropic.lib.tools import ToolError, beta_async_tool
from anthropic.lib.tools.agent_toolset import AgentToolContext, beta_agent_toolset_20260401

from exec_server.adapters import claude_managed_agents
from exec_server.adapters.claude_managed_agents import ExecServerTools, directory_name
from exec_server.client.engine import session as client_session
from tests.adapters.coding_task import NEVER_ENDS, NUMBER
from tests.adapters.managed_agents import SESSION_TOKEN, Api, start_api
from tests.adapters.proxy import Proxy
from tests.support.client import descendants, scaled
from tests.support.server_internals import eventually

# A picture of one pixel; the tool looks at the name alone.
PIXEL = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
SESSION = "sesn_01"


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with start_api() as running:
        yield running


class Place:
    """The double, a target, and two directories: of the sessions, and of the worker."""

    def __init__(self, api: Api, target: str, folder: Path) -> None:
        self.api, self.target = api, target
        self.root, self.workdir = folder / "sessions", folder / "worker"
        self.workdir.mkdir()

    def tools(self, **options: Any) -> ExecServerTools:
        return ExecServerTools(options.pop("target", self.target), root=str(self.root), **options)

    @contextlib.asynccontextmanager
    async def session(
        self, session_id: str = SESSION, facts: dict[str, Any] | None = None, **options: Any
    ) -> AsyncIterator[Path]:
        """A session that a worker serves; it is idle at the end. Its directory."""
        self.api.stopped.clear()
        self.api.open_session(session_id, **(facts or {}))
        async with self.api.working(self.workdir, self.tools(**options)):
            yield self.root / directory_name(session_id)
            self.api.end_turn(session_id)
            await self.api.wait_stopped(session_id)


@pytest.fixture
def place(api: Api, server_url: str, tmp_path: Path) -> Place:
    api.events.clear()
    return Place(api, server_url, tmp_path)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(scaled(60)):
            await scene()

    asyncio.run(limited())


async def run_in(api: Api, command: str) -> str:
    return await api.ok(SESSION, "bash", command=command)


def is_running(words: str) -> bool:
    """Whether a process of this machine has these words in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if words in path.read_text().replace("\0", " "):
                return True
    return False


async def wait_ended(words: str) -> None:
    await asyncio.to_thread(eventually, f"{words} ends", lambda: not is_running(words), 20)


async def wait_begun(path: Path) -> None:
    await asyncio.to_thread(eventually, "the command begins", path.exists, 20)


# ---- the tools ----------------------------------------------------------------------------------


def test_every_tool(place: Place) -> None:
    api = place.api

    async def scene() -> None:
        async with place.session() as folder:
            assert await api.ok(SESSION, "bash", command="pwd; ls -A") == str(folder)
            wrote = await api.ok(SESSION, "write", file_path="a/b.txt", content="one\ntwø\n")
            assert wrote == "wrote 9 bytes to a/b.txt"
            assert await api.ok(SESSION, "read", file_path=f"{folder}/a/b.txt") == "one\ntwø\n"
            lines = await api.ok(SESSION, "read", file_path="a/b.txt", view_range=[2, 2])
            assert lines == "twø"
            edit = {"file_path": "a/b.txt", "old_string": "one", "new_string": "1"}
            assert await api.ok(SESSION, "edit", **edit) == "edited a/b.txt (1 replacement(s))"
            assert "does not occur" in await api.error(SESSION, "edit", **edit)
            await api.ok(SESSION, "write", file_path="newer.txt", content="1 1\n")
            edit = {"file_path": "newer.txt", "old_string": "1", "new_string": "one"}
            assert "occurs 2 times" in await api.error(SESSION, "edit", **edit)
            edited = await api.ok(SESSION, "edit", **edit, replace_all=True)
            assert edited == "edited newer.txt (2 replacement(s))"
            os.utime(folder / "a/b.txt", (1, 1))
            found = await api.ok(SESSION, "glob", pattern="**/*.txt")
            assert found.split() == [f"{folder}/newer.txt", f"{folder}/a/b.txt"]
            found = await api.ok(SESSION, "glob", pattern="*", path="a")
            assert found == f"{folder}/a/b.txt"
            assert await api.ok(SESSION, "grep", pattern="tw[ø]$") == f"{folder}/a/b.txt:2:twø"
            found = await api.ok(SESSION, "grep", pattern="one", path="newer.txt")
            assert found == f"{folder}/newer.txt:1:one one"
            assert await api.ok(SESSION, "grep", pattern="nothing") == "no matches"
            assert await api.ok(SESSION, "glob", pattern="*.none") == "no matches"
            assert "no such file" in await api.error(SESSION, "read", file_path="missing")
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert api.authorizations == {"Bearer the-environment-key", f"Bearer {SESSION_TOKEN}"}

    play(scene)


@pytest.mark.parametrize("command", ["echo 'x", "echo `x", "echo a \\"])
def test_a_command_that_cannot_be_read_leaves_the_shell_as_it_was(
    place: Place, command: str
) -> None:
    api = place.api

    async def scene() -> None:
        async with place.session():
            await run_in(api, "state=kept")
            await api.call(SESSION, "bash", command=command)
            assert await run_in(api, "echo $state") == "kept"

    play(scene)


def test_the_shell_keeps_its_state(place: Place) -> None:
    api = place.api

    async def scene() -> None:
        async with place.session() as folder:
            run = partial(run_in, api)
            await run("mkdir sub; cd sub; export A=b; f() { echo f; }")
            assert await run("echo $A; pwd; f; cat; echo -e '\\e[31mred'") == (
                f"b\n{folder}/sub\nf\nred"
            )
            assert await api.ok(SESSION, "bash", restart=True) == "the shell was restarted"
            assert await run("echo $A; pwd") == f"\n{folder}"
            failed = await api.error(SESSION, "bash", command="echo out; echo err >&2; (exit 7)")
            assert failed == "out\nerr\n[exit code 7]"
            assert "syntax error" in await api.error(SESSION, "bash", command="if then '")
            assert await run("cat <<END\nhere\nEND") == "here"
            assert "no command" in await api.error(SESSION, "bash")
            late = await api.error(SESSION, "bash", command="echo", timeout_ms=-1)
            assert "not be negative" in late
            assert await run("echo next") == "next"

    play(scene)


def test_commands_that_attack_their_shell(place: Place) -> None:
    """Only the command itself may suffer: the next one has its own output and exit code."""
    api = place.api

    async def scene() -> None:
        async with place.session():
            run = partial(run_in, api)
            assert await run("exec >/dev/null 2>&1; echo hidden") == "(no output)"
            assert await run("exec 1>&- 2>&- 0<&-; true") == "(no output)"
            traced = await run("set -xv; echo a; set +xv")
            assert "printf" not in traced
            assert await run("echo next") == "next"
            # The text of its own shell, which it can read, and marks of other commands.
            assert "no" in await run("(tr '\\0' '\\n' </proc/$$/cmdline; echo no)")
            await run("(setsid sleep 1; echo late) & echo begun")
            assert await run("wait; echo done") == "late\ndone"
            assert await run("printf 'a\\0b\\377'") == "a\0b\ufffd"
            gone = await api.error(SESSION, "bash", command="echo last; exit 3")
            assert gone.startswith("last\nexit\n[the command has ended the shell with")
            assert await run("echo anew") == "anew"
            # A daemon holds the output of a shell that has ended.
            gone = await api.error(SESSION, "bash", command=f"sleep {NUMBER} & exit 0")
            assert "has ended the shell" in gone
        await wait_ended(f"sleep {NUMBER}")

    play(scene)


def test_a_late_command_keeps_its_output(place: Place) -> None:
    api = place.api

    async def scene() -> None:
        async with place.session():
            command = f"state=kept; echo begun; sleep {NUMBER}; echo never"
            late = await api.error(SESSION, "bash", command=command, timeout_ms=700)
            assert late.startswith("begun\n[the command was interrupted after 0.7 s]")
            assert not is_running(f"sleep {NUMBER}")
            assert await run_in(api, "echo $state") == "kept"
            command = f"echo begun; setsid sleep {NUMBER} & (trap '' INT; sleep {NUMBER})"
            late = await api.error(SESSION, "bash", command=command, timeout_ms=700)
            assert "[the command was killed after 0.7 s, and the shell with it: the" in late
            assert not is_running(f"sleep {NUMBER}")
            assert await run_in(api, "echo .$state") == "."

    play(scene)


def test_much_output_and_large_files(place: Place) -> None:
    api = place.api

    async def scene() -> None:
        async with place.session() as folder:
            shown = await api.ok(SESSION, "bash", command="seq 1 1000000")
            assert shown.endswith("\n999999\n1000000")
            assert shown.startswith("[67")
            assert 100 * 1024 <= len(shown) < 101 * 1024
            (folder / "large").write_text("".join(f"line {n}\n" for n in range(1, 200_001)))
            assert "view_range" in await api.error(SESSION, "read", file_path="large")
            read = {"file_path": "large", "view_range": [199_999, 10**30]}
            assert await api.ok(SESSION, "read", **read) == "line 199999\nline 200000\n"
            read = {"file_path": "large", "view_range": [-5, 2]}
            assert await api.ok(SESSION, "read", **read) == "line 1\nline 2"
            read = {"file_path": "large", "view_range": [5, 2]}
            assert await api.ok(SESSION, "read", **read) == "(no output)"
            read = {"file_path": "large", "view_range": [1, 0]}
            assert "more than 262144 bytes" in await api.error(SESSION, "read", **read)
            read = {"file_path": "large", "view_range": [1]}
            assert "two numbers" in await api.error(SESSION, "read", **read)
            large = "x" * 5_000_000
            await api.ok(SESSION, "write", file_path="written", content=large)
            assert (folder / "written").read_text() == large
            found = await api.ok(SESSION, "grep", pattern="line")
            assert len(found) < 101 * 1024
            assert found.endswith("[the output is cut at 102400 bytes]")
            for number in range(250):
                (folder / f"{number}.n").touch()
            names = (await api.ok(SESSION, "glob", pattern="*.n")).splitlines()
            assert len(names) == 201
            assert names[-1] == "[50 older matches are left out]"
            # Exponential in Python's `re`: the server gives up after seconds.
            (folder / "slow").write_text("a" * 60 + "!")
            slow = await api.call(SESSION, "grep", pattern="(a|a)*$", path="slow")
            assert "limits" in slow[1] or "no matches" in slow[1]

    play(scene)


def test_images_are_content_blocks(place: Place) -> None:
    api = place.api

    async def scene() -> None:
        async with place.session() as folder:
            await api.ok(SESSION, "bash", command="true")
            (folder / "a.PNG").write_bytes(PIXEL)
            (folder / "a.pdf").write_bytes(b"%PDF")
            (folder / "large.gif").write_bytes(b"G" * 4_000_000)
            (folder / "binary").write_bytes(b"\xff\0")
            call_id = api.begin(SESSION, "read", file_path="a.PNG")
            is_error, (image,) = await asyncio.to_thread(api.result, SESSION, call_id)
            assert (is_error, image["type"]) == (False, "image")
            assert base64.b64decode(image["source"]["data"]) == PIXEL
            assert await api.ok(SESSION, "read", file_path="a.pdf") == "<document>"
            assert "the limit of" in await api.error(SESSION, "read", file_path="large.gif")
            read = {"file_path": "a.pdf", "view_range": [1, 2]}
            assert "view_range" in await api.error(SESSION, "read", **read)
            assert "UTF-8" in await api.error(SESSION, "read", file_path="binary")

    play(scene)


# ---- what is separated --------------------------------------------------------------------------


def test_two_sessions_at_once(place: Place) -> None:
    api = place.api
    tools = place.tools()

    async def scene() -> None:
        for name in ("sesn_a", "sesn_b"):
            api.open_session(name)
        async with api.working(place.workdir, tools), api.working(place.workdir, tools):
            async with asyncio.TaskGroup() as tasks:
                for name in ("sesn_a", "sesn_b"):
                    command = "echo $$ >file; export A=x"
                    tasks.create_task(api.ok(name, "bash", command=command))
            pids = {(place.root / name / "file").read_text() for name in ("sesn_a", "sesn_b")}
            assert len(pids) == 2
            for path in ("../sesn_a/file", f"{place.root}/sesn_a/file", "/etc/passwd", ".."):
                assert "outside" in await api.error("sesn_b", "read", file_path=path)
            assert await api.ok("sesn_b", "grep", pattern=".") == (
                f"{place.root}/sesn_b/file:1:" + (place.root / "sesn_b/file").read_text().strip()
            )
            for name in ("sesn_a", "sesn_b"):
                api.end_turn(name)
                await api.wait_stopped(name)

    play(scene)


def test_links_out_of_the_directory(place: Place, tmp_path: Path) -> None:
    api = place.api
    secret = tmp_path / "secret"
    secret.write_text("secret\n")

    async def scene() -> None:
        async with place.session():
            command = (
                f"ln -s {secret} leaf; ln -s {tmp_path} dir; ln -s {tmp_path}/new dangling; "
                "ln -s loop loop; mkfifo fifo; mkdir -p sub; ln -s .. sub/up; echo in >own"
            )
            await api.ok(SESSION, "bash", command=command)
            outside = ("leaf", "dir/secret", "dangling", "dir/new", "sub/up/../secret")
            for path in (*outside, f"{tmp_path}/secret", "../../secret", "sub/up/dir/secret"):
                for view in ({}, {"view_range": [1, 2]}):
                    text = await api.error(SESSION, "read", file_path=path, **view)
                    assert "outside" in text or "no such file" in text, path
                await api.error(SESSION, "edit", file_path=path, old_string="s", new_string="x")
                written = await api.call(SESSION, "write", file_path=path, content="x")
                assert written[0] or "sub/up/../secret" in path
            for path in ("loop", "fifo", "."):
                await api.error(SESSION, "read", file_path=path)
                await api.error(SESSION, "write", file_path=path, content="x")
            assert await api.ok(SESSION, "read", file_path="sub/up/own") == "in\n"
            for search in ({"path": "dir"}, {"path": "leaf"}, {"path": ".."}, {"path": "/"}):
                assert "outside" in await api.error(SESSION, "grep", pattern="secret", **search)
                assert "outside" in await api.error(SESSION, "glob", pattern="*", **search)
            assert await api.ok(SESSION, "grep", pattern="secret") == "no matches"
            assert await api.ok(SESSION, "glob", pattern="dir/*") == "no matches"
            for pattern in ("../*", "/etc/*", "sub/../../*"):
                await api.error(SESSION, "glob", pattern=pattern)
            for path in ("a\0b", "x" * 5000, "\n/../../.."):
                await api.error(SESSION, "read", file_path=path)

    play(scene)
    assert secret.read_text() == "secret\n"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("session_id", ["../../x", "a/b", "..", ".", "a\nb", "", "é" * 300, "-rf"])
def test_odd_session_ids(place: Place, session_id: str) -> None:
    """Each has a directory of its own below the root; without an id there are no tools."""
    if not session_id:
        with pytest.raises(ValueError, match="names no session"):
            place.tools()(AgentToolContext(session_id=session_id))
        return

    async def scene() -> None:
        tools = {t.name: t for t in place.tools()(AgentToolContext(session_id=session_id))}
        folder = await tools["bash"].call({"command": "pwd; touch file"})
        assert folder == str(place.root / directory_name(session_id))
        await tools["grep"].close()

    play(scene)
    (directory,) = place.root.iterdir()
    assert [path.name for path in directory.iterdir()] == ["file"]


def test_names_of_directories_are_different() -> None:
    ids = ["a", "a/", "a_", "a\n", "A", "a.b", "a" * 101, "a" * 102, "\ud800", "?"]
    names = [directory_name(each) for each in ids]
    assert len(set(names)) == len(ids)
    assert directory_name("a/") not in (directory_name(directory_name("a/")), "a_")


def test_a_directory_that_is_a_link_is_not_used(place: Place, tmp_path: Path) -> None:
    place.root.mkdir()
    (place.root / SESSION).symlink_to(tmp_path)

    async def scene() -> None:
        async with place.session():
            assert "not used" in await place.api.error(SESSION, "bash", command="touch here")

    play(scene)
    assert not (tmp_path / "here").exists()


def test_credentials_do_not_reach_commands(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither from a server of the worker's own, nor from one that has them itself."""
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_ENVIRONMENT_KEY", "ANTHROPIC_WORK_SECRET"):
        monkeypatch.setenv(name, "the-secret")
    monkeypatch.setenv("BASH_ENV", "/nonexistent")
    api = place.api
    look = "env; tr '\\0' '\\n' </proc/$$/environ; cat /proc/$PPID/environ; cat /proc/$$/cmdline"

    async def scene(target: str | None) -> None:
        async with place.session(target=target, env={"OWN": "kept"}):
            shown = (await api.call(SESSION, "bash", command=look))[1]
            assert "OWN=kept" in shown
            assert "the-secret" not in shown
            assert "ANTHROPIC_" not in shown

    play(lambda: scene(None))
    with pytest.raises(ValueError, match="ANTHROPIC_API_KEY"):
        place.tools(env={"ANTHROPIC_API_KEY": "x"})

    async def inherited() -> None:
        """A server that was started with them: its commands, not its own memory."""
        async with place.session(target="stdio:exec-server --listen stdio"):
            command = "env; tr '\\0' '\\n' </proc/$$/environ"
            assert "ANTHROPIC_" not in await api.ok(SESSION, "bash", command=command)

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    play(inherited)


def test_confined(place: Place) -> None:
    """The policy allows the directory and /tmp, where the other tests have their sessions."""
    api = place.api

    async def scene(root: Path) -> None:
        async with place.session(sandbox="workspace-write") as folder:
            assert await api.ok(SESSION, "bash", command="echo in >own; cat own") == "in"
            await api.ok(SESSION, "write", file_path="file", content="x")
            for path in (root / "outside", folder.parent / "other"):
                await api.error(SESSION, "bash", command=f"echo x >{path}")
                await api.error(SESSION, "write", file_path=str(path), content="x")
        assert {path.name for path in root.rglob("*") if path.is_file()} == {"own", "file"}

    with tempfile.TemporaryDirectory(dir="/var/tmp") as root:
        place.root = Path(root) / "sessions"
        play(lambda: scene(Path(root)))


def test_another_user(place: Place, ordinary_user: str | None) -> None:
    """Commands, files, the directory and the skills are those of the user."""
    api = place.api
    skill = api.add_skill("mine", {"SKILL.md": "read me"})

    async def scene() -> None:
        facts = {"agent": {"skills": [skill]}}
        async with place.session(facts=facts, user=ordinary_user, keep_files=False) as folder:
            name = await api.ok(SESSION, "bash", command="id -un; touch command")
            await api.ok(SESSION, "write", file_path="a/file", content="x")
            assert await api.ok(SESSION, "grep", pattern="x", path="a") == f"{folder}/a/file:1:x"
            made = [folder, folder / "command", folder / "a/file", folder / "skills/mine/SKILL.md"]
            assert {path.owner() for path in made} == {name}
            assert ordinary_user in (None, name)
        assert not folder.exists()

    with tempfile.TemporaryDirectory(dir="/var/tmp") as root:
        Path(root).chmod(0o777)
        place.root = Path(root) / "sessions"
        play(scene)


# ---- the end of a session -----------------------------------------------------------------------


def test_files_stay_until_the_session_is_over(place: Place) -> None:
    api = place.api

    async def scene() -> None:
        async with place.session() as folder:
            await api.ok(SESSION, "bash", command=f"touch kept; sleep {NUMBER} &")
        await wait_ended(f"sleep {NUMBER}")
        assert (folder / "kept").exists()
        async with place.session():  # it comes back
            assert await api.ok(SESSION, "bash", command="ls") == "kept"
            api.terminate(SESSION)
        assert not folder.exists()
        async with place.session("sesn_deleted") as folder:
            await api.ok("sesn_deleted", "bash", command="touch gone")
            api.end_turn("sesn_deleted")
            session = api.sessions.pop("sesn_deleted")
            await api.wait_stopped("sesn_deleted")
            api.sessions["sesn_deleted"] = session
        assert not folder.exists()

    play(scene)


def test_files_need_not_stay(place: Place) -> None:
    async def scene() -> None:
        async with place.session(keep_files=False) as folder:
            command = f"mkdir -p a/b; touch a/b/c; chmod 0 a; sleep {NUMBER} &"
            await place.api.ok(SESSION, "bash", command=command)
        assert not folder.exists()

    play(scene)
    assert not is_running(f"sleep {NUMBER}")


@pytest.mark.parametrize("why", ["lost", "stopping", "cancelled"])
def test_a_given_up_session_kills_its_command(place: Place, why: str) -> None:
    """The lease is lost, the work is stopped, or the worker ends; the runner shields its tools."""
    api = place.api
    api.lost.clear()
    api.stopping.clear()
    command = f"touch begun; setsid sleep {NUMBER} & {NEVER_ENDS}"

    async def scene() -> None:
        api.stopped.clear()
        api.open_session(SESSION)
        folder = place.root / SESSION
        async with api.working(place.workdir, place.tools(keep_files=False)):
            call_id = api.begin(SESSION, "bash", command=command)
            await wait_begun(folder / "begun")
            polls = api.polls
            if why != "cancelled":
                getattr(api, why).add(f"work_{SESSION}")
                await wait_ended(f"sleep {NUMBER}")
                await api.wait_polled(polls)
        await wait_ended(f"sleep {NUMBER}")
        # Another worker may have the session now: it has the files, and repeats the call.
        assert folder.exists()
        assert not api.has_result(SESSION, call_id)
        assert (f"work_{SESSION}" in api.stopped) == (why != "lost")

    try:
        play(scene)
    finally:
        api.lost.clear()
        api.stopping.clear()


# ---- the target ---------------------------------------------------------------------------------


def test_a_target_that_is_away(place: Place) -> None:
    """The model is told, and the worker goes on with the next session."""
    api = place.api

    async def scene() -> None:
        api.open_session("sesn_next")
        api.queue.clear()
        async with place.session(target="ws://127.0.0.1:1"):
            for call in (("bash", {"command": "ls"}), ("read", {"file_path": "a"})):
                text = await api.error(SESSION, call[0], **call[1])
                assert "the machine is out of reach: cannot connect to ws://127.0.0.1:1" in text
                assert "Traceback" not in text
            api.open_session("sesn_next")
            api.end_turn(SESSION)
            await api.wait_stopped(SESSION)
            assert "out of reach" in await api.error("sesn_next", "grep", pattern="x")

    play(scene)


def test_a_target_that_is_lost_in_the_middle(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_session, "RECOVERY_SECONDS", 1.0)
    api = place.api

    async def scene(proxy: Proxy) -> None:
        async with place.session(target=proxy.url) as folder:
            call_id = api.begin(SESSION, "bash", command="touch begun; sleep 600")
            await wait_begun(folder / "begun")
            proxy.cut()
            is_error, (text,) = await asyncio.to_thread(api.result, SESSION, call_id)
            assert is_error
            assert "out of reach" in text["text"]
            proxy.mend()
            assert await api.ok(SESSION, "bash", command="ls") == "begun"
            proxy.cut_next()
            assert "out of reach" in await api.error(SESSION, "read", file_path="begun")
            proxy.mend()
            assert await api.ok(SESSION, "read", file_path="begun") == "(no output)"

    with Proxy(place.target).running() as proxy:
        play(lambda: scene(proxy))


def test_a_connection_that_is_cancelled_while_it_is_made(place: Place) -> None:
    """A server that accepts and does not answer: the tool call is given up with the session."""
    api = place.api

    async def scene() -> None:
        links = []
        silent = await asyncio.start_server(lambda *ends: links.append(ends), "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        api.open_session(SESSION)
        tools = {
            t.name: t
            for t in place.tools(target=f"ws://127.0.0.1:{port}")(
                AgentToolContext(session_id=SESSION)
            )
        }
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await tools["read"].call({"file_path": "x"})
        await tools["read"].close()
        assert links
        for _, writer in links:
            writer.close()
        silent.close()

    play(scene)


def test_calls_at_once(place: Place) -> None:
    """The package's runner makes one call at a time; other callers need not."""

    async def scene() -> None:
        tools = {t.name: t for t in place.tools()(AgentToolContext(session_id=SESSION))}
        async with asyncio.TaskGroup() as tasks:
            runs = [
                tasks.create_task(tools["bash"].call({"command": f"sleep 0.0{n}; echo {n}"}))
                for n in range(5)
            ]
            for n in range(5):
                await tools["write"].call({"file_path": f"{n}", "content": f"{n}"})
        assert [run.result() for run in runs] == ["0", "1", "2", "3", "4"]
        assert len((await tools["bash"].call({"command": "ls"})).split()) == 5
        await tools["bash"].close()
        with pytest.raises(Exception, match="has ended"):
            await tools["read"].call({"file_path": "0"})

    play(scene)


# ---- skills and memory --------------------------------------------------------------------------


def test_skills_are_copied_before_the_first_call(place: Place) -> None:
    api = place.api
    skill = api.add_skill("pdf", {"SKILL.md": "read me", "scripts/run.sh": "#!/bin/sh\necho ran\n"})

    async def scene() -> None:
        for _ in range(2):  # a changed copy is replaced when the session comes back
            async with place.session(facts={"agent": {"skills": [skill]}}) as folder:
                assert await api.ok(SESSION, "bash", command="skills/pdf/scripts/run.sh") == "ran"
                found = await api.ok(SESSION, "read", file_path="skills/pdf/SKILL.md")
                assert found == "read me"
                await api.ok(SESSION, "bash", command="echo changed >skills/pdf/SKILL.md")
            assert list((place.workdir / "skills").iterdir()) == []
        assert (folder / "skills/pdf/SKILL.md").exists()

    play(scene)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_nothing_is_written_where_a_command_put_another_skills(place: Place, kind: str) -> None:
    api = place.api
    skill = api.add_skill("pdf", {"SKILL.md": "read me"})

    async def scene(victim: Path) -> None:
        plant = f"ln -s {victim} skills" if kind == "link" else "echo x >skills"
        for command in (f"rm -r skills; {plant}", "cat skills/pdf/SKILL.md"):
            facts = {"agent": {"skills": [skill]}}
            async with place.session(facts=facts, sandbox="workspace-write"):
                told = await api.ok(SESSION, "bash", command=command)
        assert told == "read me"
        assert [path.name for path in victim.rglob("*")] == ["pdf", "own"]

    with tempfile.TemporaryDirectory(dir="/var/tmp") as root:
        place.root, victim = Path(root) / "sessions", Path(root) / "victim"
        (victim / "pdf").mkdir(parents=True)
        (victim / "pdf/own").touch()
        play(lambda: scene(victim))


def test_memory_stores_are_refused(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """They would be files of the worker's machine, which no tool reaches."""
    api = place.api
    mount = place.workdir / "mounted"
    store = {"type": "memory_store", "memory_store_id": "memstore_1", "mount_path": str(mount)}

    async def scene() -> None:
        api.stopped.clear()
        api.open_session(SESSION, resources=[store])
        async with api.working(place.workdir, place.tools(), memory_sync_interval=15.0):
            await api.wait_stopped(SESSION)
            text = "memory_sync_interval=None"
            await asyncio.to_thread(eventually, "it is logged", lambda: text in caplog.text)
        assert not mount.exists()
        async with place.session(facts={"resources": [store]}):  # without synchronization
            assert await api.ok(SESSION, "bash", command="echo runs") == "runs"

    play(scene)


def test_a_command_that_is_no_text(place: Place) -> None:
    async def scene() -> None:
        context = AgentToolContext(workdir=place.workdir, session_id=SESSION)
        bash = next(tool for tool in place.tools()(context) if tool.name == "bash")
        try:
            await bash.call({"command": "state=kept"})
            with pytest.raises(ToolError, match="surrogates not allowed"):
                await bash.call({"command": "echo \ud800"})
            assert await bash.call({"command": "echo $state"}) == "kept"
        finally:
            assert bash.close is not None
            await bash.close()

    play(scene)


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sandbox": "nope"}, "unknown sandbox 'nope'"),
        ({"sandbox": "read-only", "user": "root"}, "user and sandbox exclude each other"),
        ({"env": {"A=B": "1"}}, "has the name 'A=B'"),
        ({"root": ""}, "root is empty"),
    ],
)
def test_invalid_options_are_refused_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ExecServerTools(**options)


# ---- the package's tools ------------------------------------------------------------------------


def test_tools_are_those_of_the_package(place: Place) -> None:
    context = AgentToolContext(workdir=place.workdir, session_id=SESSION)
    theirs = [tool.to_dict() for tool in beta_agent_toolset_20260401(context)]
    assert [tool.to_dict() for tool in place.tools()(context)] == theirs
    assert json.dumps(theirs)


@pytest.mark.parametrize("name", ["browse", "bash"])
def test_an_unknown_tool_or_parameter_is_refused(
    place: Place, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be carried out by the package, on the machine of the worker."""

    async def call(url: str) -> str:
        raise AssertionError

    def with_new_one(context: AgentToolContext) -> list[Any]:
        known = [t for t in beta_agent_toolset_20260401(context) if t.name != name]
        return [*known, beta_async_tool(call, name=name)]

    monkeypatch.setattr(claude_managed_agents, "beta_agent_toolset_20260401", with_new_one)
    with pytest.raises(NotImplementedError, match=f"has the tool '{name}'"):
        place.tools()


def test_no_process_is_left(place: Place) -> None:
    before = set(descendants(os.getpid()))

    async def scene() -> None:
        async with place.session(target=None):
            await place.api.ok(SESSION, "bash", command="(setsid sleep 1000 &)")

    play(scene)
    eventually("no process is left", lambda: set(descendants(os.getpid())) <= before, 20)
