"""Our client through a relay with the executors of older versions, in the form that each speaks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.relay_service import Form, ThreadedRelayService
from tests.support.client_targets import bounded
from tests.support.older_servers import installed_versions, start_older_executor
from tests.support.relay import ENVIRONMENT

from exec_server import Environment, connect
from exec_server.client.engine.relay import PlainRelayDialer

# The first version of each form; the last one is that of today.
TEXT, PLAIN, NOISE = "0.129.0", "0.131.0", "0.141.0"
INSTALLED = [version for version in installed_versions() if version >= TEXT]
pytestmark = [
    pytest.mark.flaky(reruns=1),
    pytest.mark.skipif(not INSTALLED, reason="no older version of the reference is installed"),
]
MIB = 1_048_576


@contextmanager
def _relayed(version: str) -> Iterator[ThreadedRelayService]:
    """A relay with an executor of this version."""
    form = Form.TEXT if version < PLAIN else Form.RELAY
    with (
        ThreadedRelayService(plaintext=True, executor_form=form) as service,
        start_older_executor(version, service.url, ENVIRONMENT),
    ):
        service.wait_for_executor(ENVIRONMENT)
        yield service


def _cut(service: ThreadedRelayService) -> None:
    """Drop the connection of the client without a word."""
    relay = service.service

    def abort() -> None:
        for socket in relay.harnesses(ENVIRONMENT):
            socket.abort()

    service.call(abort)


def _environment(service: ThreadedRelayService, version: str) -> Environment:
    if version >= NOISE:
        return connect(registry=service.url, environment_id=ENVIRONMENT, token="client")
    url = service.plain_url(ENVIRONMENT)
    return connect(url) if version < PLAIN else Environment(PlainRelayDialer(url))


@pytest.mark.parametrize("version", INSTALLED)
def test_commands_files_and_cuts(version: str, tmp_path: Path) -> None:
    async def scene(service: ThreadedRelayService) -> None:
        async with _environment(service, version) as env:
            assert (await env.run(["cat"], input=b"in")).stdout == b"in"
            data = os.urandom(5 * MIB)
            await env.files.write(tmp_path / "f", data)
            assert await env.files.read(tmp_path / "f") == data
            script = "read line; seq 1 2000; echo end"
            async with env.start(["sh", "-c", script], tty=True) as process:
                if version >= PLAIN:  # the text form ends with its only client
                    await asyncio.to_thread(_cut, service)
                await process.write(b"go\n")
                shown = b"".join([chunk.data async for chunk in process])
            assert shown.endswith(b"2000\r\nend\r\n")

    with _relayed(version) as service:
        bounded(scene(service))
