"""Signals to a server and to its helpers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.support.client import (
    Disconnected,
    Server,
    descendants,
    scaled,
    server_environment,
    start_server,
    survivors,
)
from tests.support.sandbox import assert_serves
from tests.support.server_internals import eventually, start_prepared


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 0),
        (signal.SIGINT, 0),
        (signal.SIGHUP, -signal.SIGHUP),
        (signal.SIGQUIT, -signal.SIGQUIT),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_signals_end_the_server_and_all_children(
    number: signal.Signals, code: int, python: Callable[[str], list[str]]
) -> None:
    with start_server("ours") as server:
        client = server.connect()
        client.start(["sleep", "600"])
        client.start(["sleep", "600"], tty=True)
        client.start(["/bin/sh", "-c", "trap '' TERM INT HUP; sleep 600 & wait"])
        daemon = "import os,time; os.fork() or os.setsid(); print(flush=True); time.sleep(600)"
        client.notice("process/output", client.start(python(daemon)))
        family: dict[int, str] = {}

        def all_run() -> bool:
            family.update(descendants(server.process.pid))
            return len(family) >= 7

        eventually("the shell has started its child, too", all_run)
        server.process.send_signal(number)
        assert server.process.wait(scaled(5)) == code
        assert survivors(family) == []
        client.close()


def test_clients_are_told_before_the_end() -> None:
    with start_server("ours") as server:
        client, bare = server.connect(), server.link()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(Disconnected) as end:
            bare.receive(scaled(5))
        assert (end.value.close_code, end.value.reason) == (1001, "server is shutting down")
        assert client.wait_closed() == 1001
        assert server.process.wait(scaled(5)) == 0
        client.close()
        bare.close()


@pytest.mark.measured
def test_end_does_not_wait_for_silent_clients() -> None:
    with start_server("ours") as server:
        silent = [server.connect() for _ in range(5)]
        unfinished = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(scaled(5)) == 0
        assert time.monotonic() - began < scaled(1)
        unfinished.close()
        for client in silent:
            client.close()


def test_second_signal_changes_nothing() -> None:
    with start_server("ours") as server:
        client = server.connect()
        client.start(["sleep", "600"])
        for _ in range(3):
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(scaled(5)) == 0
        client.close()


def test_signals_after_the_end_of_the_loop_change_nothing() -> None:
    """The rest of the clean-up is not interrupted by an impatient supervisor."""
    preparation = """
import os, signal
from exec_server.process import descendants
kill_all = descendants.kill_all_descendants
def interrupted(spared):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    kill_all(spared)
descendants.kill_all_descendants = interrupted
"""
    with start_prepared(preparation) as server:
        server.stop()
        assert server.stderr() == ""


def test_a_signal_during_the_start_shows_no_traceback() -> None:
    preparation = """
import os, signal
import exec_server.cli.serve.command as module
module.parse = lambda words: os.kill(os.getpid(), signal.SIGINT)
"""
    code = f"{preparation}\nfrom exec_server.cli.main import main\nmain()"
    argv = [sys.executable, "-c", code]
    ended = subprocess.run(
        argv, env=server_environment("ours"), capture_output=True, timeout=scaled(20), check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_the_url_and_the_event_loop_ends_the_server_in_order(
    number: signal.Signals, tmp_path: Path
) -> None:
    preparation = f"""
import os
import exec_server.cli.serve.command as module
print_urls = module._print_urls
def interrupted(bound):
    print_urls(bound)
    os.kill(os.getpid(), {int(number)})
module._print_urls = interrupted
"""
    path = tmp_path / "socket"
    code = f"{preparation}\nfrom exec_server.cli.main import main\nmain()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "--listen", f"unix:{path}"],
        env=server_environment("ours"),
        capture_output=True,
        timeout=scaled(20),
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"unix:{path}\n".encode(), b"")
    assert not path.exists()


def test_signals_without_an_action_disturb_no_process_of_the_server(tmp_path: Path) -> None:
    numbers = (*_UNUSED_SIGNALS, signal.SIGRTMIN + 5)
    with start_server("ours", "--log-level", "warning") as server, server.connect() as client:
        assert_serves(client, tmp_path)
        family = eventually("helpers have their names", partial(_named_family, server))
        for pid in (*family, server.process.pid):
            for number in numbers:
                os.kill(pid, number)
        assert_serves(client, tmp_path)
        left = descendants(server.process.pid)
        assert [
            name for pid, name in family.items() if pid not in left and name != "exec-init"
        ] == []
        server.stop()
        lines = server.stderr().splitlines()
    told = [line.partition(" exec_server.cli.serve.run: ")[2] for line in lines]
    names = [number.name for number in _UNUSED_SIGNALS] + [f"signal {signal.SIGRTMIN + 5}"]
    assert set(told) == {f"ignored {name}: the server has no action for it" for name in names}


_UNUSED_SIGNALS = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF),
    *(signal.SIGIO, signal.SIGPWR, signal.SIGSTKFLT),
)


def _named_family(server: Server) -> dict[int, str] | None:
    """The helpers of a server; None while the launcher's new process has not its own name yet."""
    family = {pid: _name_of(pid) for pid in descendants(server.process.pid)}
    names = list(family.values())
    has_all = {"exec-guardian", "exec-launcher", "exec-worker"} <= set(names)
    return family if has_all and names.count("exec-launcher") == 1 else None


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""  # it has ended


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_helpers_that_are_killed_are_replaced(number: signal.Signals, tmp_path: Path) -> None:
    """Idle ones: an operation in a worker that is killed fails."""
    with start_server("ours") as server, server.connect() as client:
        assert_serves(client, tmp_path)
        for name in ("exec-launcher", "exec-worker", "exec-init"):
            found = eventually("it waits", partial(_helpers, server, name))
            for pid in found:
                os.kill(pid, number)
            if number == signal.SIGKILL:
                assert survivors(found) == []
            assert_serves(client, tmp_path)
        server.stop()
        assert server.stderr() == ""


def _helpers(server: Server, name: str) -> dict[int, str]:
    """The helper processes with this name, and their start times."""
    family = descendants(server.process.pid)
    return {pid: start for pid, start in family.items() if _name_of(pid) == name}
