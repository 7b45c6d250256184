"""Describes an access that a sandbox has denied, for people."""

from __future__ import annotations

from exec_server.protocol.sandbox import Denial


def denial_lines(denial: Denial) -> list[str]:
    """The denied access and the rule of the policy; empty if no rule is known to forbid it."""
    if denial.rule is None:
        return []
    return [f"denied: {_access(denial)}", denial.rule]


def _access(denial: Denial) -> str:
    if denial.operation == "network":
        return "network access"
    if denial.operation == "syscall" or denial.path is None:
        return "a system call"
    return f"{denial.operation} {denial.path}"
