"""A node with many executors and streams: memory, work at the same time, the processor's budget."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bench.registry import relay, resident_bytes
from tests.support.client import scaled
from tests.support.registry import Node, RawClient, RawExecutor, start_node
from tests.support.server_internals import eventually

from exec_server.relay.frames import Frame, Kind

pytestmark = pytest.mark.measured

IDLE = 1000
IDLE_BYTES = 16 * 1024
# Of processor time for a frame of 60 KiB and one of 1.1 KiB, in microseconds.
BUDGETS = {60 * 1024: 70.0, 1100: 6.0}


def _executors(node: Node, count: int, stack: contextlib.ExitStack) -> None:
    with ThreadPoolExecutor(8) as threads:
        for executor in threads.map(lambda n: RawExecutor(node, f"idle-{n}"), range(count)):
            stack.enter_context(executor)


@pytest.mark.timeout(180)
def test_a_thousand_idle_executors_take_little_memory(tmp_path: Path) -> None:
    with start_node(tmp_path) as node, contextlib.ExitStack() as stack:
        node.site.admin("tenant", "limit", "default", "--environments", "5000")
        _executors(node, 20, stack)
        before = resident_bytes(node)
        with contextlib.ExitStack() as idle:
            with ThreadPoolExecutor(8) as threads:
                names = [f"more-{n}" for n in range(IDLE)]
                for executor in threads.map(lambda name: RawExecutor(node, name), names):
                    idle.enter_context(executor)
            assert node.metric("executors") == IDLE + 20
            assert (resident_bytes(node) - before) / IDLE < IDLE_BYTES
        eventually("all have left", lambda: node.metric("executors") == 20, 20)


@pytest.mark.timeout(180)
def test_two_hundred_streams_at_work(tmp_path: Path) -> None:
    count = 40  # each way, on each of 200 streams
    with start_node(tmp_path) as node, contextlib.ExitStack() as stack:
        executors = [stack.enter_context(RawExecutor(node, f"env-{n}")) for n in range(10)]
        clients = {
            f"{n}-{k}": stack.enter_context(RawClient(node, f"env-{n}"))
            for n in range(10)
            for k in range(20)
        }

        def serve(executor: RawExecutor) -> None:
            for _ in range(20 * count):
                executor.send(executor.receive(30))

        def use(stream: str, client: RawClient) -> list[int]:
            for number in range(count):
                client.send(Frame(stream, Kind.DATA, b"x" * 1000, number))
            return [client.receive(30).seq for _ in range(count)]

        with ThreadPoolExecutor(210) as threads:
            serving = [threads.submit(serve, executor) for executor in executors]
            using = [threads.submit(use, name, client) for name, client in clients.items()]
            for task in using:
                assert task.result(scaled(60)) == list(range(count))
            for done in serving:
                done.result(scaled(60))


def test_relaying_stays_within_its_budget_of_processor_time(tmp_path: Path) -> None:
    with start_node(tmp_path) as node:
        node.site.admin("tenant", "limit", "default", "--bytes-per-second", "100000000000")
        with RawExecutor(node) as executor, RawClient(node) as client:
            client.send(Frame("s", Kind.DATA, b"first"))
            executor.receive()
            for size, budget in BUDGETS.items():
                # The best of three: another program may take the caches of the processor.
                figures = [relay(node, executor, client, size, 0.5) for _ in range(3)]
                # Twice the budget: this machine may be another one than the reference's.
                assert min(figure.microseconds for figure in figures) < 2 * budget
