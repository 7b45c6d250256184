"""Decider: the order of rules, questions and look-ups, and what is reported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.network import launch

from exec_server.protocol.network import DecisionParams, Destination, PolicyParams
from exec_server.proxy import decider as module
from exec_server.proxy.decider import MAX_ADDRESSES, Decider, decode_answer
from exec_server.proxy.policy import Decision, NetworkAccess, NetworkPolicy


class FakeClient:
    """A Controller that gives one answer, and a resolver."""

    def __init__(self, answer: object = None, addresses: Sequence[str] = ("8.8.8.8",)) -> None:
        self.answer = answer
        self.addresses = addresses
        self.asked: list[PolicyParams] = []
        self.looked_up: list[str] = []
        self.has_upstream_proxy = False
        self.reports: list[DecisionParams] = []

    def report(self, decision: DecisionParams) -> None:
        self.reports.append(decision)

    async def ask(self, question: PolicyParams) -> object:
        self.asked.append(question)
        if self.answer == "silence":
            await asyncio.Event().wait()
        return self.answer

    async def resolve(self, host: str) -> Sequence[str]:
        self.looked_up.append(host)
        if not self.addresses:
            raise OSError("unknown")
        if self.addresses == ["slow"]:
            await asyncio.Event().wait()
        return self.addresses

    def decide(self, host: str, **members: Any) -> Decision:
        port, method = members.pop("port", 80), members.pop("method", "GET")
        protocol = members.pop("protocol", "http")
        members.setdefault("domains", {"*": "allow", "bad.test": "deny"})
        policy = NetworkPolicy(launch(**members))
        request = NetworkAccess(protocol, host, port, "127.0.0.1:5", method)
        decider = Decider("p", policy, self, self.resolve, lambda _: self.has_upstream_proxy)
        return asyncio.run(decider.decide(request))


def _allow(**members: Any) -> dict[str, Any]:
    return {"decision": {"type": "allow", **members}}


def test_allowed_name_is_looked_up_once() -> None:
    client = FakeClient(addresses=("8.8.8.8", "8.8.4.4"))
    decision = client.decide("a.test")
    assert decision == Decision("allow", "baseline_policy", "allow", ("8.8.8.8", "8.8.4.4"))
    assert client.looked_up == ["a.test"]
    (report,) = client.reports
    assert report.timestamp.endswith("Z")
    assert len(report.timestamp) == len("2026-11-16T12:54:39.878Z")
    assert report == DecisionParams(
        process_id="p",
        timestamp=report.timestamp,
        scope="domain",
        decision="allow",
        source="baseline_policy",
        reason="allow",
        protocol="http",
        host="a.test",
        port=80,
        method="GET",
        client="127.0.0.1:5",
        policy_override=False,
    )


def test_the_last_refused_hosts_are_remembered() -> None:
    client = FakeClient(addresses=["10.0.0.1"])
    policy = NetworkPolicy(launch(domains={"a.test": "allow", "bad.test": "deny"}))
    decider = Decider("p", policy, client, client.resolve, lambda _: False)
    assert decider.refusal is None

    def ask(host: str) -> None:
        asyncio.run(decider.decide(NetworkAccess("http", host, 80, "127.0.0.1:5", "GET")))

    for host in ("a.test", "bad.test", "c.test", "a.test"):
        ask(host)
    assert decider.refusal == (
        "the network proxy refuses bad.test:80 (a rule denies it), c.test:80 (no rule allows it), "
        "a.test:80 (a.test leads to the local address 10.0.0.1: allowLocalBinding permits it)"
    )
    for number in range(module.MAX_REFUSED):
        ask(f"{number}.test")
    assert str(decider.refusal).count("no rule allows it") == module.MAX_REFUSED


LITERAL = (
    "Sandbox policy blocks local/private network addresses. "
    "10.0.0.1 is a local address: allowLocalBinding or a rule for exactly it permits it."
)


def test_denied_and_unlisted_names_are_not_looked_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client = FakeClient()
    assert client.decide("bad.test").reason == "denied"
    assert client.decide("a.test", domains=None).reason == "not_allowed"
    assert client.decide("10.0.0.1").reason == "not_allowed_local"
    assert (client.looked_up, client.asked) == ([], [])
    assert [record.getMessage() for record in caplog.records] == [
        "process p: http to bad.test:80 is refused: denied",
        "process p: http to a.test:80 is refused: not_allowed",
        f"process p: http to 10.0.0.1:80 is refused: not_allowed_local ({LITERAL})",
    ]


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::1"], ["fe80::1%lo"]]
)
def test_names_with_local_addresses_are_refused(addresses: list[str]) -> None:
    decision = FakeClient(addresses=addresses).decide("a.test")
    message = (
        "Sandbox policy blocks local/private network addresses. "
        f"a.test leads to the local address {addresses[-1]}: allowLocalBinding permits it."
    )
    assert decision == Decision("deny", "baseline_policy", "not_allowed_local", message=message)


def test_names_without_addresses_are_refused() -> None:
    message = (
        "Sandbox policy blocks local/private network addresses. "
        "a.test has no address that this server finds."
    )
    decision = FakeClient(addresses=[]).decide("a.test")
    assert decision == Decision("deny", "baseline_policy", "not_allowed_local", message=message)


@pytest.mark.parametrize("host", ["127.0.0.1", "::ffff:127.0.0.1", "::ffff:7f00:1", "0.0.0.0"])
def test_a_denied_address_in_the_form_of_another_is_refused_at_once(host: str) -> None:
    client = FakeClient(_allow())
    for domains in ({"*": "allow", "127.0.0.1": "deny"}, {"127.0.0.1": "deny"}):
        decision = client.decide(host, domains=domains, allowLocalBinding=True, timeout=1000)
        assert decision == Decision("deny", "baseline_policy", "denied")
    assert client.asked == []


_REFUSED_ADDRESS = Decision("deny", "baseline_policy", "denied", scope="non_domain")
_UNREVIEWED_ADDRESS = Decision("deny", "baseline_policy", "policy_denied", scope="non_domain")


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("127.1", ["127.0.0.1"]),
        ("a.test", ["::ffff:127.0.0.1", "127.0.0.1"]),
        ("a.test", ["fe80::1%lo"]),
        ("localhost", ["127.0.0.1"]),
        ("a.test", ["10.1.2.3"]),
    ],
)
def test_a_name_with_denied_addresses_is_refused(host: str, addresses: list[str]) -> None:
    rules = {"127.0.0.1": "deny", "fe80::1": "deny", "10.*": "deny"}
    client = FakeClient(_allow(), addresses)
    decision = client.decide(host, domains={"*": "allow", **rules}, allowLocalBinding=True)
    assert decision == _REFUSED_ADDRESS
    decision = client.decide(host, domains=rules, allowLocalBinding=True, timeout=1000)
    assert decision == _REFUSED_ADDRESS
    # The host itself is allowed, which the client is told first.
    assert [(each.scope, each.decision, each.reason) for each in client.reports] == [
        *(("domain", "allow", "allow"), ("non_domain", "deny", "denied")),
        *(("domain", "allow", "not_allowed"), ("non_domain", "deny", "denied")),
    ]
    assert client.looked_up == [host, host]


def test_forbidden_addresses_are_left_out() -> None:
    client = FakeClient(addresses=("10.0.0.1", "10.0.0.2", "10.0.0.3"))
    domains, review = {"*": "allow", "10.0.0.1": "deny"}, ["10.0.0.3"]
    decision = client.decide(
        "a.test", domains=domains, reviewDomains=review, allowLocalBinding=True
    )
    assert decision == Decision("allow", "baseline_policy", "allow", ("10.0.0.2",))
    assert len(client.reports) == 1
    # Without local binding every address has to be public, whether or not it would be dialled.
    decision = client.decide("a.test", domains=domains, reviewDomains=review)
    assert decision.reason == "not_allowed_local"


@pytest.mark.parametrize(
    ("domains", "review", "is_asked", "expected"),
    [
        ({"*": "allow"}, ["10.0.0.1"], False, _UNREVIEWED_ADDRESS),
        ({"*": "allow"}, ["10.0.0.*"], False, _UNREVIEWED_ADDRESS),
        ({}, ["10.0.0.1"], True, _UNREVIEWED_ADDRESS),
        ({"*": "allow"}, ["a.test", "10.0.0.1"], True, None),
        ({"*": "allow"}, ["b.test"], False, None),
        ({"*": "allow", "10.0.0.1": "deny"}, ["a.test", "10.0.0.1"], True, _REFUSED_ADDRESS),
    ],
)
def test_reviewed_addresses_need_a_reviewed_name(
    domains: dict[str, str], review: list[str], is_asked: bool, expected: Decision | None
) -> None:
    client = FakeClient(_allow(), ("10.0.0.1",))
    decision = client.decide(
        "a.test", domains=domains, reviewDomains=review, allowLocalBinding=True, timeout=1000
    )
    assert bool(client.asked) == is_asked
    assert client.reports[0].decision == "allow"
    if expected is None:
        assert (decision.is_allowed, decision.addresses) == (True, ("10.0.0.1",))
    else:
        assert decision == expected


@pytest.mark.parametrize("host", ["10.0.0.1", "::ffff:10.0.0.1"])
def test_a_reviewed_address_is_asked_about(host: str) -> None:
    client = FakeClient(_allow())
    decision = client.decide(
        host,
        domains={"*": "allow"},
        reviewDomains=["10.0.0.1"],
        allowLocalBinding=True,
        timeout=1000,
    )
    assert len(client.asked) == 1
    assert (decision.is_allowed, decision.addresses) == (True, (host,))


def test_only_some_addresses_of_a_name_are_used() -> None:
    addresses = [f"8.8.8.{number}" for number in range(1, MAX_ADDRESSES + 2)]
    decision = FakeClient(addresses=addresses).decide("a.test")
    assert decision.addresses == tuple(addresses[:MAX_ADDRESSES])


_FORBIDDEN = "A rule forbids an address of this name, and the upstream proxy could connect to it."
_UNCOMPARED = (
    "Some rules are about addresses, but this machine finds none for this name, or too many to "
    "compare, and the upstream proxy would look it up itself."
)
_SILENT: list[str] = []
_MANY = [f"8.8.8.{number}" for number in range(1, MAX_ADDRESSES + 2)]


def _decide_upstream(
    addresses: list[str], domains: dict[str, str], review: list[str], **members: Any
) -> Decision:
    client = FakeClient(_allow(), addresses)
    client.has_upstream_proxy = True
    rules = {"domains": {"*": "allow", **domains}, "reviewDomains": review, "timeout": 1000}
    return client.decide("a.test", **rules, **members)


@pytest.mark.parametrize(
    ("addresses", "domains", "review", "reason", "message"),
    [
        (["1.1.1.1", "8.8.8.8"], {"8.8.8.8": "deny"}, [], "denied", _FORBIDDEN),
        (["1.1.1.1", "8.8.8.8"], {"8.8.*": "deny"}, [], "denied", _FORBIDDEN),
        (["1.1.1.1", "8.8.8.8"], {}, ["8.8.8.8"], "policy_denied", _FORBIDDEN),
        (_MANY, {"1.1.1.1": "deny"}, [], "policy_denied", _UNCOMPARED),
        (_MANY, {}, ["1.1.1.1"], "policy_denied", _UNCOMPARED),
    ],
)
def test_an_upstream_proxy_gets_no_name_with_a_forbidden_address(
    addresses: list[str], domains: dict[str, str], review: list[str], reason: str, message: str
) -> None:
    refusal = Decision("deny", "baseline_policy", reason, scope="non_domain", message=message)
    for is_local in (False, True):
        rules = (addresses, domains, review)
        assert _decide_upstream(*rules, allowLocalBinding=is_local) == refusal


@pytest.mark.parametrize(
    ("domains", "review", "is_allowed"),
    [
        ({}, [], True),
        ({"bad.test": "deny", "*.bad.de": "deny"}, ["**.review.test"], True),
        ({"8.8.8.8": "deny"}, [], False),
        ({"2001:db8:*": "deny"}, [], False),
        ({}, ["10.0.0.?"], False),
        ({}, ["a.test", "10.0.0.1"], True),  # a reviewed name may have reviewed addresses
        ({"10.0.0.1": "deny"}, ["a.test"], False),
    ],
)
@pytest.mark.parametrize("addresses", [_SILENT, ["slow"]])
def test_a_name_that_only_the_upstream_proxy_knows(
    monkeypatch: pytest.MonkeyPatch,
    addresses: list[str],
    domains: dict[str, str],
    review: list[str],
    is_allowed: bool,
) -> None:
    monkeypatch.setattr(module, "LOOKUP_SECONDS", 0.01)
    decision = _decide_upstream(addresses, domains, review, allowLocalBinding=True)
    assert decision.is_allowed == is_allowed
    assert decision.message == ("" if is_allowed else _UNCOMPARED)
    # Without local binding the addresses have to be known and public, as in the reference.
    assert _decide_upstream(addresses, domains, review).reason == "not_allowed_local"


def test_the_sentence_about_an_upstream_proxy_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _decide_upstream(["8.8.8.8"], {"8.8.8.8": "deny"}, [])
    assert caplog.messages == [f"process p: http to a.test:80 is refused: denied ({_FORBIDDEN})"]


def test_an_allowed_name_goes_upstream_with_its_addresses() -> None:
    decision = _decide_upstream(["1.1.1.1"], {"8.8.8.8": "deny"}, ["9.9.9.9"])
    assert decision == Decision("allow", "baseline_policy", "allow", ("1.1.1.1",))
    # Without rules about addresses there is nothing to compare.
    assert _decide_upstream(_MANY, {}, []).is_allowed


def test_a_limited_process_is_told_of_its_mode_only() -> None:
    client = FakeClient(addresses=["10.0.0.1"])
    domains = {"*": "allow", "10.0.0.1": "deny"}
    decision = client.decide(
        "a.test", domains=domains, allowLocalBinding=True, mode="limited", method="POST"
    )
    assert decision.reason == "method_not_allowed"
    assert [each.reason for each in client.reports] == ["allow", "method_not_allowed"]


def test_silent_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOKUP_SECONDS", 0.01)
    assert FakeClient(addresses=["slow"]).decide("a.test").reason == "not_allowed_local"


def test_local_binding_dials_any_address() -> None:
    client = FakeClient(addresses=["127.0.0.1"])
    assert client.decide("a.test", allowLocalBinding=True).addresses == ("127.0.0.1",)
    client.addresses = ()
    # Allowed, but there is nothing to dial.
    assert client.decide("a.test", allowLocalBinding=True) == Decision(
        "allow", "baseline_policy", "allow"
    )


def test_addresses_are_not_looked_up() -> None:
    client = FakeClient()
    assert client.decide("8.8.8.8").addresses == ("8.8.8.8",)
    assert client.looked_up == []


def test_client_allows() -> None:
    client = FakeClient(_allow())
    decision = client.decide("a.test", domains=None, timeout=1000)
    assert decision == Decision("allow", "decider", "not_allowed", ("8.8.8.8",), is_override=True)
    assert client.asked == [PolicyParams("p", Destination("http", "a.test", 80))]
    assert client.reports[0].policy_override


def test_client_cannot_allow_local_addresses() -> None:
    client = FakeClient(_allow(), ["10.0.0.1"])
    decision = client.decide("a.test", domains=None, timeout=1000)
    assert (decision.outcome, decision.reason) == ("deny", "not_allowed_local")
    assert "a.test leads to the local address 10.0.0.1" in decision.message
    assert client.decide("10.0.0.1", domains=None, timeout=1000).reason == "not_allowed_local"
    assert len(client.asked) == 1


def test_reviewed_names_are_asked_about() -> None:
    client = FakeClient({"decision": {"type": "deny", "reason": "reviewed"}})
    decision = client.decide("a.test", reviewDomains=["a.test"], timeout=1000)
    assert decision == Decision("deny", "decider", "reviewed")
    assert client.decide("a.test", reviewDomains=["a.test"]).reason == "not_allowed"


def test_unusable_hosts_are_not_asked_about() -> None:
    client = FakeClient(_allow())
    assert client.decide("a b", timeout=1000) == Decision("deny", "baseline_policy", "not_allowed")
    assert client.asked == []


@pytest.mark.parametrize(
    ("answer", "decision"),
    [
        ({"type": "deny", "reason": "no"}, Decision("deny", "decider", "no")),
        ({"type": "ask", "reason": "later"}, Decision("ask", "decider", "later")),
        ({"type": "deny", "reason": ""}, Decision("deny", "decider", "policy_denied")),
        ({"type": "deny"}, Decision("deny", "decider", "not_allowed")),
        ({"type": "deny", "reason": "x" * 1025}, Decision("deny", "decider", "not_allowed")),
        ({"type": "deny", "reason": "a\nb"}, Decision("deny", "decider", "not_allowed")),
        ({"type": "deny", "reason": "a\x85b"}, Decision("deny", "decider", "not_allowed")),
        ({"type": "perhaps"}, Decision("deny", "decider", "not_allowed")),
        (None, Decision("deny", "decider", "not_allowed")),
    ],
)
def test_other_answers(answer: object, decision: Decision) -> None:
    client = FakeClient({"decision": answer})
    assert client.decide("a.test", domains=None, timeout=1000) == decision


@pytest.mark.parametrize("result", [None, 5, {}, [], "allow", {"decision": "allow"}])
def test_results_without_a_decision(result: object) -> None:
    assert decode_answer(result) is None


def test_longest_reason() -> None:
    answer = decode_answer({"decision": {"type": "ask", "reason": "é" * 512}})
    assert answer is not None
    assert answer.reason == "é" * 512


def test_silent_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exec_server.proxy.policy.ANSWER_GRACE_SECONDS", 0.01)
    decision = FakeClient("silence").decide("a.test", domains=None, timeout=1)
    assert decision == Decision("deny", "decider", "not_allowed")


def test_limited_mode_reports_both_decisions() -> None:
    client = FakeClient()
    decision = client.decide("a.test", mode="limited", method="POST")
    assert decision == Decision("deny", "mode_guard", "method_not_allowed", scope="non_domain")
    assert [(each.decision, each.source) for each in client.reports] == [
        ("allow", "baseline_policy"),
        ("deny", "mode_guard"),
    ]
    assert client.decide("bad.test", mode="limited", method="POST").reason == "denied"
    assert client.decide("a.test", mode="limited").is_allowed


@pytest.mark.parametrize(
    ("host", "port", "reasons"),
    [
        ("bad.test", 80, ["method_not_allowed"]),
        ("bad.test", 443, ["denied"]),
        ("a.test", 443, ["allow", "mitm_required"]),
    ],
)
def test_limited_mode_and_socks(host: str, port: int, reasons: list[str]) -> None:
    client = FakeClient(_allow())
    decision = client.decide(
        host, mode="limited", method=None, protocol="socks5_tcp", port=port, timeout=1
    )
    assert decision.reason == reasons[-1]
    assert [each.reason for each in client.reports] == reasons
    assert client.asked == []
