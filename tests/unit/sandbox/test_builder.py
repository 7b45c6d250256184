"""The parts of the sandbox builder that need no process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import pytest

from exec_server.errors import InternalError
from exec_server.sandbox import builder
from exec_server.sandbox.builder import SandboxBuilder, build_view, retry_while_stale
from exec_server.sandbox.policy.model import Policy, Rule, View
from exec_server.sandbox.runtime import capabilities
from exec_server.sandbox.runtime.capabilities import BEST_CONFINEMENT, Confinement
from exec_server.sandbox.runtime.disk import HostDisk
from exec_server.sandbox.runtime.kernel import CLONE_NEWNET, CLONE_NEWUSER
from exec_server.sandbox.runtime.messages import BuildRequest
from exec_server.sandbox.runtime.view import StaleView


class FakeKernel:
    """Stands for the launcher and the search for a confinement; records the attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures: list[Exception] = []  # of the next attempts
        self.found = WEAKER
        self.attempts: list[tuple[int, BuildRequest]] = []
        self.searches = 0
        monkeypatch.setattr(builder, "Launcher", lambda variables: None)
        monkeypatch.setattr(builder, "MountChanges", lambda: None)
        monkeypatch.setattr(builder, "launch", self._launch)
        monkeypatch.setattr(capabilities, "find_confinement", self._find_confinement)

    def _launch(self, launcher: None, namespaces: int, request: BuildRequest) -> str:
        self.attempts.append((namespaces, request))
        if self.failures:
            raise self.failures.pop(0)
        return "launched"

    def _find_confinement(self, launcher: None) -> Confinement:
        self.searches += 1
        return self.found


BEST = BEST_CONFINEMENT
WEAKER = Confinement(user_namespace=True)


def _make_request(confinement: Confinement) -> BuildRequest:
    return BuildRequest("init", None, "enabled", "private" if confinement.private_proc else "none")


def _attempt(confinement: Confinement, *, network: bool = False) -> tuple[int, BuildRequest]:
    return confinement.namespaces(network=network), _make_request(confinement)


def test_the_best_confinement_is_tried_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(monkeypatch)
    launched = SandboxBuilder({}).launch(_make_request, network=True)
    assert launched == cast(Any, "launched")
    assert (kernel.attempts, kernel.searches) == ([_attempt(BEST, network=True)], 0)


@pytest.mark.parametrize("error", [InternalError("no"), PermissionError(1, "no")])
def test_the_confinement_that_works_is_kept(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    kernel = FakeKernel(monkeypatch)
    kernel.failures = [error]
    sandbox_builder = SandboxBuilder({})
    for _ in range(2):
        sandbox_builder.launch(_make_request, network=False)
    assert kernel.attempts == [_attempt(BEST), _attempt(WEAKER), _attempt(WEAKER)]
    assert kernel.searches == 1


def test_nothing_runs_where_no_confinement_works(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(monkeypatch)
    kernel.failures = [InternalError("no")]
    kernel.found = Confinement(refusal="no namespaces")
    sandbox_builder = SandboxBuilder({})
    with pytest.raises(InternalError, match="no namespaces; the request was refused"):
        sandbox_builder.launch(_make_request, network=False)
    assert kernel.attempts == [_attempt(BEST)]
    # The refusal may be temporary: the next launch tries again.
    sandbox_builder.launch(_make_request, network=False)
    assert kernel.attempts[1:] == [_attempt(BEST)]


def test_no_command_runs_where_it_could_reach_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_request(role: Literal["worker", "init"]) -> Callable[[Confinement], BuildRequest]:
        return lambda _: BuildRequest(role, View(False, (), (), (), ()), "restricted", "none")

    kernel = FakeKernel(monkeypatch)
    kernel.failures = [PermissionError(1, "no")]
    kernel.found = Confinement()
    sandbox_builder = SandboxBuilder({})
    for _ in range(2):
        with pytest.raises(InternalError, match="reach each other's files through /proc"):
            sandbox_builder.launch(make_request("init"), network=False)
    assert len(kernel.attempts) == 1
    sandbox_builder.launch(make_request("worker"), network=False)
    kernel.found = Confinement(landlock=1)
    sandbox_builder.launch(make_request("init"), network=False)
    assert [request.role for _, request in kernel.attempts] == ["init", "worker", "init"]


def test_a_stale_view_is_no_reason_for_another_confinement(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(monkeypatch)
    kernel.failures = [StaleView("changed")]
    with pytest.raises(StaleView):
        SandboxBuilder({}).launch(_make_request, network=False)
    assert kernel.searches == 0


def _stale(times: int) -> tuple[Callable[[], int], list[int]]:
    calls: list[int] = []

    def build() -> int:
        calls.append(1)
        if len(calls) <= times:
            raise StaleView("changed")
        return 5

    return build, calls


def test_a_stale_build_is_repeated() -> None:
    build, calls = _stale(builder._ATTEMPTS - 1)
    assert retry_while_stale(build) == 5
    assert len(calls) == builder._ATTEMPTS


def test_a_build_that_is_always_stale_fails() -> None:
    build, calls = _stale(1000)
    with pytest.raises(StaleView):
        retry_while_stale(build)
    assert len(calls) == builder._ATTEMPTS


def test_another_failure_is_not_repeated() -> None:
    calls: list[int] = []

    def build() -> int:
        calls.append(1)
        raise InternalError("no")

    with pytest.raises(InternalError):
        retry_while_stale(build)
    assert calls == [1]


@pytest.mark.parametrize("path", ["/proc/sys", "/dev/null"])
def test_paths_in_private_file_systems_cannot_be_denied(path: str) -> None:
    policy = Policy((Rule("/", "read"), Rule(path, "deny")), (), "restricted")
    with pytest.raises(InternalError, match=f"cannot enforce sandbox deny-read path {path}"):
        build_view(policy, HostDisk(sees_placeholders=True))


def test_other_paths_can_be_denied() -> None:
    policy = Policy((Rule("/", "read"), Rule("/etc", "deny")), (), "restricted")
    view = build_view(policy, HostDisk(sees_placeholders=True))
    assert ("mask", "/etc") in [(step.kind, step.path) for step in view.steps]


def test_a_network_of_its_own_needs_a_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(monkeypatch)
    offline = BuildRequest("init", None, "restricted", "inherited")
    proxied = BuildRequest("init", None, "proxied", "inherited")
    sandbox_builder = SandboxBuilder({})
    for request in (offline, proxied):
        assert sandbox_builder.launch_unlimited(request) == cast(Any, "launched")
    both = CLONE_NEWUSER | CLONE_NEWNET
    assert kernel.attempts == [(0, offline), (both, proxied)]
    kernel.failures = [PermissionError(1, "Operation not permitted")]
    with pytest.raises(InternalError, match="no network namespace: Operation not permitted"):
        sandbox_builder.launch_unlimited(proxied)
