"""The access that a `Policy` grants at a path, and the rule that denies it. Pure.

Paths are compared as text: links are resolved by `layout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from exec_server.sandbox.policy import globs
from exec_server.sandbox.policy.model import Access, Policy, Rule

# Read-only directly below a writable root: their contents make other programs run code.
PROTECTED_NAMES: Final = (".git", ".agents", ".codex", ".aws")

_PRECEDENCE: Final[dict[Access, int]] = {"read": 0, "write": 1, "deny": 2}


def allows_all_reads(policy: Policy) -> bool:
    """Whether no read is denied, so that reads need no confined process."""
    if policy.globs:
        return False
    if policy.rules is None:
        return True
    return policy_access(policy, "/") is not None and all(
        rule.access != "deny" for rule in policy.rules
    )


def policy_access(policy: Policy, path: str) -> Access | None:
    """The access of the deepest rule above a path, without protected names and globs."""
    return "write" if policy.rules is None else rule_access(policy.rules, path)


def rule_access(rules: Sequence[Rule], path: str) -> Access | None:
    """The access of the deepest rule above a path; the rules are sorted as in a policy."""
    rule = _deepest(rules, path)
    return None if rule is None else rule.access


def explain_denial(policy: Policy, path: str, operation: Literal["read", "write"]) -> str | None:
    """The rule that denies an operation on a path without links, None if it is allowed."""
    writable = [rule.path for rule in policy.rules or () if rule.access == "write"]
    for glob in policy.globs:
        if globs.denies((glob,), path, writable):
            return f"deny glob {join(glob.root, glob.pattern)}"
    if policy.rules is None:
        return None
    rule = _deepest(policy.rules, path)
    if rule is None:
        return "no policy entry covers this path"
    if rule.access == "deny":
        return f"deny entry {rule.path}"
    if operation == "read":
        return None
    if rule.access == "read":
        return f"no policy entry allows writing here; the closest one is: read {rule.path}"
    name = path[len(rule.path) :].lstrip("/").partition("/")[0]
    if name in PROTECTED_NAMES:
        return f"`{name}` below the writable root {rule.path} is protected"
    return None


def merge_rules(stated: Iterable[tuple[str, Access]]) -> tuple[Rule, ...]:
    """The effective rules of all stated paths: sorted parents first, one per path.

    At one path deny overrides write, and write overrides read. A read below a deny has no
    effect. A deny of `/` itself only removes other entries for `/`: reads below it hold.
    """
    strongest: dict[str, Access] = {}
    for path, access in stated:
        known = strongest.get(path)
        if known is None or _PRECEDENCE[access] > _PRECEDENCE[known]:
            strongest[path] = access
    if strongest.get("/") == "deny":
        del strongest["/"]
    rules: list[Rule] = []
    for path in sorted(strongest, key=components):
        if strongest[path] == "read" and rule_access(rules, path) == "deny":
            continue
        rules.append(Rule(path, strongest[path]))
    return tuple(rules)


def contains(parent: str, path: str) -> bool:
    """Whether a path is `parent` or lies below it."""
    return parent in ("/", path) or path.startswith(parent + "/")


def components(path: str) -> list[str]:
    """The names in an absolute path; sorting by them puts parents first."""
    return [name for name in path.split("/") if name]


def join(directory: str, name: str) -> str:
    """The path of a name in a directory."""
    return f"{directory.rstrip('/')}/{name}"


def _deepest(rules: Sequence[Rule], path: str) -> Rule | None:
    # Rules that contain the same path contain each other, so the last one is the deepest.
    for rule in reversed(rules):
        if contains(rule.path, path):
            return rule
    return None
