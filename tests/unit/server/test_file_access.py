"""FileAccess: which route a request takes, and who performs it there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exec_server.errors import InternalError, InvalidParams
from exec_server.filesystem import operations
from exec_server.host import libc
from exec_server.protocol import files, session
from exec_server.protocol import sandbox as wire
from exec_server.protocol.paths import PathUri
from exec_server.sandbox.files import FilePolicy
from exec_server.sandbox.sandboxes import Sandboxes
from exec_server.server.context import check_user
from exec_server.server.file_access import (
    INLINE_RULES,
    Confined,
    Deferred,
    FileAccess,
    FileOpening,
    FileOperation,
    TrustedRead,
    Unconfined,
    choose_access,
)

METADATA = files.GetMetadataResult(False, True, False, 1, 0, 0)
SANDBOX = wire.Sandbox(permissions=wire.Disabled(), windows_sandbox_level="disabled")


class FakePolicy:
    """A FilePolicy whose worker only records calls."""

    def __init__(self, *, is_trusted_read: bool = False) -> None:
        self.is_trusted_read = is_trusted_read
        self.performed: list[str] = []
        self.opened: list[str] = []

    def perform(self, call: Any, params: object) -> object:
        self.performed.append(call.name)
        return "by the worker"

    def open(self, call: Any, params: object) -> int:
        self.opened.append(call.name)
        return -7


class FakeSandbox:
    """Sandboxes, and a FileSandbox with one answer."""

    def __init__(self, policy: FakePolicy | None, *, is_loaded: bool = True) -> None:
        self._policy = policy
        self.is_loaded = is_loaded
        self.asked: list[bool] = []

    @property
    def files(self) -> FakeSandbox:
        return self

    def policy_for(self, sandbox: wire.Sandbox, *, reading: bool) -> FakePolicy | None:
        self.asked.append(reading)
        return self._policy


def _choose(
    sandbox: wire.Sandbox | None, policy: FakePolicy | None, *, reading: bool = True
) -> FileAccess:
    return choose_access(cast(Sandboxes, FakeSandbox(policy)), sandbox, reading=reading)


def _policy(policy: FakePolicy) -> FilePolicy:
    return cast(FilePolicy, policy)


def _metadata(path: str = "/") -> files.GetMetadataParams:
    return files.GetMetadataParams(PathUri.from_wire(path))


# ---- the choice -----------------------------------------------------------------------


def test_without_a_sandbox_no_policy_is_compiled() -> None:
    sandbox = FakeSandbox(FakePolicy())
    access = choose_access(cast(Sandboxes, sandbox), None, reading=True)
    assert isinstance(access, Unconfined)
    assert sandbox.asked == []


@pytest.mark.parametrize("reading", [True, False])
def test_the_policy_knows_whether_the_request_reads(reading: bool) -> None:
    sandbox = FakeSandbox(FakePolicy())
    choose_access(cast(Sandboxes, sandbox), SANDBOX, reading=reading)
    assert sandbox.asked == [reading]


def test_the_first_policy_of_a_server_is_compiled_in_a_thread() -> None:
    sandbox = FakeSandbox(FakePolicy(), is_loaded=False)
    access = choose_access(cast(Sandboxes, sandbox), SANDBOX, reading=True)
    assert isinstance(access, Deferred)
    assert sandbox.asked == []
    operation = FileOperation(files.GET_METADATA, lambda params: pytest.fail("not confined"))
    assert access.perform(operation, _metadata()) == cast(object, "by the worker")
    assert sandbox.asked == [True]


def test_a_sandbox_that_does_not_limit_files_confines_nothing() -> None:
    assert isinstance(_choose(SANDBOX, None), Unconfined)


def test_a_policy_that_allows_every_read_is_read_by_the_server() -> None:
    assert isinstance(_choose(SANDBOX, FakePolicy(is_trusted_read=True)), TrustedRead)


def test_another_policy_needs_a_worker() -> None:
    assert isinstance(_choose(SANDBOX, FakePolicy()), Confined)


def _long_sandbox(entries: int, roots: int) -> wire.Sandbox:
    root = wire.FileUri.from_wire("file:///r")
    entry = wire.PolicyEntry(wire.SpecialPath(wire.ProjectRoots()), "write")
    return wire.Sandbox(
        permissions=wire.Managed(wire.Restricted([entry] * entries), "restricted"),
        workspace_roots=[root] * roots,
        windows_sandbox_level="disabled",
    )


@pytest.mark.parametrize(("entries", "roots"), [(INLINE_RULES + 1, 0), (20, INLINE_RULES // 20)])
def test_a_long_policy_is_compiled_when_the_request_is_performed(entries: int, roots: int) -> None:
    policy = FakePolicy()
    sandbox = FakeSandbox(policy)
    access = choose_access(cast(Sandboxes, sandbox), _long_sandbox(entries, roots), reading=False)
    assert access.try_now(cast(Any, None), _metadata()) is None
    assert sandbox.asked == []
    access.perform(_operation(), _metadata())
    opening = FileOpening(files.OPEN, lambda params: -1)
    assert access.open(opening, files.OpenParams(files.HandleId("h"), _metadata().path)) == -7
    assert (sandbox.asked, policy.performed, policy.opened) == (
        [False, False],
        ["fs/getMetadata"],
        ["fs/open"],
    )


def test_a_policy_of_usual_length_is_compiled_at_once() -> None:
    sandbox = FakeSandbox(FakePolicy())
    choose_access(cast(Sandboxes, sandbox), _long_sandbox(20, 5), reading=False)
    assert sandbox.asked == [False]


# ---- try_now --------------------------------------------------------------------------


def test_attempts_know_whether_they_are_confined() -> None:
    seen: list[bool] = []

    def attempt(
        params: files.GetMetadataParams, /, *, confined: bool
    ) -> files.GetMetadataResult | None:
        seen.append(confined)
        return METADATA

    policy = FakePolicy()
    assert Unconfined().try_now(attempt, _metadata()) is METADATA
    assert TrustedRead(_policy(policy)).try_now(attempt, _metadata()) is METADATA
    assert Confined(_policy(policy)).try_now(attempt, _metadata()) is None
    assert seen == [False, True]


# ---- perform --------------------------------------------------------------------------


def _operation(
    trusted: files.GetMetadataResult | None = None, *, has_trusted: bool = False
) -> FileOperation[files.GetMetadataParams, files.GetMetadataResult]:
    return FileOperation(
        files.GET_METADATA,
        lambda params: METADATA,
        None,
        (lambda _: trusted) if has_trusted else None,
    )


def test_the_server_performs_unconfined_operations() -> None:
    assert Unconfined().perform(_operation(), _metadata()) is METADATA


def test_a_worker_performs_confined_operations() -> None:
    policy = FakePolicy()
    operation = _operation(METADATA, has_trusted=True)
    assert Confined(_policy(policy)).perform(operation, _metadata()) == cast(Any, "by the worker")
    assert policy.performed == ["fs/getMetadata"]


def test_the_server_performs_trusted_reads() -> None:
    policy = FakePolicy()
    operation = _operation(METADATA, has_trusted=True)
    assert TrustedRead(_policy(policy)).perform(operation, _metadata()) is METADATA
    assert policy.performed == []


@pytest.mark.parametrize("operation", [_operation(), _operation(None, has_trusted=True)])
def test_a_worker_performs_trusted_reads_that_the_server_must_not(
    operation: FileOperation[files.GetMetadataParams, files.GetMetadataResult],
) -> None:
    policy = FakePolicy()
    assert TrustedRead(_policy(policy)).perform(operation, _metadata()) == cast(
        Any, "by the worker"
    )
    assert policy.performed == ["fs/getMetadata"]


# ---- other users ----------------------------------------------------------------------


def test_a_user_needs_the_rights_of_root_and_no_sandbox() -> None:
    def info(*, other_users: bool) -> session.EnvironmentInfo:
        capabilities = session.Capabilities(other_users=other_users)
        return cast(session.EnvironmentInfo, SimpleNamespace(capabilities=capabilities))

    check_user(info(other_users=True), None)
    with pytest.raises(InvalidParams, match="user and sandbox exclude each other"):
        check_user(info(other_users=True), SANDBOX)
    with pytest.raises(InvalidParams, match="does not have the rights of root"):
        check_user(info(other_users=False), None)


def test_requests_of_a_user_are_performed_with_its_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    acting: list[str] = []

    @contextlib.contextmanager
    def acting_as(name: str) -> Iterator[None]:
        acting.append(name)
        yield
        acting.remove(name)

    monkeypatch.setattr(libc, "find_user", lambda name: name)
    monkeypatch.setattr(libc, "acting_as", acting_as)

    def stat(params: files.GetMetadataParams) -> files.GetMetadataResult:
        assert acting == ["ann"]
        return METADATA

    def open_file(params: files.ReadFileParams) -> int:
        assert acting == ["ann"]
        return -7

    access = choose_access(cast(Sandboxes, FakeSandbox(None)), None, reading=True, user="ann")
    operation = FileOperation(files.GET_METADATA, stat)
    assert access.try_now(lambda params, *, confined: METADATA, _metadata()) is None
    assert access.perform(operation, _metadata()) is METADATA
    content = files.ReadFileParams(PathUri.from_wire("/"))
    assert access.open(FileOpening(files.READ_FILE, open_file), content) == -7
    assert acting == []


# ---- open -----------------------------------------------------------------------------

OPENING = FileOpening(files.READ_FILE, lambda params: operations.open_for_read(params)[0])


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 100)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("access", [Unconfined(), TrustedRead(_policy(FakePolicy()))])
def test_the_server_opens_files_that_it_may_read(access: FileAccess, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    params = files.ReadFileParams(PathUri.from_wire(str(path)))
    assert _read(access.open(OPENING, params)) == b"content"


def test_a_worker_opens_files_of_procfs() -> None:
    policy = FakePolicy()
    params = files.ReadFileParams(PathUri.from_wire("/proc/self/environ"))
    assert TrustedRead(_policy(policy)).open(OPENING, params) == -7
    assert policy.opened == ["fs/readFile"]


def test_a_worker_opens_confined_files() -> None:
    policy = FakePolicy()
    params = files.ReadFileParams(PathUri.from_wire("/etc/hostname"))
    assert Confined(_policy(policy)).open(OPENING, params) == -7
    assert policy.opened == ["fs/readFile"]


def test_errors_are_passed_on(tmp_path: Path) -> None:
    missing = files.ReadFileParams(PathUri.from_wire(str(tmp_path / "missing")))
    for access in (Unconfined(), TrustedRead(_policy(FakePolicy()))):
        with pytest.raises(FileNotFoundError):
            access.open(OPENING, missing)

    def refuse(params: object) -> files.GetMetadataResult:
        raise InternalError("no")

    with pytest.raises(InternalError):
        Unconfined().perform(FileOperation(files.GET_METADATA, refuse), _metadata())
