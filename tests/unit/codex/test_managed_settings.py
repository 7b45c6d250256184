"""Managed settings: the requirements that they amount to, and their faults."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.codex.managed_settings import implied_requirements
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


_MODES = "`read-only`, `workspace-write`, `danger-full-access`"


@pytest.mark.parametrize(
    ("key", "value", "fault", "place"),
    [
        ("sandbox_mode", {}, "wanted exactly 1 element, found 0 elements", ""),
        ("sandbox_mode", {"a": 1, "b": 2}, "wanted exactly 1 element, more than 1 element", ""),
        ("sandbox_mode", {"a": 1}, f"unknown variant `a`, expected one of {_MODES}", ""),
        ("sandbox_mode", {"read-only": 1}, "expected table, found integer", ""),
        ("sandbox_mode", {"read-only": {"a": 1}}, "expected table, found table with members", ""),
        ("sandbox_mode", ["read-only"], "invalid type: unit variant, expected string only", ""),
        (
            "approval_policy",
            "granular",
            "invalid type: unit variant, expected newtype variant",
            "",
        ),
        ("approval_policy", {"granular": {}}, "missing field `sandbox_approval`", ""),
        (
            "approval_policy",
            {"granular": {"sandbox_approval": True}},
            "missing field `rules`",
            "",
        ),
        (
            "approval_policy",
            {"granular": 5},
            "invalid type: integer `5`, expected struct GranularApprovalConfig",
            "",
        ),
        (
            "approval_policy",
            {"granular": True},
            "invalid type: boolean `true`, expected struct GranularApprovalConfig",
            "",
        ),
        (
            "approval_policy",
            {"granular": {"rules": 5}},
            "invalid type: integer `5`, expected a boolean",
            ".rules",
        ),
        (
            "approval_policy",
            {"granular": {"rules": []}},
            "invalid type: sequence, expected a boolean",
            ".rules",
        ),
    ],
)
def test_faults(key: str, value: Any, fault: str, place: str) -> None:
    with pytest.raises(InternalError) as caught:
        implied_requirements({key: value})
    prefix = "Failed to parse config requirements as TOML: "
    assert caught.value.message == f"{prefix}{fault}\nin `{key}{place}`\n"
