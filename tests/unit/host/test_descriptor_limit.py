"""The limit of open descriptors; the kernel's own is that of the tests, so it is a fake here."""

from __future__ import annotations

import fcntl
import os
import resource

import pytest

from exec_server.host import descriptor_limit
from exec_server.host.descriptor_limit import raise_descriptor_limit

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "changed", "result"),
    [
        (1024, 4096, (4096, 4096), 4096),
        (1024, 500_000, (9000, 500_000), 9000),
        (1024, NO_LIMIT, (9000, NO_LIMIT), 9000),
        (20_000, 20_000, None, 20_000),
        (NO_LIMIT, NO_LIMIT, None, 9000),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows(
    monkeypatch: pytest.MonkeyPatch,
    soft: int,
    hard: int,
    changed: tuple[int, int] | None,
    result: int,
) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: calls.append(limits))
    assert raise_descriptor_limit(9000) == result
    assert calls == ([] if changed is None else [changed])


def test_a_refusal_of_the_kernel_leaves_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, NO_LIMIT))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_descriptor_limit(9000) == 256


# ---- children of a server -------------------------------------------------------------


class _Kernel:
    """The limits of this process and of one child."""

    def __init__(self, soft: int, hard: int) -> None:
        self.own = (soft, hard)
        self.child = (soft, hard)

    def getrlimit(self, _: int) -> tuple[int, int]:
        return self.own

    def setrlimit(self, _: int, limits: tuple[int, int]) -> None:
        self.own = limits

    def prlimit(self, pid: int, _: int, limits: tuple[int, int] | None = None) -> tuple[int, int]:
        if pid != 5:
            raise ProcessLookupError
        self.child = limits or self.child
        return self.child


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    fake = _Kernel(1024, 4096)
    for name in ("getrlimit", "setrlimit", "prlimit"):
        monkeypatch.setattr(resource, name, getattr(fake, name))
    monkeypatch.setattr(descriptor_limit, "_limits", None)
    return fake


def test_children_inherit_the_former_limit(kernel: _Kernel) -> None:
    descriptor_limit.lower_for_child()
    descriptor_limit.restore()
    descriptor_limit.limit_child(5)
    assert kernel.own == (1024, 4096), "not a server yet"
    descriptor_limit.raise_server_limit()
    assert kernel.own == (4096, 4096)
    descriptor_limit.lower_for_child()
    assert kernel.own == (1024, 4096)
    descriptor_limit.restore()
    assert kernel.own == (4096, 4096)


def test_a_limit_that_cannot_be_raised(kernel: _Kernel) -> None:
    kernel.own = (4096, 4096)
    descriptor_limit.raise_server_limit()
    descriptor_limit.lower_for_child()
    descriptor_limit.restore()
    assert kernel.own == (4096, 4096)


def test_a_server_with_many_descriptors_limits_the_running_child(
    kernel: _Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor_limit.raise_server_limit()
    taken = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 960)
    try:
        descriptor_limit.lower_for_child()
        assert kernel.own == (4096, 4096)
    finally:
        os.close(taken)
    kernel.child = (4096, 4096)
    descriptor_limit.limit_child(5)
    assert kernel.child == (1024, 4096)
    kernel.child = (77, 4096)  # its own choice
    descriptor_limit.limit_child(5)
    assert kernel.child == (77, 4096)
    descriptor_limit.limit_child(6)  # has ended

    def fail(*_: object) -> int:
        raise OSError(24, "no descriptor is left")

    monkeypatch.setattr(fcntl, "fcntl", fail)
    descriptor_limit.lower_for_child()
    assert kernel.own == (4096, 4096)
