"""Two nodes on one PostgreSQL: passing on, moving, revoking, and a database that goes away."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.balancer import Balancer, start_balancer
from tests.support.certificates import make_pair
from tests.support.cli import run_client, stderr_text
from tests.support.client import HandshakeRefused, HttpReply, scaled
from tests.support.client_targets import bounded
from tests.support.postgres import Postgres, programs, start_postgres
from tests.support.registry import (
    Node,
    RawClient,
    RawEnd,
    RawExecutor,
    Site,
    at_once,
    start_executor,
    start_node,
    upgrade,
)
from tests.support.relay import key_object
from tests.support.server_internals import eventually

from exec_server import connect
from exec_server.relay.frames import Frame, Kind, encode
from exec_server.relay.noise import Identity

pytestmark = pytest.mark.skipif(programs() is None, reason="needs the package postgresql")


@dataclass
class Pair:
    """A database and two nodes of its site, with a balancer in front."""

    database: Postgres
    balancer: Balancer
    site: Site
    one: Node
    two: Node

    def executor(self, node: Node, name: str, token: str | None = None) -> RawExecutor:
        """An executor at this node: the address of the site leads to it."""
        self.balancer.nodes = [node.port]
        return RawExecutor(node, name, token)

    def client(self, node: Node, name: str, token: str | None = None) -> RawClient:
        self.balancer.nodes = [node.port]
        return RawClient(node, name, token)


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    with start_postgres() as running:
        yield running


@pytest.fixture(scope="module")
def pair(database: Postgres) -> Iterator[Pair]:
    with start_balancer() as balancer, ThreadPoolExecutor(2) as threads:
        flags = ("--public-url", balancer.url, "--stall-seconds", "0.5", "--drain-seconds", "1")
        starts = [threads.submit(Node, database.where, *flags) for _ in range(2)]
        nodes = [start.result() for start in starts]
        # Of nodes that start together exactly one makes the first tenant.
        [first] = [node for node in nodes if node.facts["first_start"]]
        for node in nodes:
            node.site = first.site
        balancer.nodes = [node.port for node in nodes]
        try:
            yield Pair(database, balancer, first.site, *nodes)
            for node in nodes:
                node.stop()
        finally:
            for node in nodes:
                if node.server.process.poll() is None:
                    node.server.kill()
                node.server.release()


@pytest.fixture
def name() -> str:
    return f"env-{secrets.token_hex(4)}"


def data(stream: str, payload: bytes = b"x", seq: int = 0) -> Frame:
    return Frame(stream, Kind.DATA, payload, seq)


def reason(reply: HttpReply) -> tuple[int, str | None]:
    return reply.status, reply.header("x-codex-rendezvous-rejection-reason")


def test_a_client_at_another_node_is_passed_on(pair: Pair, name: str) -> None:
    with pair.executor(pair.one, name) as executor, pair.client(pair.two, name) as client:
        assert pair.two.metric("passed_on") == 1
        assert pair.one.metric("passed_on") == 0
        for size in (1, 100_000, 262_000):
            client.send(data("s", b"x" * size))
            assert executor.receive() == data("s", b"x" * size)
            executor.send(data("s", b"y" * size))
            assert client.receive() == data("s", b"y" * size)
        client.socket.abort()
        assert executor.receive() == Frame("s", Kind.RESET, reason="harness_disconnected")
    eventually("the forwarder has ended", lambda: pair.two.metric("passed_on") == 0)


def test_commands_and_files_through_two_nodes(pair: Pair, name: str, tmp_path: Path) -> None:
    async def scene() -> None:
        token = pair.site.client_token
        async with connect(registry=pair.balancer.url, environment_id=name, token=token) as env:
            content = secrets.token_bytes(3_000_000)
            await env.files.write(tmp_path / "file", content)
            assert await env.files.read(tmp_path / "file") == content
            assert (await env.run(["wc", "-c", str(tmp_path / "file")])).exit_code == 0

    pair.balancer.nodes = [pair.one.port]
    with start_executor(pair.one, name, url=pair.balancer.url):
        pair.balancer.nodes = [pair.two.port]
        bounded(scene(), patience=6)


def test_a_request_is_passed_on_once_at_most(pair: Pair, name: str) -> None:
    with pair.executor(pair.one, name):
        url = pair.two.connect(Identity.generate(), name=name).url
        direct = url.replace(f":{pair.balancer.port}/", f":{pair.two.port}/")
        refused = upgrade(direct, x_exec_server_passed_on="1")
        assert reason(refused) == (503, "route_unavailable")
        with RawEnd(direct):
            pass


def test_tickets_and_authorizations_are_used_once_on_all_nodes(pair: Pair, name: str) -> None:
    with pair.executor(pair.one, name) as executor:
        client = Identity.generate()
        granted = pair.two.connect(client, name=name)
        pair.balancer.nodes = [pair.one.port, pair.two.port]

        def use() -> int:
            try:
                with RawEnd(granted.url):
                    return 101
            except HandshakeRefused as refused:
                return refused.status

        assert sorted(at_once(12, use)) == [101] + [401] * 11
        body = {
            "executor_registration_id": executor.registration_id,
            "harness_public_key": key_object(client.public),
            "harness_key_authorization": granted.authorization,
        }
        turn = iter([pair.one, pair.two] * 6)

        def validate() -> bool:
            reply = next(turn).ask("validate", body, pair.site.executor_token, name)
            return bool(json.loads(reply.body)["valid"])

        assert sorted(at_once(12, validate)) == [False] * 11 + [True]


def test_the_newest_socket_and_registration_win_across_nodes(pair: Pair, name: str) -> None:
    with pair.executor(pair.one, name) as first:
        pair.balancer.nodes = [pair.two.port]
        with RawEnd(first.url) as second:
            with pair.client(pair.one, name) as client:
                client.send(data("s"))
                assert second.receive() == data("s")
            assert first.closed(5) == 4001
            pair.two.register(name=name)
            assert second.closed(5) == 4001


def test_a_revoked_token_loses_its_sockets_on_all_nodes(pair: Pair, name: str) -> None:
    made = pair.site.create_token("connect:*")
    with (
        pair.executor(pair.one, name),
        pair.client(pair.one, name, made["token"]) as near,
        pair.client(pair.two, name, made["token"]) as far,
    ):
        pair.site.admin("token", "revoke", made["id"])
        assert pair.two.ask("connect", {}, made["token"], name).status == 401
        assert near.closed(5) == 1008
        assert far.closed(5) == 1008


def test_a_slow_client_behind_two_nodes_is_held_back_and_then_reset(pair: Pair, name: str) -> None:
    executor = pair.executor(pair.one, name)
    url = pair.two.connect(Identity.generate(), name=name).url
    direct = url.replace(f":{pair.balancer.port}/", f":{pair.two.port}/")
    with executor, RawEnd(direct) as slow:
        slow.send(data("slow"))
        assert executor.receive() == data("slow")
        slow.socket.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        frame = encode(data("slow", b"x" * 200_000))
        for _ in range(200):
            executor.send(frame)
        assert executor.receive() == Frame("slow", Kind.RESET, reason="harness_stalled")


def test_a_dead_holder_is_found_out_at_the_first_connection(pair: Pair, name: str) -> None:
    flags = ("--public-url", pair.balancer.url)
    with start_node(pair.database.where, *flags, site=pair.site) as third:
        with pair.executor(third, name):
            urls = [pair.one.connect(Identity.generate(), name=name).url for _ in range(2)]
            third.kill()
        direct = [url.replace(f":{pair.balancer.port}/", f":{pair.two.port}/") for url in urls]
        for url in direct:
            assert reason(upgrade(url)) == (503, "route_unavailable")
    body = {"harness_public_key": key_object(Identity.generate().public)}

    def is_offline() -> bool:
        return pair.one.ask("connect", body, pair.site.client_token, name).status == 409

    eventually("it counts as dead", is_offline, 10)


def test_streams_survive_a_restart_of_the_database(pair: Pair, name: str) -> None:
    with pair.executor(pair.one, name) as executor, pair.client(pair.two, name) as client:
        client.send(data("s"))
        assert executor.receive() == data("s")
        pair.database.kill()
        try:
            eventually("not ready", lambda: pair.one.get("/readyz").status == 503, 20)
            assert pair.one.get("/livez").status == 200
            body = {"security_profile": "noise_hybrid_ik_v1"}
            reply = pair.one.ask("register", body, pair.site.executor_token, name)
            assert (reply.status, json.loads(reply.body)["error"]["code"]) == (
                502,
                "authentication_service_unavailable",
            )
            assert pair.two.ask("connect", {}, pair.site.client_token, name).status == 503
            assert reason(upgrade(executor.url.replace("127.0.0.1", "localhost"))) == (
                503,
                "route_unavailable",
            )
            executor.send(data("s", b"while it is away"))
            assert client.receive() == data("s", b"while it is away")
        finally:
            pair.database.start()
        for node in (pair.one, pair.two):
            eventually("ready", lambda node=node: node.get("/readyz").status == 200, 10)  # type: ignore[misc]
        pair.two.wait_online(name)
        client.send(data("s", b"still"))
        assert executor.receive() == data("s", b"still")
        with pair.client(pair.two, name) as another:
            another.send(data("t"))
            assert executor.receive() == data("t")


def test_a_killed_token_reaches_the_node_that_holds_the_executor(pair: Pair, name: str) -> None:
    made = pair.site.create_token("connect:*")
    with (
        pair.executor(pair.one, name) as executor,
        pair.client(pair.two, name, made["token"]) as client,
    ):
        client.send(data("s"))
        assert executor.receive() == data("s")
        pair.site.admin("token", "revoke", made["id"], "--kill")
        assert executor.receive() == Frame("s", Kind.RESET, reason="token_revoked")
        assert client.closed() == 1008


def test_tenants_are_administered(pair: Pair, name: str) -> None:
    token = pair.site.token("executor:*", "connect:*", tenant=name)
    words = ("tenant", "limit", name, "--handshakes-per-second", "7")
    assert pair.site.admin(*words)["handshakes_per_second"] == 7
    with pair.executor(pair.one, "box", token):
        assert pair.site.admin("tenant", "show", name)["online"] == 1
        refused = run_client("registry", "tenant", "remove", name, *pair.site.where)
        assert (refused.returncode, b"online" in refused.stderr) == (1, True)
    eventually("offline", lambda: pair.site.admin("tenant", "show", name)["online"] == 0, 15)
    assert pair.site.admin("tenant", "remove", name) == {"tenant": name, "removed": True}
    tenants = pair.site.admin("tenant", "list")["tenants"]
    assert name not in [each["tenant"] for each in tenants]
    body = {"harness_public_key": key_object(Identity.generate().public)}
    assert pair.two.ask("connect", body, token, "box").status == 401


def test_status_shows_nodes_and_environments(pair: Pair, name: str) -> None:
    with pair.executor(pair.one, name), pair.client(pair.two, name) as client:
        client.send(data("s", b"x" * 1000))

        def entry() -> bool:
            status = pair.site.admin("status")
            assert {node["node"] for node in status["nodes"]} >= {
                pair.one.facts["node"],
                pair.two.facts["node"],
            }
            [found] = [e for e in status["environments"] if e["environment_id"] == name]
            assert found["node"] == pair.one.facts["node"]
            return bool(found["streams"] == 1 and found["bytes"] >= 1000)

        eventually("counters of the next renewal", entry, scaled(10))
        refused = run_client("registry", "environment", "remove", name, *pair.site.where)
        assert refused.returncode == 1

    def is_removed() -> bool:
        removed = pair.site.admin("environment", "remove", "--unseen", "1s")["removed"]
        return {"tenant": "default", "environment_id": name} in removed

    eventually("it is not seen for a second", is_removed)


def test_no_address_of_the_database_is_told(pair: Pair) -> None:
    url = "postgresql://user:secret-word@127.0.0.1:1/x"
    ended = run_client("registry", "status", "--database", url)
    assert ended.returncode == 1
    assert "cannot use the database" in stderr_text(ended)
    assert "secret-word" not in stderr_text(ended)


def test_nodes_reach_each_other_over_tls(pair: Pair, name: str, tmp_path: Path) -> None:
    certificate = make_pair(tmp_path, "node", "127.0.0.1")
    trust = {"SSL_CERT_FILE": str(certificate.certificate)}
    (tmp_path / "token").write_text("metrics-token")
    with (
        start_node(pair.database.where, *certificate.flags, site=pair.site, env=trust) as one,
        start_node(
            pair.database.where,
            *certificate.flags,
            *("--public-url", one.url, "--metrics-token-file", str(tmp_path / "token")),
            site=pair.site,
            env=trust,
        ) as two,
        RawExecutor(one, name) as executor,
    ):
        url = two.connect(Identity.generate(), name=name).url
        with RawEnd(url.replace(f":{one.port}/", f":{two.port}/")) as client:
            for size in (1, 200_000):
                client.send(data("s", b"x" * size))
                assert executor.receive() == data("s", b"x" * size)
                executor.send(data("s", b"y" * size))
                assert client.receive() == data("s", b"y" * size)
            assert two.metric("passed_on", "metrics-token") == 1
