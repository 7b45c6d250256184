"""ForkGuard: objects of a parent in the child of a fork, which the test pretends to be."""

from __future__ import annotations

import os

import pytest

from exec_server.host import event_loop
from exec_server.host.event_loop import ForkGuard


def test_a_guard_of_the_parent_is_forked_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "_forks", [0])
    guard = ForkGuard()
    guard.check()
    event_loop._count()
    assert guard.is_forked
    with pytest.raises(RuntimeError, match="connect again after a fork"):
        guard.check()
    assert not ForkGuard().is_forked


def test_a_child_counts_its_fork() -> None:
    guard = ForkGuard()
    child = os.fork()
    if child == 0:
        os._exit(0 if guard.is_forked else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not guard.is_forked
