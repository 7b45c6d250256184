"""Lines about refused requests: their form, and their number in a flood."""

from __future__ import annotations

import pytest

from exec_server.hosting import service
from exec_server.hosting.rules import Refusal
from exec_server.hosting.service import LINES_A_PERIOD, SHOWN_CHARACTERS, RefusalLog


def refusal(reason: str, tenant: str = "") -> Refusal:
    answer = Refusal(403, reason, "")
    answer.tenant = tenant
    return answer


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_flood_of_one_tenant_or_of_strangers_leaves_the_lines_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING")
    log = RefusalLog()
    for _ in range(LINES_A_PERIOD + 7):
        log.add("connect", refusal("unknown_token"))
        log.add("connect", refusal("sockets", "loud"))
    assert len(lines(caplog)) == 2 * LINES_A_PERIOD
    caplog.clear()
    log.add("connect", refusal("forbidden", "quiet"))
    assert len(lines(caplog)) == 1
    caplog.clear()
    log.end_period()
    assert lines(caplog) == [
        "7 more requests were refused within 60 s: tenant=-",
        "7 more requests were refused within 60 s: tenant=loud",
    ]
    caplog.clear()
    log.end_period()
    log.add("connect", refusal("unknown_token"))
    assert len(lines(caplog)) == 1


def test_tenants_beyond_the_table_share_the_lines_of_strangers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "TENANTS", 2)
    monkeypatch.setattr(service, "LINES_A_PERIOD", 1)
    caplog.set_level("WARNING")
    log = RefusalLog()
    for tenant in ("a", "b", "c", "d", "a"):
        log.add("connect", refusal("forbidden", tenant))
    log.end_period()
    assert [line.partition("tenant=")[2].partition(" ")[0] for line in lines(caplog)] == [
        *("a", "b", "c"),
        *("a", "-"),  # one more each
    ]


def test_an_id_that_a_peer_invents_cannot_pose_as_another_field(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING")
    RefusalLog().add("connect", refusal("forbidden"), 'x" token=tok-2\n' + "y" * 9999)
    [line] = lines(caplog)
    assert 'environment="x\\" token=tok-2\\ny' in line
    assert len(line) < SHOWN_CHARACTERS + 150
