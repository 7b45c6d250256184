"""The parts of the executors without a network: backoff, log texts, headers, repetition."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

import pytest

from exec_server.errors import ConnectFailed, RegistryError
from exec_server.registry.api import Registration
from exec_server.server import remote
from exec_server.server.remote import Backoff, DirectExecutor, upgrade_headers


@pytest.mark.parametrize(("fraction", "first"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_delays_double_up_to_a_limit(fraction: float, first: float) -> None:
    backoff = Backoff(lambda: fraction)
    delays = [backoff.next_delay() for _ in range(8)]
    assert delays[:5] == [first * 2**n for n in range(5)]
    assert delays[5:] == [first * remote.MAX_BACKOFF_SECONDS] * 3


def test_only_a_stable_link_resets_the_delays() -> None:
    backoff = Backoff(lambda: 1.0)
    for _ in range(3):
        backoff.next_delay()
    backoff.link_ended(remote.STABLE_LINK_SECONDS - 1)
    assert backoff.next_delay() == 8.0
    backoff.link_ended(remote.STABLE_LINK_SECONDS)
    assert backoff.next_delay() == 1.0


def test_delays_are_random() -> None:
    fractions = itertools.cycle([0.0, 1.0])
    backoff = Backoff(lambda: next(fractions))
    assert [backoff.next_delay() for _ in range(4)] == [0.5, 2.0, 2.0, 8.0]


def test_only_known_reasons_of_a_refusal_are_logged() -> None:
    header = "x-codex-rendezvous-rejection-reason"
    plain = ConnectFailed("refused", status=403, headers=[(header, "<script>")])
    known = ConnectFailed("refused", status=403, headers=[(header, "?"), (header, "expired")])
    assert remote._reason(plain) == str(plain)
    assert remote._reason(known) == f"{known} (expired)"
    assert remote._reason(TimeoutError()) == "timed out"


def test_a_second_executor_with_the_same_id_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    header = "x-codex-rendezvous-rejection-reason"
    reasons = ("expired", "unexpected_executor_registration_id")
    for reason in reasons:
        refusal = ConnectFailed("refused", status=401, headers=[(header, reason)])
        remote._log_failure(refusal, "build-7")
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "another executor has registered as build-7" in caplog.messages[1]


def test_headers_name_the_place_of_the_executor() -> None:
    environ = {"OPENAI_CLUSTER": "c", "DD_SERVICE": "", "OTHER": "x"}
    assert upgrade_headers(environ) == [("x-cluster-name", "c")]
    assert upgrade_headers({}) == []


# ---- the executor with one client ------------------------------------------------------


class FakeRegistry:
    """Registers again and again, each time at another address."""

    def __init__(self) -> None:
        self.registered = 0

    async def register_direct(self) -> Registration:
        self.registered += 1
        return Registration(f"wss://h/{self.registered}?secret", "id")


@pytest.mark.parametrize(
    ("error", "registered"),
    [
        (TimeoutError(), 0),
        (ConnectFailed("refused"), 0),
        (ConnectFailed("refused", status=500), 0),
        (ConnectFailed("refused", status=408), 0),
        (ConnectFailed("refused", status=429), 0),
        (ConnectFailed("refused", status=409), 1),
    ],
)
def test_a_failure_that_may_pass_is_tried_again(
    error: ConnectFailed | TimeoutError, registered: int
) -> None:
    registry = FakeRegistry()
    executor = DirectExecutor(cast(Any, registry), cast(Any, None))
    first = Registration("wss://h/0?secret", "id")
    found = asyncio.run(executor._after_failure(first, error))
    assert found.url == f"wss://h/{registered}?secret"


@pytest.mark.parametrize("status", [400, 499])
def test_a_refusal_ends_the_executor_without_its_secret(status: int) -> None:
    executor = DirectExecutor(cast(Any, FakeRegistry()), cast(Any, None))
    refusal = ConnectFailed("refused", status=status)
    with pytest.raises(RegistryError, match="websocket `wss://h/0`: refused") as caught:
        asyncio.run(executor._after_failure(Registration("wss://h/0?secret", "id"), refusal))
    assert "secret" not in str(caught.value)


def test_waits_grow_until_a_connection_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    outcomes = iter(["fails", "fails", "opens", "fails", "ends"])

    class Credential:
        async def ready(self, tasks: object) -> None:
            steps.append("ready")

    async def connect(self: DirectExecutor, url: str, make_receiver: object) -> object:
        outcome = next(outcomes)
        if outcome == "fails":
            raise TimeoutError
        if outcome == "ends":
            raise RegistryError("enough")
        return None

    async def until_ended(link: object) -> str:
        return "lost"

    def delay(failures: int, uniform: object) -> float:
        steps.append(f"wait {failures}")
        return 0.0

    monkeypatch.setattr(DirectExecutor, "_open", connect)
    monkeypatch.setattr(remote, "_until_ended", until_ended)
    monkeypatch.setattr(remote, "retry_delay", delay)
    executor = DirectExecutor(cast(Any, FakeRegistry()), cast(Any, Credential()))
    with pytest.raises(RegistryError, match="enough"):
        asyncio.run(executor.serve(cast(Any, None), cast(Any, None), cast(Any, None)))
    assert steps == ["ready", "wait 0", "wait 1", "wait 0", "wait 1"]
