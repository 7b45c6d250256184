"""The system call filters of confined processes, as classic BPF programs. Pure.

A program finds the number by binary search in about ten steps, of at most 62 instructions. Since
5.11 the kernel does not run it for numbers that are allowed for any arguments.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Final

from exec_server.errors import InternalError
from exec_server.sandbox.policy.model import Network


class UnsupportedMachine(InternalError):
    """There is no filter for this processor architecture."""

    def __init__(self, machine: str) -> None:
        super().__init__(f"the sandbox has no system call filter for {machine} processors")


# AUDIT_ARCH_* and the column in the tables below.
_MACHINES: Final = {"x86_64": (0xC000_003E, 0), "aarch64": (0xC000_00B7, 1)}

# Names of system calls and their numbers; None where an architecture lacks the call.
_Numbers = dict[str, tuple[int | None, int | None]]

# Decided by their arguments, at the label given as the key.
_CHECKED: Final[dict[str, _Numbers]] = {
    "ioctl": {"ioctl": (16, 29)},
    "fcntl": {"fcntl": (72, 25)},
    "flock": {"flock": (73, 32)},
    "socket": {"socket": (41, 198)},
    "pair": {"socketpair": (53, 199)},
    "namespaces": {"clone": (56, 220), "unshare": (272, 97)},
    # Its arguments are in memory, which no filter can read; programs fall back to clone.
    "absent": {"clone3": (435, 435)},
}
# Refused to every confined process. io_uring performs other calls without passing the filter. The
# reference allows the rest, but:
# - The keyrings of the server's session are inherited, and no namespace hides them.
# - perf_event_open observes the whole machine where the administrator allows it.
# - A file handle opens a file without its path, and so bypasses mounts over that path.
# - bpf and userfaultfd are for debuggers and for attacks on the kernel.
# No compiler, package manager or test runner needs these calls, and container runtimes refuse
# them by default too. Allowed: kcmp and process_madvise, which the kernel permits only where it
# permits tracing, and which neither change nor read anything.
_ALWAYS: Final[_Numbers] = {
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
# Also refused without network. pidfd_getfd, which the reference allows, copies a descriptor from
# another process, possibly a socket.
_OFFLINE: Final[_Numbers] = {
    "connect": (42, 203),
    "accept": (43, 202),
    "sendto": (44, 206),
    "shutdown": (48, 210),
    "bind": (49, 200),
    "listen": (50, 201),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "setsockopt": (54, 208),
    "getsockopt": (55, 209),
    "ptrace": (101, 117),
    "accept4": (288, 242),
    "recvmmsg": (299, 243),
    "sendmmsg": (307, 269),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
}
# Also refused to a command with proxies: the socket may be one of another network namespace.
_PROXIED: Final[_Numbers] = {"pidfd_getfd": (438, 438)}
# Also refused where a command may not nest namespaces: it could otherwise join a user namespace
# of another process of its user and gain all capabilities in it.
_NOT_NESTING: Final[_Numbers] = {"setns": (308, 268)}
# Also refused to a worker, which only operates on files and uses one open socket: with read and
# write, and with sendmsg and recvmsg to pass descriptors. It starts no process and no thread, and
# does not interact with other processes.
_WORKER: Final[_Numbers] = {
    "recvfrom": (45, 207),
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "kill": (62, 129),
    "rt_sigqueueinfo": (129, 138),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "mount": (165, 40),
    "umount2": (166, 39),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "unshare": (272, 97),
    "rt_tgsigqueueinfo": (297, 240),
    "setns": (308, 268),
    "kcmp": (312, 272),
    "execveat": (322, 281),
    "pidfd_send_signal": (424, 424),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_open": (434, 434),
    "clone3": (435, 435),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "process_mrelease": (448, 448),
    "open_tree_attr": (467, 467),
}

_LOAD: Final = 0x20  # a word of struct seccomp_data
_AND: Final = 0x54
_IF_EQUAL: Final = 0x15
_IF_GREATER: Final = 0x25
_IF_AT_LEAST: Final = 0x35
_IF_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06

_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
# The lower words of the arguments. They are ints: the kernel ignores the upper words, which can
# hold anything.
_FIRST_ARGUMENT: Final = 16
_SECOND_ARGUMENT: Final = 24

_ALLOW: Final = 0x7FFF_0000
_REFUSE: Final = 0x0005_0001  # SECCOMP_RET_ERRNO with EPERM
_NO_SUCH_CALL: Final = 0x0005_0026  # SECCOMP_RET_ERRNO with ENOSYS
_REPORT: Final = 0x7FC0_0000  # SECCOMP_RET_USER_NOTIF
_KILL: Final = 0x8000_0000
_CLONE_NEWCGROUP: Final = 0x0200_0000
_NESTING_FLAGS: Final = 0x1002_0000  # CLONE_NEWUSER and CLONE_NEWNS

_X32_BIT: Final = 0x4000_0000
_NO_CALL: Final = 0xFFFF_FFFF

_AF_UNIX: Final = 1
_AF_INET: Final = 2
_AF_INET6: Final = 10
_AF_NETLINK: Final = 16
_AF_VSOCK: Final = 40
_SOCKET_TYPE_MASK: Final = 0xF  # the other bits are SOCK_CLOEXEC and SOCK_NONBLOCK
_SOCK_STREAM: Final = 1
_SOCK_SEQPACKET: Final = 5
_TIOCSTI: Final = 0x5412
_TIOCLINUX: Final = 0x541C
_F_SETLEASE: Final = 1024
_F_SETDELEG: Final = 1040  # the same for directories, since 6.19
_LOCK_EX: Final = 2
# The labels of calls whose arguments are checked for a worker, too; it makes none of the others.
_CHECKED_IN_WORKER: Final = ("ioctl", "fcntl")

# Up to this many ranges of numbers are compared in sequence; more are split in two halves.
_MAX_SEQUENCE: Final = 3

# A line is an instruction or, as a plain string, the label of the next instruction. A jump goes to
# the first label if its condition holds, else to the second; an empty label is the next line.
_Line = tuple[int, int, str, str] | str
_Range = tuple[int, int, str]  # first number, last number, the label to go to


@cache
def build_filter(
    network: Network | None,
    *,
    machine: str,
    for_worker: bool = False,
    allow_nesting: bool = False,
    unix_sockets: bool = True,
    exclusive_locks: bool = True,
    with_listener: bool = False,
) -> bytes:
    """The filter as an array of `struct sock_filter`; raises UnsupportedMachine.

    Empty if `network` is None: nothing is refused and no filter installed. A worker has no
    network for any value of `network`. `allow_nesting` permits a command to create user and
    mount namespaces, `unix_sockets` to connect by path if it has network, `exclusive_locks` to
    lock files against all others. `with_listener` leaves it to a listener to refuse sockets of the
    internet.
    """
    if network is None and not for_worker:
        return b""
    if machine not in _MACHINES:
        raise UnsupportedMachine(machine)
    architecture, column = _MACHINES[machine]
    labels = _labels(network, column, for_worker=for_worker, allow_nesting=allow_nesting)
    if exclusive_locks and not for_worker:
        labels = {number: label for number, label in labels.items() if label != "flock"}
    ranges = _ranges(labels)
    lines: list[_Line] = [
        (_LOAD, _ARCHITECTURE, "", ""),
        (_IF_EQUAL, architecture, "", "kill"),
        (_LOAD, _NUMBER, "", ""),
    ]
    if machine == "x86_64":
        lines.append((_IF_ANY_BIT, _X32_BIT, "x32", ""))
    lines += _search(ranges, low=0)
    lines += _ioctl_check()
    lines += _lease_check()
    if not for_worker:
        lines += [] if exclusive_locks else _lock_check()
        lines += _socket_check(network, unix_sockets=unix_sockets, with_listener=with_listener)
        lines += _namespace_check(allow_nesting=allow_nesting)
        lines += ["absent", (_RETURN, _NO_SUCH_CALL, "", "")]
        if with_listener:
            lines += ["report", (_RETURN, _REPORT, "", "")]
    if machine == "x86_64":
        # A tracer sets the number to -1 for a call that it performs itself.
        lines += ["x32", (_IF_EQUAL, _NO_CALL, "allow", "kill")]
    for label, result in (("kill", _KILL), ("refuse", _REFUSE), ("allow", _ALLOW)):
        lines += [label, (_RETURN, result, "", "")]
    return _assemble(lines)


def _labels(
    network: Network | None, column: int, *, for_worker: bool, allow_nesting: bool
) -> dict[int, str]:
    """The label to go to for each number; calls without a label are allowed."""
    refused = dict(_ALWAYS)
    if for_worker or network == "restricted":
        refused |= _OFFLINE
    if network == "proxied":
        refused |= _PROXIED
    if not allow_nesting:
        refused |= _NOT_NESTING
    if for_worker:
        refused |= _WORKER
    labels = dict.fromkeys((numbers[column] for numbers in refused.values()), "refuse")
    for label, calls in _CHECKED.items():
        target = "refuse" if for_worker and label not in _CHECKED_IN_WORKER else label
        labels |= dict.fromkeys((numbers[column] for numbers in calls.values()), target)
    return {number: label for number, label in labels.items() if number is not None}


def _ranges(labels: dict[int, str]) -> list[_Range]:
    """The numbers in order; consecutive numbers with the same label form one range."""
    ranges: list[_Range] = []
    for number, label in sorted(labels.items()):
        if ranges and (number - 1, label) == ranges[-1][1:]:
            ranges[-1] = (ranges[-1][0], number, label)
        else:
            ranges.append((number, number, label))
    return ranges


def _search(ranges: list[_Range], *, low: int) -> list[_Line]:
    """Go to the label of the number in the accumulator, which is at least `low`."""
    if len(ranges) > _MAX_SEQUENCE:
        middle = len(ranges) // 2
        pivot = ranges[middle][0]
        return [
            (_IF_AT_LEAST, pivot, f"from {pivot}", ""),
            *_search(ranges[:middle], low=low),
            f"from {pivot}",
            *_search(ranges[middle:], low=pivot),
        ]
    lines: list[_Line] = []
    for index, (first, last, label) in enumerate(ranges):
        otherwise = "allow" if index == len(ranges) - 1 else ""
        if first == last:
            lines.append((_IF_EQUAL, first, label, otherwise))
            continue
        if first > low:
            lines.append((_IF_AT_LEAST, first, "", "allow"))
        lines.append((_IF_GREATER, last, otherwise, label))
        low = last + 1
    return lines


def _ioctl_check() -> list[_Line]:
    """Refuse to insert terminal input, which the next reader would take for the user's."""
    return [
        "ioctl",
        (_LOAD, _SECOND_ARGUMENT, "", ""),
        (_IF_EQUAL, _TIOCSTI, "refuse", ""),
        (_IF_EQUAL, _TIOCLINUX, "refuse", "allow"),
    ]


