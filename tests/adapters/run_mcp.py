"""`exec-server mcp` with the client of the MCP SDK, on stdio and on HTTP."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from exec_server import sync
from exec_server.adapters.mcp_commands import MAX_ENDED, MAX_RUNNING
from tests.adapters.coding_task import FIXED, READ, RUN_TESTS, make_repository

COMMAND = (sys.executable, "-m", "exec_server", "mcp")
READING = {"read_file", "list_directory", "glob", "grep"}
CHANGING = {"write_file", "edit_file", "apply_patch"}
COMMANDS = {"exec_command", "write_stdin", "kill_process", "list_processes", "read_output"}
COMMANDS |= {"wait_command"}
Scene = Callable[[Client], Awaitable[None]]


def play(scene: Scene, *words: str, **options: Any) -> None:
    async def with_client() -> None:
        parameters = StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], *words])
        async with asyncio.timeout(60), Client(parameters, **options) as client:
            await scene(client)

    asyncio.run(with_client())


async def call(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    text = "".join(part.text for part in result.content)
    assert not result.is_error, text
    return text


async def refusal(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return "".join(part.text for part in result.content)


def test_a_coding_task(server_url: str, tmp_path: Path) -> None:
    folder = make_repository(tmp_path)

    async def scene(client: Client) -> None:
        assert "return a - b" in await call(client, "exec_command", cmd=READ)
        failed = await call(client, "exec_command", cmd=RUN_TESTS)
        assert "Exited with code 1" in failed
        assert "AssertionError: -1" in failed
        edits = [{"old_text": "a - b", "new_text": "a + b"}]
        diff = await call(client, "edit_file", path="app.py", edits=edits, dry_run=True)
        assert "+    return a + b" in diff
        assert "a - b" in await call(client, "read_file", path="app.py")
        assert await call(client, "edit_file", path="app.py", edits=edits) == diff
        assert await call(client, "read_file", path=f"{folder}/app.py") == FIXED
        passed = await call(client, "exec_command", cmd=RUN_TESTS)
        assert passed.startswith("Exited with code 0\n")
        assert "does not occur" in await refusal(client, "edit_file", path="app.py", edits=edits)

    play(scene, "--cwd", str(folder), server_url)


async def check_schemas(client: Client) -> None:
    """No union types, which some clients refuse, and annotations that are true."""
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(tools) == READING | CHANGING | COMMANDS
    for tool in tools.values():
        text = tool.model_dump_json(by_alias=True)
        assert "anyOf" not in text
        assert "oneOf" not in text
        assert tool.description
        assert tool.annotations is not None
        reads = tool.name in READING | {"list_processes", "read_output", "wait_command"}
        assert tool.annotations.read_only_hint == reads
        assert "ctx" not in tool.input_schema["properties"]


async def check_resources(client: Client, folder: Path) -> None:
    (folder / "ä b").write_text("text")
    text = (await client.read_resource((folder / "ä b").as_uri())).contents[0]
    assert (text.text, text.mime_type) == ("text", "text/plain")
    blob = (await client.read_resource((folder / "binary").as_uri())).contents[0]
    assert base64.b64decode(blob.blob) == b"\xff\xfe"
    assert blob.mime_type == "application/octet-stream"
    templates = (await client.list_resource_templates()).resource_templates
    uris = [template.uri_template for template in templates]
    assert uris == ["file:///{+path}", "command:///{session_id}"]
    with pytest.raises(MCPError, match="No such file"):
        await client.read_resource((folder / "missing").as_uri())


def test_schemas_and_files(server_url: str, tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        await check_schemas(client)
        await call(client, "write_file", path="a/b.txt", content="one\ntwo\nthree\n")
        assert (tmp_path / "a/b.txt").read_text() == "one\ntwo\nthree\n"
        part = await call(client, "read_file", path="a/b.txt", offset=2, limit=1)
        assert part == "two\n[lines 2 to 2 of 3; continue with offset=3]"
        assert await call(client, "list_directory") == "a/\n"
        assert await call(client, "list_directory", path="a") == "b.txt\t14\n"
        assert await call(client, "glob", pattern="**/*.txt") == "a/b.txt"
        found = await call(client, "grep", pattern="t[wh]", context=1, glob="*.txt")
        assert "a/b.txt:2:two" in found
        assert "a/b.txt-1-one" in found
        for path in ("a", "a/", "a/b.txt"):
            assert await call(client, "grep", pattern="two", path=path) == "a/b.txt:2:two"
        whole = f"{tmp_path}/a"
        assert await call(client, "grep", pattern="two", path=whole) == f"{whole}/b.txt:2:two"
        assert await call(client, "glob", pattern="*.txt", path="a") == "a/b.txt"
        patch = "*** Begin Patch\n*** Add File: c.txt\n+new\n*** End Patch\n"
        assert await call(client, "apply_patch", patch=patch) == "added c.txt"
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        assert "not a text" in await refusal(client, "read_file", path="binary")
        await check_resources(client, tmp_path)
        missing = await refusal(client, "read_file", path="missing")
        assert "No such file" in missing
        assert "Traceback" not in missing

    play(scene, "--cwd", str(tmp_path), server_url)


def test_terminals_and_long_output(server_url: str) -> None:
    async def scene(client: Client) -> None:
        begun = await call(
            client, "exec_command", cmd="read a; echo $((a * 7)); cat", tty=True, yield_time_ms=200
        )
        session = int(re.search(r"^Running, session_id=(\d+)\n", begun)[1])  # type: ignore[index]
        await call(client, "write_stdin", session_id=session, chars="6\n", yield_time_ms=200)
        assert "42" in await call(client, "read_output", session_id=session)
        ended = await call(client, "write_stdin", session_id=session, chars="\x03")
        assert ended.startswith("Exited with code 130\n")
        assert f"session_id={session}: Exited" in await call(client, "list_processes")

        long = await call(client, "exec_command", cmd="seq 20000", max_output_tokens=100)
        assert "Output:\n1\n2\n" in long
        assert long.endswith("\n20000\n")
        note = re.search(r"session_id=(\d+) and offset=(\d+) shows", long)
        assert note is not None
        rest = await call(
            client, "read_output", session_id=int(note[1]), offset=int(note[2]), max_output_tokens=9
        )
        assert "\n71\n72\n" in rest

        begun = await call(client, "exec_command", cmd="sleep 61236", yield_time_ms=1)
        session = int(begun.splitlines()[0].partition("=")[2])
        refused = await refusal(client, "write_stdin", session_id=session, chars="x")
        assert "tty=true" in refused
        killed = await call(client, "kill_process", session_id=session)
        assert killed.startswith("Exited with code ")
        assert "no command" in await refusal(client, "kill_process", session_id=999)

    play(scene, server_url)


async def started(client: Client, fifo: Path, code: int = 0) -> int:
    """The session of a background command that ends as soon as the FIFO is written."""
    os.mkfifo(fifo)
    command = f"cat {fifo}; exit {code}"
    begun = await call(client, "exec_command", cmd=command, yield_time_ms=1)
    return int(begun.splitlines()[0].removeprefix("Running, session_id="))


def end(fifo: Path) -> None:
    fifo.write_text("done\n")


def test_the_end_of_a_command_is_waited_for(server_url: str, tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        assert await call(client, "wait_command") == "no command runs in the background"
        first = await started(client, tmp_path / "1")
        second = await started(client, tmp_path / "2", 3)
        waiting = await call(client, "wait_command", timeout_ms=1)
        assert waiting.startswith(f"still running\nsession_id={first}: Running; 0 bytes: 'cat ")
        async with asyncio.TaskGroup() as tasks:
            any_end = tasks.create_task(call(client, "wait_command"))
            its_end = tasks.create_task(call(client, "wait_command", session_id=first))
            end(tmp_path / "2")
            ended = await any_end
            assert ended.startswith(f"session_id={second}\nExited with code 3\n")
            assert ended.endswith("Output:\ndone\n")
            end(tmp_path / "1")
            assert (await its_end).startswith(f"session_id={first}\nExited with code 0\n")
        assert await call(client, "list_directory", path=str(tmp_path)) == "1\n2\n"
        again = await call(client, "wait_command", session_id=first)
        assert again.startswith(f"session_id={first}\nExited with code 0\n")
        assert "no command with" in await refusal(client, "wait_command", session_id=99)

    play(scene, server_url)


def test_the_next_result_mentions_what_has_ended(server_url: str, tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        session = await started(client, tmp_path / "fifo", 1)
        end(tmp_path / "fifo")
        texts: list[str] = []
        while len(texts) < 2:
            result = await client.call_tool("list_directory", {"path": str(tmp_path)})
            texts = [part.text for part in result.content]
        assert texts[0] == "fifo\n"
        assert texts[1].startswith(
            f"[meanwhile session_id={session}: Exited with code 1; 5 bytes: "
        )
        assert await call(client, "list_directory", path=str(tmp_path)) == "fifo\n"

    play(scene, server_url)


def test_clients_are_told_of_the_end_of_a_command(server_url: str, tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        async with client.listen(resources_list_changed=True) as changes:
            session = await started(client, tmp_path / "fifo")
            assert type(await anext(changes)).__name__ == "ResourcesListChanged"
        [listed] = (await client.list_resources()).resources
        assert str(listed.uri) == f"command:///{session}"
        assert listed.title == f"cat {tmp_path}/fifo; exit 0"
        async with client.listen(resource_subscriptions=[str(listed.uri)]) as changes:
            end(tmp_path / "fifo")
            assert str((await anext(changes)).uri) == str(listed.uri)
        text = (await client.read_resource(str(listed.uri))).contents[0].text
        assert text.startswith(f"session_id={session}: Exited with code 0; 5 bytes: ")
        assert text.endswith("\ndone\n")
        for unknown in ("99", "x"):
            with pytest.raises(MCPError, match="no command with"):
                await client.read_resource(f"command:///{unknown}")

    play(scene, server_url)


def test_older_clients_subscribe_to_a_command(server_url: str, tmp_path: Path) -> None:
    told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def on_message(message: Any) -> None:
        uri = getattr(message.params, "uri", "")
        await told.put((message.method, str(uri)))

    async def scene(client: Client) -> None:
        session = await started(client, tmp_path / "fifo")
        other = await started(client, tmp_path / "other")
        for _ in range(2):
            assert await told.get() == ("notifications/resources/list_changed", "")
        uri = f"command:///{session}"
        await client.subscribe_resource(f"command:///{other}")
        await client.unsubscribe_resource(f"command:///{other}")
        await client.subscribe_resource(uri)
        with pytest.raises(MCPError, match="is no command that runs in the background"):
            await client.subscribe_resource("file:///etc/passwd")
        end(tmp_path / "other")
        await call(client, "wait_command", session_id=other)
        end(tmp_path / "fifo")
        assert await told.get() == ("notifications/resources/updated", uri)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the newer protocol has no such requests
        play(scene, server_url, mode="legacy", message_handler=on_message)


async def check_limits(client: Client, command: str) -> None:
    """As many commands as are allowed run and are remembered; those that run stay."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(MAX_ENDED + 2):
            tasks.create_task(call(client, "exec_command", cmd="true"))
    async with asyncio.TaskGroup() as tasks:
        for _ in range(MAX_RUNNING):
            tasks.create_task(call(client, "exec_command", cmd=command, yield_time_ms=1))
    assert "kill_process" in await refusal(client, "exec_command", cmd="true")
    lines = (await call(client, "list_processes")).splitlines()
    assert [": Exited with code 0;" in line for line in lines].count(True) == MAX_ENDED
    assert [": Running; " in line for line in lines].count(True) == MAX_RUNNING


