"""`exec-server sandbox check`: which policies this machine can enforce, and how to fix problems.

Features are tested by using them; files of /proc only help to guess the cause of a failure.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from exec_server.sandbox.policy.model import Restrictions, Step, View
from exec_server.sandbox.runtime import capabilities, kernel
from exec_server.sandbox.runtime.capabilities import Confinement, Feature
from exec_server.sandbox.runtime.launcher import Launcher

_EPERM, _EACCES, _EINVAL, _ENOSPC, _ENOSYS = 1, 13, 22, 28, 38
_OLDEST_KERNEL: Final = "5.12"  # mount_setattr
# The features added by each version, except unused ones: TCP ports (4) and audit records (7).
_LANDLOCK_FEATURES: Final = {
    1: "files",
    2: "moves",
    3: "truncation",
    5: "devices",
    6: "signals, abstract sockets",
}
_USER_SYSCTLS: Final = {
    capabilities.USER_NAMESPACES: "user.max_user_namespaces",
    "mount namespaces": "user.max_mnt_namespaces",
    "pid namespaces": "user.max_pid_namespaces",
    "ipc namespaces": "user.max_ipc_namespaces",
    "network namespaces": "user.max_net_namespaces",
}
_WORKSPACE: Final = View(False, (Step("write", "/workspace", True, 0, 0),), (), (), ())
# The requests that fail with a command of `capabilities.check_commands`.
_COMMAND_REQUESTS: Final = {
    capabilities.RESTRICTED_ROOT: "requests whose policy does not grant all reads",
    capabilities.MANAGED_NETWORK: "commands with a managed network",
}
_NEEDED_SYSCALLS: Final = (
    "clone, mount, umount2, pivot_root, open_tree, move_mount and mount_setattr"
)
_NESTING: Final = (
    "refused with network, and if the policy protects or denies paths in a writable directory"
)
# Nothing of the host may be below the root of a command that nests namespaces.
_NESTING_ON_RAMFS: Final = (
    "refused with network, and if the policy protects or denies paths or does not grant all reads"
)
_LANDLOCK_FIX: Final = "Linux 5.19 or newer with `landlock` in the kernel's `lsm=` list"
_USEFUL_LANDLOCK: Final = 2
_OLD_LANDLOCK: Final = (
    f"Landlock is optional; version {_USEFUL_LANDLOCK} prevents commands from writing to named",
    f"pipes outside of their policy, and lets them use unix sockets. It needs {_LANDLOCK_FIX}.",
)
_UNIX_SOCKETS: Final = (
    "refused to commands with network: Landlock is missing or older than version 2"
)
_WIDTH: Final = 20


@dataclass(frozen=True)
class Problem:
    """A feature that does not work, the reason, and ways to fix it."""

    feature: str
    reason: str
    fixes: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The result of the checks; `refused` lists the kinds of requests that will be refused."""

    confinement: Confinement
    features: tuple[Feature, ...]
    problems: tuple[Problem, ...]
    refused: tuple[str, ...]


def run_checks() -> Report:
    """Test all features. Blocking, for some tens of milliseconds."""
    launcher = Launcher(os.environ)
    try:
        confinement = capabilities.find_confinement(launcher)
        features = (
            *capabilities.check_features(launcher),
            *capabilities.check_commands(launcher, confinement),
        )
    finally:
        launcher.close()
    return Report(
        confinement,
        features,
        tuple(_problems(confinement, features)),
        tuple(_refused(confinement, features)),
    )


def _refused(confinement: Confinement, features: tuple[Feature, ...]) -> Iterator[str]:
    failed = [feature.name for feature in features if feature.failure]
    untested = [each.name for each in features if each.failure and _is_untested(each.failure)]
    if confinement.refusal is not None:
        yield "file operations, except reads under a policy that allows all reads"
    elif not confinement.private_proc:
        yield "file operations whose policy denies files by a pattern"
    needed = (capabilities.MOUNTS, capabilities.WHOLE_ROOT)
    if not _enforces_commands(confinement) or any(name in failed for name in needed):
        yield "commands whose policy limits files"
    for name, requests in _COMMAND_REQUESTS.items():
        if name in failed and name not in untested:
            yield requests
    if capabilities.FILTER in failed:
        yield "commands whose policy limits only the network"