def _lease_check() -> list[_Line]:
    """Refuse leases, for which reading suffices: other programs wait up to a minute for a file."""
    return [
        "fcntl",
        (_LOAD, _SECOND_ARGUMENT, "", ""),
        (_IF_EQUAL, _F_SETLEASE, "refuse", ""),
        (_IF_EQUAL, _F_SETDELEG, "refuse", "allow"),
    ]


def _lock_check() -> list[_Line]:
    """Refuse exclusive locks of flock, for which reading suffices; those of fcntl need writing."""
    return ["flock", (_LOAD, _SECOND_ARGUMENT, "", ""), (_IF_ANY_BIT, _LOCK_EX, "refuse", "allow")]


def _socket_check(
    network: Network | None, *, unix_sockets: bool, with_listener: bool
) -> list[_Line]:
    if network == "restricted":
        reported = _internet_check() if with_listener else []
        return ["socket", *reported, "pair", *_connected_unix_check()]
    if network == "proxied":
        return ["socket", *_namespaced_check(), "pair", *_connected_unix_check()]
    if unix_sockets:
        return ["socket", "pair", *_online_check(_AF_VSOCK)]
    return ["socket", *_online_check(_AF_VSOCK, _AF_UNIX), "pair", *_connected_unix_check()]


def _internet_check() -> list[_Line]:
    """Report sockets of the internet. Others are not worth a report: many programs try them."""
    return [
        (_LOAD, _FIRST_ARGUMENT, "", ""),
        (_IF_EQUAL, _AF_UNIX, "kind", ""),
        (_IF_EQUAL, _AF_INET, "report", ""),
        (_IF_EQUAL, _AF_INET6, "report", "refuse"),
    ]


