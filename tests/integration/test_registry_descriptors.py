"""A node has few descriptors, or raises its limit of them."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
from pathlib import Path

import pytest
from tests.support.client import scaled, server_command
from tests.support.registry import Node, start_node

RETRIED = "authentication_service_unavailable"
REQUEST = b"GET /livez HTTP/1.1\r\nhost: registry\r\n\r\n"


def _limit(monkeypatch: pytest.MonkeyPatch, limits: str) -> None:
    words = ["prlimit", f"--nofile={limits}", *server_command("ours")]
    monkeypatch.setenv("EXEC_SERVER_COMMAND", shlex.join(words))


def _open_files(node: Node) -> list[str]:
    lines = Path(f"/proc/{node.server.process.pid}/limits").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("Max open files")]
    return line.split()[3:5]


def test_a_node_raises_the_usual_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _limit(monkeypatch, "1024:10000")
    with start_node(tmp_path) as node:
        assert _open_files(node) == ["9472", "10000"]
        assert "open files" not in node.server.stderr()


def test_every_connection_is_answered_also_without_free_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _limit(monkeypatch, "256:256")
    with start_node(tmp_path) as node, contextlib.ExitStack() as stack:
        assert "at most 64 sockets instead of 8192" in node.server.stderr()
        idle = [_dial(node, stack) for _ in range(64)]
        for _ in range(10):
            register = node.ask("register", {}, node.site.executor_token)
            assert register.status == 502
            assert json.loads(register.body)["error"]["code"] == RETRIED
            assert node.get("/livez").status == 503
        late = [_dial(node, stack) for _ in range(150)]
        for connection in late:
            assert connection.recv(4096).startswith(b"HTTP/1.1 503 ")
        idle[0].sendall(REQUEST)
        assert idle[0].recv(4096).startswith(b"HTTP/1.1 200 ")


def _dial(node: Node, stack: contextlib.ExitStack) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", node.port), scaled(10))
    return stack.enter_context(connection)