def _problems(confinement: Confinement, features: tuple[Feature, ...]) -> Iterator[Problem]:
    broken = [each for each in features if each.failure and not _is_untested(each.failure)]
    if confinement.refusal is None:
        # Root needs no user namespace.
        needed = (
            *(capabilities.MOUNTS, capabilities.PRIVATE_PROC, capabilities.FILTER),
            *capabilities.COMMANDS,
        )
        broken = [feature for feature in broken if feature.name in needed]
    seen: set[tuple[str, ...]] = set()
    for feature in broken:
        failure = feature.failure or ""
        fixes = tuple(_fixes(feature.name, failure))
        if fixes not in seen:  # one cause often breaks several features
            seen.add(fixes)
            yield Problem(feature.name, failure, fixes)
    if confinement.refusal is None and not _restrictions(confinement).is_separate:
        fixes = ("allow user namespaces or a private /proc, or use", _LANDLOCK_FIX)
        yield Problem("commands", capabilities.NOT_SEPARATE, fixes)
    if confinement.refusal is not None and not broken:
        yield Problem("confinement", confinement.refusal, tuple(_fixes_for_unsupported_machine()))


def _is_untested(failure: str) -> bool:
    return failure.startswith(capabilities.NOT_TRIED)


def _fixes_for_unsupported_machine() -> Iterator[str]:
    if not kernel.is_supported_machine():
        yield "the sandbox supports only x86_64 and aarch64"


def _fixes(feature: str, failure: str) -> Iterator[str]:
    """Ways to make a feature work, the most likely one first."""
    number = _error_number(failure)
    if number == _ENOSPC and feature in _USER_SYSCTLS:
        name = _USER_SYSCTLS[feature]
        yield f"sysctl -w {name}=15000   (it is {_sysctl(name) or 'too small'})"
    elif feature == capabilities.PRIVATE_PROC and number in (_EPERM, _EACCES):
        yield "parts of /proc are masked, probably by a container runtime; start it with:"
        yield "docker run --security-opt systempaths=unconfined"
        yield "podman run --security-opt unmask=ALL"
        yield "Kubernetes: securityContext.procMount: Unmasked"
    elif number in (_EPERM, _EACCES) or (number == _ENOSYS and _is_filtered()):
        yield from _fixes_for_permission_error()
    elif number == _ENOSYS and feature == capabilities.MOUNTS:
        yield f"Linux {_OLDEST_KERNEL} or newer is needed; this is {platform.release()}"
    elif number == _EINVAL and feature == capabilities.MOUNTS:
        yield "the root of this process is probably a chroot to a directory that is no mount point:"
        yield "run `mount --bind DIR DIR` before `chroot DIR`"
    elif number in (_EINVAL, _ENOSYS) and feature not in capabilities.COMMANDS:
        yield f"this kernel was built without {feature}; boot another one"


def _fixes_for_permission_error() -> list[str]:
    """Ways to allow a system call that the kernel supports but has refused."""
    fixes = []
    if os.geteuid() != 0 and _sysctl("kernel.unprivileged_userns_clone") == "0":
        fixes.append("sysctl -w kernel.unprivileged_userns_clone=1")
    if os.geteuid() != 0 and _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
        fixes.append("sysctl -w kernel.apparmor_restrict_unprivileged_userns=0")
        fixes.append("or give this Python an AppArmor profile with the rule `userns,`")
    if _is_filtered():
        fixes.append("a seccomp filter, probably of a container runtime, confines this process:")
        fixes.append("docker or podman run --security-opt seccomp=unconfined")
        fixes.append(f"or with a profile that also allows {_NEEDED_SYSCALLS}")
    label = _security_label()
    if label:
        fixes.append(f"this process has the security label `{label}`; if that is a container's:")
        fixes.append("docker or podman run --security-opt apparmor=unconfined")
    return fixes or ["unknown cause: a security module, or a chroot of this process"]


def _error_number(failure: str) -> int | None:
    match = re.search(r"\(os error (\d+)\)", failure)
    return int(match[1]) if match else None


def _sysctl(name: str) -> str | None:
    return _line(f"/proc/sys/{name.replace('.', '/')}")


def _is_filtered() -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return any(line.split() == ["Seccomp:", "2"] for line in file)


def _security_label() -> str | None:
    label = (_line("/proc/self/attr/current") or "").rstrip("\0")
    return None if label in ("", "unconfined", "kernel") else label


