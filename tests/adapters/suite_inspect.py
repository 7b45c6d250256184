"""The self check of Inspect, unmodified; a server of root gets an ordinary default user."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def sandbox_env(
    server_url: str, ordinary_user: str | None
) -> AsyncIterator[SandboxEnvironment]:
    kind = registry_find_sandboxenv("exec-server")  # by the entry point
    config = kind.config_deserialize({"target": server_url, "user": ordinary_user})
    made = await kind.sample_init("self_check", config, {})
    yield made["default"]
    await kind.sample_cleanup("self_check", config, made, False)
