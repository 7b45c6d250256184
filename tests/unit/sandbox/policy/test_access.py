"""The access that rules grant at a path, and the rule that a denial names."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from exec_server.sandbox.policy.access import (
    allows_all_reads,
    explain_denial,
    merge_rules,
    policy_access,
)
from exec_server.sandbox.policy.model import Access, Glob, Policy, Rule

Pair = tuple[str, Access]

READ_ALL: Pair = ("/", "read")
WRITE_ALL: Pair = ("/", "write")
KEYS = Glob("/ws", "**/*.key", None)
NO_LIMITS = Policy(None, (), "restricted")


def policy(*pairs: Pair, globs: tuple[Glob, ...] = ()) -> Policy:
    return Policy(merge_rules(pairs), globs, "restricted")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (policy(READ_ALL), True),
        (policy(READ_ALL, ("/ws", "write"), ("/ws/ro", "read")), True),
        (policy(WRITE_ALL), True),
        (NO_LIMITS, True),
        (policy(READ_ALL, ("/x", "deny")), False),
        (policy(READ_ALL, globs=(KEYS,)), False),
        (policy(("/ws", "read")), False),
        (policy(), False),
    ],
)
def test_reads_are_direct_only_if_nothing_is_hidden(found: Policy, expected: bool) -> None:
    assert allows_all_reads(found) is expected


def test_the_deepest_rule_decides_by_whole_names() -> None:
    found = policy(READ_ALL, ("/ws", "write"), ("/ws/a", "deny"))
    assert policy_access(found, "/ws/ab") == "write"
    assert policy_access(found, "/ws/a/b") == "deny"
    assert policy_access(found, "/wsx") == "read"
    assert policy_access(policy(("/ws", "read")), "/x") is None
    assert policy_access(NO_LIMITS, "/x") == "write"


@pytest.mark.parametrize(
    ("where", "operation", "reason"),
    [
        ("/ws/a", "write", None),
        ("/ws/.git", "read", None),
        ("/ws/.git/config", "write", "`.git` below the writable root /ws is protected"),
        ("/ws/.git/hooks/h", "write", None),
        ("/ws/x/.git", "write", None),
        ("/etc/x", "write", "no policy entry allows writing here; the closest one is: read /"),
        (
            "/ws/ro/x",
            "write",
            "no policy entry allows writing here; the closest one is: read /ws/ro",
        ),
        ("/ws/sub/x", "read", "deny entry /ws/sub"),
        ("/ws/b/a.key", "read", "deny glob /ws/**/*.key"),
        ("/ws/b/a.key", "write", "deny glob /ws/**/*.key"),
        ("/ws/b.key/a", "read", "deny glob /ws/**/*.key"),
    ],
)
def test_a_denial_names_its_rule(where: str, operation: Any, reason: str | None) -> None:
    found = policy(
        READ_ALL,
        ("/ws", "write"),
        ("/ws/ro", "read"),
        ("/ws/sub", "deny"),
        ("/ws/.git/hooks", "write"),
        globs=(KEYS,),
    )
    assert explain_denial(found, where, operation) == reason


def test_only_a_writable_entry_is_reopened_below_a_glob() -> None:
    found = policy(READ_ALL, ("/ws/a.key/w", "write"), ("/ws/a.key/r", "read"), globs=(KEYS,))
    assert explain_denial(found, "/ws/a.key/w/x", "write") is None
    assert explain_denial(found, "/ws/a.key/r/x", "read") == "deny glob /ws/**/*.key"


def test_a_path_without_an_entry_is_explained_so() -> None:
    assert (
        explain_denial(policy(("/ws", "read")), "/etc", "read")
        == "no policy entry covers this path"
    )
    assert explain_denial(NO_LIMITS, "/.git", "write") is None
    narrowed = policy(WRITE_ALL, ("/x", "read"))
    expected = "`.git` below the writable root / is protected"
    assert explain_denial(narrowed, "/.git", "write") == expected


def test_rules_are_merged_in_any_order() -> None:
    expected = (Rule("/a", "deny"), Rule("/a/b", "write"))
    assert merge_rules([("/a/b", "write"), ("/a/c", "read"), ("/a", "deny")]) == expected


@pytest.mark.parametrize("order", list(permutations(("read", "write", "deny"))))
def test_the_strongest_of_several_entries_for_a_path_holds(order: tuple[Access, ...]) -> None:
    assert merge_rules(("/a", access) for access in order) == (Rule("/a", "deny"),)
    weaker = [access for access in order if access != "deny"]
    assert merge_rules(("/a", access) for access in weaker) == (Rule("/a", "write"),)


def test_a_deny_of_everything_removes_only_entries_for_everything() -> None:
    stated: list[Pair] = [("/", "deny"), WRITE_ALL, ("/a", "read")]
    assert merge_rules(stated) == (Rule("/a", "read"),)
