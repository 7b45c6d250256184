"""Signed addresses: one spelling is accepted, every other one is refused with its reason."""

from __future__ import annotations

import dataclasses

import pytest

from exec_server.hosting import rules
from exec_server.hosting.rules import CLIENT_ROLE, EXECUTOR_ROLE, Rejection, Ticket

TICKET = Ticket("0123456789abcdef", "env.1", CLIENT_ROLE, "reg-1", 2000, "n0nce", "tok-1")
KEY = b"k" * 32
KEYS = {"7": KEY, "6": b"old"}


def _split(target: str) -> tuple[str, str]:
    path, _, query = target.partition("?")
    return path, query


def _reason(path: str, query: str) -> tuple[int, str]:
    with pytest.raises(Rejection) as refused:
        rules.check(path, query, KEYS)
    assert str(refused.value) == f"{refused.value.status} {refused.value.reason}"
    return refused.value.status, refused.value.reason


def test_a_signed_ticket_is_read_again() -> None:
    path, query = _split(rules.sign(TICKET, "7", KEY))
    assert path == "/rendezvous/0123456789abcdef.env.1"
    assert rules.check(path, query, KEYS) == TICKET
    assert not TICKET.is_executor
    executor = dataclasses.replace(TICKET, role=EXECUTOR_ROLE)
    assert rules.check(*_split(rules.sign(executor, "6", b"old")), KEYS).is_executor


def test_the_key_of_a_query_is_found() -> None:
    _, query = _split(rules.sign(TICKET, "7", KEY))
    assert rules.key_id(query) == "7"
    assert rules.key_id("v=1&x=y") == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("v", "missing_version"),
        ("role", "missing_role"),
        ("executor_registration_id", "missing_executor_registration_id"),
        ("exp", "missing_expiry"),
        ("nonce", "malformed_query"),
        ("kid", "malformed_query"),
        ("sig", "missing_signature"),
    ],
)
def test_each_parameter_is_needed_once(name: str, reason: str) -> None:
    path, query = _split(rules.sign(TICKET, "7", KEY))
    pairs = query.split("&")
    without = [pair for pair in pairs if not pair.startswith(f"{name}=")]
    assert _reason(path, "&".join(without)) == (401, reason)
    [one] = set(pairs) - set(without)
    assert _reason(path, "&".join([*pairs, one])) == (401, "malformed_query")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("v", "2", "malformed_query"),
        ("role", "admin", "invalid_role"),
        ("role", EXECUTOR_ROLE, "invalid_signature"),
        ("executor_registration_id", "reg-2", "invalid_signature"),
        ("exp", "soon", "invalid_expiry"),
        ("exp", "9999", "invalid_signature"),
        ("nonce", "other.tok-1", "invalid_signature"),
        ("nonce", "n0nce.tok-2", "invalid_signature"),
        ("kid", "6", "invalid_signature"),
        ("kid", "5", "invalid_signature"),
        ("sig", "0" * 64, "invalid_signature"),
        ("nonce", "%6e0nce.tok-1", "malformed_query"),
        ("nonce", "", "malformed_query"),
    ],
)
def test_each_changed_parameter_is_refused(name: str, value: str, reason: str) -> None:
    path, query = _split(rules.sign(TICKET, "7", KEY))
    pairs = [pair.split("=", 1) for pair in query.split("&")]
    changed = "&".join(f"{key}={value if key == name else old}" for key, old in pairs)
    assert _reason(path, changed) == (401, reason)


def test_additional_parameters_and_other_paths_are_refused() -> None:
    path, query = _split(rules.sign(TICKET, "7", KEY))
    assert _reason(path, f"{query}&extra=1") == (401, "extra_query_param")
    assert _reason(path, "") == (401, "malformed_query")
    assert _reason(path.replace("env.1", "env.2"), query) == (401, "invalid_signature")
    assert _reason(path.replace("0123", "9999"), query) == (401, "invalid_signature")
    for other in ("/rendezvous/", "/rendezvous/x.env", "/other", f"{path}/x", "/rendezvous/0.e"):
        assert _reason(other, query) == (404, "unknown_route")
