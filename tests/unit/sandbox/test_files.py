"""FileSandbox: which policy a sandbox object gives, and how policies are cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from exec_server.errors import InternalError, InvalidRequest, RpcError
from exec_server.protocol import files
from exec_server.protocol import sandbox as wire
from exec_server.protocol.paths import PathUri
from exec_server.sandbox import files as sandbox_files
from exec_server.sandbox.builder import SandboxBuilder
from exec_server.sandbox.files import FilePolicy, FileSandbox
from exec_server.sandbox.policy.model import Glob, Policy, Rule

PARAMS = files.ReadFileParams(PathUri.from_wire("/secret"))


def _sandbox(*entries: wire.PolicyEntry, **members: Any) -> wire.Sandbox:
    return wire.Sandbox(
        permissions=wire.Managed(wire.Restricted(list(entries), None), "restricted"),
        windows_sandbox_level="disabled",
        **members,
    )


def _root(access: wire.Access) -> wire.PolicyEntry:
    return wire.PolicyEntry(wire.SpecialPath(wire.Root()), access)


def _path(path: str, access: wire.Access) -> wire.PolicyEntry:
    return wire.PolicyEntry(wire.ExactPath(wire.FileUri.from_wire("file://" + path)), access)


def _file_sandbox() -> FileSandbox:
    return FileSandbox(cast(SandboxBuilder, None), None)


def test_a_disabled_sandbox_has_no_policy() -> None:
    disabled = wire.Sandbox(permissions=wire.Disabled(), windows_sandbox_level="disabled")
    assert _file_sandbox().policy_for(disabled, reading=True) is None
    assert _file_sandbox().policy_for(_sandbox(_root("write")), reading=False) is None


def test_a_sandbox_of_windows_is_refused_for_all_but_trusted_reads() -> None:
    reads = replace(_sandbox(_root("read")), windows_sandbox_level="mxc")
    policy = _file_sandbox().policy_for(reads, reading=True)
    assert policy is not None
    assert policy.is_trusted_read
    text = "failed to prepare fs sandbox: failed to prepare MXC sandbox: native MXC is unavailable"
    with pytest.raises(InvalidRequest, match=text):
        _file_sandbox().policy_for(reads, reading=False)
    partial = replace(_sandbox(_path("/usr", "read")), windows_sandbox_level="mxc")
    with pytest.raises(InvalidRequest, match=text):
        _file_sandbox().policy_for(partial, reading=True)


@pytest.mark.parametrize(
    ("entries", "reading", "expected"),
    [
        ([_root("read")], True, True),
        ([_root("read")], False, False),
        ([_root("read"), _path("/secret", "deny")], True, False),
        ([_path("/usr", "read")], True, False),
    ],
)
def test_reads_are_trusted_if_every_read_is_allowed(
    entries: list[wire.PolicyEntry], reading: bool, expected: bool
) -> None:
    policy = _file_sandbox().policy_for(_sandbox(*entries), reading=reading)
    assert policy is not None
    assert policy.is_trusted_read == expected


def test_equal_sandboxes_share_a_policy() -> None:
    sandbox = _file_sandbox()
    first = sandbox.policy_for(_sandbox(_root("read")), reading=True)
    assert sandbox.policy_for(_sandbox(_root("read")), reading=True) is first
    assert sandbox.policy_for(_sandbox(_root("read")), reading=False) is not first
    assert sandbox.policy_for(_sandbox(_path("/usr", "read")), reading=True) is not first


def test_the_policy_used_longest_ago_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_files, "_CACHED_POLICIES", 2)
    sandbox = _file_sandbox()
    a, b, c = (_sandbox(_path(path, "read")) for path in ("/a", "/b", "/c"))
    first, second = (sandbox.policy_for(each, reading=True) for each in (a, b))
    assert sandbox.policy_for(a, reading=True) is first
    sandbox.policy_for(c, reading=True)
    assert sandbox.policy_for(a, reading=True) is first
    assert sandbox.policy_for(b, reading=True) is not second


def test_the_policy_of_a_long_sandbox_object_is_not_kept() -> None:
    sandbox = _file_sandbox()
    long = _sandbox(*(_path(f"/{number:0100}", "read") for number in range(1000)))
    first = sandbox.policy_for(long, reading=True)
    assert sandbox.policy_for(long, reading=True) is not first


class FakeWorkers:
    """A WorkerPool that fails or returns a value."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.policies: list[Policy] = []

    def run(self, policy: Policy, action: Callable[[Any], object]) -> object:
        self.policies.append(policy)
        if self._error is not None:
            raise self._error
        return "result"


DENYING = Policy((Rule("/", "read"), Rule("/secret", "deny")), (), "restricted")


def _policy(workers: FakeWorkers, *, is_legacy: bool = False) -> FilePolicy:
    return FilePolicy(cast(Any, workers), DENYING, False, is_legacy=is_legacy)


def test_operations_run_on_workers_of_their_policy() -> None:
    workers = FakeWorkers()
    assert _policy(workers).perform(files.READ_FILE, PARAMS) == cast(Any, "result")
    assert _policy(workers).open(files.READ_FILE, PARAMS) == cast(Any, "result")
    assert workers.policies == [DENYING, DENYING]


def test_errors_of_workers_name_the_rule() -> None:
    workers = FakeWorkers(PermissionError(13, "Permission denied"))
    with pytest.raises(RpcError) as caught:
        _policy(workers).perform(files.READ_FILE, PARAMS)
    denial = {"path": "/secret", "operation": "read", "rule": "deny entry /secret"}
    assert caught.value.data == {"sandboxDenial": denial}


def test_a_weaker_confinement_is_refused() -> None:
    workers = FakeWorkers()
    with pytest.raises(InternalError, match="useLegacyLandlock is not supported"):
        _policy(workers, is_legacy=True).open(files.READ_FILE, PARAMS)
    assert workers.policies == []


def test_paths_that_a_policy_hides(tmp_path: Path) -> None:
    for name in ("open", "secret"):
        (tmp_path / name).mkdir()
    (tmp_path / "alias").symlink_to("secret")
    base = str(tmp_path)
    rules = (Rule("/", "read"), Rule(f"{base}/alias", "deny"))
    denying = Policy(rules, (Glob(base, "**/*.key", None),), "restricted")
    paths = [f"{base}/{name}" for name in ("open/a", "open/a.key", "secret", "secret/a")]
    hidden = [f"{base}/{name}" for name in ("open/d.key", "open/d.key/a")]

    def visible(policy: Policy, *, is_legacy: bool = False) -> list[str]:
        return FilePolicy(cast(Any, None), policy, False, is_legacy=is_legacy).visible(
            [*paths, *hidden]
        )

    assert visible(denying) == paths[:1]
    assert visible(Policy((Rule(f"{base}/secret", "read"),), (), "restricted")) == paths[2:]
    with pytest.raises(InternalError, match="useLegacyLandlock is not supported"):
        visible(denying, is_legacy=True)
