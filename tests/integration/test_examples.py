"""The programs of examples/ run and print what they promise, alone and on a server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.client import DEFAULT_TIMEOUT, Server, scaled, server_environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

_AGENT = [
    '   | 3:GREETING = "Hello, Mars"',
    'shell: 3:GREETING = "Hello, Mars" (exit code 0)',
    "edit: failed: FOLDER/app.py: the old text does not occur",
    "edit: edited",
    "patch: added",
    "   | OK",
    "shell: OK (exit code 0)",
    "serve: Hello, World",
    "python:",
    "python: 'HELLO, WORLD'",
]
EXPECTED = {
    "run_commands": [
        "Linux exit code 0",
        "12 bytes of input",
        "hello world",
        "squares [1, 4, 9, 16, 25]",
        "failed with 3 oh no",
        "too slow, but it had printed begun",
    ],
    "follow_output": ["['line 1', 'line 2', 'line 3', 'line 4', 'line 5']", "ended: True"],
    "terminal": [
        "42",
        "['0', '1', '2']",
        "'Hello, World'",
        "ZeroDivisionError: division by zero",
        "80",
        "exit code 5",
    ],
    "edit_files": [
        "print('hello')",
        "4 entries below the folder",
        "there is no such file",
        "4194304 bytes read back",
    ],
    "copy_tree": ["all 3 files are there", "3 files, 30000 bytes back"],
    "confine": ["reading: allowed", "writing: denied by the sandbox"],
    "script": ["hello", "remember the milk", "[b'1', b'2', b'3']"],
    "agent_tools": [
        "(wrote 13 bytes)",
        "42",
        "",
        "(exit code 0)",
        "(cannot read it: missing.py: No such file or directory (os error 2))",
    ],
    "coding_agent": _AGENT,
    "coding_agent_sync": _AGENT,
    "many_tasks": [
        "25 done, 25 cancelled",
        "done in the workspaces: 25",
        "succeeded: [True, False]",
    ],
    "job_runner": ["8 of 8 jobs done", "[1, 4, 9, 16, 25, 36, 49, 64]"],
}


def _run(name: str, *arguments: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *arguments],
        env=server_environment("ours"),
        capture_output=True,
        text=True,
        timeout=scaled(3 * DEFAULT_TIMEOUT),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return [line.rstrip() for line in ended.stdout.splitlines()]


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_starts_a_server_of_its_own(name: str) -> None:
    assert _run(name) == [line.rstrip() for line in EXPECTED[name]]


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_talks_to_a_server(name: str, server: Server) -> None:
    assert _run(name, server.url) == [line.rstrip() for line in EXPECTED[name]]


@pytest.mark.quick
def test_every_example_is_run_and_described() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == set(EXPECTED)
    described = re.findall(
        r"^\| `(\w+)\.py` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(described) == sorted(names)
