"""WorkerPool with fake workers: reuse, staleness, limits and closing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from exec_server.errors import InternalError
from exec_server.sandbox import files
from exec_server.sandbox.builder import ViewDependencies
from exec_server.sandbox.files import MAX_PER_POLICY, MAX_WORKERS, WorkerPool
from exec_server.sandbox.policy.model import Policy, Rule
from exec_server.sandbox.runtime.worker import Worker


def _policy(name: object) -> Policy:
    return Policy((Rule(f"/{name}", "read"),), (), "restricted")


class _Fake(Worker, ViewDependencies):
    """A worker and its dependencies in one."""

    def __init__(self) -> None:
        self.is_broken = False
        self.current = True
        self.ended = False
        self.is_closed = False

    def has_ended(self) -> bool:
        return self.ended

    def is_current(self) -> bool:
        return self.current

    def close(self) -> None:
        self.is_closed = True


class _Builder:
    def __init__(self) -> None:
        self.built: list[_Fake] = []

    def __call__(self, policy: Policy) -> tuple[Worker, ViewDependencies]:
        fake = _Fake()
        self.built.append(fake)
        return fake, fake

    @property
    def open(self) -> list[_Fake]:
        return [fake for fake in self.built if not fake.is_closed]


@pytest.fixture
def builder() -> _Builder:
    return _Builder()


@pytest.fixture
def pool(builder: _Builder) -> WorkerPool:
    return WorkerPool(builder)


def _use(worker: Worker) -> Worker:
    return worker


def test_a_worker_is_reused_by_its_policy_only(pool: WorkerPool) -> None:
    first = pool.run(_policy(1), _use)
    assert pool.run(_policy(1), _use) is first
    assert pool.run(_policy(2), _use) is not first


def test_stale_killed_and_broken_workers_are_replaced(pool: WorkerPool, builder: _Builder) -> None:
    pool.run(_policy(1), _use)
    builder.built[0].current = False
    pool.run(_policy(1), _use)
    builder.built[1].ended = True
    pool.run(_policy(1), _use)
    builder.built[2].is_broken = True
    pool.run(_policy(1), _use)  # closes the broken one when it is released
    pool.run(_policy(1), _use)
    assert len(builder.built) == 4
    assert builder.open == builder.built[3:]


def test_an_error_of_the_action_keeps_the_worker(pool: WorkerPool, builder: _Builder) -> None:
    def fail(worker: Worker) -> None:
        raise OSError(2, "missing")

    with pytest.raises(OSError, match="missing"):
        pool.run(_policy(1), fail)
    pool.run(_policy(1), _use)
    assert len(builder.built) == 1


def test_a_failed_build_frees_its_slot() -> None:
    def fail(policy: Policy) -> tuple[Worker, ViewDependencies]:
        raise InternalError("no")

    pool = WorkerPool(fail)
    for _ in range(MAX_WORKERS + 1):
        with pytest.raises(InternalError, match="no"):
            pool.run(_policy(1), _use)


def test_the_longest_idle_worker_is_closed_for_a_new_one(
    pool: WorkerPool, builder: _Builder
) -> None:
    for number in range(MAX_WORKERS + 1):
        pool.run(_policy(number), _use)
    assert builder.open == builder.built[1:]


def test_requests_of_one_policy_wait_beyond_their_limit(
    pool: WorkerPool, builder: _Builder
) -> None:
    go_on = threading.Event()
    started = threading.Semaphore(0)

    def occupy(worker: Worker) -> None:
        started.release()
        assert go_on.wait(20)

    with ThreadPoolExecutor(MAX_PER_POLICY + 1) as threads:
        runs = [threads.submit(pool.run, _policy(1), occupy) for _ in range(MAX_PER_POLICY + 1)]
        for _ in range(MAX_PER_POLICY):
            assert started.acquire(timeout=20)
        pool.run(_policy(2), _use)  # another policy does not wait
        assert not started.acquire(blocking=False)
        go_on.set()
        for run in runs:
            run.result(20)
    assert len(builder.built) == MAX_PER_POLICY + 1


def test_idle_workers_end(
    pool: WorkerPool, builder: _Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(_policy(1), _use)
    pool.drop_idle()
    assert len(builder.open) == 1
    monkeypatch.setattr(files, "IDLE_SECONDS", -1.0)
    pool.drop_idle()
    assert builder.open == []


def test_a_closed_pool_ends_workers_and_refuses_requests(
    pool: WorkerPool, builder: _Builder
) -> None:
    pool.run(_policy(1), _use)
    pool.run(_policy(2), lambda worker: pool.close())
    assert builder.open == []
    with pytest.raises(InternalError, match="shutting down"):
        pool.run(_policy(1), _use)