def _connected_unix_check() -> list[_Line]:
    """Allow only unix sockets that need a connection: connecting is refused, except for pairs.

    sendmsg can give an address to a datagram socket, even to one of a pair, and so reach any
    socket of the host that has a path. The address is in memory, which no filter can read. A
    stream socket refuses such an address, and a sequenced one ignores it. SOCK_RAW is refused
    too: in this family it means datagrams.
    """
    return [
        (_LOAD, _FIRST_ARGUMENT, "", ""),
        (_IF_EQUAL, _AF_UNIX, "", "refuse"),
        "kind",
        (_LOAD, _SECOND_ARGUMENT, "", ""),
        (_AND, _SOCKET_TYPE_MASK, "", ""),
        (_IF_EQUAL, _SOCK_STREAM, "allow", ""),
        (_IF_EQUAL, _SOCK_SEQPACKET, "allow", "refuse"),
    ]


def _namespaced_check() -> list[_Line]:
    """Allow only sockets of families that a network namespace confines."""
    return [
        (_LOAD, _FIRST_ARGUMENT, "", ""),
        (_IF_EQUAL, _AF_INET, "allow", ""),
        (_IF_EQUAL, _AF_INET6, "allow", ""),
        (_IF_EQUAL, _AF_NETLINK, "allow", "refuse"),
    ]


