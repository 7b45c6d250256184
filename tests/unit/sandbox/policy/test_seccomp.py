"""System call filters: every rule in an interpreter for both machines, and in this kernel."""

from __future__ import annotations

import fcntl
import json
import platform
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.errors import InternalError
from exec_server.sandbox.policy.seccomp import UnsupportedMachine, build_filter

ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000
ABSENT = 0x00050026  # ENOSYS
REPORT = 0x7FC00000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, ARM = 0x40000003, 0x40000028
MACHINES = tuple(ARCHITECTURES)
GARBAGE = 0xDEADBEEF_00000000
HERE = platform.machine()

# Numbers on x86_64 and aarch64, from the kernel's tables.
CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "exit_group": (231, 94),
    "futex": (202, 98),
    "openat2": (437, 437),
    "ioctl": (16, 29),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "fcntl": (72, 25),
    "flock": (73, 32),
}
ALWAYS = {
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "open_by_handle_at": (304, 265),
}
NOT_NESTING = {"setns": (308, 268)}
OFFLINE = {
    "connect": (42, 203),
    "accept": (43, 202),
    "accept4": (288, 242),
    "bind": (49, 200),
    "listen": (50, 201),
    "getpeername": (52, 205),
    "getsockname": (51, 204),
    "shutdown": (48, 210),
    "sendto": (44, 206),
    "sendmmsg": (307, 269),
    "recvmmsg": (299, 243),
    "getsockopt": (55, 209),
    "setsockopt": (54, 208),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
}
WORKER: dict[str, tuple[int | None, int | None]] = {
    "recvfrom": (45, 207),
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
}
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, AF_PACKET, AF_ALG, AF_VSOCK = 1, 2, 10, 16, 17, 38, 40
STREAM, DATAGRAM, RAW, SEQPACKET = 1, 2, 3, 5
NONBLOCK_CLOEXEC = 0o2004000
TIOCSTI, TIOCLINUX, TCGETS = 0x5412, 0x541C, 0x5401


KINDS = ["restricted", "enabled", "worker", "restricted, nesting", "enabled, nesting"]
KINDS += ["enabled, no unix", "restricted, listener", "proxied", "restricted, no locks"]


def number(name: str, machine: str) -> int | None:
    numbers: Mapping[str, tuple[int | None, ...]] = {**CALLS, **ALWAYS, **OFFLINE, **WORKER}
    return numbers[name][MACHINES.index(machine)]


def run(code: bytes, architecture: int, call: int, *args: int) -> tuple[int, int]:
    """Run the filter for a call as the kernel does: the result, and the instructions run."""
    data = struct.pack("=IIQ6Q", call, architecture, 0, *args, *[0] * (6 - len(args)))
    instructions = list(struct.iter_unpack("=HBBI", code))
    accumulator = at = steps = 0
    conditions: dict[int, Callable[[int], bool]] = {
        0x15: lambda k: accumulator == k,
        0x25: lambda k: accumulator > k,
        0x35: lambda k: accumulator >= k,
        0x45: lambda k: bool(accumulator & k),
    }
    while True:
        operation, yes, no, operand = instructions[at]
        at += 1
        steps += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif operation == 0x54:
            accumulator &= operand
        elif operation == 0x06:
            return operand, steps
        else:
            at += yes if conditions[operation](operand) else no


def outcome(code: bytes, machine: str, name: str, *args: int) -> int:
    call = number(name, machine)
    assert call is not None
    return run(code, ARCHITECTURES[machine], call, *args)[0]


