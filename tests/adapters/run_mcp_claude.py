"""`exec-server mcp` in a real Claude Code: `claude mcp add`, then its own check of the servers."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLAUDE = os.environ.get("EXEC_SERVER_CLAUDE") or shutil.which("claude")
SECONDS = 120


def claude(home: Path, *words: str) -> str:
    """Run a command of Claude Code with a configuration of its own, and without telemetry."""
    assert CLAUDE is not None
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    done = subprocess.run(
        [CLAUDE, "mcp", *words],
        cwd=home,
        env=variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def http_server(server_url: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--http", str(port), "--http-token-env", "MCP_TOKEN", server_url]
    with subprocess.Popen(
        [sys.executable, "-m", "exec_server", "mcp", *words],
        env=os.environ | {"MCP_TOKEN": "correct"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert "serving" in process.stderr.readline()
        yield f"http://127.0.0.1:{port}/mcp"
        process.send_signal(signal.SIGTERM)


def test_claude_code_connects(server_url: str, tmp_path: Path) -> None:
    claude(tmp_path, "add", "build", "--", "exec-server", "mcp", server_url)
    with http_server(server_url) as url:
        for name, token in (("web", "correct"), ("other", "wrong")):
            header = f"Authorization: Bearer {token}"
            claude(tmp_path, "add", "--transport", "http", name, url, "--header", header)
        lines = claude(tmp_path, "list").splitlines()
    states = {line.partition(":")[0]: line.rpartition(" - ")[2] for line in lines if " - " in line}
    assert set(states) == {"build", "web", "other"}
    assert "Connected" in states["build"]
    assert "Connected" in states["web"]
    assert "Connected" not in states["other"]
