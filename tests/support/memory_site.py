"""A whole node without sockets: requests are values, transports are in memory, SQLite is real."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from exec_server.hosting.http_connection import TakeOver
from exec_server.hosting.http_messages import ServiceAnswer, ServiceRequest
from exec_server.hosting.metrics import Metrics
from exec_server.hosting.node import ServiceOptions
from exec_server.hosting.rules import secret_hash
from exec_server.hosting.service import FIRST_TENANT, Service
from exec_server.hosting.sqlite_database import SqliteDatabase
from exec_server.hosting.store import NewToken, Store
from exec_server.relay.noise import SUITE
from tests.support.memory_transport import MemoryTransport

TENANT = "0123456789abcdef"
PUBLIC = "http://registry.example.net/base"
KEY = {
    "suite": SUITE,
    "x25519_public_key": base64.b64encode(bytes(32)).decode(),
    "mlkem768_public_key": base64.b64encode(bytes(1184)).decode(),
}
VALIDATION = {
    "executor_registration_id": "reg-x",
    "harness_public_key": KEY,
    "harness_key_authorization": "x",
}
BODIES: dict[str, dict[str, Any]] = {
    "register": {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": KEY},
    "connect": {"harness_public_key": KEY},
}


class Site:
    """A node and the requests of its peers."""

    def __init__(self, directory: Path, tasks: asyncio.TaskGroup) -> None:
        self.store = Store(SqliteDatabase(directory / "registry.db"), Metrics())
        options = ServiceOptions(PUBLIC, "http://10.0.0.1:1")
        self.service = Service(self.store, Metrics(), options, tasks.create_task)

    async def open(self) -> None:
        await self.store.open()
        token = NewToken("tok-1", secret_hash("token"), "", TENANT, ("executor:*", "connect:*"))
        assert await self.store.add_first_tenant(TENANT, FIRST_TENANT, [token])
        await self.service.node.start()

    async def get(self, path: str, method: str = "GET") -> ServiceAnswer:
        answer = await self.service.answer(ServiceRequest(method, path, "", {}))
        assert isinstance(answer, ServiceAnswer)
        return answer

    async def ask(
        self, verb: str, body: Any = None, name: str = "env", token: str = "token"
    ) -> ServiceAnswer:
        content = json.dumps(BODIES[verb] if body is None else body).encode()
        headers = {"authorization": f"Bearer {token}"}
        path = f"/base/cloud/environment/{name}/{verb}"
        answer = await self.service.answer(ServiceRequest("POST", path, "", headers, content))
        assert isinstance(answer, ServiceAnswer)
        return answer

    async def url(self, verb: str) -> dict[str, Any]:
        answer = await self.ask(verb)
        assert answer.status == 200, answer
        found: dict[str, Any] = json.loads(answer.body)
        assert found["url"].startswith("ws://registry.example.net/base/rendezvous/")
        return found

    async def upgrade(self, url: str, **more: str) -> ServiceAnswer | TakeOver:
        path, _, query = url.partition("example.net")[2].partition("?")
        headers = {
            "connection": "upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": "x",
            **more,
        }
        return await self.service.answer(ServiceRequest("GET", path, query, headers, head=b"GET"))

    async def join(self, url: str) -> MemoryTransport:
        granted = await self.upgrade(url)
        assert not isinstance(granted, ServiceAnswer), granted
        transport = MemoryTransport(asyncio.Protocol())
        granted.open(transport, ServiceRequest("GET", "/", "", {"sec-websocket-key": "x"}), b"")
        assert transport.take_written().startswith(b"HTTP/1.1 101 ")
        return transport

    async def refusal(self, url: str, **more: str) -> tuple[int, str]:
        answer = await self.upgrade(url, **more)
        assert isinstance(answer, ServiceAnswer)
        return answer.status, answer.headers["x-codex-rendezvous-rejection-reason"]


def play(directory: Path, scene: Callable[[Site], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            site = Site(directory, tasks)
            await site.open()
            await scene(site)
        await site.store.close()

    asyncio.run(run())


def code(answer: ServiceAnswer) -> tuple[int, str]:
    return answer.status, json.loads(answer.body)["error"]["code"]


def message(answer: ServiceAnswer) -> str:
    return str(json.loads(answer.body)["error"]["message"])


async def refusals(site: Site) -> dict[str, int]:
    """The counts of the metric, by its labels."""
    name = "exec_server_registry_refusals_total"
    lines = (await site.get("/metrics")).body.decode().splitlines()
    found = [line.removeprefix(name).rsplit(" ", 1) for line in lines if line.startswith(name)]
    return {labels: int(count) for labels, count in found}