def _online_check(*families: int) -> list[_Line]:
    """Refuse sockets of some families, like those to the hypervisor, which is no network."""
    *others, last = families
    return [
        (_LOAD, _FIRST_ARGUMENT, "", ""),
        *((_IF_EQUAL, family, "refuse", "") for family in others),
        (_IF_EQUAL, last, "refuse", "allow"),
    ]


def _namespace_check(*, allow_nesting: bool) -> list[_Line]:
    """Refuse new cgroup namespaces, and nesting where it would undo mounts.

    The owner of a cgroup namespace may mount cgroups. In a sandbox of root they belong to root,
    so a command could change limits of the whole machine. `model` explains nesting.
    """
    flags = _CLONE_NEWCGROUP if allow_nesting else _CLONE_NEWCGROUP | _NESTING_FLAGS
    return ["namespaces", (_LOAD, _FIRST_ARGUMENT, "", ""), (_IF_ANY_BIT, flags, "refuse", "allow")]


def _assemble(lines: list[_Line]) -> bytes:
    """The instructions with labels replaced by distances, which must fit into a byte."""
    labels: dict[str, int] = {}
    instructions: list[tuple[int, int, str, str]] = []
    for line in lines:
        if isinstance(line, str):
            labels[line] = len(instructions)
        else:
            instructions.append(line)
    return b"".join(
        struct.pack(
            "=HBBI",
            code,
            labels[yes] - index - 1 if yes else 0,
            labels[no] - index - 1 if no else 0,
            operand,
        )
        for index, (code, operand, yes, no) in enumerate(instructions)
    )
