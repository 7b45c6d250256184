"""Resolution of paths on a disk in memory, and the entries that it depends on."""

from __future__ import annotations

import pytest
from tests.support.layout_model import Tree

from exec_server.errors import InternalError
from exec_server.sandbox.policy.resolver import MAX_LINKS, CrossedLink, DiskResolver

_TREE = Tree(
    [
        ("/ws/a.txt", b"text"),
        ("/ws/sub", None),
        ("/ws/link", "sub"),
        ("/ws/up", "../out"),
        ("/out/root", "/ws"),
        ("/ws/loop", "loop"),
    ]
)


def _dependencies(resolver: DiskResolver) -> list[str]:
    return [dependency.path for dependency in resolver.dependencies(())]


@pytest.mark.parametrize(
    ("path", "reached", "absent", "links"),
    [
        ("/", "/", (), []),
        ("/ws/a.txt", "/ws/a.txt", (), []),
        ("/ws/./sub/../sub", "/ws/sub", (), []),
        ("/ws/link/new/x", "/ws/sub", ("new", "x"), ["/ws/link"]),
        ("/ws/up/root/sub", "/ws/sub", (), ["/ws/up", "/out/root"]),
        ("/ws/a.txt/x", "/ws/a.txt", ("x",), []),
        ("/none/x", "/", ("none", "x"), []),
    ],
)
def test_a_path_is_resolved(
    path: str, reached: str, absent: tuple[str, ...], links: list[str]
) -> None:
    resolved = DiskResolver(_TREE).resolve(path)
    assert (resolved.path, resolved.absent) == (reached, absent)
    assert [link.path for link in resolved.links] == links
    assert resolved.node == _TREE.status(reached)


@pytest.mark.parametrize(("path", "base"), [("../link", "/ws/sub"), ("/ws/link", "/out")])
def test_only_a_relative_path_starts_at_its_base(path: str, base: str) -> None:
    resolved = DiskResolver(_TREE).resolve(path, base)
    assert (resolved.path, resolved.links) == ("/ws/sub", (CrossedLink("/ws/link", "sub"),))


def test_a_loop_of_links_ends() -> None:
    resolved = DiskResolver(_TREE).resolve("/ws/loop/x")
    assert (resolved.path, resolved.absent) == ("/ws", ("loop", "x"))
    assert len(resolved.links) == MAX_LINKS + 1


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/ws/sub", ["/ws/sub"]),
        ("/ws/link", ["/ws/link", "/ws/sub"]),
        ("/ws/new/x", ["/ws/new"]),
        ("/ws/a.txt/x", ["/ws/a.txt"]),
        ("/ws/sub/../a.txt", ["/ws/a.txt", "/ws/sub"]),
    ],
)
def test_the_entries_that_decide_are_dependencies(path: str, expected: list[str]) -> None:
    resolver = DiskResolver(_TREE)
    resolver.resolve(path)
    assert _dependencies(resolver) == expected


def test_a_missing_entry_is_a_dependency_without_a_device() -> None:
    resolver = DiskResolver(_TREE)
    (dependency,) = resolver.dependencies(["/ws/new"])
    assert (dependency.path, dependency.device, dependency.inode) == ("/ws/new", None, None)
    with pytest.raises(InternalError, match="/ws/new cannot be examined"):
        resolver.node("/ws/new")
