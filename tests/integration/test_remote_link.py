"""The one link of an executor to its rendezvous: how it is opened, watched, lost and replaced."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.client import DEFAULT_TIMEOUT, Client, Server, descendants, scaled, survivors
from tests.support.relay import (
    ENVIRONMENT,
    QUICK_BACKOFF,
    RelayLink,
    StreamReset,
    backoff_bases,
    backoffs,
    connect,
    exit_code,
    is_served,
    relay_link,
    start_executor,
    wait_attached,
    wait_logged,
)
from tests.support.server_internals import eventually

from exec_server.relay.frames import data_frame, stream_prefix

READY = {"status": "ready"}
GONE = "executor_disconnected"


def _asked(service: ThreadedRelayService) -> list[str]:
    """What the executor has asked for so far, in short: registrations, and sockets by their URL."""
    names: dict[str, str] = {}
    found = []
    for request in service.requests:
        if request.path.endswith("/register"):
            found.append("register")
        elif "role=environment" in request.query:
            found.append(names.setdefault(request.target, f"socket {len(names) + 1}"))
    return found


# ---- opening ----------------------------------------------------------------------------


@pytest.mark.quick
def test_an_executor_says_little_and_listens_nowhere() -> None:
    with ThreadedRelayService() as service, start_executor(service) as executor:
        assert is_served(service)
        assert _asked(service) == ["register", "socket 1"]
        executor.process.send_signal(signal.SIGTERM)
        assert exit_code(executor) == 0
        assert executor.stderr() == ""
        assert executor.process.stdout is not None
        assert executor.process.stdout.read() == b""


def test_the_upgrade_carries_no_secret_and_says_where_it_comes_from() -> None:
    where = {"OPENAI_CLUSTER": "cluster-1", "DD_SERVICE": "caller-1"}
    with (
        ThreadedRelayService() as service,
        start_executor(service, env=where, preparation=QUICK_BACKOFF) as executor,
    ):
        service.executor(ENVIRONMENT).abort()
        wait_logged(executor, "backoff")
        wait_attached(service, executor)
        upgrades = service.requests_to(Endpoint.EXECUTOR_SOCKET)
        assert len(upgrades) == 2
        for upgrade in upgrades:
            assert upgrade.header("authorization") is None
            assert upgrade.header("sec-websocket-protocol") is None
            assert upgrade.header("sec-websocket-extensions") is None
            assert upgrade.header("x-cluster-name") == "cluster-1"
            assert upgrade.header("x-openai-internal-caller") == "caller-1"
        names = [upgrade.header("x-request-id") for upgrade in upgrades]
        assert all(name and re.fullmatch("req_[0-9a-f]{32}", name) for name in names)
        assert names[0] != names[1]


@pytest.mark.parametrize("status", [401, 429])
def test_a_refusal_of_the_address_leads_to_a_new_registration(status: int) -> None:
    with ThreadedRelayService() as service:
        service.faults.http.reject(Endpoint.EXECUTOR_SOCKET, status, "expired", times=2)
        flags = ("--log-level", "warning")
        with start_executor(service, *flags, preparation=QUICK_BACKOFF) as executor:
            assert _asked(service) == [
                *("register", "socket 1", "register", "socket 2", "register", "socket 3")
            ]
            bodies = {request.body for request in service.requests_to(Endpoint.REGISTER)}
            assert len(bodies) == 1  # the same key each time
            assert backoff_bases(backoffs(executor)) == [1.0, 2.0]
            assert f"HTTP error: {status}" in executor.stderr()
            assert "(expired)" in executor.stderr()
            assert is_served(service)


_UPGRADE_FAULTS: dict[str, Callable[[Any], Any]] = {
    "503": lambda http: http.reject(Endpoint.EXECUTOR_SOCKET, 503, "pod_draining", times=2),
    "302": lambda http: http.answer(
        Endpoint.EXECUTOR_SOCKET, 302, headers=[("location", "/elsewhere")], times=2
    ),
    "hang": lambda http: http.hang(Endpoint.EXECUTOR_SOCKET, times=2),
    "garbage": lambda http: http.garbage(Endpoint.EXECUTOR_SOCKET, times=2),
}


@pytest.mark.parametrize("fault", _UPGRADE_FAULTS)
def test_any_other_failure_is_tried_again_at_the_same_address(fault: str) -> None:
    constants = {"server.remote.OPEN_SECONDS": scaled(0.5)}
    with ThreadedRelayService() as service:
        _UPGRADE_FAULTS[fault](service.faults.http)
        with start_executor(service, constants=constants, preparation=QUICK_BACKOFF) as executor:
            assert _asked(service) == ["register", "socket 1", "socket 1", "socket 1"]
            assert backoff_bases(backoffs(executor)) == [1.0, 2.0]
            assert is_served(service)


def test_reasons_of_strangers_are_not_repeated() -> None:
    with ThreadedRelayService() as service:
        service.faults.http.reject(Endpoint.EXECUTOR_SOCKET, 503, "pay-me-a-coin")
        service.faults.http.reject(Endpoint.EXECUTOR_SOCKET, 503, "pod_draining")
        flags = ("--log-level", "debug")
        with start_executor(service, *flags, preparation=QUICK_BACKOFF) as executor:
            assert "(pod_draining)" in executor.stderr()
            assert "coin" not in executor.stderr()


def test_a_rendezvous_that_refuses_connections_is_tried_until_it_is_back() -> None:
    with (
        ThreadedRelayService() as service,
        start_executor(service, preparation=QUICK_BACKOFF) as executor,
    ):
        service.deafen()
        service.executor(ENVIRONMENT).abort()
        wait_logged(executor, "backoff", times=7)
        service.listen()
        wait_attached(service, executor)
        assert is_served(service)
        waits = backoffs(executor)[:7]
        assert backoff_bases(waits) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
        # Jitter: not the same part of each.
        assert len({round(wait / base, 4) for wait, base in zip(waits, _BASES, strict=True)}) > 1
        assert _asked(service) == ["register", "socket 1", "socket 1"]


_BASES = [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


@pytest.mark.parametrize("url", ["nonsense", "ws://127.0.0.1:1/"])
def test_an_unusable_address_is_tried_for_ever(url: str) -> None:
    with ThreadedRelayService() as service:
        service.faults.http.rewrite(Endpoint.REGISTER, lambda answer: {**answer, "url": url})
        with start_executor(service, preparation=QUICK_BACKOFF, attached=False) as executor:
            wait_logged(executor, "backoff", times=3)
            assert executor.process.poll() is None
            assert _asked(service) == ["register"]


def test_a_refused_registration_ends_even_an_old_executor() -> None:
    with (
        ThreadedRelayService() as service,
        start_executor(service, preparation=QUICK_BACKOFF) as executor,
    ):
        service.faults.http.reject(Endpoint.EXECUTOR_SOCKET, 404)
        service.faults.http.answer(Endpoint.REGISTER, 403, code="forbidden")
        service.executor(ENVIRONMENT).abort()
        assert exit_code(executor) == 1
        assert executor.stderr().splitlines()[-1] == (
            "Error: environment registry authentication error: environment registry "
            "authentication failed (403 Forbidden): forbidden"
        )


# ---- losing it --------------------------------------------------------------------------


def _lose(service: ThreadedRelayService, executor: Server, lose: Callable[[Any], Any]) -> None:
    """Do something to the link that ends it, and wait for the next one."""
    old = service.call(service.service.executor, ENVIRONMENT)
    lose(service.executor(ENVIRONMENT))

    def is_replaced() -> bool:
        return service.service.executor(ENVIRONMENT) not in (None, old)

    service.until(is_replaced)


_LOSSES: dict[str, Callable[[Any], Any]] = {
    "abort": lambda socket: socket.abort(),
    "close": lambda socket: socket.close(1001, "restarting"),
    "close with a private code": lambda socket: socket.close(4001, "replaced"),
    "message too large": lambda socket: socket.send(bytes(262_145)),
}


@pytest.mark.parametrize("loss", _LOSSES)
def test_a_lost_link_is_opened_again_at_the_same_address(loss: str) -> None:
    with (
        ThreadedRelayService() as service,
        start_executor(service, preparation=QUICK_BACKOFF) as executor,
        connect(service) as client,
    ):
        _lose(service, executor, _LOSSES[loss])
        assert relay_link(client).wait_reset() == GONE
        assert is_served(service)
        assert _asked(service) == ["register", "socket 1", "socket 1"]


def test_the_largest_message_of_a_relay_is_taken() -> None:
    with ThreadedRelayService() as service, start_executor(service):
        prefix = stream_prefix("nobody")
        around = len(data_frame(prefix, 0, bytes(262_000))) - 262_000
        frame = data_frame(prefix, 0, bytes(262_144 - around))
        assert len(frame) == 262_144
        service.executor(ENVIRONMENT).send(frame)
        assert is_served(service)
        assert _asked(service) == ["register", "socket 1"]


def test_waits_grow_over_short_links_and_shrink_after_a_good_one() -> None:
    with (
        ThreadedRelayService() as service,
        start_executor(service, preparation=QUICK_BACKOFF) as executor,
    ):
        for _ in range(3):
            _lose(service, executor, lambda socket: socket.abort())
        assert is_served(service)  # which makes none of them a good one
        assert backoff_bases(backoffs(executor)) == [1.0, 2.0, 4.0]
    constants = {"server.remote.STABLE_LINK_SECONDS": 0.0}
    with (
        ThreadedRelayService() as service,
        start_executor(service, constants=constants, preparation=QUICK_BACKOFF) as executor,
    ):
        service.deafen()
        service.executor(ENVIRONMENT).abort()
        wait_logged(executor, "backoff", times=4)
        service.listen()
        wait_attached(service, executor)
        failed = len(backoffs(executor))
        _lose(service, executor, lambda socket: socket.abort())
        assert 0.5 <= backoffs(executor)[failed] <= 1.0


def test_handshakes_of_a_lost_link_are_forgotten() -> None:
    with (
        ThreadedRelayService() as service,
        start_executor(service, preparation=QUICK_BACKOFF) as executor,
        RelayLink(service, handshake=False) as link,
    ):
        fault = service.faults.http.hang(Endpoint.VALIDATE)
        link.begin()
        service.until(lambda: fault.hits)
        _lose(service, executor, lambda socket: socket.abort())
        assert link.wait_reset() == GONE
        assert is_served(service)


# ---- silence ----------------------------------------------------------------------------

_QUICK_PINGS = {"net.relay_stream.PING_SECONDS": 0.05, "net.relay_stream.PONG_SECONDS": scaled(0.5)}


def test_pings_go_on_while_they_are_answered() -> None:
    with (
        ThreadedRelayService() as service,
        start_executor(service, constants=_QUICK_PINGS),
        connect(service) as client,
    ):
        executor = service.call(service.service.executor, ENVIRONMENT)
        assert executor is not None
        eventually("many pings", lambda: executor.pings >= 12)
        assert client.call("environment/status") == READY
        assert _asked(service) == ["register", "socket 1"]


def _served_until_reset(client: Client) -> str:
    deadline = time.monotonic() + scaled(DEFAULT_TIMEOUT)
    try:
        while time.monotonic() < deadline:
            assert client.call("environment/status") == READY
    except StreamReset as end:
        return end.reason
    return "not reset"


def test_without_a_pong_the_link_is_dropped_although_messages_pass() -> None:
    with (
        ThreadedRelayService() as service,
        start_executor(service, constants=_QUICK_PINGS, preparation=QUICK_BACKOFF) as executor,
        connect(service) as client,
    ):
        deaf = service.call(service.service.executor, ENVIRONMENT)
        assert deaf is not None
        service.call(deaf.swallow_pings)
        before = deaf.pings
        assert _served_until_reset(client) == GONE
        wait_logged(executor, "backoff")
        wait_attached(service, executor)
        assert deaf.pings <= before + 1  # while one is unanswered there is no second
        assert is_served(service)


def test_a_relay_that_is_there_no_more_is_noticed() -> None:
    with (
        ThreadedRelayService() as service,
        start_executor(service, constants=_QUICK_PINGS, preparation=QUICK_BACKOFF) as executor,
    ):
        frozen = service.executor(ENVIRONMENT)
        frozen.freeze()
        wait_logged(executor, "backoff")
        service.until(lambda: service.service.executor(ENVIRONMENT) is not None)
        service.until(lambda: len(service.service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 2)
        wait_attached(service, executor)
        assert is_served(service)


def test_a_relay_that_takes_nothing_is_given_up() -> None:
    constants = {"net.relay_stream.WRITE_SECONDS": scaled(0.3)}
    with (
        ThreadedRelayService() as service,
        start_executor(
            service, "--log-level", "warning", constants=constants, preparation=QUICK_BACKOFF
        ) as executor,
        connect(service) as client,
    ):
        client.start(["sh", "-c", "yes 0123456"], process_id="flood")
        service.executor(ENVIRONMENT).freeze()
        wait_logged(executor, "write timeout")
        service.until(lambda: len(service.service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 2)
        wait_attached(service, executor)
        with connect(service, resume=client.session_id) as again:
            assert again.call("process/terminate", {"processId": "flood"}) == {"running": True}


# ---- the end ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_executor_its_children_and_its_link(number: signal.Signals) -> None:
    with (
        ThreadedRelayService() as service,
        start_executor(service) as executor,
        connect(service) as client,
        connect(service) as other,
    ):
        client.start(["sh", "-c", "sleep 600 & sleep 600"], process_id="p")
        other.start(["sleep", "600"], process_id="q")
        pid = executor.process.pid
        # The watchdog, both commands, and the child that the shell has to start.
        eventually("all children run", lambda: len(descendants(pid)) >= 4)
        family = descendants(pid)
        executor.process.send_signal(number)
        assert exit_code(executor) == 0
        assert survivors(family) == []
        for link in (relay_link(client), relay_link(other)):
            assert link.wait_reset() == GONE
        service.until(lambda: service.service.executor(ENVIRONMENT) is None)
        assert executor.stderr() == ""


@pytest.mark.parametrize("state", ["registering", "connecting", "waiting"])
def test_a_signal_ends_the_executor_whatever_it_is_doing(state: str) -> None:
    with ThreadedRelayService() as service:
        if state == "registering":
            fault = service.faults.http.hang(Endpoint.REGISTER)
        else:
            fault = service.faults.http.hang(Endpoint.EXECUTOR_SOCKET)
        constants = {"server.remote.OPEN_SECONDS": 0.1} if state == "waiting" else {}
        flags = ("--log-level", "warning")
        with start_executor(service, *flags, constants=constants, attached=False) as executor:
            service.until(lambda: fault.hits)
            if state == "waiting":
                wait_logged(executor, "rendezvous connection failed: timed out")
            executor.process.send_signal(signal.SIGTERM)
            assert exit_code(executor) == 0


def test_a_killed_executor_leaves_no_children() -> None:
    with (
        ThreadedRelayService() as service,
        start_executor(service) as executor,
        connect(service) as client,
    ):
        client.start(["sleep", "600"], process_id="p")
        executor.process.kill()
        assert exit_code(executor) == -signal.SIGKILL
        assert relay_link(client).wait_reset() == GONE