def test_cancellation_and_the_end_kill(server_url: str) -> None:
    reported = asyncio.Event()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        assert message == "0 bytes of output"
        reported.set()

    async def scene(client: Client) -> None:
        arguments = {"cmd": "sleep 61237", "yield_time_ms": 50_000}
        async with asyncio.TaskGroup() as tasks:
            work = client.call_tool("exec_command", arguments, progress_callback=on_progress)
            task = tasks.create_task(work)
            await reported.wait()
            task.cancel()
        assert await call(client, "list_processes") == "no command was started"
        await check_limits(client, "sleep 61238")

    play(scene, server_url)
    assert reported.is_set()
    with sync.connect(server_url) as env:
        for number in (61237, 61238):
            gone = f"while pgrep -f '[s]leep {number}'; do sleep 0.05; done"
            env.shell(gone, timeout=20, check=True)


def test_modes(server_url: str, tmp_path: Path) -> None:
    async def reading(client: Client) -> None:
        assert {tool.name for tool in (await client.list_tools()).tools} == READING

    async def confined(client: Client) -> None:
        outside = Path(f"/var/tmp/exec-server-mcp-{os.getpid()}")
        # The model may choose a directory, but not the workspace.
        text = f"touch {outside}; touch inside; echo end"
        for workdir in ("", "/"):
            done = await call(client, "exec_command", cmd=text, workdir=workdir)
            assert "end" in done
        assert (tmp_path / "inside").exists()
        assert "Read-only" in await refusal(client, "write_file", path=str(outside), content="")
        assert not outside.exists()
        await call(client, "write_file", path="file", content="text")

    play(reading, "--read-only", server_url)
    play(confined, "--sandbox", "workspace-write", "--cwd", str(tmp_path), server_url)


