"""The limit of open descriptors; the kernel's own is that of the tests, so it is a fake here."""

from __future__ import annotations

import resource

import pytest

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
