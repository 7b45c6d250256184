"""The requirements that managed settings amount to, with the faults of the reference. Pure.

A setting is a text, or a table with one key: `never` and `{never = {}}` are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

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
_TYPES: Final = {bool: "boolean", int: "integer", float: "float", str: "string", list: "array"}


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
    chosen = value
    if isinstance(value, dict):
        if len(value) != 1:
            found = "more than 1 element" if value else "found 0 elements"
            raise _fault(f"wanted exactly 1 element, {found}", key)
        (chosen,) = value
    if not isinstance(chosen, str):
        raise _fault("invalid type: unit variant, expected string only", key)
    if chosen not in choices:
        expected = ", ".join(f"`{choice}`" for choice in choices)
        raise _fault(f"unknown variant `{chosen}`, expected one of {expected}", key)
    if chosen == _GRANULAR:
        if not isinstance(value, dict):
            raise _fault("invalid type: unit variant, expected newtype variant", key)
    elif isinstance(value, dict) and value[chosen] != {}:
        found = "table with members" if isinstance(value[chosen], dict) else _type(value[chosen])
        raise _fault(f"expected table, found {found}", key)
    return chosen


def _granular(value: Table) -> Table:
    """The table of the granular policy with all its members."""
    given = value[_GRANULAR]
    key = "approval_policy"
    if not isinstance(given, dict):
        raise _fault(f"invalid type: {_shown(given)}, expected struct GranularApprovalConfig", key)
    for name in _GRANULAR_MEMBERS:
        if name in given and not isinstance(given[name], bool):
            fault = f"invalid type: {_shown(given[name])}, expected a boolean"
            raise _fault(fault, f"{key}.{name}")
    members = {name: given.get(name, default) for name, default in _GRANULAR_MEMBERS.items()}
    missing = next((name for name, member in members.items() if member is None), None)
    if missing is not None:
        raise _fault(f"missing field `{missing}`", key)
    return {_GRANULAR: members}


def _type(value: Any) -> str:
    """The name of the type of a value."""
    return _TYPES.get(type(value), "table" if isinstance(value, dict) else "datetime")


def _shown(value: Any) -> str:
    """A value in a fault: numbers and booleans with what they are."""
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int | float):
        return f"{'integer' if isinstance(value, int) else 'floating point'} `{value}`"
    return {"string": "string", "array": "sequence"}.get(_type(value), "map")


def _fault(text: str, place: str) -> InternalError:
    return InternalError(f"Failed to parse config requirements as TOML: {text}\nin `{place}`\n")