@contextmanager
def http_server(server_url: str, token: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--http", str(port), "--http-token-file", str(token), server_url]
    with subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = f"http://127.0.0.1:{port}/mcp"
            assert process.stderr.readline().endswith(f" at {url}\n")
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 128 + signal.SIGTERM
            assert process.stderr is not None
            assert process.stderr.read() == ""


def test_http_needs_the_token(server_url: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("correct horse\n")

    async def scene(url: str) -> None:
        async with httpx2.AsyncClient() as client:
            assert (await client.post(url, json={})).status_code == 401
            wrong = {"Authorization": "Bearer wrong"}
            assert (await client.post(url, json={}, headers=wrong)).status_code == 401
        right = {"Authorization": "Bearer correct horse"}
        async with httpx2.AsyncClient(headers=right) as http:
            transport = streamable_http_client(url, http_client=http)
            async with asyncio.timeout(30), Client(transport) as client:
                assert "hello" in await call(client, "exec_command", cmd="echo hello")

    with http_server(server_url, token) as url:
        asyncio.run(scene(url))


def test_http_ends_in_the_middle_of_a_command(server_url: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("correct horse\n")
    headers = {"Authorization": "Bearer correct horse"}
    reported = asyncio.Event()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        reported.set()

    async def scene(url: str) -> None:
        async with httpx2.AsyncClient(headers=headers) as http:
            transport = streamable_http_client(url, http_client=http)
            async with asyncio.timeout(30), Client(transport) as client:
                arguments = {"cmd": "sleep 61239", "yield_time_ms": 50_000}
                work = client.call_tool("exec_command", arguments, progress_callback=on_progress)
                async with asyncio.TaskGroup() as tasks:
                    task = tasks.create_task(work)
                    await reported.wait()
                    serving.close()  # sends SIGTERM
                    task.cancel()

    serving = contextlib.ExitStack()
    with serving, contextlib.suppress(BaseExceptionGroup, httpx2.HTTPError):
        asyncio.run(scene(serving.enter_context(http_server(server_url, token))))
    assert reported.is_set()
    with sync.connect(server_url) as env:
        gone = "while pgrep -f '[s]leep 61239'; do sleep 0.05; done"
        env.shell(gone, timeout=20, check=True)


def test_a_signal_ends_it(server_url: str) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([*COMMAND, server_url], stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n')
        process.stdin.flush()
        assert b'"id":1' in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


def test_a_server_that_is_restarted_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")

    async def scene(client: Client) -> None:
        with sync.serve(url, cwd=tmp_path):
            uri = (tmp_path / "file").as_uri()
            begun = await call(client, "exec_command", cmd="sleep 61240", yield_time_ms=1)
            assert "Running, session_id=1" in begun
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(call(client, "read_file", path="file"))
            with sync.serve(url, cwd=tmp_path):
                assert (await reading).startswith("text[meanwhile session_id=1: Lost: ")
                assert (await client.read_resource(uri)).contents[0].text == "text"
                done = await call(client, "exec_command", cmd="echo on")
                assert done.startswith("Exited with code 0")
                lost = await call(client, "write_stdin", session_id=1)
                assert lost.startswith("Lost: ")

    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"ws://127.0.0.1:{free.getsockname()[1]}"
    with sync.serve(url, cwd=tmp_path) as first:
        asyncio.run(play_restarted(scene, first, "--cwd", str(tmp_path), url))


def test_a_directory_that_does_not_exist_is_named_at_the_start(
    server_url: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for name, reason in (("none", "No such file or directory"), ("file", "Not a directory")):
        words = [*COMMAND, "--cwd", f"{tmp_path}/{name}", server_url]
        ended = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode != 0
        assert ended.stderr == f"Error: --cwd {tmp_path}/{name}: {reason}\n"


async def play_restarted(scene: Scene, first: sync.RunningServer, *words: str) -> None:
    """Play a scene with a client whose first server has ended."""
    parameters = StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], *words])
    async with asyncio.timeout(60), Client(parameters) as client:
        await call(client, "list_directory")
        first.close()
        await scene(client)
