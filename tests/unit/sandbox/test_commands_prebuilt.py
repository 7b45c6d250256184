"""PrebuiltPool with fake inits: one per policy, current, bounded, ended when idle."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from exec_server.errors import InternalError
from exec_server.sandbox import commands
from exec_server.sandbox.commands import MAX_PREBUILT, Init, PrebuiltPool
from exec_server.sandbox.policy.model import Policy, Rule
from exec_server.sandbox.runtime.messages import ControlSocket


def _policy(name: str) -> Policy:
    return Policy((Rule(f"/{name}", "read"),), (), "restricted")


class _Dependencies:
    def __init__(self) -> None:
        self.is_open = True
        self.current = True

    def is_current(self) -> bool:
        return self.current

    def close(self) -> None:
        self.is_open = False


class _Builder:
    """Builds fake inits, once `go_on` is set."""

    def __init__(self) -> None:
        self.built: list[tuple[Policy, _Dependencies]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.failure: Exception | None = None
        self.other_ends: list[socket.socket] = []

    def __call__(self, policy: Policy) -> Init:
        assert self.go_on.wait(20)
        if self.failure is not None:
            raise self.failure
        ours, other = socket.socketpair()
        self.other_ends.append(other)
        dependencies = _Dependencies()
        self.built.append((policy, dependencies))
        control = ControlSocket(1, ours)
        return Init(1, control, (), dependencies)  # type: ignore[arg-type]

    @property
    def open(self) -> list[Policy]:
        return [policy for policy, dependencies in self.built if dependencies.is_open]


@pytest.fixture
def builder() -> _Builder:
    return _Builder()


@pytest.fixture
def pool(builder: _Builder) -> Iterator[PrebuiltPool]:
    pool = PrebuiltPool(builder)
    yield pool
    builder.go_on.set()
    pool.close()
    for other in builder.other_ends:
        other.close()


def _prebuild(pool: PrebuiltPool, *policies: Policy) -> None:
    """Build in the background and wait until it is done."""
    for policy in policies:
        pool.prebuild(policy)
        pool._thread.submit(lambda: None).result(20)


def test_an_init_that_was_killed_is_not_used(pool: PrebuiltPool, builder: _Builder) -> None:
    one = _policy("one")
    _prebuild(pool, one)
    builder.other_ends[0].close()
    assert pool.take(one) is None
    assert builder.open == []


def test_an_init_is_taken_once(pool: PrebuiltPool) -> None:
    one = _policy("one")
    assert pool.take(one) is None
    _prebuild(pool, one)
    init = pool.take(one)
    assert init is not None
    assert pool.take(one) is None
    init.close()


def test_a_stale_init_is_closed_instead_of_taken(pool: PrebuiltPool, builder: _Builder) -> None:
    one = _policy("one")
    _prebuild(pool, one)
    builder.built[0][1].current = False
    assert pool.take(one) is None
    assert builder.open == []


def test_a_caller_waits_for_the_init_that_is_being_built(
    pool: PrebuiltPool, builder: _Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "BUILD_SECONDS", 20.0)
    one = _policy("one")
    builder.go_on.clear()
    pool.prebuild(one)
    pool.prebuild(one)
    threading.Timer(0.05, builder.go_on.set).start()
    init = pool.take(one)
    assert init is not None
    init.close()
    assert len(builder.built) == 1


def test_a_policy_is_building_until_its_init_is_there(
    pool: PrebuiltPool, builder: _Builder
) -> None:
    one = _policy("one")
    builder.go_on.clear()
    pool.prebuild(one)
    assert pool.is_building(one)
    assert not pool.is_building(_policy("two"))
    builder.go_on.set()
    pool._thread.submit(lambda: None).result(20)
    assert not pool.is_building(one)


def test_the_pool_is_bounded_and_drops_the_oldest(pool: PrebuiltPool, builder: _Builder) -> None:
    policies = [_policy(str(number)) for number in range(MAX_PREBUILT + 1)]
    _prebuild(pool, *policies)
    assert builder.open == policies[1:]


def test_another_init_for_a_policy_replaces_the_first(
    pool: PrebuiltPool, builder: _Builder
) -> None:
    one = _policy("one")
    _prebuild(pool, one, one)
    assert (len(builder.built), builder.open) == (2, [one])


def test_a_failed_build_leaves_nothing(pool: PrebuiltPool, builder: _Builder) -> None:
    builder.failure = InternalError("no")
    _prebuild(pool, _policy("one"))
    assert pool.take(_policy("one")) is None


def test_idle_inits_end(
    pool: PrebuiltPool, builder: _Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _prebuild(pool, _policy("one"))
    pool.drop_idle()
    assert builder.open == [_policy("one")]
    monkeypatch.setattr(commands, "IDLE_SECONDS", -1.0)
    pool.drop_idle()
    assert builder.open == []


def test_a_closed_pool_builds_nothing(pool: PrebuiltPool, builder: _Builder) -> None:
    _prebuild(pool, _policy("one"))
    pool.close()
    pool.prebuild(_policy("two"))
    assert (len(builder.built), builder.open) == (1, [])
