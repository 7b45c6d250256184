"""`exec-server sandbox check`: what this machine can confine, and how to fill the gaps.

All of it is found out by trying (see sandbox.means). What files of /proc say is only used to
guess the reason for a failure, and with it the fix.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from exec_server.sandbox import kernel, means
from exec_server.sandbox.launcher import Launcher
from exec_server.sandbox.means import Means, Part

_EPERM, _EACCES, _EINVAL, _ENOSPC, _ENOSYS = 1, 13, 22, 28, 38
_OLDEST_KERNEL: Final = "5.12"  # mount_setattr
# What each version added of what is used here: neither TCP ports (4) nor audit records (7).
_ADDED_BY_LANDLOCK: Final = {
    1: "files",
    2: "moves",
    3: "truncation",
    5: "devices",
    6: "signals, abstract sockets",
}
_USER_SYSCTLS: Final = {
    means.USER_NAMESPACES: "user.max_user_namespaces",
    "mount namespaces": "user.max_mnt_namespaces",
    "pid namespaces": "user.max_pid_namespaces",
    "ipc namespaces": "user.max_ipc_namespaces",
    "network namespaces": "user.max_net_namespaces",
}
_CALLS: Final = "clone, mount, umount2, pivot_root, open_tree, move_mount and mount_setattr"
_NO_SECOND_WALL: Final = (
    "Landlock would repeat the limits of file operations as a second wall. Linux 5.13 or newer "
    "with `landlock` among the `lsm=` of its command line offers it."
)


@dataclass(frozen=True)
class Gap:
    """Something that does not work here, and what would make it work."""

    part: str
    reason: str
    fixes: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All that there is to say about this machine."""

    found: Means
    parts: tuple[Part, ...]
    gaps: tuple[Gap, ...]
    refused: tuple[str, ...]


def examine() -> Report:
    """Try everything out. Blocking, for some tens of milliseconds."""
    launcher = Launcher(os.environ)
    try:
        found = means.find_means(launcher)
        parts = tuple(means.survey(launcher))
    finally:
        launcher.close()
    return Report(found, parts, tuple(_gaps(found, parts)), tuple(_refused(found, parts)))


def _refused(found: Means, parts: tuple[Part, ...]) -> Iterator[str]:
    if found.refusal is not None:
        yield "file operations, except reads by a policy that lets everything be read"
        yield "commands whose policy limits files"
    elif not found.own_proc:
        yield "file operations whose policy denies files by a pattern"
    if any(part.name == means.FILTER and part.failure for part in parts):
        yield "commands whose policy limits only the network"


# ---- reasons and fixes ----------------------------------------------------------------


def _gaps(found: Means, parts: tuple[Part, ...]) -> Iterator[Gap]:
    broken = [part for part in parts if part.failure and not _is_consequence(part.failure)]
    if found.refusal is None:
        # Root does without a user namespace.
        broken = [part for part in broken if part.name in (means.OWN_PROC, means.FILTER)]
    seen: set[tuple[str, ...]] = set()
    for part in broken:
        failure = part.failure or ""
        fixes = tuple(_fixes(part.name, failure))
        if fixes not in seen:  # one cause often breaks several
            seen.add(fixes)
            yield Gap(part.name, failure, fixes)
    if found.refusal is not None and not broken:
        yield Gap("confinement", found.refusal, tuple(_fixes_of_the_rest()))


def _is_consequence(failure: str) -> bool:
    return failure.startswith(means.NOT_TRIED)


def _fixes_of_the_rest() -> Iterator[str]:
    if not kernel.is_known_machine():
        yield "confinement is known for x86_64 and aarch64 only"


def _fixes(part: str, failure: str) -> Iterator[str]:
    """What would make a part work, the likeliest first."""
    number = _error_number(failure)
    if number == _ENOSPC and part in _USER_SYSCTLS:
        name = _USER_SYSCTLS[part]
        yield f"sysctl -w {name}=15000   (it is {_sysctl(name) or 'too small'})"
    elif part == means.OWN_PROC and number in (_EPERM, _EACCES):
        yield "parts of /proc are masked here, as container runtimes do:"
        yield "docker run --security-opt systempaths=unconfined"
        yield "podman run --security-opt unmask=ALL"
        yield "Kubernetes: securityContext.procMount: Unmasked"
    elif number in (_EPERM, _EACCES) or (number == _ENOSYS and _is_filtered()):
        yield from _fixes_of_a_refusal()
    elif number == _ENOSYS and part == means.MOUNTS:
        yield f"Linux {_OLDEST_KERNEL} or newer is needed; this is {platform.release()}"
    elif number in (_EINVAL, _ENOSYS):
        yield f"this kernel was built without {part}; another one is needed"


