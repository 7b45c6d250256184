"""`exec_server.jupyter` in real kernels, driven as notebooks drive them, and in a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from jupyter_client.manager import start_new_kernel

from exec_server import sync

SECONDS = 60


class Kernel:
    """A kernel with the extension; `run` gives the outputs of a cell in the form of a notebook."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3")
        assert self.run("%load_ext exec_server.jupyter") == []

    def run(self, code: str, *, interrupt_at: str | None = None) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = []

        def receive(message: dict[str, Any]) -> None:
            kind, content = message["header"]["msg_type"], message["content"]
            if kind in ("stream", "error", "execute_result", "display_data"):
                outputs.append({"kind": kind, "at": time.monotonic()} | content)
                if interrupt_at is not None and interrupt_at in content.get("text", ""):
                    self.manager.interrupt_kernel()

        # Otherwise a kernel aborts a cell that follows soon after an error.
        self.client.execute_interactive(
            code, output_hook=receive, timeout=SECONDS, stop_on_error=False
        )
        return outputs

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel()


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    found = Kernel()
    yield found
    found.close()


def joined(outputs: list[dict[str, Any]], name: str) -> str:
    return "".join(each["text"] for each in outputs if each.get("name") == name)


def wait_until_gone(server_url: str, pattern: str) -> None:
    with sync.connect(server_url) as env:
        env.shell(f"while pgrep -f '{pattern}'; do sleep 0.05; done", timeout=20, check=True)


def test_a_cell_streams(kernel: Kernel, server_url: str, tmp_path: Path) -> None:
    # The command goes on when the first output has been seen, so it was shown meanwhile.
    seen = tmp_path / "seen"
    code = (
        f"%%remote {server_url}\n"
        "printf '\\e[31mred\\e[0m\\n'; echo careful >&2\n"
        f"until [[ -e {seen} ]]; do sleep 0.05; done; echo end"
    )
    outputs: list[dict[str, Any]] = []

    def receive(message: dict[str, Any]) -> None:
        if message["header"]["msg_type"] == "stream":
            outputs.append(message["content"])
            seen.touch()

    kernel.client.execute_interactive(code, output_hook=receive, timeout=SECONDS)
    assert joined(outputs, "stdout") == "\x1b[31mred\x1b[0m\nend\n"
    assert joined(outputs, "stderr") == "careful\n"


def test_output_is_that_of_its_own_cell(kernel: Kernel, server_url: str) -> None:
    for number in range(3):  # the thread of the connection began in the first one
        outputs = kernel.run(f"%remote {server_url} echo {number}; echo {number} >&2")
        assert joined(outputs, "stdout") == joined(outputs, "stderr") == f"{number}\n"
    value = "a b"
    kernel.run(f"value = {value!r}")
    outputs = kernel.run(f"%remote --env 'X={{value}}' {server_url} echo \"$$X\" {{value}}")
    assert joined(outputs, "stdout") == "a b a b\n"


def test_results_are_text(kernel: Kernel, server_url: str) -> None:
    text = "\x1b[32m<script>alert(1)</script>\x1b[0m"
    outputs = kernel.run(f"%%remote -q -o result {server_url}\nseq 1000; echo '{text}'")
    assert outputs == []
    (shown,) = kernel.run("result")
    assert list(shown["data"]) == ["text/plain"]
    assert shown["data"]["text/plain"].startswith("Result(argv=")
    # A notebook renders the colours of printed text itself.
    outputs = kernel.run("print(result.text)")
    assert joined(outputs, "stdout").endswith(f"1000\n{text}\n\n")


def test_errors_have_no_traceback(kernel: Kernel, server_url: str) -> None:
    (error,) = kernel.run(f"%%remote {server_url}\nexit 3")
    assert error["kind"] == "error"
    assert error["ename"] == "RemoteCommandFailed"
    assert len(error["traceback"]) == 1
    assert error["traceback"][0].startswith("RemoteCommandFailed: exit code 3 after ")
    assert kernel.run(f"%remote --no-raise {server_url} exit 3") == []
    (error,) = kernel.run("%remote ws://127.0.0.1:1 true")
    assert error["traceback"][0].startswith("RemoteError: cannot connect to ws://127.0.0.1:1: ")
    (error,) = kernel.run("%%remote --nonsense x\ntrue")
    assert len(error["traceback"]) == 1


def test_an_interrupt_kills_the_command(kernel: Kernel, server_url: str) -> None:
    code = f"%%remote {server_url}\nsleep 61441 &\necho begun; sleep 61441"
    *_, error = kernel.run(code, interrupt_at="begun")
    assert error["ename"] == "RemoteInterrupt"
    assert error["traceback"] == ["RemoteInterrupt: the command was killed"]
    wait_until_gone(server_url, "[s]leep 61441")
    assert joined(kernel.run(f"%remote {server_url} echo on"), "stdout") == "on\n"


def test_closing_ends_background_commands(kernel: Kernel, server_url: str) -> None:
    kernel.run(f"%%remote --background -o process {server_url}\necho ready; sleep 61442")
    outputs = kernel.run("print(process.read_until(b'ready', timeout=20))")
    assert joined(outputs, "stdout") == "b'ready'\n"
    assert joined(kernel.run("%remote_close"), "stdout") == f"closed {server_url}\n"
    wait_until_gone(server_url, "[s]leep 61442")
    (error,) = kernel.run("%remote_close nothing")
    assert error["traceback"] == ["RemoteError: not connected: nothing"]
    assert kernel.run("%reload_ext exec_server.jupyter") == []
    assert joined(kernel.run(f"%remote {server_url} echo on"), "stdout") == "on\n"
    kernel.run("%unload_ext exec_server.jupyter")
    assert "not found" in joined(kernel.run("%remote"), "stderr")
    kernel.run("%load_ext exec_server.jupyter")


def test_the_end_of_a_kernel_ends_its_commands(server_url: str) -> None:
    kernel = Kernel()
    kernel.run(f"%%remote --background -o p {server_url}\nsleep 61443")
    kernel.close()
    wait_until_gone(server_url, "[s]leep 61443")


def test_a_notebook_stops_at_a_failed_cell(server_url: str) -> None:
    cells = [
        "%load_ext exec_server.jupyter",
        f"%%remote {server_url}\necho one",
        f"%%remote {server_url}\nfalse",
        "never = 1",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="exit code 1 after"):
        nbclient.NotebookClient(notebook, timeout=SECONDS).execute()
    assert notebook.cells[1].outputs[0].text == "one\n"
    assert notebook.cells[3].execution_count is None


def test_named_targets_in_a_terminal(server_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "exec-server"
    folder.mkdir()
    (folder / "targets.toml").write_text(f'[build]\nurl = "{server_url}"\n')
    script = tmp_path / "script.ipy"
    script.write_text(
        "%load_ext exec_server.jupyter\n"
        "%remote -o r build echo here\n"
        "print(type(r).__name__, r.exit_code)\n"
        "%remote build exit 7\n"
    )
    variables = os.environ | {"XDG_CONFIG_HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path / "i")}
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--colors=NoColor", str(script)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 1
    shown = done.stdout + done.stderr
    assert "here\nResult 0\n" in shown
    assert "RemoteCommandFailed: exit code 7 after" in shown
    assert "Traceback" not in shown
