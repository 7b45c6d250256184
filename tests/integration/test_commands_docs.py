"""docs/commands.md: its examples run in their order, on a target that is named `build`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.cli import client_environment
from tests.support.client import DEFAULT_TIMEOUT, scaled, start_server

_TEXT = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
# Lines that need another machine, a terminal or a shell of its own, or go on until Ctrl-C.
_LEFT_OUT = re.compile(r"example\.net|vim|^source|completion| (attach|watch|port|mcp|login|up)\b")
_REPLACED = {"tail -n 100 -f": "tail -n 100", "npm run dev": "sleep 60", "logs -f": "logs"}
_FOLDERS = ("/srv", "/src", "/tmp", "/var/log")


def _lines() -> list[str]:
    blocks = [each for each in _TEXT.split("\n```")[3::2] if each.startswith(("\n", "sh\n"))]
    lines = [line for block in blocks for line in block.splitlines()]
    return [each for each in lines if "exec-server" in each and not _LEFT_OUT.search(each)]


def _below(folder: Path, line: str) -> str:
    """The line with an end, and without folders of the machine."""
    for old, new in _REPLACED.items():
        line = line.replace(old, new)
    return re.sub(rf"(?<=[ :])({'|'.join(_FOLDERS)})\b", rf"{folder}\1", line)


def test_the_examples(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    local = ("src/a.py", "docs/b", "app/.git/c", "app/node_modules/d", "app/e", "report.pdf")
    remote = ("src/a.py", "logs/f.gz", "var/log/syslog", "server.log", "a.txt", "b.txt")
    for path in (*(here / name for name in local), *(there / name for name in remote)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# TODO\n")
    for name in ("Makefile", "src/Makefile"):
        (there / name).write_text("test:\n\techo tested\n")
    for name in ("srv", "tmp", "project", "old"):
        (there / name).mkdir()
    programs = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    variables = client_environment(tmp_path / "config/exec-server", {"PATH": programs})
    lines = _lines()
    assert len(lines) >= 28
    with start_server("ours", cwd=there) as server:
        add = f"exec-server targets add build {server.url}"
        for line in (add, "exec-server exec -d --name web : true", *lines):
            ended = subprocess.run(
                ["sh", "-ec", _below(there, line)],
                cwd=here,
                env=variables | {"EXEC_SERVER_TARGET": "build"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=scaled(DEFAULT_TIMEOUT),
                check=False,
            )
            assert ended.returncode == 0, (line, ended.stdout, ended.stderr)
    assert sorted(each.name for each in (there / "app").iterdir()) == ["e"]
    assert {each.name for each in (there / "srv").iterdir()} == {"report.pdf", "src"}
    assert {each.name for each in here.iterdir()} >= {"syslog", "f.gz"}
