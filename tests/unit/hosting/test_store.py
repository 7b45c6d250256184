"""The questions to the database, on SQLite: single use, epochs, tenants, renewals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from exec_server.errors import StartupError
from exec_server.hosting.database import DatabaseUnavailable, Row, Step
from exec_server.hosting.metrics import Metrics
from exec_server.hosting.rules import Ticket
from exec_server.hosting.sqlite_database import SqliteDatabase
from exec_server.hosting.store import (
    AuthenticatedToken,
    Count,
    EnvironmentFacts,
    ExecutorLease,
    Limits,
    NewToken,
    NodeFacts,
    Store,
)

Scene = Callable[[Store, AuthenticatedToken], Coroutine[Any, Any, None]]
TENANT = "0123456789abcdef"


def play(directory: Path, scene: Scene) -> None:
    """Run a scene on a new database with one tenant and its token."""

    async def run() -> None:
        store = Store(SqliteDatabase(directory / "registry.db"), Metrics())
        await store.open()
        token = NewToken("tok-1", "hash", "name", TENANT, ("executor:*", "connect:a"))
        assert await store.add_first_tenant(TENANT, "default", [token])
        caller = await store.caller("hash")
        assert caller is not None
        try:
            await scene(store, caller)
        finally:
            await store.close()

    asyncio.run(run())


def ticket(role: str = "environment", registration: str = "reg-1", **changes: Any) -> Ticket:
    values = {"expires": 4_000_000_000, "nonce": "n", "token_id": "tok-1", **changes}
    return Ticket(TENANT, "env", role, registration, **values)


async def online(store: Store, caller: AuthenticatedToken, node: str = "node-1") -> ExecutorLease:
    """Register `env` and claim it for a node that lives."""
    assert await store.register(caller, "env", "reg-1", '{"key": 1}', takeover=True)
    await renew(store, node)
    epoch = await store.claim(ticket(), node)
    assert epoch is not None
    return ExecutorLease(TENANT, "env", "reg-1", epoch)


async def renew(store: Store, node: str, **changes: Any) -> Any:
    values: dict[str, Any] = {"draining": False, "since": 0.0, "counts": [], "used_tokens": []}
    return await store.renew(node, "http://node", **{**values, **changes})


def test_the_first_tenant_is_made_once(tmp_path: Path) -> None:
    async def scene(store: Store, caller: AuthenticatedToken) -> None:
        assert caller == AuthenticatedToken(
            "tok-1", TENANT, ("executor:*", "connect:a"), Limits(), "default"
        )
        again = NewToken("tok-2", "other", "", "f" * 16, ("connect:*",))
        assert not await store.add_first_tenant("f" * 16, "default", [again])
        assert await store.caller("other") is None
        assert await store.caller("none") is None
        assert await store.tenant("default", "e" * 16) == (TENANT, Limits())
        assert await store.tenant("none") is None
        limits = await store.limit_tenant("default", (5, None, None, 7))
        assert limits == Limits(environments=5, handshakes_per_second=7)
        assert await store.limit_tenant("none", (5, None, None, None)) is None

    play(tmp_path, scene)


def test_tokens_expire_and_are_revoked(tmp_path: Path) -> None:
    async def scene(store: Store, caller: AuthenticatedToken) -> None:
        short = NewToken("tok-2", "short", "", TENANT, ("connect:*",), 0.05)
        assert await store.add_token(short) is not None
        assert await store.caller("short") is not None
        await asyncio.sleep(0.06)
        found = await store.caller("short")
        assert found is not None
        assert (found.is_expired, found.is_revoked) == (True, False)
        assert [token.id for token in await store.tokens(None)] == ["tok-1", "tok-2"]
        assert await store.tokens("other") == []
        before = await store.now()
        assert await store.revoke_token("tok-1")
        assert not await store.revoke_token("tok-1")
        found = await store.caller("hash")
        assert found is not None
        assert (found.is_expired, found.is_revoked) == (False, True)
        assert (await renew(store, "node-1", since=before)).revoked == {"tok-1"}
        assert (await renew(store, "node-1", since=before + 100)).revoked == frozenset()
        assert (await renew(store, "node-1", since=before)).killed == frozenset()
        # A token that is revoked already.
        assert await store.revoke_token("tok-1", kill=True)
        assert await store.revoke_token("tok-2", kill=True)
        assert not await store.revoke_token("none", kill=True)
        renewal = await renew(store, "node-1", since=before)
        assert (renewal.revoked, renewal.killed) == ({"tok-1", "tok-2"}, {"tok-1", "tok-2"})

    play(tmp_path, scene)


def test_registrations_replace_each_other_within_limits(tmp_path: Path) -> None:
    async def scene(store: Store, caller: AuthenticatedToken) -> None:
        small = AuthenticatedToken("tok-1", TENANT, (), Limits(environments=1))
        assert await store.register(small, "env", "reg-0", "{}", takeover=True)
        assert await store.register(small, "other", "reg", "{}", takeover=True) is None
        assert not await store.is_known(TENANT, "other")
        await online(store, caller)
        refused = await store.register(caller, "env", "reg-2", "other key", takeover=False)
        assert refused is None
        same = await store.register(caller, "env", "reg-2", '{"key": 1}', takeover=False)
        assert same is not None
        assert await store.claim(ticket(), "node-1") is None  # of the former registration

    play(tmp_path, scene)


def test_an_authorization_is_consumed_once_and_only_by_its_key(tmp_path: Path) -> None:
    async def scene(store: Store, caller: AuthenticatedToken) -> None:
        assert await store.authorize(caller, "env", "secret", "key", 60) is None
        await online(store, caller)
        grant = await store.authorize(caller, "env", "secret", "key", 60)
        assert grant is not None
        assert (grant.registration_id, grant.executor_key) == ("reg-1", '{"key": 1}')
        right = (TENANT, "env", "reg-1", "key", "secret")
        for place in range(5):
            wrong = [*right[:place], "wrong", *right[place + 1 :]]
            assert not await store.consume(*wrong)
        async with asyncio.TaskGroup() as tasks:
            tries = [tasks.create_task(store.consume(*right)) for _ in range(12)]
        assert sorted(task.result() for task in tries) == [False] * 11 + [True]
        await store.authorize(caller, "env", "late", "key", 0)
        assert not await store.consume(TENANT, "env", "reg-1", "key", "late")
        await store.authorize(caller, "env", "revoked", "key", 60)
        await store.revoke_token("tok-1")
        assert not await store.consume(TENANT, "env", "reg-1", "key", "revoked")

    play(tmp_path, scene)


def test_a_ticket_is_spent_once_and_its_facts_are_found(tmp_path: Path) -> None:
    async def scene(store: Store, caller: AuthenticatedToken) -> None:
        assert await store.spend(ticket(nonce="a"))
        assert not await store.spend(ticket(nonce="a"))
        assert not await store.spend(ticket(nonce="b", expires=1))
        await online(store, caller)
        facts = await store.admission(ticket())
        assert facts is not None
        assert (facts.is_expired, facts.has_token, facts.is_current) == (False, True, True)
        assert (facts.node, facts.node_url, facts.limits) == ("node-1", "http://node", Limits())
        wrong = ticket(registration="reg-9", expires=1, token_id="tok-9")
        facts = await store.admission(wrong)
        assert facts is not None
        assert (facts.is_expired, facts.has_token, facts.is_current) == (True, False, False)
        unknown = Ticket("f" * 16, "env", "harness", "reg-1", 1, "n", "tok-1")
        assert await store.admission(unknown) is None

    play(tmp_path, scene)


def test_the_newest_claim_holds_and_lost_ones_are_repaired(tmp_path: Path) -> None:
    async def scene(store: Store, caller: AuthenticatedToken) -> None:
        first = await online(store, caller)
        second = await store.claim(ticket(), "node-2")
        assert second == first.epoch + 1
        assert (await renew(store, "node-1")).held == {}
        assert (await renew(store, "node-2")).held == {(TENANT, "env"): (second, "reg-1")}
        assert not await store.reclaim(first, "node-1")  # a newer one exists
        lost = ExecutorLease(TENANT, "env", "reg-1", second + 1)
        assert await store.reclaim(lost, "node-1")  # the database has lost this one
        await store.release(first, "node-1")  # an old epoch: no effect
        held = (await renew(store, "node-1")).held
        assert held == {(TENANT, "env"): (second + 1, "reg-1")}
        await store.release(lost, "node-1")
        assert (await renew(store, "node-1")).held == {}

    play(tmp_path, scene)


def test_a_renewal_writes_counters_and_status_shows_them(tmp_path: Path) -> None:
    async def scene(store: Store, caller: AuthenticatedToken) -> None:
        lease = await online(store, caller)
        await renew(store, "node-1", counts=[Count(lease, 2, 70)], used_tokens=["tok-1"])
        await renew(store, "node-1", counts=[Count(lease, 1, 30)], draining=True)
        [environment], [node] = await store.status()
        since = environment.since
        assert environment == EnvironmentFacts("default", "env", "node-1", since, 1, 100)
        assert node == NodeFacts("node-1", "http://node", True, 1)
        [token] = await store.tokens("default")
        assert token.last_used_at is not None
        await store.remove_node("node-1")
        [environment], nodes = await store.status()
        assert (environment.node, nodes) == (None, [])

    play(tmp_path, scene)


def test_keys_are_rotated_once_a_day_and_two_are_kept(tmp_path: Path) -> None:
    async def scene(store: Store, caller: AuthenticatedToken) -> None:
        assert await store.keys() == {}
        assert await store.rotate_keys(86_400.0, b"one") == {"1": b"one"}
        assert await store.rotate_keys(86_401.0, b"other node") == {"1": b"one"}
        await asyncio.sleep(0.005)
        await store.rotate_keys(2 * 86_400.0, b"two")
        await asyncio.sleep(0.005)
        assert list(await store.rotate_keys(3 * 86_400.0, b"three")) == ["3", "2"]
        assert (await renew(store, "node-1")).keys == {"3": b"three", "2": b"two"}

    play(tmp_path, scene)


class Flaky:
    """A database that fails once."""

    def __init__(self) -> None:
        self.calls = 0

    async def run(self, steps: list[Step], *, durable: bool = False) -> list[list[Row]]:
        self.calls += 1
        if self.calls == 1:
            raise DatabaseUnavailable("away")
        return [[(1,)]]


def test_a_validation_is_tried_twice() -> None:
    async def scene() -> None:
        flaky = Flaky()
        store = Store(flaky, Metrics())  # type: ignore[arg-type]
        assert await store.consume("t", "e", "r", "k", "s")
        assert flaky.calls == 2

    asyncio.run(scene())


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def scene() -> None:
        store = Store(SqliteDatabase(tmp_path / "file" / "data" / "registry.db"), Metrics())
        with pytest.raises(StartupError, match="cannot open"):
            await store.open()
        await store.close()

    asyncio.run(scene())
