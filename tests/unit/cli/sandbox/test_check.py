"""The report of `exec-server sandbox check`, from invented results of its tests."""

from __future__ import annotations

import json
import platform

import pytest

from exec_server.cli.sandbox import check
from exec_server.cli.sandbox.check import Report, as_json, as_text
from exec_server.sandbox.runtime import capabilities, kernel
from exec_server.sandbox.runtime.capabilities import Confinement, Feature

_NAMES = (
    capabilities.USER_NAMESPACES,
    *capabilities.NAMESPACES,
    capabilities.MOUNTS,
    capabilities.PRIVATE_PROC,
    capabilities.FILTER,
    *capabilities.COMMANDS,
)
_EPERM = "Operation not permitted (os error 1)"


def _report(confinement: Confinement, **failures: str) -> Report:
    """A report of a machine where features fail, named with _ for each space."""
    named = {name.replace("_", " "): text for name, text in failures.items()}
    named = {"private /proc" if name == "proc" else name: text for name, text in named.items()}
    features = tuple(Feature(name, named.get(name)) for name in _NAMES)
    assert set(named) <= set(_NAMES)
    return Report(
        confinement,
        features,
        tuple(check._problems(confinement, features)),
        tuple(check._refused(confinement, features)),
    )


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine without seccomp filter and security label; sysctls are set by the test."""
    sysctls: dict[str, str] = {}
    monkeypatch.setattr(check, "_is_filtered", lambda: False)
    monkeypatch.setattr(check, "_security_label", lambda: None)
    monkeypatch.setattr(check, "_sysctl", sysctls.get)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    return sysctls


def test_a_machine_where_everything_works() -> None:
    report = _report(Confinement(user_namespace=True, private_proc=True, landlock=6))
    assert (report.problems, report.refused) == ((), ())
    text = as_text(report)
    assert "  user                uid 1000\n" in text
    assert "  Landlock            yes, version 6: files, moves, truncation, devices, " in text
    mechanisms = "mounts, dropped capabilities, namespaces, Landlock and seccomp"
    assert f"  commands            enforced by {mechanisms}\n" in text
    assert text.endswith("Refused requests\n  none\n")
    value = json.loads(as_json(report))
    assert (value["refused"], value["gaps"], value["uid"]) == ([], [], 1000)


def test_a_missing_landlock_is_mentioned_but_refuses_nothing() -> None:
    report = _report(Confinement(user_namespace=True, private_proc=True))
    assert report.refused == ()
    text = as_text(report)
    assert "  Landlock            no\n" in text
    assert "How to fix it\n  Landlock is optional" in text


@pytest.mark.parametrize(("landlock", "is_used"), [(0, False), (1, False), (2, True)])
def test_an_old_landlock_leaves_commands_without_unix_sockets(landlock: int, is_used: bool) -> None:
    report = _report(Confinement(user_namespace=True, private_proc=True, landlock=landlock))
    assert report.refused == ()
    text = as_text(report)
    assert ("  unix sockets        refused to commands with network" in text) != is_used
    assert ("namespaces, Landlock and seccomp" in text) == is_used
    assert ("Landlock is optional" in text) != is_used


def test_commands_that_cannot_be_separated_are_refused() -> None:
    report = _report(Confinement(), user_namespaces=_EPERM, proc=_EPERM)
    assert report.refused == (
        "file operations whose policy denies files by a pattern",
        "commands whose policy limits files",
    )
    text = as_text(report)
    assert "  commands            refused if the policy limits files\n" in text
    assert "  file operations     enforced by mounts" in text
    assert "nested namespaces" not in text
    assert "  commands: none of user namespaces, private /proc and Landlock is available" in text
    enforced = json.loads(as_json(report))["enforced"]
    assert (enforced["fileOperations"], enforced["commands"]) == (True, False)
    separated = _report(Confinement(landlock=1), user_namespaces=_EPERM, proc=_EPERM)
    assert "commands whose policy limits files" not in separated.refused
    assert "  nested namespaces   refused without user namespaces\n" in as_text(separated)


def test_commands_are_refused_where_only_their_views_fail() -> None:
    best = Confinement(user_namespace=True, private_proc=True, landlock=7)
    report = _report(best, new_mount_calls="Function not implemented (os error 38)")
    assert report.refused == ("commands whose policy limits files",)
    assert [problem.feature for problem in report.problems] == ["new mount calls"]


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("whole_root", "commands whose policy limits files"),
        ("restricted_root", "requests whose policy does not grant all reads"),
        ("managed_network", "commands with a managed network"),
    ],
)
def test_a_command_that_fails_although_all_features_work(name: str, refused: str) -> None:
    best = Confinement(user_namespace=True, private_proc=True, landlock=7)
    failure = "cannot build the view of the file system: Invalid argument (os error 22)"
    report = _report(best, **{name: failure})
    assert report.refused == (refused,)
    (problem,) = report.problems
    assert (problem.feature, problem.reason) == (name.replace("_", " "), failure)
    assert f"  {name.replace('_', ' '):<20}no: {failure}\n" in as_text(report)


def test_commands_that_could_not_be_run_are_no_problem() -> None:
    confinement = Confinement(refusal="cannot create namespaces")
    report = _report(confinement, user_namespaces=_EPERM, restricted_root="not without confinement")
    assert [problem.feature for problem in report.problems] == ["user namespaces"]
    assert "requests whose policy does not grant all reads" not in report.refused


@pytest.mark.parametrize("is_ramfs", [False, True])
def test_nesting_depends_on_the_root(monkeypatch: pytest.MonkeyPatch, is_ramfs: bool) -> None:
    monkeypatch.setattr(check, "_is_on_initial_ramfs", lambda: is_ramfs)
    text = as_text(_report(Confinement(user_namespace=True, private_proc=True, landlock=6)))
    assert ("paths or does not grant all reads\n" in text) == is_ramfs


def test_one_cause_is_one_problem(plain_machine: dict[str, str]) -> None:
    plain_machine["kernel.unprivileged_userns_clone"] = "0"
    report = _report(
        Confinement(refusal="cannot create namespaces"),
        user_namespaces=_EPERM,
        new_mount_calls=_EPERM,
        mount_namespaces="not without user namespaces",
    )
    assert [problem.feature for problem in report.problems] == ["user namespaces"]
    assert report.problems[0].fixes == ("sysctl -w kernel.unprivileged_userns_clone=1",)
    assert "commands whose policy limits files" in report.refused
    text = as_text(report)
    assert "  commands            refused if the policy limits files\n" in text
    assert f"  user namespaces: {_EPERM}\n      sysctl -w kernel." in text
    (gap,) = json.loads(as_json(report))["gaps"]
    assert gap == {
        "part": "user namespaces",
        "reason": _EPERM,
        "fixes": ["sysctl -w kernel.unprivileged_userns_clone=1"],
    }


def test_fixes_depend_on_the_error(plain_machine: dict[str, str]) -> None:
    plain_machine["user.max_user_namespaces"] = "0"
    refused = Confinement(refusal="x")
    for name, failure, fix in (
        ("user_namespaces", "No space left on device (os error 28)", "max_user_namespaces=15000"),
        ("new_mount_calls", "Function not implemented (os error 38)", "Linux 5.12 or newer"),
        ("network_namespaces", "Invalid argument (os error 22)", "without network namespaces"),
        ("user_namespaces", _EPERM, "unknown cause: a security module"),
        ("proc", _EPERM, "parts of /proc are masked"),
    ):
        (problem,) = _report(refused, **{name: failure}).problems
        assert fix in problem.fixes[0]


def test_filters_and_labels_are_named(
    monkeypatch: pytest.MonkeyPatch, plain_machine: dict[str, str]
) -> None:
    plain_machine["kernel.apparmor_restrict_unprivileged_userns"] = "1"
    monkeypatch.setattr(check, "_is_filtered", lambda: True)
    monkeypatch.setattr(check, "_security_label", lambda: "docker-default (enforce)")
    (problem,) = _report(Confinement(refusal="x"), user_namespaces=_EPERM).problems
    text = "\n".join(problem.fixes)
    for part in ("`userns,`", "seccomp=unconfined", "pivot_root", "`docker-default (enforce)`"):
        assert part in text


def test_root_needs_no_user_namespace() -> None:
    report = _report(Confinement(private_proc=True, landlock=1), user_namespaces=_EPERM)
    assert (report.problems, report.refused) == ((), ())
    assert f"  user namespaces     no, and not needed by root ({_EPERM})\n" in as_text(report)


def test_a_masked_proc_and_a_missing_filter() -> None:
    confinement = Confinement(user_namespace=True, landlock=3)
    report = _report(confinement, proc=_EPERM, seccomp=_EPERM)
    assert report.refused == (
        "file operations whose policy denies files by a pattern",
        "commands whose policy limits only the network",
    )
    assert "; commands see the host's /proc\n" in as_text(report)


def test_an_unsupported_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "is_supported_machine", lambda: False)
    (problem,) = _report(Confinement(refusal="no sandbox here")).problems
    assert problem.fixes == ("the sandbox supports only x86_64 and aarch64",)
    assert platform.release() in as_text(_report(Confinement()))
