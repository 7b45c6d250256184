"""Nodes that are killed and drained under load: every session resumes, every byte is there.

`make test-fleet` kills 50 nodes and drains 20; other runs do fewer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import sys
from collections.abc import Callable, Iterator

import pytest
from tests.support.balancer import Balancer, start_balancer
from tests.support.client import scaled
from tests.support.client_targets import bounded
from tests.support.postgres import Postgres, programs, start_postgres
from tests.support.registry import Node, Site, start_executor

from exec_server import connect
from exec_server.client.environment import Environment

pytestmark = [
    pytest.mark.skipif(programs() is None, reason="needs the package postgresql"),
    pytest.mark.measured,
]

KILLS = int(os.environ.get("EXEC_SERVER_FLEET_KILLS", "8"))
DRAINS = int(os.environ.get("EXEC_SERVER_FLEET_DRAINS", "4"))
EXECUTORS = 3
# A client gives its session up after 45 s without an executor.
RESUME_SECONDS = 45.0

# Numbered lines until a file appears, as fast as the stream takes them for a moment, then slowly.
LOAD = """
import os, sys, time
number = 0
while not os.path.exists(sys.argv[1]):
    for _ in range(40):
        print(f"{number:08d}", "x" * 60)
        number += 1
    sys.stdout.flush()
    time.sleep(0.01)
print("end", number)
"""
# The wait of an executor would double with each lost link; it is not the subject here.
STEADY = "import exec_server.server.remote as remote\nremote.STABLE_LINK_SECONDS = 0.0\n"


class Fleet:
    """Two nodes behind a balancer; one that ends is replaced by a new one."""

    def __init__(self, database: Postgres, balancer: Balancer) -> None:
        self._database = database
        self._balancer = balancer
        self._flags = ("--public-url", balancer.url, "--drain-seconds", "1")
        self._all: list[Node] = []
        self.nodes = [self._start(None)]
        self.site: Site = self.nodes[0].site
        self.nodes.append(self._start(self.site))
        self._publish()

    def _start(self, site: Site | None) -> Node:
        node = Node(self._database.where, *self._flags, site=site)
        self._all.append(node)
        return node

    def _publish(self) -> None:
        self._balancer.nodes = [node.port for node in self.nodes]

    def replace(self, number: int, end: Callable[[Node], None]) -> None:
        """End one node, and start another one in its place."""
        end(self.nodes[number])
        self.nodes[number] = self._start(self.site)
        self._publish()

    def close(self) -> None:
        for node in self._all:
            if node.server.process.poll() is None:
                node.server.kill()
            node.server.release()


@contextlib.contextmanager
def _steady_executors() -> Iterator[None]:
    code = f"{STEADY}\nfrom exec_server.cli.main import main\nmain()"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXEC_SERVER_COMMAND", shlex.join([sys.executable, "-c", code]))
        yield


async def _check_round(envs: list[Environment], name: str, disturb: Callable[[], None]) -> None:
    """Load on all sessions, a disturbance, and every byte of the output."""
    stop = f"/tmp/{name}"
    try:
        async with asyncio.TaskGroup() as tasks:
            command = [sys.executable, "-c", LOAD, stop]
            runs = [tasks.create_task(env.run(command)) for env in envs]
            await asyncio.sleep(0.2)
            await asyncio.to_thread(disturb)
            # The session is there again once it answers.
            async with asyncio.timeout(scaled(RESUME_SECONDS)):
                for env in envs:
                    assert (await env.run(["true"])).exit_code == 0
            with open(stop, "w"):
                pass
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stop)
    results = [run.result() for run in runs]
    for result in results:
        *lines, last = result.stdout.decode().splitlines()
        assert last == f"end {len(lines)}"
        assert lines == [f"{number:08d} {'x' * 60}" for number in range(len(lines))]


async def _scene(fleet: Fleet, url: str, tokens: list[str]) -> None:
    dice = random.Random(15)
    async with contextlib.AsyncExitStack() as stack:
        envs = [
            await stack.enter_async_context(
                connect(registry=url, environment_id=f"env-{n}", token=tokens[n])
            )
            for n in range(EXECUTORS)
        ]
        ways = [Node.kill] * KILLS + [Node.stop] * DRAINS
        dice.shuffle(ways)
        for number, way in enumerate(ways):
            victim = dice.randrange(2)

            def disturb(victim: int = victim, way: Callable[[Node], None] = way) -> None:
                fleet.replace(victim, way)

            await _check_round(envs, f"fleet-{os.getpid()}-{number}", disturb)


@pytest.mark.timeout(120 + 25 * (KILLS + DRAINS))
def test_kills_and_drains_cost_no_session_and_no_byte() -> None:
    with start_postgres() as database, start_balancer() as balancer, _steady_executors():
        fleet = Fleet(database, balancer)
        with contextlib.ExitStack() as stack:
            stack.callback(fleet.close)
            tokens = []
            for number in range(EXECUTORS):
                name = f"env-{number}"
                stack.enter_context(start_executor(fleet.nodes[0], name, url=balancer.url))
                tokens.append(fleet.site.token("connect:*"))
            bounded(_scene(fleet, balancer.url, tokens), patience=3 * (KILLS + DRAINS + 4))
