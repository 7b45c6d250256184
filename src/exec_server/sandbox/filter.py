"""The system call filters of confined processes, as classic BPF programs. Pure.

A program looks at the architecture, then at the number of the call, and for three calls at
their arguments. The kernel works out beforehand which numbers are allowed whatever their
arguments (from 5.11 on) and does not run the program for those at all; for the others, and
on older kernels for all, the number is found by halving, in some ten steps. The longest program
has 52 instructions.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Final

from exec_server.errors import InternalError
from exec_server.sandbox.plan import Network


class Unsupported(InternalError):
    """There is no filter for the processor of this machine."""

    def __init__(self, machine: str) -> None:
        super().__init__(f"the sandbox has no system call filter for {machine} processors")


# AUDIT_ARCH_*, and the column in the tables below.
_MACHINES: Final = {"x86_64": (0xC000_003E, 0), "aarch64": (0xC000_00B7, 1)}

# Names of calls and their numbers; None where a machine does not have the call.
_Numbers = dict[str, tuple[int | None, int | None]]

# Decided by their arguments: by the code at this label.
_CHECKED: Final[dict[str, _Numbers]] = {
    "ioctl": {"ioctl": (16, 29)},
    "socket": {"socket": (41, 198), "socketpair": (53, 199)},
    "namespaces": {"clone": (56, 220), "unshare": (272, 97)},
    # Its arguments are in memory, where no filter can look; programs then use the older call.
    "absent": {"clone3": (435, 435)},
}
# Refused to every confined process. io_uring does what any other call does, behind the back of
# the filter. The others the reference allows, but:
# - The keyrings of the server's session are inherited, and no namespace hides them.
# - Where the administrator allows it, perf_event_open observes the whole machine.
# - A file handle names a file without its path, so what is mounted over that does not count.
# - bpf and userfaultfd are for debuggers and for attacks on the kernel.
# No compiler, package manager or test runner needs one of them, and container runtimes refuse
# them by default too. Left alone: kcmp and process_madvise, which the kernel allows only where
# it allows tracing, and which neither change nor read anything.
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
# Also refused without network. pidfd_getfd, which the reference allows, takes a descriptor out
# of another process, and that could be a socket.
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
# Also refused to a worker, which only works on files and talks over a descriptor that it has:
# by read and write, or sendmsg and recvmsg when it passes descriptors. It neither starts
# anything, not even a thread, nor has to do with other processes.
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
# The lower words of arguments. They are ints, so the kernel does not look at the upper words,
# where a caller may leave anything.
_FIRST_ARGUMENT: Final = 16
_SECOND_ARGUMENT: Final = 24

_ALLOW: Final = 0x7FFF_0000
_REFUSE: Final = 0x0005_0001  # SECCOMP_RET_ERRNO with EPERM
_NO_SUCH_CALL: Final = 0x0005_0026  # SECCOMP_RET_ERRNO with ENOSYS
_KILL: Final = 0x8000_0000
_CLONE_NEWCGROUP: Final = 0x0200_0000

_X32_BIT: Final = 0x4000_0000
_NO_CALL: Final = 0xFFFF_FFFF

_AF_UNIX: Final = 1
_AF_VSOCK: Final = 40
_SOCKET_TYPE_MASK: Final = 0xF  # the other bits are SOCK_CLOEXEC and SOCK_NONBLOCK
_SOCK_STREAM: Final = 1
_SOCK_SEQPACKET: Final = 5
_TIOCSTI: Final = 0x5412
_TIOCLINUX: Final = 0x541C

# So many runs of numbers are compared one after the other before halving pays.
_COMPARED_IN_TURN: Final = 3

# A line is an instruction or, as a plain string, the label of the next one. A jump goes to the
# first label if its condition holds, else to the second; an empty one means the next line.
_Line = tuple[int, int, str, str] | str
_Run = tuple[int, int, str]  # from, to, the label of what happens to these numbers


@cache
def program(
    network: Network | None,
    *,
    machine: str,
    for_worker: bool = False,
) -> bytes:
    """The filter as an array of `struct sock_filter`; raises Unsupported.

    Empty if `network` is None: then nothing is refused and there is nothing to install. A
    worker has no network, whatever `network` says.
    """
    if network is None and not for_worker:
        return b""
    if machine not in _MACHINES:
        raise Unsupported(machine)
    architecture, column = _MACHINES[machine]
    runs = _runs(_outcomes(network, column, for_worker=for_worker))
    lines: list[_Line] = [
        (_LOAD, _ARCHITECTURE, "", ""),
        (_IF_EQUAL, architecture, "", "kill"),
        (_LOAD, _NUMBER, "", ""),
    ]
    if machine == "x86_64":
        lines.append((_IF_ANY_BIT, _X32_BIT, "x32", ""))
    lines += _search(runs, low=0)
    lines += _ioctl_check()
    if not for_worker:
        lines += _socket_check_offline() if network == "restricted" else _socket_check_online()
        lines += _namespace_check()
        lines += ["absent", (_RETURN, _NO_SUCH_CALL, "", "")]
    if machine == "x86_64":
        # No call at all is what a tracer leaves of a call that it carries out itself.
        lines += ["x32", (_IF_EQUAL, _NO_CALL, "allow", "kill")]
    for label, result in (("kill", _KILL), ("refuse", _REFUSE), ("allow", _ALLOW)):
        lines += [label, (_RETURN, result, "", "")]
    return _assembled(lines)


def _outcomes(network: Network | None, column: int, *, for_worker: bool) -> dict[int, str]:
    """What happens to which number, as the label to go to; any other call is allowed."""
    refused = dict(_ALWAYS)
    if for_worker or network == "restricted":
        refused |= _OFFLINE
    if for_worker:
        refused |= _WORKER
    outcomes = dict.fromkeys((numbers[column] for numbers in refused.values()), "refuse")
    for label, calls in _CHECKED.items():
        fate = "refuse" if for_worker and label != "ioctl" else label
        outcomes |= dict.fromkeys((numbers[column] for numbers in calls.values()), fate)
    return {number: label for number, label in outcomes.items() if number is not None}


def _runs(outcomes: dict[int, str]) -> list[_Run]:
    """The numbers in order, neighbours of one fate together."""
    runs: list[_Run] = []
    for number, label in sorted(outcomes.items()):
        if runs and (number - 1, label) == runs[-1][1:]:
            runs[-1] = (runs[-1][0], number, label)
        else:
            runs.append((number, number, label))
    return runs


def _search(runs: list[_Run], *, low: int) -> list[_Line]:
    """Go where the number in the accumulator, which is at least `low`, belongs."""
    if len(runs) > _COMPARED_IN_TURN:
        middle = len(runs) // 2
        pivot = runs[middle][0]
        return [
            (_IF_AT_LEAST, pivot, f"from {pivot}", ""),
            *_search(runs[:middle], low=low),
            f"from {pivot}",
            *_search(runs[middle:], low=pivot),
        ]
    lines: list[_Line] = []
    for index, (first, last, label) in enumerate(runs):
        otherwise = "allow" if index == len(runs) - 1 else ""
        if first == last:
            lines.append((_IF_EQUAL, first, label, otherwise))
            continue
        if first > low:
            lines.append((_IF_AT_LEAST, first, "", "allow"))
        lines.append((_IF_GREATER, last, otherwise, label))
        low = last + 1
    return lines


def _ioctl_check() -> list[_Line]:
    """Refuse to type into the terminal: whoever reads it next would take it for the user's."""
    return [
        "ioctl",
        (_LOAD, _SECOND_ARGUMENT, "", ""),
        (_IF_EQUAL, _TIOCSTI, "refuse", ""),
        (_IF_EQUAL, _TIOCLINUX, "refuse", "allow"),
    ]


