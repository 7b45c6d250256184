"""The pure parts of the executors: backoff, log texts, headers."""

from __future__ import annotations

import itertools

import pytest

from exec_server.errors import ConnectFailed
from exec_server.server import remote
from exec_server.server.remote import Backoff, upgrade_headers


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
