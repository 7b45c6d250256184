"""Managed settings: the requirements that they amount to, and their faults."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.codex.config import implied_requirements
from exec_server.errors import InternalError

_GRANULAR = {"sandbox_approval": True, "rules": False, "mcp_elicitations": True}


@pytest.mark.parametrize(
    ("managed", "expected"),
    [
        ({}, {}),
        ({"approval_policy": "never"}, {"allowed_approval_policies": ["never"]}),
        ({"approval_policy": {"never": {}}}, {"allowed_approval_policies": ["never"]}),
        ({"approval_policy": "on-failure"}, {"allowed_approval_policies": ["on-request"]}),
        ({"sandbox_mode": {"read-only": {}}}, {"allowed_sandbox_modes": ["read-only"]}),
        ({"approvals_reviewer": {"user": {}}}, {"allowed_approvals_reviewers": ["user"]}),
        (
            {"approval_policy": {"granular": _GRANULAR | {"unknown": 1}}},
            {
                "allowed_approval_policies": [
                    {
                        "granular": {
                            **_GRANULAR,
                            "skill_approval": False,
                            "request_permissions": False,
                        }
                    }
                ]
            },
        ),
    ],
)
def test_requirements(managed: dict[str, Any], expected: dict[str, Any]) -> None:
    assert implied_requirements(managed) == expected


_MODES = "sandbox_mode: expected one of read-only, workspace-write, danger-full-access"
_TABLE = "approval_policy.granular: expected a table with members"


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("sandbox_mode", "x", _MODES),
        ("sandbox_mode", 1, _MODES),
        ("sandbox_mode", {}, _MODES),
        ("sandbox_mode", {"a": 1, "b": 2}, _MODES),
        ("sandbox_mode", {"a": 1}, _MODES),
        ("sandbox_mode", ["read-only"], _MODES),
        (
            "sandbox_mode",
            {"read-only": 1},
            "sandbox_mode.read-only: expected a table without members",
        ),
        (
            "sandbox_mode",
            {"read-only": {"a": 1}},
            "sandbox_mode.read-only: expected a table without members",
        ),
        ("approval_policy", "granular", _TABLE),
        ("approval_policy", {"granular": 5}, _TABLE),
        (
            "approval_policy",
            {"granular": {"sandbox_approval": True}},
            "approval_policy.granular.rules: expected a boolean",
        ),
        (
            "approval_policy",
            {"granular": _GRANULAR | {"skill_approval": []}},
            "approval_policy.granular.skill_approval: expected a boolean",
        ),
    ],
)
def test_faults(key: str, value: Any, fault: str) -> None:
    with pytest.raises(InternalError) as caught:
        implied_requirements({key: value})
    assert caught.value.message == f"Failed to parse config requirements as TOML: {fault}"
