"""Ids, tokens, scopes and rates of the registry."""

from __future__ import annotations

import pytest

from exec_server.hosting import rules
from exec_server.hosting.rules import ByteRate, HandshakeRate, Operation, Refusal


@pytest.mark.parametrize("text", ["a", "A.b_c-9", "x" * 128])
def test_environment_ids(text: str) -> None:
    assert rules.is_environment_id(text)


@pytest.mark.parametrize("text", ["", "x" * 129, "a/b", "a b", "ä", "a\n", "*"])
def test_other_texts_are_no_environment_ids(text: str) -> None:
    assert not rules.is_environment_id(text)


def test_names_of_tenants() -> None:
    assert rules.is_tenant_name("ops-1")
    assert not rules.is_tenant_name("a/b")


def test_a_token_is_random_bytes_behind_a_prefix_and_stored_as_a_hash() -> None:
    token = rules.token_text(bytes(32))
    assert token == "esr_" + "A" * 43
    assert len(rules.secret_hash(token)) == 64
    assert rules.secret_hash(token) != rules.secret_hash(token + "x")
    assert rules.secret_hash("\udcff")  # any header value has one


@pytest.mark.parametrize("value", ["Bearer abc", "bearer abc", "  BEARER   abc "])
def test_a_bearer_token_is_found(value: str) -> None:
    assert rules.bearer_token(value) == "abc"


@pytest.mark.parametrize("value", [None, "", "abc", "Basic abc", "Bearer", "Bearer  "])
def test_every_other_authorization_is_refused_alike(value: str | None) -> None:
    with pytest.raises(Refusal) as refused:
        rules.bearer_token(value)
    error = refused.value
    assert (error.status, error.code) == (401, "invalid_token")
    assert str(error) == "401 invalid_token"


@pytest.mark.parametrize("text", ["executor:a", "connect:*", "connect:a.b-*"])
def test_scopes(text: str) -> None:
    assert rules.check_scope(text) == text


@pytest.mark.parametrize("text", ["", "admin", "all:*", "executor:", "connect:a*b", "connect:ä"])
def test_other_texts_are_no_scopes(text: str) -> None:
    with pytest.raises(ValueError, match="invalid scope"):
        rules.check_scope(text)


@pytest.mark.parametrize(
    ("scopes", "name", "expected"),
    [
        (["executor:box"], "box", True),
        (["executor:box"], "box2", False),
        (["executor:bo*"], "box", True),
        (["executor:*"], "anything", True),
        (["connect:*"], "box", False),
        (["connect:*", "executor:a", "executor:box"], "box", True),
        ([], "box", False),
    ],
)
def test_a_scope_covers_an_id_or_a_prefix(scopes: list[str], name: str, expected: bool) -> None:
    assert rules.covers(scopes, Operation.EXECUTOR, name) is expected


def test_the_scope_is_checked_before_the_id() -> None:
    rules.check_permission(["connect:box"], Operation.CONNECT, "box")
    with pytest.raises(Refusal, match="403 forbidden"):
        rules.check_permission(["connect:box"], Operation.CONNECT, "a/b")
    with pytest.raises(Refusal, match="400 invalid_environment_id"):
        rules.check_permission(["connect:*"], Operation.CONNECT, "a/b")


def test_twenty_handshakes_in_any_second_for_each_pair() -> None:
    rate = HandshakeRate()
    assert [rate.take(("t", "e"), 20, 100.0 + n / 40) for n in range(20)] == [0.0] * 20
    assert rate.take(("t", "e"), 20, 100.5) == pytest.approx(0.5)
    assert rate.take(("t", "other"), 20, 100.5) == 0.0
    assert rate.take(("t", "e"), 20, 101.0) == 0.0  # the first one is a second ago
    assert rate.take(("t", "e"), 20, 101.0) == pytest.approx(0.025)
    assert rate.take(("t", "e"), 5, 101.0) == pytest.approx(0.4)  # a limit that was lowered
    assert rate.take(("t", "e"), 20, 200.0) == 0.0


def test_a_steady_loop_makes_1200_handshakes_a_minute() -> None:
    rate = HandshakeRate()
    assert not any(rate.take(("t", "e"), 20, number * 0.050001) for number in range(1200))


def test_only_pairs_of_the_last_second_take_memory_and_no_more_than_the_limit() -> None:
    rate = HandshakeRate(keys=2)
    for pair in ("a", "b", "c"):
        assert rate.take((pair,), 1, 0.0) == 0.0
    assert rate.take(("c",), 1, 0.0) > 0
    assert rate.take(("a",), 1, 0.0) == 0.0
    assert rate.take(("d",), 1, 9.0) == 0.0
    assert list(rate._times) == [("d",)]


def test_a_tenant_beyond_its_rate_is_read_more_slowly() -> None:
    rate = ByteRate(1000.0, 0.0)
    assert rate.spend(250, 0.0) == 0.0  # the burst
    assert rate.spend(500, 0.0) == pytest.approx(0.5)
    assert rate.spend(0, 1.0) == 0.0
    assert rate.spend(250, 60.0) == 0.0  # no more than the burst is saved
    assert rate.spend(1, 60.0) == pytest.approx(0.001)