def programs(machine: str) -> dict[str, bytes]:
    return {
        "restricted": build_filter("restricted", machine=machine),
        "enabled": build_filter("enabled", machine=machine),
        "worker": build_filter(None, machine=machine, for_worker=True),
        "restricted, nesting": build_filter("restricted", machine=machine, allow_nesting=True),
        "enabled, nesting": build_filter("enabled", machine=machine, allow_nesting=True),
        "enabled, no unix": build_filter("enabled", machine=machine, unix_sockets=False),
        "restricted, listener": build_filter("restricted", machine=machine, with_listener=True),
        "proxied": build_filter("proxied", machine=machine),
        "restricted, no locks": build_filter("restricted", machine=machine, exclusive_locks=False),
    }


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_listed_numbers_are_refused(kind: str, machine: str) -> None:
    refused: dict[str, tuple[int | None, ...]] = {**ALWAYS}
    if kind == "proxied":
        refused |= {"pidfd_getfd": OFFLINE["pidfd_getfd"], "socket": CALLS["socket"]}
    elif not kind.startswith("enabled"):
        refused |= OFFLINE
    if not kind.endswith("nesting"):
        refused = refused | NOT_NESTING
    if kind == "worker":
        sockets = {name: CALLS[name] for name in ("socket", "socketpair", "flock")}
        refused = refused | WORKER | sockets
    if kind.endswith("no unix"):
        refused |= {"socket": CALLS["socket"]}
    column = MACHINES.index(machine)
    numbers = {numbers[column] for numbers in refused.values()} - {None}
    code = programs(machine)[kind]
    # With these arguments the checked calls are allowed.
    found = {
        call
        for call in range(600)
        if run(code, ARCHITECTURES[machine], call, AF_UNIX, STREAM)[0] == REFUSE
    }
    assert found == numbers


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_refused_is_allowed(kind: str, machine: str) -> None:
    code = programs(machine)[kind]
    results = {run(code, ARCHITECTURES[machine], call, 1, 1)[0] for call in range(600)}
    assert results == {ALLOW, REFUSE} | ({ABSENT} if kind != "worker" else set())
    for name in ("read", "write", "sendmsg", "recvmsg", "openat2", "exit_group", "futex"):
        assert outcome(code, machine, name) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("call", ["socket", "socketpair"])
def test_offline_only_sockets_that_must_be_connected_are_made(machine: str, call: str) -> None:
    code = build_filter("restricted", machine=machine)
    for family, kind in product(range(64), range(16)):
        expected = ALLOW if family == AF_UNIX and kind in (STREAM, SEQPACKET) else REFUSE
        for flags, high in product((0, NONBLOCK_CLOEXEC), (0, GARBAGE)):
            args = (family | high, kind | flags | high)
            assert outcome(code, machine, call, *args) == expected, args


@pytest.mark.parametrize("machine", MACHINES)
def test_a_listener_gets_new_sockets_of_the_internet_and_nothing_else(machine: str) -> None:
    code = build_filter("restricted", machine=machine, with_listener=True)
    plain = build_filter("restricted", machine=machine)
    for family, kind, high in product(range(64), range(16), (0, GARBAGE)):
        args = (family | high, kind | high)
        expected = outcome(plain, machine, "socket", *args)
        reported = REPORT if family in (AF_INET, AF_INET6) else expected
        assert outcome(code, machine, "socket", *args) == reported, args
        pair = outcome(plain, machine, "socketpair", *args)
        assert outcome(code, machine, "socketpair", *args) == pair, args
    for call in set(range(600)) - {number("socket", machine)}:
        for family in (AF_UNIX, AF_INET):
            found = [run(c, ARCHITECTURES[machine], call, family, STREAM)[0] for c in (code, plain)]
            assert found[0] == found[1]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("call", ["socket", "socketpair"])
def test_online_only_the_hypervisor_is_out_of_reach(machine: str, call: str) -> None:
    code = build_filter("enabled", machine=machine)
    for family, kind, high in product(range(64), range(16), (0, GARBAGE)):
        expected = REFUSE if family == AF_VSOCK else ALLOW
        assert outcome(code, machine, call, family | high, kind) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_online_without_unix_sockets_only_connected_pairs_are_made(machine: str) -> None:
    code = build_filter("enabled", machine=machine, unix_sockets=False)
    for family, kind, high in product(range(64), range(16), (0, GARBAGE)):
        expected = REFUSE if family in (AF_UNIX, AF_VSOCK) else ALLOW
        assert outcome(code, machine, "socket", family | high, kind) == expected
        expected = ALLOW if family == AF_UNIX and kind in (STREAM, SEQPACKET) else REFUSE
        assert outcome(code, machine, "socketpair", family | high, kind | high) == expected


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("unix_sockets", [False, True])
def test_with_proxies_only_namespaced_families_are_left(machine: str, unix_sockets: bool) -> None:
    code = build_filter("proxied", machine=machine, unix_sockets=unix_sockets)
    for family, kind, high in product(range(64), range(16), (0, GARBAGE)):
        expected = ALLOW if family in (AF_INET, AF_INET6, AF_NETLINK) else REFUSE
        assert outcome(code, machine, "socket", family | high, kind) == expected
        expected = ALLOW if family == AF_UNIX and kind in (STREAM, SEQPACKET) else REFUSE
        assert outcome(code, machine, "socketpair", family | high, kind | high) == expected


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", ["restricted", "enabled", "worker"])
def test_terminal_input_cannot_be_inserted(kind: str, machine: str) -> None:
    code = programs(machine)[kind]
    for high in (0, GARBAGE):
        for request in (TIOCSTI, TIOCLINUX):
            assert outcome(code, machine, "ioctl", 0, request | high) == REFUSE
        assert outcome(code, machine, "ioctl", TIOCSTI, TCGETS | high) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", KINDS)
