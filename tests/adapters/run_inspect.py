"""What the self check of Inspect does not ask: configurations, users, and the end of a sample."""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.util import SandboxUserUnsupportedError
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

from exec_server.adapters.inspect import ExecServerSandboxConfig
from tests.support.server_internals import eventually


def play(config: dict[str, Any], scene: Callable[[Any], Awaitable[None]]) -> None:
    """Run a scene in the sandbox of a sample, which is cleaned up."""
    kind = registry_find_sandboxenv("exec-server")
    settings = kind.config_deserialize(config)

    async def run() -> None:
        made = await kind.sample_init("task", settings, {})
        try:
            async with asyncio.timeout(60):
                await scene(made["default"])
        finally:
            await kind.sample_cleanup("task", settings, made, False)

    asyncio.run(run())


def test_a_configuration_with_a_policy_is_hashable() -> None:
    """Inspect has the configurations of all samples in a set."""
    policies = [{"permissions": {"type": "disabled"}}, {"permissions": {"type": "external"}}]
    configs = {ExecServerSandboxConfig(sandbox=policy) for policy in [*policies, policies[0]]}
    assert len(configs) == 2


def test_the_own_user_of_the_server(server_url: str) -> None:
    """Every server can run commands as its own user, under a sandbox too; as others it may not."""
    own = [pwd.getpwuid(os.geteuid()).pw_name, str(os.geteuid())]

    async def scene(sandbox: Any) -> None:
        for user in own:
            done = await sandbox.exec(["id", "-u"], user=user)
            assert done.stdout == f"{os.geteuid()}\n"
        await sandbox.write_file("file", "text")
        assert await sandbox.read_file("file") == "text"

    async def confined(sandbox: Any) -> None:
        await scene(sandbox)
        with pytest.raises(SandboxUserUnsupportedError, match="nobody"):
            await sandbox.exec(["id", "-u"], user="nobody")

    play({"target": server_url}, scene)
    play({"target": server_url, "user": own[0]}, scene)
    play({"target": server_url, "sandbox": "workspace-write"}, confined)


def test_a_connection_has_the_user(server_url: str) -> None:
    async def scene(sandbox: Any) -> None:
        connection = await sandbox.connection(user="nobody")
        begin = f"exec-server exec -t --user nobody {server_url} -- sh -c "
        assert connection.command.startswith(begin)

    play({"target": server_url}, scene)


def test_the_directory_of_a_busy_sample_is_deleted(server_url: str) -> None:
    """Processes in the background create files in it, and some have closed their output."""
    folders = []

    async def scene(sandbox: Any) -> None:
        folders.append(Path((await sandbox.exec(["pwd"])).stdout.strip()))
        loop = "while :; do i=$((i+1)); : > $0-$i; done"
        for name in ("a", "b", "c"):
            await sandbox.exec(["sh", "-c", f"sh -c '{loop}' {name} &"])
            await sandbox.exec(["sh", "-c", f"sh -c '{loop}' closed-{name} >/dev/null 2>&1 &"])
        begun = [folders[0] / f"closed-{name}-1" for name in ("a", "b", "c")]
        await asyncio.to_thread(eventually, "they begin", lambda: all(map(Path.exists, begun)))

    play({"target": server_url}, scene)
    (folder,) = folders
    assert not folder.exists()