def _fixes_of_a_refusal() -> list[str]:
    """What may have refused a call that this kernel knows."""
    fixes = []
    if os.geteuid() != 0 and _sysctl("kernel.unprivileged_userns_clone") == "0":
        fixes.append("sysctl -w kernel.unprivileged_userns_clone=1")
    if os.geteuid() != 0 and _sysctl("kernel.apparmor_restrict_unprivileged_userns") == "1":
        fixes.append("sysctl -w kernel.apparmor_restrict_unprivileged_userns=0")
        fixes.append("or give this Python an AppArmor profile that says `userns,`")
    if _is_filtered():
        fixes.append("a seccomp filter is around this process, as container runtimes put one:")
        fixes.append("docker or podman run --security-opt seccomp=unconfined")
        fixes.append(f"or with a profile that also allows {_CALLS}")
    label = _security_label()
    if label:
        fixes.append(f"this process has the security label `{label}`; in a container:")
        fixes.append("docker or podman run --security-opt apparmor=unconfined")
    return fixes or ["something forbids it: a security module, or a chroot around this process"]


def _error_number(failure: str) -> int | None:
    match = re.search(r"\(os error (\d+)\)", failure)
    return int(match[1]) if match else None


def _sysctl(name: str) -> str | None:
    return _line(f"/proc/sys/{name.replace('.', '/')}")


def _is_filtered() -> bool:
    """Whether somebody has put a seccomp filter around this process."""
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
        return None  # not on this kernel


# ---- as text --------------------------------------------------------------------------

_WIDTH: Final = 20


def text(report: Report) -> str:
    """The report for people, who read it in ten seconds."""
    found = report.found
    lines = ["This machine"]
    lines.append(_row("kernel", f"Linux {platform.release()}, {kernel.MACHINE}"))
    lines.append(_row("user", "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"))
    lines += [_row(part.name, _answer(part, found)) for part in report.parts]
    lines.append(_row("Landlock", _landlock(found.landlock)))
    lines += ["", "What is asked to be confined"]
    lines.append(_row("file operations", _enforcement(found, for_commands=False)))
    lines.append(_row("commands", _enforcement(found, for_commands=True)))
    lines += ["", "What is refused"]
    lines += [f"  {what}" for what in report.refused or ("nothing",)]
    if report.gaps or not found.landlock:
        lines += ["", "What to do about it"]
    for gap in report.gaps:
        lines.append(f"  {gap.part}: {gap.reason}")
        lines += [f"      {fix}" for fix in gap.fixes]
    if not found.landlock:
        lines.append(f"  {_NO_SECOND_WALL}")
    return "\n".join(lines) + "\n"


def _row(name: str, value: str) -> str:
    return f"  {name:<{_WIDTH}}{value}"


def _answer(part: Part, found: Means) -> str:
    if part.failure is None:
        return "yes"
    if part.name == means.USER_NAMESPACES and found.refusal is None:
        return f"no, and root does without ({part.failure})"
    return f"no: {part.failure}"


def _landlock(version: int) -> str:
    if not version:
        return "no"
    known = [text for number, text in _ADDED_BY_LANDLOCK.items() if number <= version]
    return f"yes, version {version}: {', '.join(known)}"


def _enforcement(found: Means, *, for_commands: bool) -> str:
    if found.refusal is not None:
        return "refused where limits on files are asked for"
    walls = ["mounts", "dropped capabilities"]
    if for_commands:
        walls.append("namespaces")
    if found.landlock >= (6 if for_commands else 1):
        walls.append("Landlock")
    walls.append("seccomp")
    sight = "" if found.own_proc or not for_commands else "; they see the machine's /proc"
    return f"enforced by {', '.join(walls[:-1])} and {walls[-1]}{sight}"


# ---- as JSON --------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """The report for programs."""
    found = report.found
    value: dict[str, Any] = {
        "kernel": platform.release(),
        "machine": kernel.MACHINE,
        "uid": os.geteuid(),
        "offers": {
            part.name: {"works": part.failure is None, "reason": part.failure}
            for part in report.parts
        },
        "landlock": found.landlock,
        "enforced": {
            "fileOperations": found.refusal is None,
            "commands": found.refusal is None,
            "userNamespace": found.user_namespace,
            "privateProc": found.own_proc,
        },
        "refused": list(report.refused),
        "gaps": [
            {"part": gap.part, "reason": gap.reason, "fixes": list(gap.fixes)}
            for gap in report.gaps
        ],
    }
    return json.dumps(value, indent=2) + "\n"
