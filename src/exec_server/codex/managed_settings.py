"""The requirements that managed settings amount to. Pure.

A setting is a text, or a table with one key: `never` and `{never = {}}` are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from exec_server.codex.selection import Table
from exec_server.errors import InternalError

_APPROVAL_POLICIES: Final = ("untrusted", "on-failure", "on-request", "granular", "never")
_REVIEWERS: Final = ("user", "auto_review", "guardian_subagent")
_SANDBOX_MODES: Final = ("read-only", "workspace-write", "danger-full-access")
# The only choice with members of its own, and their values if they are missing.
_GRANULAR: Final = "granular"
_GRANULAR_MEMBERS: Final = {
    "sandbox_approval": None,
    "rules": None,
    "skill_approval": False,
    "request_permissions": False,
    "mcp_elicitations": None,
}


def implied_requirements(managed: Table) -> Table:
    """The requirements of managed settings; raises InternalError for settings that are unknown."""
    implied: Table = {}
    approval = _choice(managed, "approval_policy", _APPROVAL_POLICIES)
    if approval == _GRANULAR:
        implied["allowed_approval_policies"] = [_granular(managed["approval_policy"])]
    elif approval is not None:
        # The older name of the reference for the same policy.
        policy = "on-request" if approval == "on-failure" else approval
        implied["allowed_approval_policies"] = [policy]
    reviewer = _choice(managed, "approvals_reviewer", _REVIEWERS)
    if reviewer is not None:
        allowed = ["user"] if reviewer == "user" else ["auto_review", "user"]
        implied["allowed_approvals_reviewers"] = allowed
    mode = _choice(managed, "sandbox_mode", _SANDBOX_MODES)
    if mode is not None:
        implied["allowed_sandbox_modes"] = list(dict.fromkeys(["read-only", mode]))
    return implied


def _choice(table: Table, key: str, choices: Sequence[str]) -> str | None:
    value = table.get(key)
    if value is None:
        return None
    chosen: object = value
    members: object = {}
    if isinstance(value, dict) and len(value) == 1:
        ((chosen, members),) = value.items()
    if not isinstance(chosen, str) or chosen not in choices:
        raise _fault(f"expected one of {', '.join(choices)}", key)
    if chosen == _GRANULAR:
        if not isinstance(value, dict) or not isinstance(members, dict):
            raise _fault("expected a table with members", f"{key}.{_GRANULAR}")
    elif members != {}:
        raise _fault("expected a table without members", f"{key}.{chosen}")
    return chosen


def _granular(value: Table) -> Table:
    """The table of the granular policy with all its members."""
    table = value[_GRANULAR]
    members = {name: table.get(name, default) for name, default in _GRANULAR_MEMBERS.items()}
    for name, member in members.items():
        if not isinstance(member, bool):
            raise _fault("expected a boolean", f"approval_policy.{_GRANULAR}.{name}")
    return {_GRANULAR: members}


def _fault(text: str, place: str) -> InternalError:
    return InternalError(f"Failed to parse config requirements as TOML: {place}: {text}")