def test_leases_are_refused_to_all_and_exclusive_locks_to_readers(kind: str, machine: str) -> None:
    code = programs(machine)[kind]
    for high in (0, GARBAGE):
        for command in (fcntl.F_SETLEASE, 1040):
            assert outcome(code, machine, "fcntl", 3, command | high) == REFUSE
        for command in (fcntl.F_DUPFD, fcntl.F_SETLK, fcntl.F_OFD_SETLK, fcntl.F_GETLEASE):
            assert outcome(code, machine, "fcntl", fcntl.F_SETLEASE, command | high) == ALLOW
        for operation in (fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB):
            expected = REFUSE if kind in ("worker", "restricted, no locks") else ALLOW
            assert outcome(code, machine, "flock", 3, operation | high) == expected
        for operation in (fcntl.LOCK_SH, fcntl.LOCK_UN, fcntl.LOCK_SH | fcntl.LOCK_NB):
            expected = REFUSE if kind == "worker" else ALLOW
            assert outcome(code, machine, "flock", fcntl.LOCK_EX, operation | high) == expected


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", ["restricted", "enabled", "worker"])
def test_foreign_architectures_are_fatal(kind: str, machine: str) -> None:
    code = programs(machine)[kind]
    others = {I386, ARM, 0, *ARCHITECTURES.values()} - {ARCHITECTURES[machine]}
    for architecture, call in product(others, range(500)):
        assert run(code, architecture, call)[0] == KILL


@pytest.mark.parametrize("kind", ["restricted", "enabled", "worker"])
def test_x32_numbers_are_fatal(kind: str) -> None:
    code = programs("x86_64")[kind]
    for call in range(600):
        assert run(code, ARCHITECTURES["x86_64"], 0x40000000 | call)[0] == KILL
        assert run(code, ARCHITECTURES["x86_64"], 0xC0000000 | call)[0] == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_no_call_is_left_to_the_kernel(machine: str) -> None:
    # A tracer that performs a call itself sets its number to -1.
    code = build_filter("enabled", machine=machine)
    assert run(code, ARCHITECTURES[machine], 0xFFFFFFFF)[0] == ALLOW


@given(
    call=st.integers(0, 2**32 - 1),
    args=st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6),
    architecture=st.sampled_from([*ARCHITECTURES.values(), I386]),
)
def test_every_call_gets_an_answer_soon(call: int, args: list[int], architecture: int) -> None:
    for machine in MACHINES:
        for code in programs(machine).values():
            result, steps = run(code, architecture, call, *args)
            assert result in (ALLOW, REFUSE, KILL, ABSENT, REPORT)
            assert steps <= 16


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "worker"])
def test_which_namespaces_are_refused_and_others_allowed(kind: str, machine: str) -> None:
    code = programs(machine)[kind]
    nesting = ALLOW if kind.endswith("nesting") else REFUSE
    clone, unshare = {"x86_64": (56, 272), "aarch64": (220, 97)}[machine]
    for call in (clone, unshare):
        for flags in (0x02000000, 0x7E020000, 0x12000000 | 0xFF << 32):
            assert run(code, ARCHITECTURES[machine], call, flags)[0] == REFUSE
        for flags in (0x10000000, 0x00020000, 0x7C020000, 0x10020011 | 0xFF << 32):
            assert run(code, ARCHITECTURES[machine], call, flags)[0] == nesting
        for flags in (0, 17, 0x6C000000, 0x02000000 << 32, 0x10020000 << 32):
            assert run(code, ARCHITECTURES[machine], call, flags)[0] == ALLOW
    assert run(code, ARCHITECTURES[machine], 435)[0] == ABSENT


