"""ClientSession through a relay: cut ends, executors that change, registries that refuse."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from typing import Any

import pytest
import uvloop
from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.client import DEFAULT_TIMEOUT, KINDS, scaled
from tests.support.client_targets import (
    COUNTED,
    LOOPS,
    Recorder,
    Run,
    bounded,
    exercise,
    until_lost,
)
from tests.support.relay import ENVIRONMENT, register_absent, start_executor, wait_attached

from exec_server.client.engine import relay
from exec_server.client.engine.relay import PlainRelayDialer, RelayDialer
from exec_server.client.engine.session import ClientSession
from exec_server.errors import ConnectFailed, RegistryError, RegistryUnavailable, SessionLost
from exec_server.relay.noise import PublicKey


def relay_dialer(service: ThreadedRelayService, **options: Any) -> RelayDialer:
    return RelayDialer(service.url, ENVIRONMENT, token="client", **options)


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", LOOPS)
def test_a_session_through_a_relay(kind: str, run: Run) -> None:
    with ThreadedRelayService() as service, start_executor(service, kind=kind):
        bounded(exercise(relay_dialer(service, account_id="account-1")), run)
        [request] = service.requests_to(Endpoint.CONNECT)
        assert request.header("authorization") == "Bearer client"
        assert request.header("chatgpt-account-id") == "account-1"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["harness", "executor"])
def test_no_output_is_lost_when_an_end_of_the_relay_is_cut(kind: str, end: str) -> None:
    async def scene(service: ThreadedRelayService) -> None:
        async with ClientSession(relay_dialer(service)) as session, asyncio.TaskGroup() as tasks:
            recorder = Recorder(session, tasks)

            def cut() -> None:
                recorder.on_output = lambda: None
                if end == "harness":
                    service.harnesses(ENVIRONMENT)[0].abort()
                else:
                    service.executor(ENVIRONMENT).abort()

            recorder.on_output = cut
            await recorder.count()
            await recorder.complete.wait()
        assert recorder.output == COUNTED
        assert recorder.resumed == 1

    with ThreadedRelayService() as service, start_executor(service, kind=kind):
        bounded(scene(service), uvloop.run)
        # A fresh bundle for each attempt, and more than one of them while the executor was away.
        assert len(service.requests_to(Endpoint.CONNECT)) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_executor_may_come_later_than_its_client(kind: str) -> None:
    failures: list[BaseException] = []

    def use() -> None:
        try:
            bounded(exercise(relay_dialer(service)))
        except BaseException as error:
            failures.append(error)

    with ThreadedRelayService() as service:
        register_absent(service)
        client = threading.Thread(target=use)
        client.start()
        try:
            service.until(lambda: service.service.requests_to(Endpoint.CONNECT))
            with start_executor(service, kind=kind):
                client.join(scaled(3 * DEFAULT_TIMEOUT))
                assert not client.is_alive()
        finally:
            client.join(scaled(3 * DEFAULT_TIMEOUT))
        assert not failures
        assert len(service.requests_to(Endpoint.CONNECT)) >= 2


def test_an_executor_that_was_replaced_ends_the_session() -> None:
    async def scene(service: ThreadedRelayService, first: Any) -> None:
        async with ClientSession(relay_dialer(service)) as session:
            with start_executor(service, attached=False) as second:
                first.kill()
                await asyncio.to_thread(wait_attached, service, second)
                with pytest.raises(SessionLost, match="unknown session id"):
                    await until_lost(session)

    with ThreadedRelayService() as service, start_executor(service) as executor:
        bounded(scene(service, executor))


def no_delay(attempt: int) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("status", "code", "requests", "kind"),
    [
        (503, "busy", 5, RegistryUnavailable),
        (429, "slow_down", 5, RegistryUnavailable),
        (409, "environment_offline", 5, RegistryUnavailable),
        (409, "another", 1, RegistryError),
        (401, "invalid_token", 1, RegistryError),
        (404, "environment_not_found", 1, RegistryError),
    ],
)
def test_a_registry_that_refuses(
    status: int, code: str, requests: int, kind: type[Exception]
) -> None:
    with ThreadedRelayService() as service:
        service.faults.http.answer(Endpoint.CONNECT, status, code=code, times=None)
        dialer = relay_dialer(service)
        dialer.retry_delay = no_delay  # type: ignore[method-assign]
        with pytest.raises(kind) as raised:
            bounded(exercise(dialer))
        assert type(raised.value) is kind
        assert len(service.requests_to(Endpoint.CONNECT)) == requests


def test_a_registry_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(relay, "FIRST_SECONDS", 0.25)
    with ThreadedRelayService() as service:
        service.faults.http.hang(Endpoint.CONNECT, times=None)
        dialer = relay_dialer(service)
        dialer.retry_delay = no_delay  # type: ignore[method-assign]
        with pytest.raises(RegistryUnavailable, match="timed out"):
            bounded(exercise(dialer))
        # On a busy machine a request may use up the time of the third one.
        assert len(service.requests_to(Endpoint.CONNECT)) in (2, 3)


def test_an_expired_address_is_fetched_anew_once() -> None:
    with ThreadedRelayService() as service, start_executor(service):
        service.faults.http.reject(Endpoint.HARNESS_SOCKET, 401, "expired")
        bounded(exercise(relay_dialer(service)))
        assert len(service.requests_to(Endpoint.CONNECT)) == 2
        service.faults.http.reject(Endpoint.HARNESS_SOCKET, 401, "expired", times=None)
        with pytest.raises(ConnectFailed, match="relay: HTTP error: 401"):
            bounded(exercise(relay_dialer(service)))
        assert len(service.requests_to(Endpoint.CONNECT)) == 4


def test_a_relay_that_refuses_is_not_asked_twice() -> None:
    with ThreadedRelayService() as service, start_executor(service):
        service.faults.http.reject(Endpoint.HARNESS_SOCKET, 503, "pod_draining")
        with pytest.raises(ConnectFailed, match="relay: HTTP error: 503"):
            bounded(exercise(relay_dialer(service)))
        assert len(service.requests_to(Endpoint.CONNECT)) == 1


def test_a_handshake_that_is_reset_is_tried_again() -> None:
    with ThreadedRelayService() as service, start_executor(service):
        service.faults.http.answer(Endpoint.VALIDATE, 200, {"valid": False}, times=2)
        dialer = relay_dialer(service)
        dialer.retry_delay = no_delay  # type: ignore[method-assign]
        bounded(exercise(dialer))
        assert len(service.requests_to(Endpoint.CONNECT)) == 3


def test_a_handshake_that_is_always_refused_is_no_connection() -> None:
    with ThreadedRelayService() as service, start_executor(service):
        service.faults.http.answer(Endpoint.VALIDATE, 200, {"valid": False}, times=None)
        dialer = relay_dialer(service)
        dialer.retry_delay = no_delay  # type: ignore[method-assign]
        with pytest.raises(
            ConnectFailed, match="relay: relay handshake failed: relay stream reset"
        ):
            bounded(exercise(dialer))
        assert len(service.requests_to(Endpoint.CONNECT)) == 5


def test_an_executor_can_be_pinned() -> None:
    with ThreadedRelayService() as service, start_executor(service):
        [request] = service.requests_to(Endpoint.REGISTER)
        written = json.loads(request.body)["executor_public_key"]
        halves = [written[f"{name}_public_key"] for name in ("x25519", "mlkem768")]
        pin = PublicKey(*map(base64.b64decode, halves)).fingerprint
        bounded(exercise(relay_dialer(service, executor_key_fingerprint=pin.upper())))
        wrong = f"{pin[:-1]}{int(pin[-1], 16) ^ 1:x}"
        with pytest.raises(RegistryError, match=f"not the expected one: its fingerprint is {pin}"):
            bounded(exercise(relay_dialer(service, executor_key_fingerprint=wrong)))
        assert len(service.requests_to(Endpoint.HARNESS_SOCKET)) == 1


@pytest.mark.parametrize("run", LOOPS)
def test_the_older_relay_without_encryption(run: Run) -> None:
    flags = ("--relay-security", "plain")
    with ThreadedRelayService(plaintext=True) as service, start_executor(service, *flags):
        bounded(exercise(PlainRelayDialer(service.plain_url(ENVIRONMENT))), run)
