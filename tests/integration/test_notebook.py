"""Cells on a target, without IPython; `make adapters` runs them in real kernels."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import Server

from exec_server import Timeout, sync
from exec_server.client.results import Chunk, Result
from exec_server.notebook import remote_cell
from exec_server.notebook.magic_line import parse_cell_line
from exec_server.notebook.remote_cell import (
    NotebookConnections,
    RemoteCommandFailed,
    RemoteError,
    RemoteInterrupt,
    RemoteTimeout,
    run_cell,
)
from exec_server.sync import environment
from exec_server.sync.environment import run_streamed


class Notebook:
    def __init__(self, url: str) -> None:
        self.url = url
        self.connections = NotebookConnections()
        self.names: dict[str, Any] = {}

    def run(self, text: str, options: str = "") -> None:
        run_cell(parse_cell_line(f"{options} {self.url}"), text, self.connections, self.names)


@pytest.fixture
def notebook(server: Server) -> Iterator[Notebook]:
    found = Notebook(server.url)
    yield found
    found.connections.close([])


def gone(pattern: str) -> str:
    return f"while pgrep -f '{pattern}'; do sleep 0.05; done"


@pytest.mark.quick
def test_a_cell_shows_its_output_and_keeps_its_result(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--cwd / --env A=1 -o result"
    notebook.run("echo out $A; pwd; echo err >&2; [[ x == x ]]", options)
    assert capsys.readouterr() == ("out 1\n/\n", "err\n")
    result = notebook.names["result"]
    assert (result.text, result.error_text) == ("out 1\n/\n", "err\n")
    assert notebook.names["_exit_code"] == 0
    notebook.run("echo hidden", "-q -o result --shell sh")
    assert capsys.readouterr() == ("", "")
    assert notebook.names["result"].text == "hidden\n"
    notebook.run("tty >/dev/null && echo $TERM", "--tty")
    assert capsys.readouterr().out == "xterm-256color\r\n"
    assert len(notebook.connections._open) == 1


def test_failures_are_brief(notebook: Notebook, tmp_path: Path) -> None:
    with pytest.raises(RemoteCommandFailed, match=r"^exit code 3 after \d\.\d s$") as failed:
        notebook.run("echo text; exit 3")
    assert failed.value.result.text == "text\n"
    notebook.run("exit 4", "--no-raise")
    assert notebook.names["_exit_code"] == 4
    with pytest.raises(RemoteTimeout, match=r"^killed after 0.2 s$"):
        notebook.run("echo begun; sleep 61339", "--timeout 0.2 -o late")
    assert notebook.names["late"].text == "begun\n"
    with pytest.raises(RemoteError, match="no-such-shell"):
        notebook.run("true", "--shell no-such-shell")
    with pytest.raises(RemoteError, match="holds no token"):
        notebook.run("true", "--token-env NO_SUCH_VARIABLE")
    with pytest.raises(RemoteError, match="--sandbox: x does not exist"):
        notebook.run("true", "--sandbox x")
    with pytest.raises(RemoteError, match=r"cannot connect to ws://127\.0\.0\.1:1: .*refused"):
        Notebook("ws://127.0.0.1:1").run("true")
    with pytest.raises(RemoteError, match="unknown target"):
        Notebook("no-such-name").run("true")
    with pytest.raises(RemoteCommandFailed, match="denied by its sandbox"):
        notebook.run("touch x", f"--sandbox read-only --cwd {tmp_path}")


def test_a_late_cell_that_was_not_sent_says_so(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_late(*_: Any, **options: Any) -> Result:
        result = Result(("sh",), b"", b"", 137, options["timeout"])
        raise Timeout(options["timeout"], result, was_sent=False)

    monkeypatch.setattr(remote_cell, "run_streamed", run_late)
    with pytest.raises(RemoteTimeout, match=r"^sh was not sent within 0\.2 s, .*; nothing runs$"):
        notebook.run("true", "--timeout 0.2")


def test_a_process_in_the_background(notebook: Notebook) -> None:
    notebook.run("echo ready; sleep 61340", "--background -o process")
    process = notebook.names["process"]
    assert process.read_until(b"ready\n", timeout=20) == b"ready\n"
    notebook.run("pgrep -f '[s]leep 61340'")
    assert notebook.connections.close([]) == [notebook.url]
    notebook.run(gone("[s]leep 61340"), "--timeout 20")


def test_closing_ends_what_cells_have_left(notebook: Notebook) -> None:
    notebook.run("(setsid sleep 61342 > /dev/null 2>&1 &)")
    notebook.run("pgrep -f '[s]leep 61342'")
    assert notebook.connections.close([]) == [notebook.url]
    notebook.run("! pgrep -f '[s]leep 61342'")  # at once


def test_an_interrupt_kills_the_command(notebook: Notebook) -> None:
    class Interrupter:
        """The screen of a user who presses Ctrl-C as soon as there is output."""

        def write(self, text: str) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        def flush(self) -> None:
            pass

    with contextlib.redirect_stdout(Interrupter()), pytest.raises(RemoteInterrupt):  # type: ignore[type-var]
        notebook.run("echo begun; sleep 61341 & sleep 61341")
    notebook.run(gone("[s]leep 61341"), "--timeout 20")


def test_a_lost_session_is_opened_again(capsys: pytest.CaptureFixture[str]) -> None:
    with sync.serve() as first:
        other = Notebook(first.url)
        other.run("echo one")
        port = first.url.rpartition(":")[2]
    with sync.serve(f"ws://127.0.0.1:{port}"):
        other.run("echo two")
        other.connections.close([])
    assert capsys.readouterr().out == "one\ntwo\n"


def test_an_environment_that_was_closed_is_opened_again(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.run("echo one")
    (environment,) = notebook.connections._open.values()
    environment.close()
    notebook.run("echo two")
    assert capsys.readouterr().out == "one\ntwo\n"
    assert len(notebook.connections._open) == 1


def test_connections_are_limited(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.run("true")
    monkeypatch.setattr(remote_cell, "MAX_OPEN", 1)
    with pytest.raises(RemoteError, match="1 targets are connected"):
        notebook.run("true", "--executor-key other")
    assert notebook.connections.labels == [notebook.url]
    assert notebook.connections.close(["another"]) == []


@pytest.mark.quick
def test_output_arrives_in_the_calling_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "QUEUED_BYTES", 65_536)
    threads, sizes, data = set(), [], bytearray()

    def receive(chunks: list[Chunk]) -> None:
        threads.add(threading.current_thread())
        sizes.append(sum(len(chunk.data) for chunk in chunks))
        data.extend(b"".join(chunk.data for chunk in chunks))

    with sync.connect(server.url) as env:
        result: Result = run_streamed(env, ["seq", "200000"], receive)
        assert bytes(data) == result.stdout == b"".join(b"%d\n" % n for n in range(1, 200_001))
        assert threads == {threading.current_thread()}
        assert max(sizes) <= 65_536 + 262_144  # the limit, and the piece that exceeds it

        def fail(chunks: list[Chunk]) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run_streamed(env, ["sh", "-c", "echo a; sleep 61342"], fail)
        env.shell(gone("[s]leep 61342"), timeout=20, check=True)
