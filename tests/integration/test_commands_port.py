"""`exec-server port`: pages are fetched through it, also on a terminal."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.support import tmux
from tests.support.cli import next_line, run_client, start_client, stderr_text
from tests.support.client import SOURCE, Server, scaled

PAGE = b"<h1>it works</h1>\n"


class _Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def page_port() -> Iterator[int]:
    """The port of a web server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def _fetch(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=scaled(10)) as page:
        content: bytes = page.read()
        return content


def test_a_port_of_the_target_is_forwarded(server: Server, page_port: int) -> None:
    with start_client("port", server.url, f"0:{page_port}", f"0:localhost:{page_port}") as client:
        lines = [next_line(client).decode() for _ in range(2)]
        first = re.fullmatch(rf"127\.0\.0\.1:(\d+) -> {server.url}:{page_port}\n", lines[0])
        second = re.fullmatch(
            rf"127\.0\.0\.1:(\d+) -> localhost:{page_port} by {server.url}\n", lines[1]
        )
        assert first is not None
        assert second is not None
        for match in (first, second):
            assert _fetch(int(match[1])) == PAGE
        client.send_signal(signal.SIGINT)
        assert client.wait(scaled(10)) == 128 + signal.SIGINT
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(first[1]))) != 0


def test_a_local_port_is_forwarded_to_the_target(server: Server, page_port: int) -> None:
    with start_client("port", "-R", server.url, f"{page_port}:0") as client:
        line = next_line(client).decode()
        match = re.fullmatch(rf"{server.url}:(\d+) -> 127\.0\.0\.1:{page_port}\n", line)
        assert match is not None
        assert _fetch(int(match[1])) == PAGE


def test_ports_in_use(server: Server, page_port: int) -> None:
    ended = run_client("port", server.url, str(page_port))
    assert ended.returncode == 1
    assert stderr_text(ended) == (
        f"Error: cannot listen on 127.0.0.1:{page_port}: Address already in use\n"
        f"For any free port write 0:{page_port}.\n"
    )
    ended = run_client("port", "-R", server.url, f"1:{page_port}")
    text = f"Error: {server.url}: cannot listen on port {page_port}: Address in use\n"
    assert (ended.returncode, stderr_text(ended)) == (1, text)


def test_wrong_arguments_and_missing_servers() -> None:
    ended = run_client("port", "ws://127.0.0.1:1", "http")
    assert ended.returncode == 2
    assert "`http` is not [LOCAL:]PORT or [LOCAL:]HOST:PORT" in stderr_text(ended)
    ended = run_client("port", "ws://127.0.0.1:1", "80")
    assert ended.returncode == 255
    assert "refused" in stderr_text(ended)


@pytest.mark.skipif(not tmux.is_installed(), reason="there is no tmux")
def test_a_page_is_fetched_on_a_terminal(server: Server, page_port: int) -> None:
    words = shlex.join([sys.executable, "-m", "exec_server"])
    client = f"PYTHONPATH={shlex.quote(str(SOURCE))} {words}"
    line = re.compile(rf"127\.0\.0\.1:(\d+) -> {server.url}:{page_port}")
    with tmux.terminal(100, 30) as window:
        window.line(f"clear; {client} port {server.url} 0:{page_port} &")
        screen = window.wait_for(lambda screen: line.search(screen) is not None)
        match = line.search(screen)
        assert match is not None
        code = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
        fetch = shlex.join([sys.executable, "-c", code, f"http://127.0.0.1:{match[1]}/"])
        assert window.command(fetch) == PAGE.decode().strip()
        window.line("clear; fg; echo code-$?")
        window.wait_for(" port ")  # the shell prints the command
        window.keys("C-c")
        window.wait_for("code-130")
