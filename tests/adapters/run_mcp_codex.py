"""`exec-server mcp` in a real Codex: `codex mcp add`, then a scripted model calls its tools."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conformance.codex import start_codex
from tests.conformance.model import ToolCall
from tests.support.client import reference_binary, server_environment


def registered(*words: str) -> str:
    """The configuration that `codex mcp add` writes."""
    binary = reference_binary()
    assert binary is not None
    # Below a temporary directory Codex does without some of its helpers.
    cache = Path(server_environment("reference")["CODEX_HOME"]).parent
    with tempfile.TemporaryDirectory(prefix="mcp-", dir=cache) as home:
        argv = [str(binary), "mcp", "add", "build", "--", *words]
        subprocess.run(argv, env={"CODEX_HOME": home}, check=True, capture_output=True)
        return (Path(home) / "config.toml").read_text()


def test_codex_calls_the_tools(server_url: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "exec_server", "mcp", "--cwd", str(tmp_path), server_url]
    settings = registered(*words)
    assert settings.startswith("[mcp_servers.build]\n")
    settings += "required = true\n"  # Codex waits for it; else its first request may lack the tools
    script = [
        [ToolCall("w", "write_file", {"path": "a.txt", "content": "from Codex\n"}, "mcp__build")],
        [ToolCall("c", "exec_command", {"cmd": "cat a.txt; pwd"}, "mcp__build")],
        [ToolCall("r", "read_file", {"path": "missing"}, "mcp__build")],
    ]
    with start_codex(script, tmp_path, variables={}, mcp=f"\n{settings}") as client:
        model = client.completed()
    assert "a.txt: 11 bytes written" in model.outputs["w"]
    assert f"Output:\nfrom Codex\n{tmp_path}\n" in model.outputs["c"]
    assert "No such file" in model.outputs["r"]
    assert (tmp_path / "a.txt").read_text() == "from Codex\n"
