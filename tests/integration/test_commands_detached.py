"""`exec-server exec -d`, `ps`, `logs`, `attach` and `kill`, against a server of ours."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
from collections.abc import Iterator

import pytest
from tests.support import tmux
from tests.support.cli import next_line, run_client, start_client
from tests.support.client import server_command
from tests.support.client_targets import ClientTarget, Proxy, bounded
from tests.support.server_internals import eventually

from exec_server.client.connect import connect

_HAS_TMUX = pytest.mark.skipif(not tmux.is_installed(), reason="tmux is not installed")


@pytest.fixture
def name(ours: ClientTarget, request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for a command, which is killed at the end."""
    chosen = request.node.name[:40].replace("[", "-").replace("]", "")
    yield chosen
    run_client("kill", "-s", "KILL", ours.url, chosen)


def _detach(ours: ClientTarget, name: str, script: str, *flags: str) -> None:
    words = ["exec", "-d", "--name", name, *flags, ours.url, "sh", "-c", script]
    ended = run_client(*words)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{name}\n".encode(), b"")


def _listed(ours: ClientTarget, name: str) -> dict[str, object]:
    listed = json.loads(run_client("ps", "--json", ours.url).stdout)
    [found] = [each for each in listed if each["name"] == name]
    return dict(found)


@pytest.mark.quick
def test_from_start_to_end(ours: ClientTarget, name: str) -> None:
    _detach(ours, name, "echo out; echo err >&2; sleep 60", "--idle-timeout", "600")
    listed = _listed(ours, name)
    assert (listed["running"], listed["attached"], listed["idleTimeoutMs"]) == (True, 0, 600_000)
    table = run_client("ps", ours.url).stdout.decode().splitlines()
    assert table[0].split() == ["NAME", "STATUS", "STARTED", "CLIENTS", "COMMAND"]
    [row] = [line for line in table if line.startswith(name)]
    assert "running" in row
    assert "sh -c 'echo out;" in row

    def logged() -> bool:
        ended = run_client("logs", ours.url, name)
        return (ended.returncode, ended.stdout, ended.stderr) == (0, b"out\n", b"err\n")

    eventually("all is printed", logged)
    ended = run_client("kill", ours.url, name)
    assert (ended.returncode, ended.stderr) == (0, b"")
    eventually("it has ended", lambda: _listed(ours, name)["exitCode"] == 143)
    assert run_client("attach", ours.url, name).returncode == 143
    again = run_client("kill", ours.url, name)
    assert (again.returncode, f"{name} has already ended" in again.stderr.decode()) == (1, True)


def test_logs_follow_to_the_end(ours: ClientTarget, name: str) -> None:
    _detach(ours, name, "echo one; read x; echo $x; exit 3", "-i")
    with start_client("logs", "-f", ours.url, name) as following:
        assert next_line(following) == b"one\n"
        ended = run_client("attach", ours.url, name, input=b"two\n")
        assert (ended.returncode, ended.stdout) == (3, b"one\ntwo\n")
        assert next_line(following) == b"two\n"
        assert following.wait() == 0


def test_older_output_is_declared(ours: ClientTarget, name: str) -> None:
    _detach(ours, name, "head -c 3000000 /dev/zero; echo end")
    eventually("it has ended", lambda: _listed(ours, name)["closed"])
    for flags in ([], ["-f"]):
        ended = run_client("logs", *flags, ours.url, name)
        assert ended.stdout.endswith(b"end\n")
        lost = 3_000_004 - len(ended.stdout)
        text = f"exec-server: {lost} bytes of older output are not retained any more\n"
        assert ended.stderr.decode() == text


def test_a_signal_leaves_and_the_command_goes_on(ours: ClientTarget, name: str) -> None:
    _detach(ours, name, "echo ready; sleep 60")
    with start_client("attach", ours.url, name) as attached:
        assert next_line(attached) == b"ready\n"
        attached.send_signal(signal.SIGINT)
        assert attached.wait() == 128 + signal.SIGINT
    assert _listed(ours, name)["running"]