def _line(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(256).strip()
    except OSError:
        return None  # this kernel does not have the file


def as_text(report: Report) -> str:
    """The report as text."""
    confinement = report.confinement
    lines = ["Machine"]
    lines.append(_row("kernel", f"Linux {platform.release()}, {kernel.MACHINE}"))
    lines.append(_row("user", "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"))
    lines += [
        _row(feature.name, _feature_status(feature, confinement)) for feature in report.features
    ]
    lines.append(_row("Landlock", _landlock_status(confinement.landlock)))
    lines += ["", "Requests with a sandbox"]
    lines.append(_row("file operations", _enforcement(confinement, for_commands=False)))
    lines.append(_row("commands", _enforcement(confinement, for_commands=True)))
    if _enforces_commands(confinement):
        lines.append(_row("nested namespaces", _nesting_status(confinement)))
        if not _restrictions(confinement).unix_sockets:
            lines.append(_row("unix sockets", _UNIX_SOCKETS))
    lines += ["", "Refused requests"]
    lines += [f"  {kind}" for kind in report.refused or ("none",)]
    has_old_landlock = confinement.landlock < _USEFUL_LANDLOCK
    if report.problems or has_old_landlock:
        lines += ["", "How to fix it"]
    for problem in report.problems:
        lines.append(f"  {problem.feature}: {problem.reason}")
        lines += [f"      {fix}" for fix in problem.fixes]
    if has_old_landlock:
        lines += [f"  {line}" for line in _OLD_LANDLOCK]
    return "\n".join(lines) + "\n"


def _row(name: str, value: str) -> str:
    return f"  {name:<{_WIDTH}}{value}"


def _feature_status(feature: Feature, confinement: Confinement) -> str:
    if feature.failure is None:
        return "yes"
    if feature.name == capabilities.USER_NAMESPACES and confinement.refusal is None:
        return f"no, and not needed by root ({feature.failure})"
    return f"no: {feature.failure}"


def _landlock_status(version: int) -> str:
    if not version:
        return "no"
    known = [name for number, name in _LANDLOCK_FEATURES.items() if number <= version]
    return f"yes, version {version}: {', '.join(known)}"


def _nesting_status(confinement: Confinement) -> str:
    if not confinement.user_namespace:
        return "refused without user namespaces"
    return _NESTING_ON_RAMFS if _is_on_initial_ramfs() else _NESTING


def _is_on_initial_ramfs() -> bool:
    """Whether the root is the file system that the kernel boots with, which cannot be moved."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        mounts = [line.split() for line in file]
    kinds = [mount[mount.index("-") + 1] for mount in mounts if mount[4] == "/"]
    return kinds[-1:] == ["rootfs"]


def _restrictions(confinement: Confinement) -> Restrictions:
    """The restrictions of a command with a writable workspace and network."""
    return confinement.restrictions(_WORKSPACE, "enabled")


def _enforces_commands(confinement: Confinement) -> bool:
    return confinement.refusal is None and _restrictions(confinement).is_separate


def _enforcement(confinement: Confinement, *, for_commands: bool) -> str:
    if confinement.refusal is not None or (for_commands and not _enforces_commands(confinement)):
        return "refused if the policy limits files"
    mechanisms = ["mounts", "dropped capabilities"]
    if for_commands:
        mechanisms.append("namespaces")
    if _restrictions(confinement).file_rights if for_commands else confinement.landlock:
        mechanisms.append("Landlock")
    mechanisms.append("seccomp")
    sees_host_proc = for_commands and not confinement.private_proc
    note = "; commands see the host's /proc" if sees_host_proc else ""
    return f"enforced by {', '.join(mechanisms[:-1])} and {mechanisms[-1]}{note}"


def as_json(report: Report) -> str:
    """The report as JSON; its keys are an interface for programs."""
    confinement = report.confinement
    value: dict[str, Any] = {
        "kernel": platform.release(),
        "machine": kernel.MACHINE,
        "uid": os.geteuid(),
        "offers": {
            feature.name: {"works": feature.failure is None, "reason": feature.failure}
            for feature in report.features
        },
        "landlock": confinement.landlock,
        "enforced": {
            "fileOperations": confinement.refusal is None,
            "commands": _enforces_commands(confinement),
            "userNamespace": confinement.user_namespace,
            "privateProc": confinement.private_proc,
        },
        "refused": list(report.refused),
        "gaps": [
            {"part": problem.feature, "reason": problem.reason, "fixes": list(problem.fixes)}
            for problem in report.problems
        ],
    }
    return json.dumps(value, indent=2) + "\n"
