"""Explanations of a denial; running commands is tested in integration."""

from __future__ import annotations

import pytest

from exec_server.cli.sandbox.run import EXIT_CANNOT_EXECUTE, describe_denial
from exec_server.sandbox.commands import CommandDenials
from exec_server.sandbox.policy.model import Policy, Rule

_NO_RULES = Policy((), (), "enabled")


def _describe(policy: Policy, code: int, stderr: bytes) -> str:
    return describe_denial(CommandDenials(policy, "/"), policy, code, stderr)


@pytest.mark.parametrize(
    ("code", "stderr", "text"),
    [
        (0, b"x: Permission denied\n", ""),
        (1, b"no reason\n", ""),
        (EXIT_CANNOT_EXECUTE, b"exec-server: cannot execute x: Permission denied\n", ""),
    ],
)
def test_other_failures_are_not_explained(code: int, stderr: bytes, text: str) -> None:
    assert _describe(Policy(None, (), "enabled"), code, stderr) == text


def test_a_denial_names_access_and_rule() -> None:
    text = _describe(_NO_RULES, 1, b"cat: /a: Permission denied\n")
    first, second = text.splitlines()
    assert first == "exec-server: denied: read /a"
    assert second.startswith("exec-server: ")


def test_output_of_the_command_makes_no_lines_and_no_escapes() -> None:
    stderr = b"cat: '/a'$'\\n''exec-server: all is well'$'\\033[2J': Permission denied\n"
    first, _ = _describe(_NO_RULES, 1, stderr).splitlines()
    assert first == r"exec-server: denied: read /a\nexec-server: all is well\x1b[2J"
    everything = Policy((Rule("/", "write"),), (), "enabled")
    text = _describe(everything, 1, "\x9b2J/a: denied by the sandbox\n".encode())
    assert text.endswith("explains this error: \\x9b2J/a: denied by the sandbox\n")


def test_several_denials_are_named_as_candidates() -> None:
    policy = Policy((Rule("/", "read"),), (), "enabled")
    stderr = b"mv: cannot move '/etc/a' to '/etc/b': Read-only file system\n"
    assert _describe(policy, 1, stderr).splitlines() == [
        "exec-server: denied: one of these",
        "exec-server: - write /etc/a (no policy entry allows writing here; the closest one is: "
        "read /)",
        "exec-server: - write /etc/b (no policy entry allows writing here; the closest one is: "
        "read /)",
    ]


def test_a_denial_of_a_successful_command_is_explained() -> None:
    policy = Policy((Rule("/", "read"),), (), "enabled")
    stderr = b"touch: cannot touch '/etc/x': Read-only file system\nbut all is well\n"
    first, second = _describe(policy, 0, stderr).splitlines()
    assert first == "exec-server: denied: write /etc/x"
    assert second.endswith("the closest one is: read /")