def test_programs_are_small() -> None:
    sizes = {m: [len(code) // 8 for code in programs(m).values()] for m in MACHINES}
    assert sizes == {
        "x86_64": [54, 38, 56, 53, 37, 45, 59, 49, 57],
        "aarch64": [50, 36, 45, 50, 35, 43, 55, 47, 52],
    }


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_found_in_few_steps(machine: str) -> None:
    for code in programs(machine).values():
        steps = [run(code, ARCHITECTURES[machine], call)[1] for call in range(600)]
        assert max(steps) <= 14
        assert sum(steps) / len(steps) < 11


def test_without_a_limit_there_is_no_filter() -> None:
    assert build_filter(None, machine="x86_64") == b""
    assert build_filter(None, machine="riscv64") == b""


def test_worker_has_no_network_whatever_is_asked() -> None:
    for machine in MACHINES:
        codes = {build_filter(n, machine=machine, for_worker=True) for n in (None, "enabled")}
        assert codes == {build_filter("restricted", machine=machine, for_worker=True)}


def test_other_processors_are_refused() -> None:
    with pytest.raises(UnsupportedMachine, match="for riscv64 processors") as caught:
        build_filter("enabled", machine="riscv64")
    assert isinstance(caught.value, InternalError)


# ---- in this kernel -------------------------------------------------------------------------

# The code of a child process: installs the filter and then runs the script.
INSTALL = """
import array, ctypes, json, mmap, os, socket, sys, termios, fcntl
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    # c_long keeps all 64 bits of an argument.
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in args])
    return "ok" if result >= 0 else ctypes.get_errno()
def attempt(action):
    try:
        action()
    except OSError as error:
        return error.errno
    return "ok"
code = bytes.fromhex(sys.argv[1])
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
program = Program(len(code) // 8, code)
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 38, 22
assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
before = socket.socketpair()
assert libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) == 0
out = {}
"""

here = pytest.mark.skipif(HERE not in MACHINES, reason="there is no filter for this machine")
only_x86 = pytest.mark.skipif(HERE != "x86_64", reason="other machines have no such way in")


def confined(kind: str, script: str) -> subprocess.CompletedProcess[str]:
    code = programs(HERE)[kind].hex()
    script = f"{INSTALL}\n{script}\nprint(json.dumps(out), flush=True)\nos._exit(0)"
    return subprocess.run(
        [sys.executable, "-I", "-c", script, code],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )


def answers(kind: str, script: str) -> dict[str, Any]:
    child = confined(kind, script)
    assert child.returncode == 0, child.stderr
    found: dict[str, Any] = json.loads(child.stdout)
    return found


SOCKETS = """
for name, family, kind in (
    ("unix stream", 1, 1), ("unix seqpacket", 1, 5), ("unix datagram", 1, 2), ("unix raw", 1, 3),
    ("tcp", 2, 1), ("udp", 2, 2), ("tcp6", 10, 1), ("netlink", 16, 3), ("vsock", 40, 1),
):
    out[name] = attempt(lambda: socket.socket(family, kind).detach())
for name, kind in (("stream pair", 1), ("seqpacket pair", 5), ("datagram pair", 2)):
    out[name] = attempt(lambda: socket.socketpair(1, kind))
"""


@here
def test_sockets_offline_in_this_kernel() -> None:
    found = answers("restricted", SOCKETS)
    allowed = {name for name, result in found.items() if result == "ok"}
    assert allowed == {"unix stream", "unix seqpacket", "stream pair", "seqpacket pair"}
    assert set(found.values()) == {"ok", 1}


@here
def test_sockets_online_in_this_kernel() -> None:
    found = answers("enabled", SOCKETS)
    assert found.pop("vsock") == 1
    # The filter refuses none of the families of this kernel.
    assert 1 not in found.values()
    assert {found["tcp"], found["udp"], found["unix datagram"], found["datagram pair"]} == {"ok"}


@here
def test_sockets_online_without_unix_in_this_kernel() -> None:
    found = answers("enabled, no unix", SOCKETS)
    refused = {name for name, result in found.items() if result == 1}
    unix = {"unix stream", "unix seqpacket", "unix datagram", "unix raw"}
    assert refused == {"vsock", "datagram pair", *unix}


@here
def test_high_words_do_not_deceive_this_kernel() -> None:
    script = f"""
socket_call, ioctl_call = {number("socket", HERE)}, {number("ioctl", HERE)}
high = 0x7eadbeef << 32
out["unix"] = call(socket_call, high | 1, high | 1, 0)
out["inet"] = call(socket_call, high | 2, high | 1, 0)
out["datagram"] = call(socket_call, high | 1, high | 2, 0)
out["type"] = call(ioctl_call, 0, high | 0x5412, 0)
"""
    assert answers("restricted", script) == {"unix": "ok", "inet": 1, "datagram": 1, "type": 1}


@here
def test_pairs_work_offline_in_this_kernel() -> None:
    script = """
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    left, right = socket.socketpair(socket.AF_UNIX, kind)
    left.sendmsg([b"abc"])
    out[kind] = right.recv(3).decode()
    os.write(left.fileno(), b"def")
    out[kind] += os.read(right.fileno(), 3).decode()
out["send"] = attempt(lambda: left.send(b"x"))
out["connect"] = attempt(lambda: socket.socket(socket.AF_UNIX).connect("/none"))
"""
    assert answers("restricted", script) == {"1": "abcdef", "5": "abcdef", "send": 1, "connect": 1}


@here
def test_address_in_sendmsg_reaches_no_socket_in_this_kernel(tmp_path: Path) -> None:
    """The reason for the rule on datagrams: refusing connect and sendto does not stop them."""
    script = f"""
left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
left.sendmsg([b"x"], [], 0, {str(tmp_path / "socket")!r})
out["to its peer"] = right.recv(1).decode()
left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
out["stream"] = attempt(lambda: left.sendmsg([b"x"], [], 0, {str(tmp_path / "socket")!r}))
out["pair"] = attempt(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as victim:
        victim.bind(str(tmp_path / "socket"))
        victim.setblocking(False)
        assert answers("restricted", script) == {"to its peer": "x", "stream": 106, "pair": 1}
        with pytest.raises(BlockingIOError):
            victim.recv(1)
        # Without the filter the same kind of socket does arrive.
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with left, right:
            left.sendmsg([b"x"], [], 0, str(tmp_path / "socket"))
        assert victim.recv(1) == b"x"


@here
@pytest.mark.parametrize("kind", ["restricted", "enabled", "worker"])
def test_refused_numbers_in_this_kernel(kind: str) -> None:
    # Invalid arguments: an allowed call fails with another error.
    refused: dict[str, Any] = dict(ALWAYS)
    if kind != "enabled":
        refused |= OFFLINE
    if kind == "worker":
        # These would take effect without arguments if they were allowed.
        refused |= {n: v for n, v in WORKER.items() if n not in ("fork", "vfork", "unshare")}
    numbers = {name: number(name, HERE) for name in refused}
    script = f"out = {{n: call(v, *[-1] * 6) for n, v in {numbers!r}.items()}}"
    assert answers(kind, script) == dict.fromkeys(numbers, 1)


@here
def test_worker_starts_nothing_but_does_its_work_in_this_kernel() -> None:
    script = """
import threading
out["fork"] = attempt(os.fork)
out["exec"] = attempt(lambda: os.execv("/bin/true", ["true"]))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    out["thread"] = "none"
out["socket"] = attempt(lambda: os.close(socket.socket(socket.AF_UNIX).detach()))
out["kill"] = attempt(lambda: os.kill(os.getppid(), 0))
left, right = before
socket.send_fds(left, [b"f"], [0])
message, descriptors, _, _ = socket.recv_fds(right, 1, 1)
out["descriptors"] = len(descriptors)
left.sendmsg([b"abc"])
out["read"] = os.read(right.fileno(), 3).decode()
out["files"] = attempt(lambda: (os.stat("/"), os.listdir("/"), open("/dev/null").close()))
"""
    assert answers("worker", script) == {
        "fork": 1,
        "exec": 1,
        "thread": "none",
        "socket": 1,
        "kill": 1,
        "descriptors": 1,
        "read": "abc",
        "files": "ok",
    }


@here
def test_typing_into_a_terminal_is_refused_in_this_kernel() -> None:
    script = """
controller, terminal = os.openpty()
out["type"] = attempt(lambda: fcntl.ioctl(terminal, termios.TIOCSTI, b"x"))
out["linux"] = attempt(lambda: fcntl.ioctl(terminal, 0x541C, b"\\0"))
out["size"] = attempt(lambda: termios.tcgetwinsize(terminal))
"""
    assert answers("enabled", script) == {"type": 1, "linux": 1, "size": "ok"}


# mov eax, 20 (getpid of i386); int 0x80; ret
INT_80 = """
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
ctypes.CFUNCTYPE(ctypes.c_long)(address)()
"""


@only_x86
@pytest.mark.parametrize("kind", ["restricted", "enabled", "worker"])
@pytest.mark.parametrize("script", [INT_80, "call(0x40000000 | 39)", "call(0x40000000 | 425)"])
def test_other_ways_into_this_kernel_are_fatal(script: str, kind: str) -> None:
    assert confined(kind, script).returncode == -signal.SIGSYS