def _socket_check_offline() -> list[_Line]:
    """Allow only sockets that need to be connected: that is refused, except for pairs.

    A datagram socket can be given an address by sendmsg, even one of a pair, and so reach any
    socket of the host that has a path. The address is in memory, where no filter can look. A
    stream socket refuses such an address and a sequenced one ignores it. SOCK_RAW is no way
    round either: it is another word for datagrams in this family.
    """
    return [
        "socket",
        (_LOAD, _FIRST_ARGUMENT, "", ""),
        (_IF_EQUAL, _AF_UNIX, "", "refuse"),
        (_LOAD, _SECOND_ARGUMENT, "", ""),
        (_AND, _SOCKET_TYPE_MASK, "", ""),
        (_IF_EQUAL, _SOCK_STREAM, "allow", ""),
        (_IF_EQUAL, _SOCK_SEQPACKET, "allow", "refuse"),
    ]


def _socket_check_online() -> list[_Line]:
    """Refuse the way to the hypervisor, which is no part of the network."""
    return [
        "socket",
        (_LOAD, _FIRST_ARGUMENT, "", ""),
        (_IF_EQUAL, _AF_VSOCK, "refuse", "allow"),
    ]


def _namespace_check() -> list[_Line]:
    """Refuse new cgroup namespaces: whoever owns one may mount cgroups, and in a sandbox of
    root's they belong to it, so it could change the limits of the whole machine.
    """
    return [
        "namespaces",
        (_LOAD, _FIRST_ARGUMENT, "", ""),
        (_IF_ANY_BIT, _CLONE_NEWCGROUP, "refuse", "allow"),
    ]


def _assembled(lines: list[_Line]) -> bytes:
    """The instructions with labels replaced by distances; those must fit into a byte."""
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
