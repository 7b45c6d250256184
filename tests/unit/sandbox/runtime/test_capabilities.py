"""The choice of the confinement, with a machine that lacks some features."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, cast

import pytest

from exec_server.errors import InternalError
from exec_server.sandbox.runtime import capabilities, kernel
from exec_server.sandbox.runtime.capabilities import (
    BEST_CONFINEMENT,
    Confinement,
    Feature,
    check_commands,
    check_features,
    find_confinement,
)
from exec_server.sandbox.runtime.launcher import Launcher
from exec_server.sandbox.runtime.messages import BuildRequest

Lacks = Callable[[int, BuildRequest], Exception | None]
_LAUNCHER = cast(Launcher, None)
_EPERM = "Operation not permitted (os error 1)"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Lacks, int], None]:
    """Sets the error of launches and the user of the server."""

    def pretend(lacks: Lacks, user: int) -> None:
        def launch(_: Any, namespaces: int, build: BuildRequest) -> tuple[int, socket.socket]:
            error = lacks(namespaces, build)
            if error is not None:
                raise error
            return 1, socket.socket()

        monkeypatch.setattr(capabilities, "launch", launch)
        monkeypatch.setattr(capabilities, "request", lambda *arguments: None)
        monkeypatch.setattr(kernel, "landlock_version", lambda: 3)
        monkeypatch.setattr(kernel, "is_supported_machine", lambda: True)
        monkeypatch.setattr(os, "geteuid", lambda: user)

    return pretend


def _nothing(namespaces: int, build: BuildRequest) -> None:
    return None


def _user_namespaces(namespaces: int, build: BuildRequest) -> Exception | None:
    return (
        PermissionError(1, "Operation not permitted") if namespaces & kernel.CLONE_NEWUSER else None
    )


def _private_proc(namespaces: int, build: BuildRequest) -> Exception | None:
    return InternalError("masked") if build.proc == "private" else None


def _everything(namespaces: int, build: BuildRequest) -> Exception | None:
    return PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("lacks", "user", "expected"),
    [
        (_nothing, 1000, Confinement(True, True, 3)),
        (_nothing, 0, Confinement(True, True, 3)),
        (_user_namespaces, 0, Confinement(False, True, 3)),
        (_private_proc, 1000, Confinement(True, False, 3)),
        (
            _user_namespaces,
            1000,
            Confinement(landlock=3, refusal=f"cannot create namespaces: {_EPERM}"),
        ),
        (_everything, 0, Confinement(landlock=3, refusal=f"cannot create namespaces: {_EPERM}")),
    ],
)
def test_the_best_working_confinement_is_found(
    machine: Callable[[Lacks, int], None], lacks: Lacks, user: int, expected: Confinement
) -> None:
    machine(lacks, user)
    assert find_confinement(_LAUNCHER) == expected


def test_an_unknown_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "is_supported_machine", lambda: False)
    found = find_confinement(_LAUNCHER)
    assert found.refusal == f"system calls of {kernel.MACHINE} are not known"
    assert check_features(_LAUNCHER) == []


def _failures(features: list[Feature]) -> dict[str, str]:
    return {feature.name: feature.failure for feature in features if feature.failure}


def test_every_feature_is_checked(machine: Callable[[Lacks, int], None]) -> None:
    machine(_nothing, 1000)
    features = check_features(_LAUNCHER)
    assert _failures(features) == {}
    assert [feature.name for feature in features] == [
        "user namespaces",
        "mount namespaces",
        "pid namespaces",
        "ipc namespaces",
        "network namespaces",
        "new mount calls",
        "private /proc",
        "seccomp",
    ]


def test_features_that_need_a_failed_one_are_not_tried(
    machine: Callable[[Lacks, int], None],
) -> None:
    machine(_user_namespaces, 1000)
    failures = _failures(check_features(_LAUNCHER))
    assert failures.pop("user namespaces") == _EPERM
    assert set(failures.values()) == {"not without user namespaces"}
    assert len(failures) == 6

    def no_pids(namespaces: int, build: BuildRequest) -> Exception | None:
        return OSError(22, "Invalid argument") if namespaces & kernel.CLONE_NEWPID else None

    machine(no_pids, 0)
    failures = _failures(check_features(_LAUNCHER))
    assert failures == {
        "pid namespaces": "Invalid argument (os error 22)",
        "new mount calls": "not without pid namespaces",
        "private /proc": "not without pid namespaces",
    }


def test_a_masked_proc_is_told_apart(machine: Callable[[Lacks, int], None]) -> None:
    machine(_private_proc, 1000)
    assert _failures(check_features(_LAUNCHER)) == {"private /proc": "masked"}


def test_commands_are_run_as_requests_would_be(machine: Callable[[Lacks, int], None]) -> None:
    seen = []

    def no_restricted_root(namespaces: int, build: BuildRequest) -> Exception | None:
        seen.append((namespaces & kernel.CLONE_NEWUSER, build.proc, build.network))
        assert build.view is not None
        return OSError(22, "Invalid argument") if build.view.is_empty else None

    machine(no_restricted_root, 0)
    checked = check_commands(_LAUNCHER, Confinement(False, True, 3))
    assert [each.name for each in checked] == ["whole root", "restricted root", "managed network"]
    assert _failures(checked) == {"restricted root": "Invalid argument (os error 22)"}
    assert seen == [(0, "private", network) for network in ("restricted", "restricted", "proxied")]


@pytest.mark.parametrize(
    ("confinement", "reason"),
    [
        (Confinement(refusal="x"), "not without confinement"),
        (Confinement(), "not without separation of commands"),
    ],
)
def test_no_command_is_run_that_requests_would_not_run(
    machine: Callable[[Lacks, int], None], confinement: Confinement, reason: str
) -> None:
    machine(_everything, 1000)
    assert set(_failures(check_commands(_LAUNCHER, confinement)).values()) == {reason}


def test_namespaces_of_a_confinement() -> None:
    usual = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
    assert Confinement().namespaces(network=False) == usual
    assert BEST_CONFINEMENT.namespaces(network=True) == (
        usual | kernel.CLONE_NEWUSER | kernel.CLONE_NEWNET
    )
