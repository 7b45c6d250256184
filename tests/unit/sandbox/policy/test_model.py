"""The restrictions of commands, for views, networks and kernels."""

from __future__ import annotations

import pytest
from tests.support.layout_model import Tree

from exec_server.sandbox.policy.access import PROTECTED_NAMES, merge_rules
from exec_server.sandbox.policy.layout import lay_out
from exec_server.sandbox.policy.model import (
    Access,
    Network,
    Policy,
    Restrictions,
    View,
    choose_restrictions,
)

_TREE = Tree([("/ws/a.txt", b""), ("/ws/.git", None), ("/ws/sub/deep", None), ("/out", None)])
_BEST = (True, True, 7)
_READ_ALL: tuple[str, Access] = ("/", "read")
_UNPROTECTED: list[tuple[str, Access]] = [(f"/ws/{name}", "write") for name in PROTECTED_NAMES[1:]]


def _view(*claims: tuple[str, Access], denied: tuple[str, ...] = ()) -> View:
    return lay_out(Policy(merge_rules(claims), (), "restricted"), _TREE, denied)


def _restrictions(
    view: View | None, network: Network = "restricted", kernel: tuple[bool, bool, int] = _BEST
) -> Restrictions:
    user_namespace, private_proc, landlock = kernel
    return choose_restrictions(
        view, network, user_namespace=user_namespace, private_proc=private_proc, landlock=landlock
    )


def _allows_nesting(*claims: tuple[str, Access], denied: tuple[str, ...] = ()) -> bool:
    return _restrictions(_view(*claims, denied=denied)).allow_nesting


@pytest.mark.parametrize("kernel", [_BEST, (False, False, 0)])
def test_nothing_is_added_where_files_are_not_limited(kernel: tuple[bool, bool, int]) -> None:
    assert _restrictions(None, "restricted", kernel) == Restrictions(True, False, True, True, True)


def test_a_command_with_proxies_nests_no_namespaces() -> None:
    assert _restrictions(None, "proxied") == Restrictions(False, False, True, True, True)
    assert not _restrictions(_view(_READ_ALL), "proxied").allow_nesting
    assert _restrictions(_view(_READ_ALL), "restricted").allow_nesting


def test_no_nesting_above_the_mounts_of_the_host() -> None:
    view = _view(("/ws", "read"))
    for covers_host, allows in ((False, True), (True, False)):
        found = choose_restrictions(
            view,
            "restricted",
            user_namespace=True,
            private_proc=True,
            landlock=7,
            covers_host=covers_host,
        )
        assert (found.allow_nesting, found.file_rights) == (allows, not allows)


# User namespace, private /proc, version of Landlock; then file rights, unix sockets of a command
# with network, and whether other commands are out of reach.
_KERNELS = [
    ((True, True, 7), (True, True, True)),
    ((True, True, 2), (True, True, True)),
    ((True, True, 1), (False, False, True)),
    ((True, True, 0), (False, False, True)),
    ((True, False, 1), (False, False, True)),
    ((False, True, 7), (True, True, True)),
    ((False, True, 1), (False, False, True)),
    ((False, False, 7), (True, True, True)),
    ((False, False, 1), (True, True, True)),
    ((False, False, 0), (False, False, False)),
]


@pytest.mark.parametrize("access", ["read", "write"])
@pytest.mark.parametrize(("kernel", "expected"), _KERNELS)
def test_restrictions_of_a_command_with_network(
    kernel: tuple[bool, bool, int], expected: tuple[bool, bool, bool], access: Access
) -> None:
    found = _restrictions(_view(_READ_ALL, ("/ws", access)), "enabled", kernel)
    assert found == Restrictions(False, *expected, exclusive_locks=access == "write")


@pytest.mark.parametrize(("kernel", "expected"), _KERNELS)
def test_restrictions_of_a_command_that_can_change_nothing(
    kernel: tuple[bool, bool, int], expected: tuple[bool, bool, bool]
) -> None:
    found = _restrictions(_view(_READ_ALL), "restricted", kernel)
    # Nested namespaces need a user namespace around them, and exclude file rights.
    file_rights = expected[0] and not kernel[0]
    assert found == Restrictions(kernel[0], file_rights, True, expected[2], exclusive_locks=False)


@pytest.mark.parametrize(
    "claims",
    [
        [_READ_ALL],
        [_READ_ALL, ("/ws/sub", "deny")],
        [_READ_ALL, ("/ws/a.txt", "write")],
        [("/ws", "read"), ("/ws/sub", "deny")],
        [_READ_ALL, ("/ws/sub/deep", "deny"), ("/ws/missing", "deny")],
    ],
)
def test_nesting_stays_where_nothing_is_covered_in_a_writable_place(
    claims: list[tuple[str, Access]],
) -> None:
    assert _allows_nesting(*claims)
    assert _allows_nesting(*claims, denied=("/ws/sub/deep/x",))


@pytest.mark.parametrize(
    "claims",
    [
        [_READ_ALL, ("/ws", "write")],
        [("/ws", "write")],
        [_READ_ALL, ("/out", "write")],  # its protected names are missing
        [("/", "write"), ("/ws/sub", "deny")],
        [_READ_ALL, ("/ws", "write"), ("/ws/.git", "write"), *_UNPROTECTED, ("/ws/sub", "read")],
    ],
)
def test_no_nesting_around_covers(claims: list[tuple[str, Access]]) -> None:
    assert not _allows_nesting(*claims)


def test_a_denied_file_in_a_writable_place_is_a_cover() -> None:
    tree = Tree([("/ws/a.key", b"")])
    unprotected: list[tuple[str, Access]] = [(f"/ws/{name}", "write") for name in PROTECTED_NAMES]
    policy = Policy(merge_rules([_READ_ALL, ("/ws", "write"), *unprotected]), (), "restricted")
    assert _restrictions(lay_out(policy, tree)).allow_nesting
    assert not _restrictions(lay_out(policy, tree, ["/ws/a.key"])).allow_nesting
