"""CommandDenials: the rule behind the failure of a command."""

from __future__ import annotations

import contextlib
import socket

import pytest

from exec_server.protocol.process import OutputChunk
from exec_server.protocol.sandbox import Denial
from exec_server.sandbox.commands import CommandDenials
from exec_server.sandbox.policy.model import Network, Policy, Rule
from exec_server.sandbox.runtime.messages import CommandReports

READ_ONLY = "no policy entry allows writing here; the closest one is: read /"


def _policy(*rules: Rule, network: Network = "restricted") -> Policy:
    return Policy((Rule("/", "read"), *rules), (), network)


def _output(text: str) -> list[OutputChunk]:
    return [OutputChunk(1, "stderr", text.encode())]


READ_ONLY_ERROR = "touch: cannot touch '/etc/x': Read-only file system"


def test_a_command_that_was_denied_nothing() -> None:
    assert CommandDenials(_policy(), "/").check(0, _output("permission denied")) == (False, None)
    assert CommandDenials(_policy(), "/").check(1, _output("no such file")) == (False, None)


def test_a_command_that_was_denied_a_read() -> None:
    output = _output("cat: /x/y: Permission denied\n")
    policy = _policy(Rule("/x", "deny"))
    expected = Denial("cat: /x/y: Permission denied", "/x/y", "read", "deny entry /x")
    assert CommandDenials(policy, "/").check(1, output) == (True, expected)


def test_a_successful_command_is_not_denied_but_its_denial_is_known() -> None:
    denials = CommandDenials(_policy(), "/")
    expected = Denial(READ_ONLY_ERROR, "/etc/x", "write", READ_ONLY)
    assert denials.check(0, _output(READ_ONLY_ERROR)) == (False, expected)


def test_words_spread_over_streams_are_a_denial_without_a_line() -> None:
    chunks = [OutputChunk(1, "stdout", b"permission "), OutputChunk(2, "stderr", b"denied")]
    expected = (True, Denial(None, None, None, None))
    assert CommandDenials(_policy(), "/").check(1, chunks) == expected


# ---- refused calls --------------------------------------------------------------------


def _followed(policy: Policy, report: bytes) -> tuple[CommandDenials, socket.socket]:
    """The denials of a command whose init has reported something and ended."""
    control, init = socket.socketpair()
    denials = CommandDenials(policy, "/")
    denials.follow(CommandReports(control))
    with init, contextlib.suppress(OSError):
        init.send(report)
    return denials, control


@pytest.mark.parametrize("exit_code", [0, 6])
def test_a_reported_call_is_a_denial_of_the_network(exit_code: int) -> None:
    denials, control = _followed(_policy(), b"r")
    line = "curl: (6) Could not resolve host: example.com"
    expected = Denial(line, None, "network", "network access is restricted")
    assert denials.check(exit_code, _output(line)) == (False, expected)
    assert control.fileno() == -1


@pytest.mark.parametrize(
    ("policy", "report"),
    [(_policy(), b""), (_policy(network="enabled"), b"r"), (Policy(None, (), "restricted"), b"r")],
)
def test_without_a_report_there_is_none(policy: Policy, report: bytes) -> None:
    denials, control = _followed(policy, report)
    line = "curl: (6) Could not resolve host: example.com"
    assert denials.check(6, _output(line)) == (False, None)
    assert control.fileno() == -1


def test_what_the_proxies_refuse_is_a_denial_of_a_failed_command() -> None:
    rule = "the network proxy refuses a.test:443 (no rule allows it)"
    line = "curl: (56) CONNECT tunnel failed, response 403"
    denials = CommandDenials(_policy(network="proxied"), "/", lambda: rule)
    assert denials.check(56, _output(line)) == (False, Denial(line, None, "network", rule))
    assert denials.check(0, _output(line)) == (False, None)


def test_a_report_may_be_missing_while_the_init_lives() -> None:
    control, init = socket.socketpair()
    denials = CommandDenials(_policy(), "/")
    denials.follow(CommandReports(control))
    with init:
        assert denials.check(1, []) == (False, None)


def test_a_command_that_was_not_started_has_no_report() -> None:
    assert CommandDenials(_policy(), "/").check(1, []) == (False, None)
