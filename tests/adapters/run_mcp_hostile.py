"""`exec-server mcp` with clients that break the rules, on stdio and on HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from exec_server import connect, sync
from exec_server.adapters import mcp as adapter
from exec_server.adapters import mcp_http, mcp_stdio
from exec_server.adapters.mcp_commands import CommandSessions
from exec_server.cli import mcp
from exec_server.errors import InvalidParams

SECONDS = 60
CLIENT = {"name": "hostile", "version": "1"}
HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": CLIENT}
TOKEN = "correct horse"


def request(number: Any, method: str, params: Any = None) -> dict[str, Any]:
    found = {"jsonrpc": "2.0", "id": number, "method": method}
    return found if params is None else found | {"params": params}


def tool(number: Any, name: str, **arguments: Any) -> dict[str, Any]:
    return request(number, "tools/call", {"name": name, "arguments": arguments})


def cancellation(number: Any) -> dict[str, Any]:
    method = "notifications/cancelled"
    return {"jsonrpc": "2.0", "method": method, "params": {"requestId": number}}


class RawClient:
    """A client that writes the lines it likes."""

    def __init__(self, *words: str) -> None:
        pipe = subprocess.PIPE
        argv = [sys.executable, "-m", "exec_server", "mcp", *words]
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe)
        self.send(request(0, "initialize", HELLO))
        self.answers(1)
        self.send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def send(self, *messages: Any) -> None:
        assert self.process.stdin is not None
        for message in messages:
            line = message if isinstance(message, bytes) else json.dumps(message).encode()
            self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def answers(self, count: int) -> dict[Any, Any]:
        assert self.process.stdout is not None
        found: dict[Any, Any] = {}
        while len(found) < count:
            message = json.loads(self.process.stdout.readline())
            if "method" not in message:  # a notification, that a command is in the background
                found[message["id"]] = message
        return found

    def texts(self, count: int) -> dict[Any, str]:
        answers = self.answers(count).items()
        return {
            number: answer["result"]["content"][0]["text"]
            if "result" in answer
            else answer["error"]["message"]
            for number, answer in answers
        }

    def close(self) -> str:
        _, errors = self.process.communicate(timeout=SECONDS)
        return errors.decode()


@contextmanager
def raw_client(*words: str) -> Iterator[RawClient]:
    client = RawClient(*words)
    try:
        yield client
    finally:
        client.process.kill()
        client.process.communicate()


def test_lines_that_are_no_requests_are_answered(server_url: str) -> None:
    with raw_client(server_url) as client:
        for line, number, code in (
            (b"\xff\xfe", None, -32700),
            (b"not json", None, -32700),
            (b"[" * 100_000, None, -32700),
            (b"[]", None, -32600),
            (b'{"jsonrpc":"2.0","id":true,"method":"ping","params":7}', None, -32600),
            (b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":[1]}', 7, -32600),
            (json.dumps(tool(8, "exec_command", cmd="\ud800")).encode(), 8, -32600),
        ):
            client.send(line)
            (answer,) = client.answers(1).values()
            assert (answer["id"], answer["error"]["code"]) == (number, code)
        client.send(b'{"jsonrpc":"2.0","id":9,"result":[]}', b"{}", request(10, "ping"))
        assert list(client.answers(1)) == [10]  # an answer is not answered
        assert client.close() == ""


def test_a_line_that_is_too_long_ends_it(server_url: str) -> None:
    with raw_client(server_url) as client:
        assert client.process.stdin is not None
        with pytest.raises(BrokenPipeError):
            client.send(b"x" * (mcp.LINE_BYTES + 1_048_576))
        client.process.stdin = None
        errors = client.close()
        assert client.process.returncode == 1
        assert errors == "Error: the client has sent a line of more than 8388608 bytes\n"


def test_extreme_arguments_are_answered(server_url: str) -> None:
    big = 10**400
    wrong = [
        tool(1, "exec_command", cmd=5),
        tool(2, "read_file", path=["a"]),
        tool(3, "no_such_tool"),
        tool(4, "read_file", path="/etc/\0"),
        tool(5, "exec_command", cmd="a\0b"),
        tool(6, "exec_command", cmd="true", shell="/bin/\0"),
        tool(7, "exec_command", cmd="x" * 3_000_000),
        tool(8, "read_file", path="/" + "a/" * 100_000),
        tool(9, "kill_process", session_id=big),
        tool(10, "edit_file", path="/etc/passwd", edits=[[]]),
        tool(11, "edit_file", path="/etc/passwd", edits=[{"old_text": "", "new_text": ""}] * 2000),
        request(12, "resources/read", {"uri": "file:///tmp/../etc/passwd"}),
        request(13, "resources/read", {"uri": "file:///tmp/%2e%2e/etc/passwd"}),
        request(14, "resources/read", {"uri": "file:///dev/zero"}),
    ]
    right = [
        tool(20, "exec_command", cmd="echo hi", yield_time_ms=big, max_output_tokens=-big),
        tool(21, "read_file", path="/etc/passwd", offset=big, limit=big),
        tool(22, "grep", pattern="root", path="/etc/passwd", context=big),
        tool(23, "grep", pattern="root", path="/etc/passwd", context=-big),
        tool(24, "read_file", path="/etc/passwd", offset=-big, limit=-big),
    ]
    with raw_client(server_url) as client:
        client.send(*wrong, *right)
        answers = client.answers(len(wrong) + len(right))
        for number, answer in answers.items():
            is_error = answer.get("result", {}).get("isError", True)
            assert is_error == (number < 20), answer
            assert "root:" not in json.dumps(answer) or number >= 20
        assert client.close() == ""


def test_too_many_requests_are_refused(server_url: str) -> None:
    with raw_client(server_url) as client:
        client.send(tool("first", "exec_command", cmd="sleep 61501", yield_time_ms=1))
        assert "session_id=1" in client.texts(1)["first"]
        waits = [tool(n, "write_stdin", session_id=1, yield_time_ms=50_000) for n in range(300)]
        client.send(*waits)
        refused = client.answers(len(waits) - mcp_stdio.MAX_REQUESTS)
        assert {answer["error"]["code"] for answer in refused.values()} == {-32000}
        waiting = set(range(300)) - set(refused)
        client.send(tool(min(waiting), "list_processes"))
        assert client.answers(1)[min(waiting)]["error"]["code"] == -32600  # the id is in use
        client.send(*map(cancellation, waiting), tool("last", "kill_process", session_id=1))
        assert client.texts(1)["last"].startswith("Exited")
        starts = [tool(n, "exec_command", cmd="sleep 61501", yield_time_ms=1) for n in range(33)]
        client.send(*starts)
        assert sum("kill_process" in text for text in client.texts(33).values()) == 1
        assert client.close() == ""
    wait_until_gone(server_url, "[s]leep 61501")


def test_requests_that_are_cancelled_at_once_leave_nothing(server_url: str) -> None:
    with raw_client(server_url) as client:
        for number in range(1, 100):
            arguments = {"cmd": "sleep 61502", "yield_time_ms": 50_000}
            client.send(tool(number, "exec_command", **arguments), cancellation(number))
            client.send(cancellation(number), cancellation("x"), cancellation([number]))
            client.send(request(1000 + number, "ping"))  # the server takes a few steps
            client.answers(1)
        client.send(tool("last", "list_processes"))
        assert client.texts(1)["last"] == "no command was started"
        wait_until_gone(server_url, "[s]leep 61502")
        assert "Traceback" not in client.close()


def test_a_client_that_does_not_read_can_be_left(server_url: str) -> None:
    with raw_client(server_url) as client:
        assert client.process.stdin is not None
        stdin = client.process.stdin.fileno()
        os.set_blocking(stdin, False)
        calls = (tool(number, "exec_command", cmd="seq 99999") for number in range(100_000))
        with contextlib.suppress(BlockingIOError):  # the server no longer reads
            for call in calls:
                os.write(stdin, json.dumps(call).encode() + b"\n")
        assert next(calls, None) is not None
        client.process.send_signal(signal.SIGTERM)
        assert client.process.wait(SECONDS) == 128 + signal.SIGTERM


def test_a_terminal_that_is_not_read_does_not_hold_a_call(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exec_server.adapters.mcp_commands.WRITE_SECONDS", 0.5)

    async def report(seconds: float, size: int) -> None:
        pass

    async def scene() -> None:
        async with connect(server_url) as env, CommandSessions(env) as sessions:
            argv = ["sh", "-c", "stty raw -echo; echo ready; sleep 61503"]
            begun = await sessions.run(
                argv, workdir="/", tty=True, wait_ms=500, tokens=100, report=report
            )
            assert "ready" in begun
            text = "x" * 4 * 1_048_576
            with pytest.raises(InvalidParams, match="does not read its input"):
                await sessions.write(1, text, wait_ms=0, tokens=1, report=report)
            assert (await sessions.kill(1)).startswith("Exited")

    asyncio.run(scene())


def test_links_do_not_lead_out_of_a_workspace(server_url: str, tmp_path: Path) -> None:
    outside = Path(f"/var/tmp/exec-server-hostile-{os.getpid()}")
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "folder").symlink_to("/var/tmp")
    words = ("--sandbox", "workspace-write", "--cwd", str(tmp_path), server_url)
    patch = f"*** Begin Patch\n*** Add File: folder/{outside.name}\n+x\n*** End Patch\n"
    attacks = [
        tool(1, "write_file", path="link", content="x"),
        tool(2, "write_file", path=f"folder/{outside.name}", content="x"),
        tool(3, "write_file", path=f"../../../../../../../..{outside}", content="x"),
        tool(4, "apply_patch", patch=patch),
        tool(5, "apply_patch", patch=patch, workdir="/var/tmp"),
        tool(6, "exec_command", cmd=f"echo x > {outside}", workdir="/var/tmp"),
    ]
    with raw_client(*words) as client:
        client.send(*attacks)
        answers = client.answers(len(attacks))
        assert "Exited with code 0" not in answers.pop(6)["result"]["content"][0]["text"]
        assert all(answer["result"]["isError"] for answer in answers.values()), answers
    assert not outside.exists()


def wait_until_gone(server_url: str, pattern: str) -> None:
    with sync.connect(server_url) as env:
        env.shell(f"while pgrep -f '{pattern}'; do sleep 0.05; done", timeout=20, check=True)


# ---- HTTP -----------------------------------------------------------------------------


@asynccontextmanager
async def http_server(server_url: str) -> AsyncIterator[str]:
    ready = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with connect(server_url) as env, CommandSessions(env) as sessions:
            server = adapter.build_server(env, sessions, "/")
            async with asyncio.TaskGroup() as tasks:
                work = mcp_http.serve_http(server, listener, "127.0.0.1", TOKEN, ready.set)
                serving = tasks.create_task(work)
                await ready.wait()
                yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
                serving.cancel()


def client(token: str | None = TOKEN, **headers: str) -> httpx2.AsyncClient:
    accept = {"Accept": "application/json, text/event-stream"}
    authorization = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx2.AsyncClient(headers=accept | authorization | headers, timeout=SECONDS)


async def status(made: httpx2.AsyncClient, url: str, body: Any = None, **headers: str) -> int:
    async with made:
        content = json.dumps(request(1, "initialize", HELLO)) if body is None else body
        sent = {"Content-Type": "application/json"} | headers
        found: int = (await made.post(url, content=content, headers=sent)).status_code
        return found


def test_http_refuses(server_url: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        async with http_server(server_url) as url:
            assert await status(client(), url) == 200
            assert await status(client(None, Authorization=f"bearer {TOKEN}"), url) == 200
            for wrong in (None, "correct", f"{TOKEN}x", "Correct horse"):
                assert await status(client(wrong), url) == 401
            assert await status(client(None, Authorization=TOKEN), url) == 401
            twice = [("Authorization", f"Bearer {TOKEN}")] * 2
            async with httpx2.AsyncClient(headers=twice) as made:
                assert (await made.post(url, json={})).status_code == 401
            # A page in a browser: by a name of its own, or with the address of this machine.
            assert await status(client(Host="evil.example:80"), url) == 421
            assert await status(client(Origin="http://evil.example"), url) == 403
            assert await status(client(Origin="http://127.0.0.1.evil.example"), url) == 403
            assert await status(client(Origin="null"), url) == 403
            # A session is the server's to name.
            assert await status(client(**{"Mcp-Session-Id": "fixed"}), url) == 404
            assert await status(client(), url, b"x" * (mcp_http.BODY_BYTES + 1)) == 413
            assert await status(client(), url, b"not json") == 400
            upgrade = {"Upgrade": "websocket", "Connection": "Upgrade"}
            async with client(None, **upgrade) as made:
                assert (await made.get(url)).status_code == 401

    asyncio.run(scene())
    shown = "".join(capfd.readouterr())
    assert "correct" not in shown
    assert "Traceback" not in shown


async def closed_by_server(url: str, data: bytes) -> bytes:
    """What the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.split(":")[2][:-4]))
    writer.write(data)
    async with asyncio.timeout(SECONDS):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def test_http_is_patient_for_a_time_only(server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_http, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(mcp_http, "BODY_SECONDS", 0.3)
    head = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:1\r\nContent-Length: 9\r\n"
    refused = head.replace(b"9", b"0") + b"\r\n"

    async def scene() -> None:
        async with http_server(server_url) as url:
            assert await closed_by_server(url, b"") == b""
            assert await closed_by_server(url, head) == b""
            # The same behind a request that was answered.
            answer = await closed_by_server(url, refused + head)
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert answer.count(b"HTTP/1.1") == 1
            token = b"Authorization: Bearer correct horse\r\nContent-Type: application/json\r\n"
            await closed_by_server(url, head + token + b"\r\n{")
            # A request that is answered late is not cut off.
            assert await status(client(), url) == 200

    asyncio.run(scene())


def test_http_requests_are_limited(server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_http, "MAX_REQUESTS", 3)

    async def scene() -> None:
        async with http_server(server_url) as url, client() as made:
            hello = await made.post(url, json=request(1, "initialize", HELLO))
            session = {"Mcp-Session-Id": hello.headers["mcp-session-id"]}
            await made.post(
                url, json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=session
            )
            begun = [asyncio.Event() for _ in range(3)]

            async def run(number: int) -> None:
                call = tool(number, "exec_command", cmd="sleep 61504", yield_time_ms=50_000)
                call["params"]["_meta"] = {"progressToken": number}
                async with made.stream("POST", url, json=call, headers=session) as answer:
                    async for line in answer.aiter_lines():
                        if "progress" in line:
                            begun[number].set()

            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(run(number)) for number in range(3)]
                for event in begun:
                    await event.wait()
                answer = await made.post(url, json=request(9, "ping"), headers=session)
                assert answer.status_code == 503
                for task in running:
                    task.cancel()

    asyncio.run(scene())
    wait_until_gone(server_url, "[s]leep 61504")


def test_an_address_in_use_is_one_sentence(server_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        words = ["--http", port, "--http-token-env", "MCP_TOKEN", server_url]
        done = subprocess.run(
            [sys.executable, "-m", "exec_server", "mcp", *words],
            env=os.environ | {"MCP_TOKEN": TOKEN},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 1
    where = f"127.0.0.1:{port}"
    assert done.stderr == f"Error: --http: cannot listen at {where}: Address already in use\n"
