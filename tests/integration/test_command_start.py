"""The start of a server: its one line, its standard streams, and without them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.cli import run_client
from tests.support.client import (
    DEFAULT_TIMEOUT,
    Client,
    Server,
    StdioLink,
    WebSocketLink,
    b64,
    descendants,
    scaled,
    server_command,
    server_environment,
    start_server,
    survivors,
    uri,
)
from tests.support.sandbox import assert_serves, read_only
from tests.support.server_internals import eventually

_LOOPBACK = "ws://127.0.0.1:0"


def test_prints_one_line_and_nothing_else(python: Callable[[str], list[str]]) -> None:
    with start_server("ours") as server:
        assert re.fullmatch(r"ws://127\.0\.0\.1:[1-9]\d*", server.url)
        with server.connect() as client:
            client.run(["true"])
            client.link.send_text("garbage")
            client.receive()
        server.stop()
        assert server.process.stdout is not None
        assert server.process.stdout.read() == b""
        assert server.stderr() == ""


def test_a_terminal_is_told_more_than_a_program() -> None:
    screen, terminal = os.openpty()
    words = [*server_command("ours"), "--listen", _LOOPBACK]
    variables = server_environment("ours")
    with (
        open(screen, "rb", buffering=0) as shown,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=terminal, env=variables) as server,
    ):
        try:
            os.close(terminal)
            assert server.stdout is not None
            url = server.stdout.readline().decode().strip()
            text = shown.read(4096)
            while b"Ctrl-C" not in text:
                text += shown.read(4096)
            assert f"exec-server exec {url} --" in text.decode()
            server.send_signal(signal.SIGINT)
            assert server.stdout.read() == b""
            assert server.wait(scaled(DEFAULT_TIMEOUT)) == 0
        finally:
            server.kill()


def test_names_are_utf_8_whatever_the_locale_says(tmp_path: Path) -> None:
    # An interpreter that takes the C locale at its word; those of Latin-1 need not be installed.
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    (tmp_path / "żółć").write_text("ä")
    with start_server("ours", env=ascii_only) as server, server.connect() as client:
        assert client.run(["/bin/echo", "żółć"]).stdout.decode() == "żółć\n"
        [entry] = client.call("fs/readDirectory", {"path": uri(tmp_path)})["entries"]
        assert entry["fileName"] == "żółć"
        file = {"path": uri(tmp_path / "żółć")}
        assert client.call("fs/readFile", file)["dataBase64"] == b64("ä".encode())
        confined = client.call("fs/readFile", file | {"sandbox": read_only()})
        assert confined["dataBase64"] == b64("ä".encode())
        assert "PYTHONUTF8=0" in client.run(["/usr/bin/env"], env=ascii_only).stdout.decode()
        shown = run_client("cat", f"{server.url}:{tmp_path}/żółć", env=ascii_only)
        assert shown.stdout.decode() == "ä"


def test_first_connection_is_served_as_soon_as_the_line_is_there() -> None:
    with start_server("ours") as server:
        assert server.http(b"GET /readyz HTTP/1.1\r\n\r\n").status == 200


def test_signal_right_after_the_line_ends_it_cleanly() -> None:
    for _ in range(5):
        with start_server("ours") as server:
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(scaled(5)) == 0


def test_stdin_is_ignored_by_default() -> None:
    server = Server("ours", ["--listen", _LOOPBACK], stdin=subprocess.PIPE)
    try:
        server.read_url()
        assert server.process.stdin is not None
        server.process.stdin.write(b"garbage\n")
        server.process.stdin.close()
        with server.connect() as client:
            assert client.run(["true"]).exit_code == 0
        server.stop()
    finally:
        server.kill()
        server.release()


@pytest.mark.parametrize(
    ("flags", "environment"),
    [(["--exit-on-stdin-close"], {}), ([], {"CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE": "true"})],
)
def test_exit_on_stdin_close(flags: list[str], environment: dict[str, str]) -> None:
    server = Server("ours", ["--listen", _LOOPBACK, *flags], stdin=subprocess.PIPE, env=environment)
    try:
        server.read_url()
        client = server.connect()
        # The thread that watches stdin does not take the signals that tell of ended children.
        assert client.run(["true"]).exit_code == 0
        client.start(["sleep", "600"])
        family = descendants(server.process.pid)
        assert server.process.stdin is not None
        server.process.stdin.write(b"ignored\n")
        server.process.stdin.flush()
        assert client.call("environment/status") == {"status": "ready"}
        server.process.stdin.close()
        assert client.wait_closed() == 1001
        assert server.process.wait(scaled(5)) == 0
        assert survivors(family) == []
        client.close()
    finally:
        server.kill()
        server.release()


_CLOSED = {0: "<&-", 1: ">&-", 2: "2>&-"}


def _with_closed(closed: tuple[int, ...], *flags: str) -> list[str]:
    """The words that start a server with some of its standard descriptors closed."""
    redirections = " ".join(_CLOSED[descriptor] for descriptor in closed)
    return ["/bin/sh", "-c", f'exec "$@" {redirections}', "sh", *server_command("ours"), *flags]


@pytest.mark.parametrize("closed", [(0,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_a_listener_works_without_standard_streams(closed: tuple[int, ...], tmp_path: Path) -> None:
    """No socket may get the number of a closed stream, in the server or in its helpers."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        url = f"ws://127.0.0.1:{holder.getsockname()[1]}"
    process = subprocess.Popen(
        _with_closed(closed, "--listen", url),
        env=server_environment("ours"),
        stdout=subprocess.DEVNULL,
    )
    try:
        with eventually("it listens", lambda: _try_to_connect(url)) as client:
            assert_serves(client, tmp_path)
    finally:
        process.terminate()
        assert process.wait(scaled(10)) == 0


def _try_to_connect(url: str) -> Client | None:
    try:
        client = Client(WebSocketLink(url))
    except OSError:
        return None
    client.initialize()
    return client


def test_a_server_on_stdio_works_without_stderr(tmp_path: Path) -> None:
    process = subprocess.Popen(
        _with_closed((2,), "--listen", "stdio"),
        env=server_environment("ours"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with Client(StdioLink(process)) as client:
        client.initialize()
        assert_serves(client, tmp_path)
    assert process.wait(scaled(10)) == 0
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1), (0, 1, 2)], ids=str)
def test_a_server_on_closed_stdio_ends_at_once(closed: tuple[int, ...]) -> None:
    ended = subprocess.run(
        _with_closed(closed, "--listen", "stdio"),
        env=server_environment("ours"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=scaled(20),
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_an_error_is_not_printed_to_stdout_without_stderr() -> None:
    ended = subprocess.run(
        _with_closed((2,), "--listen", "nowhere"),
        env=server_environment("ours"),
        capture_output=True,
        timeout=scaled(20),
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_a_url_that_cannot_be_printed_is_an_error() -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [*server_command("ours"), "--listen", _LOOPBACK],
            env=server_environment("ours"),
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=scaled(20),
            check=False,
        )
    text = b"Error: cannot write the URL to stdout: No space left on device (os error 28)\n"
    assert (ended.returncode, ended.stderr) == (1, text)