def test_a_signal_is_sent(ours: ClientTarget, name: str) -> None:
    _detach(ours, name, "trap 'echo got; exit 5' USR1; echo ready; while :; do sleep 0.05; done")
    with start_client("logs", "-f", ours.url, name) as following:
        assert next_line(following) == b"ready\n"
        assert run_client("kill", "-s", "USR1", ours.url, name).returncode == 0
        assert next_line(following) == b"got\n"
    assert run_client("attach", ours.url, name).returncode == 5


def test_mistakes_are_explained(ours: ClientTarget, name: str) -> None:
    for words in (["attach"], ["logs"], ["logs", "-f"], ["kill"]):
        ended = run_client(*words, ours.url, "nothing")
        assert ended.returncode == 1
        text = f"Error: {ours.url}: unknown detached process nothing\n`exec-server ps"
        assert ended.stderr.decode().startswith(text)
    _detach(ours, name, "sleep 60")
    ended = run_client("exec", "-d", "--name", name, ours.url, "true")
    assert ended.returncode == 125
    assert f"the name {name} is in use" in ended.stderr.decode()
    assert run_client("exec", "-d", ours.url, "/nonexistent").returncode == 127
    assert run_client("kill", "-s", "NONSENSE", ours.url, name).returncode == 2
    for flags in (["--name", "x"], ["-d"], ["-d", "--timeout", "3"]):
        argv = [] if flags == ["-d"] else ["true"]
        ended = run_client("exec", *flags, ours.url, *argv)
        assert (ended.returncode, ended.stderr[:6]) == (2, b"Error:")
    unreachable = run_client("attach", "ws://127.0.0.1:1", "x")
    assert unreachable.returncode == 255


# ---- in a terminal --------------------------------------------------------------------


@_HAS_TMUX
def test_two_terminals_share_one_command(ours: ClientTarget, name: str) -> None:
    with tmux.terminal() as one, tmux.terminal() as two:
        client = shlex.join(server_command("ours"))
        script = "stty -echo; echo here; while read x; do echo got $x; done"
        one.line(f"{client} exec -d -t --name {name} {ours.url} sh -c {shlex.quote(script)}")
        one.wait_for(f"\n{name}\n")
        for terminal in (one, two):
            terminal.line(f"clear; {client} attach {ours.url} {name}")
            terminal.wait_for("here")
        one.line("first")
        two.wait_for("got first")
        two.line("second")
        one.wait_for("got second")
        one.type("~")
        one.type(".")
        one.wait_for(f"left {name}, which goes on")
        two.line("third")
        two.wait_for("got third")
        assert "got third" not in one.screen()
        two.keys("C-d")
        two.wait_for(tmux.PROMPT)
        assert two.command("echo code $?").endswith("code 0")


@_HAS_TMUX
def test_logs_go_on_after_a_reconnect(ours: ClientTarget, name: str) -> None:
    _detach(ours, name, "while read x; do echo got $x; done", "-i")

    async def scene(terminal: tmux.Terminal) -> None:
        async with (
            Proxy(ours.url).running() as proxy,
            connect(ours.url) as env,
            env.attach(name) as process,
        ):
            await process.write(b"one\n")
            client = shlex.join(server_command("ours"))
            await asyncio.to_thread(terminal.line, f"clear; {client} logs -f {proxy.url} {name}")
            await asyncio.to_thread(terminal.wait_for, "got one")
            for word in ("two", "three", "four"):
                proxy.cut()
                await process.write(f"{word}\n".encode())
                await asyncio.to_thread(terminal.wait_for, f"got {word}")
            await process.close_stdin()
            # The prompt comes after the end of the command, and everything was printed once.
            expected = "got one\ngot two\ngot three\ngot four\nready>"
            await asyncio.to_thread(terminal.wait_for, expected)

    with tmux.terminal() as terminal:
        bounded(scene(terminal))
