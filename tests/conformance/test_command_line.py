"""Start-up: listen URLs, refused arguments, what is printed, and how signals end the server."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.matching import build
from tests.support.client import descendants, run_command, scaled, start_server, survivors

_ERRORS: list[Any] = json.loads((Path(__file__).resolve().parent / "command_line.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "code", "text"), [pytest.param(*row[1:], id=row[0]) for row in _ERRORS]
)
def test_refused_arguments(
    arguments: list[str], code: int, text: str, kind: str, folder: Path
) -> None:
    (folder / "token").write_text("a-token\n")
    (folder / "blank").write_text(" \n")
    (folder / "secret").write_text("s" * 40)
    variables = {"dir": str(folder), "digest": "0" * 64}
    if "--listen" not in arguments:
        arguments = ["--listen", "ws://127.0.0.1:0", *arguments]
    ended = run_command(kind, *build(arguments, variables))
    assert (ended.returncode, ended.stdout) == (code, "")
    expected = build(text, variables)
    if "unsupported --listen URL" in expected and kind == "ours":
        expected += ", or `wss://IP:PORT` or `unix:/PATH`"  # ours has two more forms
    # Usage errors are worded by the argument parser; the others are the server's own.
    assert ended.stderr == f"Error: {expected}\n" if code == 1 else ended.stderr


@pytest.mark.reference
def test_listeners_that_only_ours_has() -> None:
    for url in ("wss://127.0.0.1:0", "ws://localhost:1", "unix:/tmp/s"):
        ended = run_command("reference", "--listen", url)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert f"--listen URL `{url}`; expected `ws://IP:PORT`" in ended.stderr


@pytest.mark.quick
def test_taken_port(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        url = f"ws://127.0.0.1:{holder.getsockname()[1]}"
        ended = run_command(kind, "--listen", url)
    assert (ended.returncode, ended.stdout) == (1, "")
    # By choice only ours names the address: there may be several.
    prefix = f"cannot listen on {url}: " if kind == "ours" else ""
    assert ended.stderr == f"Error: {prefix}Address in use (os error 98)\n"


def test_prints_one_line_and_nothing_else(kind: str) -> None:
    with start_server(kind) as server:
        assert server.url.startswith("ws://127.0.0.1:")
        assert int(server.url.rsplit(":", 1)[1]) > 0
        with server.connect() as client:
            client.run(["true"])
        server.stop()
        assert server.process.stdout is not None
        assert server.process.stdout.read() == b""
        assert server.stderr() == ""


@pytest.mark.parametrize(
    ("flags", "is_ignored"),
    [
        (["-c", "model=o3", "--config=a.b=[1", "-cc=d"], True),
        (["--enable", "network_proxy", "--disable", "network_proxy"], True),
        (["--strict-config"], True),
        (["--linux-sandbox-pid-namespace", "isolate"], False),
        (["--linux-sandbox-pid-namespace", "inherit"], True),
        (["--proxy-private-ips-via-upstream"], False),
    ],
)
def test_flags_of_the_reference(flags: list[str], is_ignored: bool, kind: str) -> None:
    with start_server(kind, *flags) as server:
        with server.connect() as client:
            client.run(["true"])
        server.stop()
        assert server.process.stdout is not None
        assert server.process.stdout.read() == b""
        told = server.stderr()
        if kind == "ours" and is_ignored:
            assert told.startswith("Warning: --")
            assert told.count("\n") == 1
        else:
            assert told == ""


def test_given_port_and_default_address(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    with start_server(kind, "--listen", f"ws://127.0.0.1:{port}") as server:
        assert server.url == f"ws://127.0.0.1:{port}"


def test_ipv6(kind: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with start_server(kind, "--listen", "ws://[::1]:0") as server:
        assert server.url.startswith("ws://[::1]:")
        with server.connect() as client:
            assert client.call("environment/status") == {"status": "ready"}
            client.link.send_text("?")
            message = client.answer(-1)["error"]["message"]
            assert f"websocket [::1]:{client.websocket.sock.getsockname()[1]}: " in message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_server_and_children(number: signal.Signals, kind: str) -> None:
    with start_server(kind) as server:
        client = server.connect()
        client.start(["sleep", "60"])
        client.start(["bash", "-c", "trap '' TERM INT HUP; sleep 60 & wait"])
        client.start(["sleep", "60"], tty=True)
        family = descendants(server.process.pid)
        assert len(family) >= 3
        os.kill(server.process.pid, number)
        assert server.process.wait(scaled(5)) == 0
        assert survivors(family) == []
        client.close()


def test_non_loopback_address_needs_authentication(kind: str) -> None:
    if kind == "reference":
        pytest.skip("by choice only ours refuses it: anyone on the network could run commands")
    ended = run_command(kind, "--listen", "ws://0.0.0.0:0")
    assert ended.returncode == 1
    assert "--allow-unauthenticated" in ended.stderr
    with start_server(kind, "--listen", "ws://0.0.0.0:0", "--allow-unauthenticated") as server:
        assert server.url.startswith("ws://0.0.0.0:")
