"""What `exec-server exec` imports, and signals before its command is started.

Its behaviour with a server is tested in integration.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from exec_server.cli.commands import exec_command, execution
from exec_server.cli.commands.targets import Target

# Each takes milliseconds, and no command on a WebSocket target needs it.
UNNEEDED = (
    "exec_server.client.engine.relay",
    "exec_server.client.engine.stdio",
    "exec_server.client.files",
    "exec_server.client.http",
    "exec_server.patching",
    "exec_server.server",
    "cryptography",
    "http",
    "pathlib",
    "shutil",
    "tempfile",
    "tomllib",
)


def test_unneeded_modules_are_not_imported() -> None:
    code = (
        "import sys; from exec_server.cli.commands import exec_command\n"
        "exec_command.build_parser().parse_words(['ws://h', 'true'])\n"
        "from exec_server.cli.commands import execution\n"
        "print(*sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert set(UNNEEDED) & set(ended.stdout.split()) == set()


def test_a_signal_before_the_start_of_the_command_ends_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = exec_command.build_parser().parse_words(["ws://h:1", "x"])
    running = execution._Execution(arguments, Target(label="x", url="ws://h:1"), None)

    @contextlib.asynccontextmanager
    async def never_open(*_: object) -> AsyncIterator[None]:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(execution, "open_environment", never_open)
    assert asyncio.run(running.run()) == 128 + signal.SIGTERM
