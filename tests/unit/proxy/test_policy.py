"""What the rules of a process say about a request, in the order of the specification."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.network import launch

from exec_server.errors import InvalidParams
from exec_server.protocol.network import NetworkProxy
from exec_server.proxy.policy import Decision, NetworkPolicy, Verdict, check


def _policy(domains: dict[str, str], **members: Any) -> NetworkPolicy:
    return NetworkPolicy(launch(domains=domains, **members))


@pytest.mark.parametrize(
    ("host", "verdict"),
    [
        ("a.test", "allow"),
        ("bad.test", "denied"),
        ("x.bad.test", "allow"),
        ("review.test", "not_allowed"),
        ("other", "not_allowed"),
        ("localhost", "not_allowed_local"),
        ("10.0.0.1", "not_allowed_local"),
        ("::1", "not_allowed_local"),
        ("::ffff:10.0.0.1", "not_allowed_local"),
        ("127.0.0.1", "allow"),
        ("127.0.0.2", "denied"),
        ("8.8.8.8", "not_allowed"),
        ("", "not_allowed"),
        ("a b.test", "not_allowed"),
        ("none.example", "not_allowed"),
    ],
)
def test_verdicts(host: str, verdict: Verdict) -> None:
    policy = _policy(
        {
            "**.test": "allow",
            "bad.test": "deny",
            "127.0.0.1": "allow",
            "127.0.0.2": "deny",
            "none.example": "none",
        },
        reviewDomains=["review.test"],
    )
    assert policy.verdict(host) == verdict


def test_a_wildcard_allows_no_local_host() -> None:
    policy = _policy({"*": "allow"})
    assert policy.verdict("8.8.8.8") == policy.verdict("a.test") == "allow"
    for host in ("localhost", "127.0.0.1", "::1", "192.168.0.1"):
        assert policy.verdict(host) == "not_allowed_local"


def test_local_binding_allows_local_hosts_that_are_listed() -> None:
    policy = _policy({"*": "allow", "bad": "deny"}, allowLocalBinding=True)
    assert policy.verdict("127.0.0.1") == policy.verdict("localhost") == "allow"
    assert policy.verdict("bad") == "denied"
    assert policy.may_dial("a.test", ["127.0.0.1"])
    assert _policy({}, allowLocalBinding=True).verdict("127.0.0.1") == "not_allowed"


def test_addresses_of_an_allowed_name() -> None:
    policy = _policy({"a.test": "allow", "localhost": "allow", "10.0.0.1": "allow"})
    assert policy.may_dial("a.test", ["8.8.8.8", "2606:4700::1111"])
    assert not policy.may_dial("a.test", ["8.8.8.8", "10.0.0.1"])
    assert policy.may_dial("localhost", ["127.0.0.1", "::1"])
    assert policy.may_dial("10.0.0.1", ["10.0.0.1"])


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::ffff:0.0.0.0", "::"])
def test_a_deny_holds_for_every_address_that_leads_there(address: str) -> None:
    policy = _policy({"*": "allow", "127.0.0.1": "deny"}, allowLocalBinding=True)
    assert policy.address_refusal("a.test", address) == "denied"
    for other in ("127.0.0.2", "::1"):
        assert policy.address_refusal("a.test", other) is None


def test_limited_mode() -> None:
    policy = _policy({}, mode="limited")
    for method in ("GET", "HEAD", "OPTIONS"):
        assert policy.mode_refusal("http", method, 80) is None
    for other in ("POST", "get", "TRACE", None):
        assert policy.mode_refusal("http", other, 80) == "method_not_allowed"
    assert policy.mode_refusal("https_connect", "CONNECT", 443) == "mitm_required"
    assert policy.mode_refusal("socks5_tcp", None, 443) == "mitm_required"
    assert policy.mode_refusal("socks5_tcp", None, 80) == "method_not_allowed"
    assert policy.mode_refusal("socks5_udp", None, 443) == "method_not_allowed"
    assert _policy({}).mode_refusal("http", "POST", 80) is None


def test_tunnels_of_a_limited_process_with_masked_credentials_are_inspected() -> None:
    policy = _policy({}, mode="limited", credentialMasking=True)
    assert policy.mode_refusal("https_connect", "CONNECT", 443) is None
    assert policy.mode_refusal("https_connect", "CONNECT", 8443) is None
    assert policy.mode_refusal("socks5_tcp", None, 443) is None
    assert policy.mode_refusal("socks5_tcp", None, 80) == "method_not_allowed"
    assert policy.mode_refusal("http", "POST", 80) == "method_not_allowed"


def test_time_for_an_answer() -> None:
    assert _policy({}).answer_seconds is None
    assert NetworkPolicy(launch(timeout=500)).answer_seconds == 5.5
    assert NetworkPolicy(launch(timeout=2**64 - 1)).answer_seconds == 86_405


def test_decisions() -> None:
    assert Decision("allow", "decider", "not_allowed").is_allowed
    assert not Decision("ask", "decider", "later").is_allowed


@pytest.mark.parametrize(
    ("proxy", "process_id", "text"),
    [
        (
            launch(enabled=False),
            "p",
            "invalid network proxy config: executor-local network proxy launch requires an "
            "enabled proxy",
        ),
        (launch(timeout=0), "p", "network policy decision callback timeout must be nonzero"),
        (
            launch(timeout=1),
            "",
            "callback-enabled process ID must be non-empty and at most 256 bytes",
        ),
        (
            launch(timeout=1),
            "ü" * 129,
            "callback-enabled process ID must be non-empty and at most 256 bytes",
        ),
        (
            launch(unixSockets={"/a": "allow", "x": "allow"}),
            "p",
            "invalid network proxy config: invalid network.allow_unix_sockets[1]: expected a "
            'NUL-free absolute path for Linux, got "x"',
        ),
        (
            launch(unixSockets={"/a\0b": "allow"}),
            "p",
            "invalid network proxy config: invalid network.allow_unix_sockets[0]: expected a "
            'NUL-free absolute path for Linux, got "/a\\0b"',
        ),
    ],
)
def test_refused_launches(proxy: NetworkProxy, process_id: str, text: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        check(proxy, process_id)
    assert caught.value.message == text


def test_accepted_launches() -> None:
    check(launch(), "")
    check(launch(timeout=1, unixSockets={"/a": "allow", "x": "deny"}), "ü" * 128)
    check(launch(unixSockets=None), "p")
