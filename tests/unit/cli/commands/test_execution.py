"""Signals before the command is started.

Behaviour with a server is tested in integration, and so is what is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from exec_server.cli.commands import exec_command, execution
from exec_server.cli.commands.targets import Target


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
