"""The rendezvous of a registry: addresses, ownership of streams, resets, limits, revocation."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.client import PING, PONG, TEXT, Disconnected, HttpReply, scaled
from tests.support.registry import (
    Node,
    RawClient,
    RawEnd,
    RawExecutor,
    at_once,
    start_node,
    upgrade,
)
from tests.support.server_internals import eventually

from exec_server.relay.frames import Frame, Kind, encode
from exec_server.relay.noise import Identity


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("data"), "--stall-seconds", "0.3") as running:
        yield running


@pytest.fixture
def name() -> str:
    """An environment of its own for each test, which has its own number of handshakes."""
    return f"env-{secrets.token_hex(4)}"


def reason(reply: HttpReply) -> tuple[int, str | None]:
    assert reply.header("connection") == "close"
    return reply.status, reply.header("x-codex-rendezvous-rejection-reason")


def data(stream: str, payload: bytes = b"x", seq: int = 0) -> Frame:
    return Frame(stream, Kind.DATA, payload, seq)


# ---- addresses ----------------------------------------------------------------------------


def test_an_address_of_a_client_is_used_once_also_with_twelve_at_once(
    node: Node, name: str
) -> None:
    with RawExecutor(node, name):
        url = node.connect(Identity.generate(), name=name).url

        def use() -> int:
            try:
                with RawEnd(url):
                    return 101
            except Exception as error:  # the link's HandshakeRefused has the answer
                found: HttpReply = error.reply  # type: ignore[attr-defined]
                assert reason(found) == (401, "expired")
                return found.status

        assert sorted(at_once(12, use)) == [101] + [401] * 11
        assert reason(upgrade(url)) == (401, "expired")


def test_an_address_of_an_executor_is_used_again_and_the_newest_socket_wins(
    node: Node, name: str
) -> None:
    with RawExecutor(node, name) as first, RawEnd(first.url) as second:
        assert first.closed() == 4001
        with RawClient(node, name) as client:
            client.send(data("s"))
            assert second.receive() == data("s")


def test_every_changed_parameter_is_refused(node: Node, name: str) -> None:
    with RawExecutor(node, name) as executor:
        url = node.connect(Identity.generate(), name=name).url
        path, _, query = url.partition("?")
        pairs = [pair.split("=", 1) for pair in query.split("&")]
        for number, (key, value) in enumerate(pairs):
            without = pairs[:number] + pairs[number + 1 :]
            last = "0" if value[-1] != "0" else "1"
            changed = [*without, [key, value[:-1] + last]]
            doubled = [*pairs, [key, value]]
            for wrong in (without, changed, doubled):
                query = "&".join("=".join(pair) for pair in wrong)
                status, why = reason(upgrade(f"{path}?{query}"))
                assert status == 401
                assert why is not None
        assert reason(upgrade(f"{url}&more=1")) == (401, "extra_query_param")
        assert reason(upgrade(path)) == (401, "malformed_query")
        assert reason(upgrade(url.replace(name, "another"))) == (401, "invalid_signature")
        assert reason(upgrade(path.replace("rendezvous/", "rendezvous/x"))) == (
            404,
            "unknown_route",
        )
        # An address of an executor is none of a client, and the other way round.
        assert reason(upgrade(executor.url.replace("role=environment", "role=harness"))) == (
            401,
            "invalid_signature",
        )
        with RawEnd(url):
            pass  # all of these have not used it up


def test_an_address_expires(tmp_path: Path) -> None:
    with start_node(tmp_path, "--ticket-seconds", "1") as node, RawExecutor(node):
        url = node.connect(Identity.generate()).url
        expires = int(url.partition("exp=")[2].partition("&")[0])
        eventually("expiry", lambda: time.time() > expires + 0.1)
        assert reason(upgrade(url)) == (401, "expired")


def test_an_older_registration_is_refused_so_that_the_executor_registers_again(
    node: Node, name: str
) -> None:
    with RawExecutor(node, name) as first:
        client_url = node.connect(Identity.generate(), name=name).url
        with RawExecutor(node, name):
            assert first.closed() == 4001
            assert reason(upgrade(first.url)) == (401, "unexpected_executor_registration_id")
            assert reason(upgrade(client_url)) == (401, "unexpected_executor_registration_id")


def test_without_its_executor_a_client_is_told_to_come_back(node: Node, name: str) -> None:
    with RawExecutor(node, name):
        url = node.connect(Identity.generate(), name=name).url
    eventually("it has left", lambda: reason(upgrade(url)) == (503, "route_unavailable"))


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_websocket_version": "12"},
        {"sec_websocket_key": ""},
        {"connection": "close"},
        {"upgrade": "other"},
    ],
)
def test_an_upgrade_has_all_its_headers(node: Node, name: str, headers: dict[str, str]) -> None:
    with RawExecutor(node, name) as executor:
        assert upgrade(executor.url, **headers).status == 400


def test_a_revoked_token_loses_its_sockets_and_its_addresses(node: Node, name: str) -> None:
    made = node.site.create_token("connect:*")
    executors = node.site.create_token("executor:*")
    with RawExecutor(node, name, executors["token"]) as executor:
        with RawClient(node, name, made["token"]) as client, RawClient(node, name) as other:
            unused = node.connect(Identity.generate(), made["token"], name).url
            node.site.admin("token", "revoke", made["id"])
            assert reason(upgrade(unused)) == (401, "invalid_secret")
            assert client.closed(5) == 1008
            other.send(data("s"))
            assert executor.receive() == data("s")
            node.site.admin("token", "revoke", executors["id"])
            assert executor.closed(5) == 1008
        assert reason(upgrade(executor.url)) == (401, "invalid_secret")


# ---- streams ------------------------------------------------------------------------------


def test_frames_go_both_ways_as_they_came(node: Node, name: str) -> None:
    with RawExecutor(node, name) as executor, RawClient(node, name) as client:
        # Unknown fields, traces and every size pass; the bytes are not changed.
        odd = encode(Frame("s", Kind.DATA, b"x", traceparent="00-1")) + b"\xa0\x06\x01"
        for frame in (odd, *(encode(data("s", b"y" * size)) for size in (1, 200, 70_000))):
            client.send(frame)
            assert executor.socket.receive_frame(scaled(10)).payload == frame
            executor.send(frame)
            assert client.socket.receive_frame(scaled(10)).payload == frame
        largest = encode(data("s", b"z" * 262_000))
        largest = encode(data("s", b"z" * (262_144 - len(largest) + 262_000)))
        assert len(largest) == 262_144
        client.send(largest)
        assert executor.socket.receive_frame(scaled(10)).payload == largest


def test_fragments_and_pings_between_them_are_understood(node: Node, name: str) -> None:
    with RawExecutor(node, name) as executor, RawClient(node, name) as client:
        frame = encode(data("s", b"f" * 50_000))
        client.socket.send_frame(2, frame[:20_000], fin=False)
        client.socket.send_frame(PING, b"between")
        client.socket.send_frame(0, frame[20_000:])
        client.send(data("s", b"next"))
        assert executor.socket.receive_frame(scaled(10)).payload == frame
        assert executor.receive() == data("s", b"next")
        found = client.socket.receive_frame(scaled(10))
        assert (found.opcode, found.payload) == (PONG, b"between")


def test_many_frames_in_odd_pieces_arrive_in_order(node: Node, name: str) -> None:
    from tests.support.raw_links import frame_bytes

    with RawExecutor(node, name) as executor, RawClient(node, name) as client:
        frames = [data("s", bytes([n % 251]) * (n * 97 % 5000 + 1), n) for n in range(300)]
        stream = b"".join(frame_bytes(2, encode(frame)) for frame in frames)
        start, step = 0, 1
        while start < len(stream):
            client.socket.send_bytes(stream[start : start + step])
            start, step = start + step, step * 3 % 70_001 + 1
        assert [executor.receive() for _ in frames] == frames


def test_a_client_owns_the_first_stream_that_it_names(node: Node, name: str) -> None:
    with (
        RawExecutor(node, name) as executor,
        RawClient(node, name) as first,
        RawClient(node, name) as second,
    ):
        first.send(data("one"))
        assert executor.receive() == data("one")
        second.send(data("one", b"injected"))
        refused = second.receive()
        assert (refused.kind, refused.stream_id) == (Kind.RESET, "one")
        assert refused.reason == "stream_id_in_use"
        second.send(data("two"))
        assert executor.receive() == data("two")
        # Also not by a frame that names its stream twice: the last name counts.
        twice = encode(data("two")) + encode(Frame("one", Kind.RESUME))[2:7]
        second.send(twice)
        assert second.receive().reason == "stream_id_not_owned"
        second.send(data("three"))
        assert second.receive().reason == "stream_id_not_owned"
        executor.send(data("one", b"for the first"))
        assert first.receive() == data("one", b"for the first")


def test_one_handshake_for_each_socket(node: Node, name: str) -> None:
    with RawExecutor(node, name) as executor, RawClient(node, name) as client:
        shake = Frame("s", Kind.HANDSHAKE, b"first")
        client.send(shake)
        received = executor.receive()
        assert received._replace(token_id="") == shake
        assert received.token_id in [
            token["id"] for token in node.site.admin("token", "list")["tokens"]
        ]
        client.send(shake)
        assert client.receive().reason == "second_handshake"


def test_leaving_is_told_by_resets_at_once(node: Node, name: str) -> None:
    with (
        RawExecutor(node, name) as executor,
        RawClient(node, name) as client,
        RawClient(node, name) as idle,
    ):
        client.send(data("s"))
        assert executor.receive() == data("s")
        client.socket.abort()
        assert executor.receive() == Frame("s", Kind.RESET, reason="harness_disconnected")
        idle.send(data("t"))
        assert executor.receive() == data("t")
        executor.socket.abort()
        assert idle.receive() == Frame("t", Kind.RESET, reason="executor_disconnected")
        assert idle.closed() == 1001


def test_a_client_that_breaks_the_rules_ends_and_an_executor_is_forgiven(
    node: Node, name: str
) -> None:
    with RawExecutor(node, name) as executor:
        for send, code in (
            (lambda end: end.socket.send_frame(TEXT, b"{}"), 1003),
            (lambda end: end.send(b"garbage"), 1007),
            (lambda end: end.send(b""), 1007),
            (lambda end: end.send(bytes(262_145)), 1009),
            (lambda end: end.socket.send_frame(2, b"x", mask=False), 1002),
            (lambda end: end.socket.send_frame(3, b"x"), 1002),
        ):
            with RawClient(node, name) as client:
                client.send(data("s"))
                assert executor.receive() == data("s")
                send(client)  # type: ignore[no-untyped-call]
                assert client.closed() == code
                assert executor.receive().kind is Kind.RESET
        executor.socket.send_frame(TEXT, b"{}")
        executor.send(b"garbage")
        executor.send(data("unknown stream"))
        with RawClient(node, name) as client:
            client.send(data("s"))
            assert executor.receive() == data("s")
        executor.send(bytes(262_145))
        assert executor.closed() == 1009


# ---- limits -------------------------------------------------------------------------------


def test_a_client_that_does_not_read_loses_its_stream_and_the_others_go_on(
    node: Node, name: str
) -> None:
    with (
        RawExecutor(node, name) as executor,
        RawClient(node, name) as slow,
        RawClient(node, name) as quick,
    ):
        for client, stream in ((slow, "slow"), (quick, "quick")):
            client.send(data(stream))
            assert executor.receive() == data(stream)
        slow.socket.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        frame = encode(data("slow", b"x" * 200_000))
        for _ in range(60):
            executor.send(frame)
        executor.send(data("quick", b"after"))
        assert quick.receive() == data("quick", b"after")
        assert executor.receive() == Frame("slow", Kind.RESET, reason="harness_stalled")
        assert slow.closed() is None
        assert node.metric('resets_total{reason="harness_stalled"}') >= 1


def test_an_executor_has_128_streams(node: Node, name: str) -> None:
    tokens = [node.site.token("connect:*") for _ in range(7)]
    with RawExecutor(node, name):
        clients = [RawClient(node, name, tokens[number // 20]) for number in range(128)]
        try:
            url = node.connect(Identity.generate(), tokens[6], name).url
            assert reason(upgrade(url)) == (503, "route_unavailable")
        finally:
            for client in clients:
                client.socket.close()


def test_a_tenant_beyond_its_rate_is_read_more_slowly(node: Node, name: str) -> None:
    token = node.site.token("connect:*", "executor:*", tenant=name)
    node.site.admin("tenant", "limit", name, "--bytes-per-second", "1000000")
    with RawExecutor(node, name, token) as executor, RawClient(node, name, token) as client:
        started = time.monotonic()
        for number in range(20):
            client.send(data("s", b"x" * 100_000, number))
        for number in range(20):
            assert executor.receive().seq == number
        assert time.monotonic() - started > 1.0  # two megabytes, a quarter of one at once


def test_sockets_of_a_node_beyond_the_head_and_the_time_are_closed(node: Node) -> None:
    reply = node.request("GET / HTTP/1.1\r\nhost: x\r\nlong: " + "x" * 70_000)
    assert reply.status == 431
    with socket.create_connection(("127.0.0.1", node.port)) as tls:
        tls.sendall(b"\x16\x03\x01" + bytes(100))
        assert tls.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_a_drain_closes_executors_with_1012_after_telling_their_clients(tmp_path: Path) -> None:
    with start_node(tmp_path, "--drain-seconds", "4") as node, contextlib.ExitStack() as stack:
        executors = [stack.enter_context(RawExecutor(node, f"env-{n}")) for n in range(30)]
        client = stack.enter_context(RawClient(node, "env-0"))
        client.send(data("s"))
        assert executors[0].receive() == data("s")
        url = node.connect(Identity.generate(), name="env-29").url
        node.server.process.terminate()
        eventually("not ready", lambda: node.get("/readyz").status == 503)
        assert node.get("/livez").status == 200
        assert node.ask("register", {}, node.site.executor_token).status == 502
        assert node.ask("connect", {}, node.site.client_token).status == 503
        assert client.receive().reason == "executor_disconnected"
        # The last executors are still here, and no socket is admitted any more.
        assert reason(upgrade(url)) == (503, "pod_draining")
        assert {executor.closed() for executor in executors} == {1012}
        assert node.server.process.wait(scaled(10)) == 0


def test_a_second_signal_ends_a_drain_at_once(tmp_path: Path) -> None:
    with start_node(tmp_path, "--drain-seconds", "600") as node, RawExecutor(node) as executor:
        node.server.process.terminate()
        eventually("not ready", lambda: node.get("/readyz").status == 503)
        node.server.process.terminate()
        assert node.server.process.wait(scaled(10)) == 0
        with pytest.raises(Disconnected):
            executor.receive()
