"""A node in memory: requests, upgrades, renewal, health, drain."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.memory_site import KEY, TENANT, VALIDATION, Site, code, message, play
from tests.support.raw_links import frame_bytes

from exec_server.hosting import node as node_module
from exec_server.hosting import relay_hub
from exec_server.hosting import service as service_module
from exec_server.hosting.database import DatabaseUnavailable
from exec_server.hosting.http_connection import SocketAdmission
from exec_server.hosting.http_messages import ServiceAnswer, ServiceRequest
from exec_server.hosting.node import QUEUED_BYTES
from exec_server.hosting.relay_link import RelayLink
from exec_server.hosting.rendezvous import Forwarder
from exec_server.hosting.rules import check, secret_hash
from exec_server.hosting.service import FIRST_TENANT
from exec_server.hosting.store import NewToken
from exec_server.relay.frames import Frame, Kind, encode


def test_an_executor_and_a_client_meet(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        assert code(await site.ask("connect")) == (404, "environment_not_found")
        registered = await site.url("register")
        assert code(await site.ask("connect")) == (409, "environment_offline")
        executor = await site.join(registered["url"])
        granted = await site.url("connect")
        assert granted["executor_public_key"] == KEY
        client = await site.join(granted["url"])
        assert await site.refusal(granted["url"]) == (401, "expired")
        frame = encode(Frame("s", Kind.DATA, b"x"))
        client.receive(frame_bytes(2, frame))
        assert executor.take_written().endswith(frame)
        asked = {
            "executor_registration_id": registered["executor_registration_id"],
            "harness_public_key": KEY,
            "harness_key_authorization": granted["harness_key_authorization"],
        }
        for expected in (True, False):
            answer = await site.ask("validate", asked)
            assert json.loads(answer.body) == {"valid": expected}
        metrics = (await site.get("/metrics")).body.decode()
        assert "exec_server_registry_executors 1\n" in metrics
        assert "exec_server_registry_streams 1\n" in metrics
        await site.service.node._renew()
        [environment], _ = await site.store.status()
        assert environment.streams == 1
        # A newer registration ends the executor and, by a reset, its client.
        newer = await site.url("register")
        assert b"\x0f\xa1" in executor.take_written()  # 4001
        assert b"executor_disconnected" in client.take_written()
        assert await site.refusal(registered["url"]) == (401, "unexpected_executor_registration_id")
        again = await site.join(newer["url"])
        again.lose()

    play(tmp_path, scene)


def test_a_socket_that_has_moved_is_let_go_and_lost_rows_are_repaired(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        node = site.service.node
        registered = await site.url("register")
        executor = await site.join(registered["url"])
        [held] = site.service.hub.executors.values()
        # As if the database had lost the claim: it is written again.
        await site.store.release(held.lease, node.id)
        object.__setattr__(held.lease, "epoch", held.lease.epoch + 1)
        await node._renew()
        assert held.link.is_open
        # As if another node had claimed it.
        path, _, query = registered["url"].partition("/base")[2].partition("?")
        await site.store.claim(check(path, query, node.keys), "node-other")
        await node._renew()
        assert b"\x0f\xa1" in executor.take_written()
        # As if the release had been lost: the next renewal repairs it.
        await site.store.claim(check(path, query, node.keys), node.id)
        await node._renew()
        [environment], _ = await site.store.status()
        assert environment.node is None

    play(tmp_path, scene)


def test_a_revoked_token_ends_sockets_and_addresses(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        registered = await site.url("register")
        executor = await site.join(registered["url"])
        used, unused = await site.url("connect"), await site.url("connect")
        client = await site.join(used["url"])
        await site.store.revoke_token("tok-1")
        await site.service.node._renew()
        for transport in (executor, client):
            assert b"\x03\xf0" in transport.take_written()  # 1008
        for url in (registered["url"], used["url"], unused["url"]):
            assert await site.refusal(url) == (401, "invalid_secret")
        assert code(await site.ask("connect")) == (401, "invalid_token")

    play(tmp_path, scene)


def test_a_killed_token_ends_the_sessions_of_its_clients(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        token = NewToken("tok-2", secret_hash("client"), "", TENANT, ("connect:*",))
        await site.store.add_token(token)
        executor = await site.join((await site.url("register"))["url"])
        granted = json.loads((await site.ask("connect", token="client")).body)
        client = await site.join(granted["url"])
        client.receive(frame_bytes(2, encode(Frame("s", Kind.DATA, b"x"))))
        await site.store.revoke_token("tok-2", kill=True)
        await site.service.node._renew()
        assert b"token_revoked" in executor.take_written()
        assert b"\x03\xf0" in client.take_written()  # 1008
        metrics = (await site.get("/metrics")).body.decode()
        assert 'resets_total{reason="token_revoked"} 1\n' in metrics

    play(tmp_path, scene)


def test_addresses_live_for_their_time(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        now = await site.store.now()
        registered = await site.url("register")
        await site.join(registered["url"])
        client = await site.url("connect")
        for url, seconds in ((registered["url"], 86_400), (client["url"], 60)):
            path, _, query = url.partition("/base")[2].partition("?")
            expires = check(path, query, site.service.node.keys).expires
            assert 0 <= expires - now - seconds < 30  # the test may be slow, the address not short

    play(tmp_path, scene)


def test_upgrades_are_refused_for_the_right_reason(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        registered = await site.url("register")
        url = registered["url"]
        assert await site.refusal(url.replace("kid=", "kid=x")) == (401, "invalid_signature")
        assert await site.refusal(url, connection="close") == (400, "malformed_query")
        granted = await site.upgrade(url)
        assert not isinstance(granted, ServiceAnswer)
        granted.cancel()  # the executor has left meanwhile
        executor = await site.join(url)
        client = await site.url("connect")
        executor.lose()
        assert await site.refusal(client["url"]) == (503, "route_unavailable")
        site.service.node.queued_bytes = QUEUED_BYTES + 1
        assert await site.refusal(url) == (503, "route_unavailable")
        assert code(await site.ask("register")) == (502, "authentication_service_unavailable")
        assert code(await site.ask("connect")) == (503, "unavailable")
        site.service.node.is_closed = True
        assert await site.refusal(url) == (503, "pod_draining")

    play(tmp_path, scene)


def test_a_tenant_without_a_free_socket_registers_only_what_has_one(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        await site.join((await site.url("register"))["url"])
        await site.store.limit_tenant(FIRST_TENANT, (None, 1, None, None))
        refused = await site.ask("register", name="other")
        assert code(refused) == (503, "registration_conflict")
        assert "all of its 1 sockets" in message(refused)
        refused = await site.ask("connect")
        assert code(refused) == (429, "too_many_requests")
        assert "limit sockets: " in message(refused)
        # Its own socket becomes free.
        await site.join((await site.url("register"))["url"])

    play(tmp_path, scene)


def test_a_ticket_that_is_refused_for_want_of_room_is_not_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(site: Site) -> None:
        await site.join((await site.url("register"))["url"])
        url = (await site.url("connect"))["url"]
        await site.store.limit_tenant(FIRST_TENANT, (None, 1, None, None))
        assert await site.refusal(url) == (503, "route_unavailable")
        await site.store.limit_tenant(FIRST_TENANT, (None, 9, None, None))
        monkeypatch.setattr(relay_hub, "STREAMS", 0)
        assert await site.refusal(url) == (503, "route_unavailable")
        monkeypatch.undo()
        await site.join(url)
        assert await site.refusal(url) == (401, "expired")

    play(tmp_path, scene)


def test_upgrades_are_counted_by_role_and_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(site: Site) -> None:
        url = (await site.url("register"))["url"]
        await site.join(url)
        client = (await site.url("connect"))["url"]
        await site.join(client)
        await site.refusal(client)  # is used
        await site.refusal(url.replace("kid=", "kid=x"))
        forwarder = Forwarder(set())

        async def pass_on(*_: object) -> Forwarder:
            return forwarder

        monkeypatch.setattr(site.service.rendezvous, "_admit_client", pass_on)
        assert await site.upgrade(client) is forwarder
        site.service.node.is_closed = True
        await site.refusal(url)
        lines = (await site.get("/metrics")).body.decode().splitlines()
        name = "exec_server_registry_upgrades_total"
        assert [line for line in lines if line.startswith(name)] == [
            f'{name}{{role="environment",outcome="accepted"}} 1',
            f'{name}{{role="environment",outcome="pod_draining"}} 1',
            f'{name}{{role="harness",outcome="accepted"}} 1',
            f'{name}{{role="harness",outcome="expired"}} 1',
            f'{name}{{role="harness",outcome="passed_on"}} 1',
            f'{name}{{role="unknown",outcome="invalid_signature"}} 1',
        ]

    play(tmp_path, scene)


def test_the_metrics_have_their_names(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        lines = (await site.get("/metrics")).body.decode().splitlines()
        types = dict(line.split()[2:] for line in lines if line.startswith("# TYPE "))
        prefix = "exec_server_registry_"
        gauges = ("executors", "clients", "streams", "passed_on", "queued_bytes")
        counters = (
            *("relayed_bytes_total", "relayed_frames_total", "requests_total"),
            *("upgrades_total", "refusals_total", "resets_total", "validations_total"),
        )
        assert types == {
            **{prefix + name: "gauge" for name in gauges},
            **{prefix + name: "counter" for name in counters},
            **{prefix + name: "histogram" for name in ("request_seconds", "database_seconds")},
        }

    play(tmp_path, scene)


def test_a_holder_that_cannot_be_reached_counts_as_dead(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        await site.store.renew(
            "node-other", "ftp://x", draining=False, since=0.0, counts=[], used_tokens=[]
        )
        registered = await site.url("register")
        path, _, query = registered["url"].partition("/base")[2].partition("?")
        ticket = check(path, query, site.service.node.keys)
        await site.store.claim(ticket, "node-other")
        client = await site.url("connect")
        assert await site.refusal(client["url"]) == (503, "route_unavailable")
        assert await site.refusal(client["url"]) == (503, "route_unavailable")
        passed = {"x-exec-server-passed-on": "1"}
        assert await site.refusal(client["url"], **passed) == (503, "route_unavailable")
        assert code(await site.ask("connect")) == (409, "environment_offline")
        # It proves that it lives.
        await site.store.renew(
            "node-other", "ftp://x", draining=False, since=0.0, counts=[], used_tokens=[]
        )
        assert (await site.ask("connect")).status == 200

    play(tmp_path, scene)


def test_paths_methods_and_health(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        assert (await site.get("/livez")).status == 200
        assert (await site.get("/base/readyz")).status == 200
        assert code(await site.get("/cloud/environment/x/connect")) == (405, "method_not_allowed")
        assert code(await site.get("/cloud/executor/x/register", "POST")) == (
            403,
            "plaintext_disabled",
        )
        assert code(await site.get("/nothing")) == (404, "not_found")
        site.service.node.has_database = False
        assert code(await site.get("/readyz")) == (503, "unavailable")
        site.service.node.is_draining = True
        assert code(await site.get("/readyz")) == (503, "draining")
        assert code(await site.ask("register")) == (502, "authentication_service_unavailable")
        for verb in ("connect", "validate"):
            assert code(await site.ask(verb, {})) == (503, "unavailable")
        handler = service_module._MetricsHandler(site.service)
        assert handler.admission() is SocketAdmission.ACCEPT
        assert code(handler.overloaded("/metrics")) == (503, "unavailable")
        for path, status in (("/metrics", 200), ("/livez", 404)):
            answer = await handler.answer(ServiceRequest("GET", path, "", {}))
            assert isinstance(answer, ServiceAnswer)
            assert answer.status == status

    play(tmp_path, scene)


@pytest.mark.parametrize(
    ("token_hash", "are_open", "header", "status"),
    [
        ("", True, "", 200),
        ("", False, "", 403),
        ("", False, "Bearer x", 403),
        (secret_hash("secret"), True, "", 401),
        (secret_hash("secret"), True, "Bearer wrong", 401),
        (secret_hash("secret"), False, "Bearer secret", 200),
    ],
)
def test_metrics_are_for_loopback_or_the_holder_of_their_token(
    tmp_path: Path, token_hash: str, are_open: bool, header: str, status: int
) -> None:
    async def scene(site: Site) -> None:
        object.__setattr__(site.service._options, "metrics_token_hash", token_hash)
        object.__setattr__(site.service._options, "metrics_are_open", are_open)
        request = ServiceRequest("GET", "/metrics", "", {"authorization": header})
        own = service_module._MetricsHandler(site.service)
        for handler in (site.service, own):
            answer = await handler.answer(request)
            assert isinstance(answer, ServiceAnswer)
            is_open = handler is own and not token_hash
            assert answer.status == (200 if is_open else status)
            assert (b"registry_executors" in answer.body) == (answer.status == 200)
        counters = site.service._metrics.text({})
        assert ('refusals_total{endpoint="metrics"' in counters) == (status != 200)
        assert 'refusals_total{endpoint="other"' not in counters

    play(tmp_path, scene)


def test_a_crowded_node_gives_the_answer_that_each_peer_retries(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        of = {
            "/base/cloud/environment/x/register": (502, "authentication_service_unavailable"),
            "/cloud/environment/x/connect": (503, "unavailable"),
            "/base/rendezvous/x": (503, "route_unavailable"),
            "/livez": (503, "unavailable"),
            "": (503, "unavailable"),
        }
        assert {path: code(site.service.overloaded(path)) for path in of} == of

    play(tmp_path, scene)


@pytest.mark.parametrize("error", [DatabaseUnavailable("away"), RuntimeError("a defect")])
def test_a_failure_makes_peers_come_back(tmp_path: Path, error: Exception) -> None:
    async def scene(site: Site) -> None:
        url = (await site.url("register"))["url"]

        async def fail(*_: object, **__: object) -> None:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            for name in ("caller", "admission", "renew", "release", "remove_node"):
                patch.setattr(site.store, name, fail)
            assert code(await site.ask("register")) == (502, "authentication_service_unavailable")
            assert code(await site.ask("connect")) == (503, "unavailable")
            assert await site.refusal(url) == (503, "route_unavailable")

    play(tmp_path, scene)


def test_the_token_of_a_validation_is_looked_up_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(site: Site) -> None:
        caller, failures = site.store.caller, 1

        async def fail_once(token_hash: str) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise DatabaseUnavailable("away")
            return await caller(token_hash)

        monkeypatch.setattr(site.store, "caller", fail_once)
        assert json.loads((await site.ask("validate", VALIDATION)).body) == {"valid": False}
        failures = 2
        assert code(await site.ask("validate", VALIDATION)) == (503, "unavailable")
        failures = 1
        assert code(await site.ask("connect")) == (503, "unavailable")

    play(tmp_path, scene)


def test_a_database_without_an_answer_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(site: Site) -> None:
        url = (await site.url("register"))["url"]

        async def hang(*_: object) -> None:
            await asyncio.Event().wait()

        for name in ("caller", "admission"):
            monkeypatch.setattr(site.store, name, hang)
        monkeypatch.setattr(service_module, "ANSWER_SECONDS", 0.001)
        assert code(await site.ask("register")) == (502, "authentication_service_unavailable")
        assert code(await site.ask("connect")) == (503, "unavailable")
        assert await site.refusal(url) == (503, "route_unavailable")

    play(tmp_path, scene)


def test_a_drain_closes_executors_one_after_the_other(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        executor = await site.join((await site.url("register"))["url"])
        await site.service.node.drain(0.02, ())
        assert b"\x03\xf4" in executor.take_written()  # 1012
        _, [node] = await site.store.status()
        assert node.draining
        await site.service.node.leave()
        assert (await site.store.status())[1] == []

    play(tmp_path, scene)


def test_a_drain_tells_clients_before_their_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[tuple[RelayLink, int]] = []
    close = RelayLink.close

    def note(self: RelayLink, code: int, reason: str) -> None:
        closed.append((self, code))
        close(self, code, reason)

    async def scene(site: Site) -> None:
        await site.join((await site.url("register"))["url"])
        transport = await site.join((await site.url("connect"))["url"])
        [executor] = site.service.hub.executors.values()
        [client] = site.service.hub.clients
        transport.receive(frame_bytes(2, encode(Frame("s", Kind.DATA, b"x"))))
        monkeypatch.setattr(RelayLink, "close", note)
        await site.service.node.drain(0.0, ())
        assert closed == [(client.link, 1001), (executor.link, 1012)]
        assert transport.take_written().count(b"executor_disconnected") == 1

    play(tmp_path, scene)


def test_a_drain_gives_notice_to_sockets_that_are_passed_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def scene(site: Site) -> None:
        node = site.service.node
        now = asyncio.get_running_loop().time()

        async def sleep_until(when: float) -> None:
            assert not node.is_closed
            waits.append(when - now)

        monkeypatch.setattr(node_module, "_sleep_until", sleep_until)
        await node.drain(20.0, ())
        assert waits == []
        node.is_closed = False
        await node.drain(20.0, [object()])
        assert node.is_closed
        assert len(waits) == 1
        assert waits[0] >= 2.0

    play(tmp_path, scene)


@pytest.mark.parametrize(("seconds", "count", "last"), [(20.0, 3, 0.1), (0.12, 3, 0.04)])
def test_a_drain_spreads_executors_over_half_of_its_time_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, count: int, last: float
) -> None:
    async def scene(site: Site) -> None:
        loop = asyncio.get_running_loop()
        for number in range(count):
            answer = await site.ask("register", name=f"env-{number}")
            await site.join(json.loads(answer.body)["url"])
        waits: list[float] = []

        async def sleep_until(when: float) -> None:
            waits.append(when)

        monkeypatch.setattr(node_module, "_sleep_until", sleep_until)
        monkeypatch.setattr(loop, "time", lambda: 100.0)
        await site.service.node.drain(seconds, ())
        monkeypatch.undo()
        assert waits[0] == 100.0 + min(2.0, seconds / 2)
        assert waits[1:] == pytest.approx([100.0, 100.0 + last / 2, 100.0 + last])

    play(tmp_path, scene)


def test_pings_and_queues_are_looked_at_in_a_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exec_server.hosting.node.TICK_SECONDS", 0.001)
    monkeypatch.setattr("exec_server.hosting.node.RENEWAL_SECONDS", 0.001)

    async def scene(site: Site) -> None:
        executor = await site.join((await site.url("register"))["url"])
        executor.buffered = 70
        client = await site.join((await site.url("connect"))["url"])
        node = site.service.node
        tasks = [asyncio.ensure_future(run()) for run in (node.tick, node.run)]  # noqa: TID251
        while node.queued_bytes != 70:
            await asyncio.sleep(0.002)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        client.lose()

    play(tmp_path, scene)


def test_a_renewal_writes_a_limited_number_of_counters_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exec_server.hosting.node.COUNTS_A_RENEWAL", 2)

    async def scene(site: Site) -> None:
        for number in range(5):
            answer = await site.ask("register", name=f"env-{number}")
            await site.join(json.loads(answer.body)["url"])
        executors = site.service.hub.executors
        written: list[str] = []
        for _ in range(3):
            for executor in executors.values():
                executor.bytes = 7  # all of them have traffic all the time
            counts = site.service.node._counts(executors)
            assert len(counts) == 2
            written += [count.lease.environment_id for count in counts]
        assert set(written) == {f"env-{number}" for number in range(5)}

    play(tmp_path, scene)
