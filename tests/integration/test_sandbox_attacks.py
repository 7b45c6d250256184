"""Attempts to get out of the sandbox, by commands and by file operations.

A command's attack is a piece of Python that makes attempts and says how each went. Inside the
sandbox every attempt has to be refused and nothing that the policy guards may have changed.
So that no test passes because its attempt is nonsense, those that are harmless are made
without a sandbox too, by root, and have to succeed there.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from sandboxing import (
    BASE_STEPS,
    MARKER,
    NEEDS_ROOT,
    USERS,
    Json,
    Outcome,
    Stage,
    guarded,
    interpreter,
    start_stage,
)
from wire import Client

_PRELUDE = """
import ctypes, os, socket, sys
base, extra = sys.argv[1], sys.argv[2:]
ws, out = base + '/ws', base + '/outside'
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), 'call')
    return result
def lib(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
def exchange(one, other):
    lib('renameat2', -100, os.fsencode(one), -100, os.fsencode(other), 2)
def attempt(name, work, *arguments, **options):
    try:
        work(*arguments, **options)
    except OSError as error:
        print(name, 'refused', error.errno, sep='|', flush=True)
    else:
        print(name, 'DONE', 0, sep='|', flush=True)
def content(path):
    with open(path, 'rb') as stream:
        if not stream.read(64):
            raise OSError(61, 'empty')
def opens(path, flags=os.O_RDWR):
    os.close(os.open(path, flags | os.O_NONBLOCK))
"""


def _attempt(
    stage: Stage, client: Client, name: str, code: str, *extra: str, **params: Any
) -> Outcome:
    """Runs attempts under a policy."""
    argv = [interpreter(), "-I", "-S", "-c", _PRELUDE + code, str(stage.base), *extra]
    return stage.run(client, name, argv, **params)


@pytest.fixture(scope="module", params=USERS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """One server for all tests of a user."""
    with start_stage(request.param) as running:
        yield running


@pytest.fixture
def client(stage: Stage) -> Iterator[Client]:
    """A connection, and the tree as it is at the beginning."""
    stage.scratch.reset(BASE_STEPS)
    with stage.server.connect() as connected:
        yield connected


def _verdicts(outcome: Outcome) -> dict[str, str]:
    """How each attempt went."""
    assert outcome.refusal is None, outcome.refusal
    lines = [line.split("|") for line in outcome.stdout.splitlines()]
    return {name: verdict for name, verdict, _ in lines}


def _successes(outcome: Outcome) -> list[str]:
    """The attempts that were not refused."""
    verdicts = _verdicts(outcome)
    assert len(verdicts) >= 3, outcome
    return [name for name, verdict in verdicts.items() if verdict != "refused"]


@dataclass(frozen=True)
class Attack:
    """Attempts that a command makes; `harmless` ones are proven without a sandbox."""

    name: str
    policy: str
    code: str
    harmless: bool = True


_METADATA = """
os.chdir(out)
here = os.open('o.txt', os.O_RDONLY)
attempt('chmod', os.chmod, 'o.txt', 0o640)
attempt('fchmod', os.fchmod, here, 0o600)
attempt('fchmodat2', call, 452, -100, b'o.txt', 0o604, 0)
attempt('chmod of the folder', os.chmod, 'dir', 0o700)
attempt('chown', os.chown, 'o.txt', os.getuid(), os.getgid())
attempt('lchown', os.lchown, 'dir', os.getuid(), os.getgid())
attempt('utime', os.utime, 'o.txt', (1, 1))
attempt('futimens', os.utime, here, (2, 2))
attempt('setxattr', os.setxattr, 'o.txt', 'user.x', b'1')
attempt('fsetxattr', os.setxattr, here, 'user.y', b'1')
attempt('reopen', opens, f'/proc/self/fd/{here}')
attempt('truncate', os.truncate, 'o.txt', 7)
attempt('link', os.link, 'o.txt', 'link')
attempt('symlink', os.symlink, 'o.txt', 'symlink')
attempt('rename', os.rename, 'dir', 'dir2')
attempt('mkdir', os.mkdir, 'new')
attempt('rmdir', os.rmdir, 'empty')
attempt('mkfifo', os.mkfifo, 'fifo')
attempt('unlink', os.unlink, 'spare.txt')
attempt('append', opens, 'o.txt', os.O_WRONLY | os.O_APPEND)
attempt('create', opens, 'created', os.O_CREAT | os.O_RDWR)
attempt('unnamed', opens, '.', os.O_TMPFILE | os.O_RDWR)
"""
_REPOSITORY = """
os.chmod('a.txt', 0o644)
attempt('chmod', os.chmod, '.git', 0o700)
attempt('chmod of a file', os.chmod, '.git/config', 0o600)
attempt('utime', os.utime, '.git/config', (1, 1))
attempt('setxattr', os.setxattr, '.git/config', 'user.x', b'1')
attempt('exchange', exchange, '.git', 'sub')
attempt('rename away', os.rename, '.git', 'git2')
os.mkdir('empty')
attempt('rename over', os.rename, 'empty', '.git')
attempt('remove hooks', os.rmdir, '.git/hooks')
"""
_LINKS = """
def linked(source, flags=0):
    target = 'linked%d' % len(os.listdir('.'))
    lib('linkat', -100, os.fsencode(source), -100, os.fsencode(target), flags)
def linked_open(source):
    linked('/proc/self/fd/%d' % os.open(source, os.O_RDONLY), 0x400)
for source in (out + '/o.txt', '.git/config', 'sub/deep/d.txt'):
    attempt('link of ' + source, linked, source)
    attempt('link of open ' + source, linked_open, source)
"""
_PROTECTED_NAMES = """
os.mkdir('full'); open('full/x', 'w').close(); open('plain', 'w').close(); os.mkdir('other')
os.symlink('.', 'alias')
unnamed = os.open('.', os.O_TMPFILE | os.O_RDWR)
for name in ('.codex', '.agents', '.aws'):
    attempt('rename a folder to ' + name, os.rename, 'full', name)
    attempt('rename a file to ' + name, os.rename, 'plain', name)
    attempt('exchange with ' + name, exchange, 'other', name)
    attempt('link to ' + name, os.link, 'a.txt', name)
    attempt('link the unnamed to ' + name, lib, 'linkat', -100,
        b'/proc/self/fd/%d' % unnamed, -100, name.encode(), 0x400)
    attempt('symlink at ' + name, os.symlink, 'other', name)
    attempt('mkfifo ' + name, os.mkfifo, name)
    attempt('file in ' + name, opens, name + '/x', os.O_CREAT | os.O_RDWR)
    attempt('by an alias ' + name, opens, 'alias/' + name + '/x', os.O_CREAT | os.O_RDWR)
    attempt('file ' + name, opens, name, os.O_CREAT | os.O_RDWR)
    attempt('chmod ' + name, os.chmod, name, 0o777)
    attempt('rmdir ' + name, os.rmdir, name)
    attempt('unlink ' + name, os.unlink, name)
"""
_PINS = """
os.mkdir('other')
attempt('rename the parent', os.rename, 'sub', 'sub2')
attempt('rename', os.rename, 'sub/deep', 'sub/deep2')
attempt('exchange the parent', exchange, 'sub', 'other')
attempt('exchange', exchange, 'sub/deep', 'other')
attempt('rename over', os.rename, 'other', 'sub/deep')
attempt('remove', os.rmdir, 'sub/deep')
attempt('chmod', os.chmod, 'sub/deep', 0o777)
attempt('create', opens, 'sub/deep/new', os.O_CREAT | os.O_RDWR)
attempt('rename the root', os.rename, ws, base + '/ws2')
"""
_MASKED_FOLDER = """
os.mkdir('other')
attempt('list', os.listdir, 'sub')
attempt('chmod', os.chmod, 'sub', 0o777)
attempt('chown', os.chown, 'sub', os.getuid(), os.getgid())
attempt('list after chmod', os.listdir, 'sub')
attempt('read', content, 'sub/s.txt')
attempt('read by descriptor', lambda: os.open('s.txt', 0, dir_fd=os.open('sub', os.O_PATH)))
attempt('enter', os.chdir, 'sub')
attempt('stat inside', os.stat, 'sub/s.txt')
attempt('create', opens, 'sub/new', os.O_CREAT | os.O_RDWR)
attempt('rename away', os.rename, 'sub', 'sub2')
attempt('rename over', os.rename, 'other', 'sub')
attempt('exchange', exchange, 'sub', 'other')
attempt('remove', os.rmdir, 'sub')
attempt('link out', os.link, 'sub/s.txt', 'linked')
"""
_MASKED_FILE = """
open('other', 'w').close()
attempt('read', content, 'a.txt')
attempt('chmod', os.chmod, 'a.txt', 0o666)
attempt('read after chmod', content, 'a.txt')
attempt('open to write', opens, 'a.txt', os.O_WRONLY)
attempt('truncate', os.truncate, 'a.txt', 0)
attempt('link', os.link, 'a.txt', 'linked')
attempt('rename away', os.rename, 'a.txt', 'b.txt')
attempt('rename over', os.rename, 'other', 'a.txt')
attempt('exchange', exchange, 'a.txt', 'other')
attempt('unlink', os.unlink, 'a.txt')
"""
_NESTED = """
uid, gid = os.getuid(), os.getgid()
if libc.unshare(0x10020000) == 0:
    for name, text in (('setgroups', 'deny'), ('uid_map', f'0 {uid} 1'), ('gid_map', f'0 {gid} 1')):
        open('/proc/self/' + name, 'w').write(text)
for name in ('other', 'merged', 'upper', 'work'):
    os.mkdir(name)
attributes = (ctypes.c_uint64 * 4)(0, 1, 0, 0)
for path in ('sub', '.git', ws, '/', '/proc', '/dev'):
    attempt('unmount ' + path, lib, 'umount2', path.encode(), 2)
for path in ('sub', '.git', '/'):
    attempt('remount ' + path, lib, 'mount', None, path.encode(), None, 0x1020, None)
    attempt('set attributes of ' + path, call, 442, -100, path.encode(), 0x8000, attributes, 32)
    attempt('clone with attributes of ' + path, call, 467, -100, path.encode(), 0x8001,
        attributes, 32)
for path in ('sub', '.git'):
    attempt('move ' + path, lib, 'mount', path.encode(), b'other', None, 8192, None)
attempt('plain bind', lib, 'mount', ws.encode(), b'other', None, 4096, None)
attempt('plain clone', call, 428, -100, ws.encode(), 1)
options = f'lowerdir={ws},upperdir={ws}/upper,workdir={ws}/work'.encode()
attempt('overlay', lambda: (lib('mount', b'o', b'merged', b'overlay', 0, options),
    content('merged/sub/s.txt')))
attempt('read', content, 'sub/s.txt')
attempt('write', opens, '.git/new', os.O_CREAT | os.O_RDWR)
attempt('write outside', opens, out + '/new', os.O_CREAT | os.O_RDWR)
attempt('device', os.mknod, 'device', 0o20666, os.makedev(1, 1))
attempt('kernel settings', opens, '/proc/sys/kernel/core_pattern', os.O_WRONLY)
"""
_KERNEL_MOUNTS = """
uid, gid = os.getuid(), os.getgid()
if libc.unshare(0x7e020000) < 0:
    libc.unshare(0x7c020000)  # without control groups
for name, text in (('setgroups', 'deny'), ('uid_map', f'0 {uid} 1'), ('gid_map', f'0 {gid} 1')):
    open('/proc/self/' + name, 'w').write(text)
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
def mounted(kind, options, path):
    os.mkdir(kind + options)
    lib('mount', b'new', (kind + options).encode(), kind.encode(), 0, options.encode())
    opens(kind + options + path, os.O_WRONLY)
attempt('settings', mounted, 'proc', '', '/sys/kernel/hostname')
attempt('devices', mounted, 'sysfs', '', '/kernel/mm/transparent_hugepage/enabled')
attempt('groups', mounted, 'cgroup2', '', '/cgroup.procs')
for name in ('cpu', 'cpuset', 'devices', 'freezer', 'memory', 'pids', 'none,name=systemd'):
    attempt('groups of ' + name, mounted, 'cgroup', name, '/cgroup.procs')
"""
_MOUNTS = """
os.mkdir('other')
attempt('mount', lib, 'mount', b't', b'other', b'tmpfs', 0, None)
attempt('unmount', lib, 'umount2', b'.git', 2)
attempt('pivot', lib, 'pivot_root', b'.', b'other')
attempt('chroot', os.chroot, '.')
attempt('join mounts', lambda: lib('setns', os.open('/proc/1/ns/mnt', os.O_RDONLY), 0))
attempt('join users', lambda: lib('setns', os.open('/proc/1/ns/user', os.O_RDONLY), 0))
attempt('char device', os.mknod, 'device', 0o20666, os.makedev(1, 1))
attempt('block device', os.mknod, 'disk', 0o60666, os.makedev(254, 0))
"""
_INIT = """
def remote(name):
    local = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
    try:
        lib(name, 1, local, 1, (ctypes.c_size_t * 2)(4096, 8), 1, 0)
    except OSError as error:
        if error.errno != 14:  # a bad address would mean that the process itself was reached
            raise
attempt('attach', lib, 'ptrace', 16, 1, 0, 0)
attempt('seize', lib, 'ptrace', 0x4206, 1, 0, 0)
attempt('read memory', remote, 'process_vm_readv')
attempt('write memory', remote, 'process_vm_writev')
attempt('take a descriptor', lambda: call(438, call(434, 1, 0), 0, 0))
for name in ('mem', 'environ', 'maps', 'auxv', 'stack', 'syscall', 'personality'):
    attempt('read ' + name, content, '/proc/1/' + name)
for name in ('map_files', 'fdinfo', 'root', 'cwd'):
    attempt('list ' + name, os.listdir, '/proc/1/' + name)
attempt('open mem', opens, '/proc/1/mem')
attempt('program', os.readlink, '/proc/1/exe')
attempt('descriptor', os.readlink, '/proc/1/fd/0')
attempt('namespace', os.readlink, '/proc/1/ns/mnt')
"""
_KERNEL_FILES = """
for path in ('kernel/core_pattern', 'kernel/hostname', 'kernel/modprobe', 'vm/overcommit_memory',
        'fs/suid_dumpable', 'kernel/sysrq', 'net/ipv4/ip_forward', 'kernel/ns_last_pid'):
    attempt(path, opens, '/proc/sys/' + path, os.O_WRONLY)
attempt('sysrq', opens, '/proc/sysrq-trigger', os.O_WRONLY)
attempt('irq', opens, '/proc/irq/default_smp_affinity', os.O_WRONLY)
attempt('sys', opens, '/sys/kernel/mm/transparent_hugepage/enabled', os.O_WRONLY)
attempt('helper', opens, '/sys/kernel/uevent_helper', os.O_WRONLY)
attempt('core', content, '/proc/kcore')
attempt('keys', content, '/proc/keys')
attempt('timers', content, '/proc/timer_list')
"""
_DATAGRAMS = """
import array
def pair(where, kind):
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    one.sendmsg([b'pair'], [], 0, where)
def passed(where):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]).tobytes())]
    one.sendmsg([b'rights'], rights, 0, where)
def unconnected(where, *arguments):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendmsg([b'sendmsg'], [], 0, where)
def sent(where):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b'sendto', where)
def connected(where):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(where)
        os.write(sender.fileno(), b'write')
for where in (out + '/d.sock', ws + '/d.sock', '\\0' + extra[0]):
    attempt('sendto ' + repr(where), sent, where)
    attempt('sendmsg ' + repr(where), unconnected, where)
    attempt('connect ' + repr(where), connected, where)
    attempt('pair ' + repr(where), pair, where, socket.SOCK_DGRAM)
    attempt('rights ' + repr(where), passed, where)
"""
_HANDLE = """
handle = bytes.fromhex(extra[0])
def opened(folder):
    descriptor = call(304, os.open(folder, os.O_RDONLY), handle, os.O_RDONLY)
    if not os.read(descriptor, 9):
        raise OSError(61, 'empty')
attempt('by the workspace', opened, ws)
attempt('by the programs', opened, '/usr')
libc.unshare(0x10020000)
attempt('by the workspace, nested', opened, ws)
"""
_HIDDEN = """
for path in (out + '/o.txt', '../outside/o.txt', '/proc/self/root' + out + '/o.txt',
        '/proc/self/cwd/../outside/o.txt', '/proc/1/root' + out + '/o.txt', ws + '/out',
        '/proc/self/fd/%d/../outside/o.txt' % os.open('.', os.O_PATH), '/home/.',
        '/proc/self/fd/0/../outside/o.txt'):
    attempt(path, os.stat, path)
attempt('by descriptor', os.open, '../outside/o.txt', 0, dir_fd=os.open('.', os.O_PATH))
"""

_ATTACKS = [
    Attack("metadata-outside", "WW", _METADATA),
    Attack("metadata-outside-of-nothing-writable", "RO", _METADATA),
    Attack("repository", "WW", _REPOSITORY, harmless=False),
    Attack("links", "RODEEP", _LINKS),
    Attack("protected-names", "WW", _PROTECTED_NAMES, harmless=False),
    Attack("pins-and-roots", "RODEEP", _PINS, harmless=False),
    Attack("masked-folder", "DENYSUB", _MASKED_FOLDER, harmless=False),
    Attack("masked-file", "DENYFILE", _MASKED_FILE, harmless=False),
    Attack("nested-namespaces", "DENYSUB", _NESTED, harmless=False),
    Attack("nested-namespaces-with-network", "DENYSUBNET", _NESTED, harmless=False),
    Attack("mounts-of-the-kernel", "WW", _KERNEL_MOUNTS, harmless=False),
    Attack("mounts-of-the-kernel-with-network", "WWNET", _KERNEL_MOUNTS, harmless=False),
    Attack("init", "WW", _INIT, harmless=False),
    Attack("init-with-network", "WWNET", _INIT, harmless=False),
    Attack("mounts", "WW", _MOUNTS, harmless=False),
    Attack("kernel-files", "WW", _KERNEL_FILES, harmless=False),
    Attack("hidden-places", "MINW", _HIDDEN, harmless=False),
]
_GUARDED = {"DENYSUB": ["sub"], "RODEEP": ["sub/deep"], "DENYFILE": ["a.txt"]}
_BY_NAME = {attack.name: attack for attack in _ATTACKS}


def _prepare(stage: Stage) -> None:
    steps: list[Json] = [
        {"mkdir": "outside/empty"},
        {"write": ["outside/spare.txt", "spare"]},
        {"symlink": [str(stage.base / "outside/o.txt"), "ws/out"]},
    ]
    stage.scratch.apply(steps)


@pytest.mark.parametrize("terminal", [False, True], ids=["pipes", "terminal"])
@pytest.mark.parametrize("name", [attack.name for attack in _ATTACKS])
def test_every_attempt_is_refused(stage: Stage, client: Client, name: str, terminal: bool) -> None:
    attack = _BY_NAME[name]
    _prepare(stage)
    names = _GUARDED.get(attack.policy.removesuffix("NET"), ())
    before = guarded(stage.base, *names)
    outcome = _attempt(stage, client, attack.policy, attack.code, tty=terminal)
    assert _successes(outcome) == []
    assert outcome.exit_code == 0, outcome
    assert guarded(stage.base, *names) == before


@pytest.mark.root
@NEEDS_ROOT
@pytest.mark.parametrize("name", [attack.name for attack in _ATTACKS if attack.harmless])
def test_harmless_attempts_succeed_without_a_sandbox(name: str) -> None:
    with start_stage("root") as stage, stage.server.connect() as client:
        _prepare(stage)
        verdicts = _verdicts(_attempt(stage, client, "NONE", _BY_NAME[name].code))
    assert verdicts == dict.fromkeys(verdicts, "DONE")
    assert len(verdicts) >= 3


def test_no_datagram_reaches_a_socket_of_the_host(stage: Stage, client: Client) -> None:
    abstract = f"exec-server-{uuid.uuid4()}"
    names = ("outside/d.sock", "ws/d.sock", f"@{abstract}")
    sockets = [stage.scratch.listen(name, socket.SOCK_DGRAM) for name in names]
    stage.scratch.give_away()
    assert _successes(_attempt(stage, client, "WW", _DATAGRAMS, abstract)) == []
    for listener in sockets:
        with pytest.raises(BlockingIOError):
            listener.recv(9, socket.MSG_DONTWAIT)
    assert len(_successes(_attempt(stage, client, "NONE", _DATAGRAMS, abstract))) == 15


@pytest.mark.xfail(reason="special files can be written on read-only mounts", strict=True)
def test_a_pipe_of_the_host_is_out_of_reach(stage: Stage, client: Client) -> None:
    stage.scratch.apply([{"fifo": "outside/fifo"}])
    reader = os.open(stage.base / "outside/fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        stage.shell(client, "WW", "echo x > ../outside/fifo")
        assert os.read(reader, 9) == b""
    finally:
        os.close(reader)


def test_no_file_is_opened_by_its_handle(stage: Stage, client: Client) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    handle = ctypes.create_string_buffer((128).to_bytes(4, "little"), 136)
    path = os.fsencode(stage.base / "outside/o.txt")
    assert libc.name_to_handle_at(-100, path, handle, ctypes.byref(ctypes.c_int()), 0) == 0
    for name in ("MINW", "WW"):
        assert _successes(_attempt(stage, client, name, _HANDLE, handle.raw.hex())) == []


_OLD_DOOR = """
import mmap
# socket(AF_INET, SOCK_STREAM, 0) by the entry for 32-bit programs, keeping rbx as callers expect
code = bytes.fromhex('53' 'b867010000' 'bb02000000' 'b901000000' 'ba00000000' 'cd80' '5b' 'c3')
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
print('result', ctypes.CFUNCTYPE(ctypes.c_int)(address)(), flush=True)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 has this entry")
def test_the_entry_for_32_bit_programs_kills(stage: Stage, client: Client) -> None:
    assert _attempt(stage, client, "NONE", _OLD_DOOR).exit_code == 0
    for name in ("WW", "WWNET"):
        outcome = _attempt(stage, client, name, _OLD_DOOR)
        assert (outcome.exit_code, outcome.denied, outcome.stdout) == (159, True, "")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 has these numbers")
def test_numbers_of_the_x32_interface_open_nothing(stage: Stage, client: Client) -> None:
    code = "print('result', libc.syscall(0x40000000 | 41, 2, 1, 0), ctypes.get_errno())"
    outcome = _attempt(stage, client, "WW", code)
    assert outcome.exit_code == 159 or outcome.stdout.startswith("result -1 "), outcome


_SIGNALS = """
import signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
attempt('to the server', os.kill, int(extra[0]), 0)
attempt('to the bystander', os.kill, int(extra[1]), 0)
attempt('by descriptor', call, 434, int(extra[1]), 0)
os.kill(1, signal.SIGKILL)
os.kill(1, signal.SIGTERM)
os.kill(0, signal.SIGTERM)
try:
    os.kill(-1, signal.SIGTERM)
except ProcessLookupError:
    pass  # there is nobody but the init and this one
os.setpriority(os.PRIO_USER, os.getuid(), 7)
attempt('still here', os.stat, '/')
"""


@pytest.fixture
def bystander(stage: Stage) -> Iterator[int]:
    """A process of the same user's outside of any sandbox."""
    user = stage.scratch.owner if os.geteuid() == 0 else None
    with subprocess.Popen(["sleep", "60"], user=user) as process:
        try:
            yield process.pid
            assert process.poll() is None
        finally:
            process.kill()


def test_signals_stay_inside(stage: Stage, client: Client, bystander: int) -> None:
    pids = (str(stage.server.process.pid), str(bystander))
    assert _verdicts(_attempt(stage, client, "WW", _SIGNALS, *pids)) == {
        "to the server": "refused",
        "to the bystander": "refused",
        "by descriptor": "refused",
        "still here": "DONE",
    }
    assert os.getpriority(os.PRIO_PROCESS, bystander) == os.getpriority(os.PRIO_PROCESS, 0)
    assert client.call("environment/info", {})


def test_shared_memory_of_the_host_is_not_found(stage: Stage, client: Client) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    key = int.from_bytes(os.urandom(3), "little") + 1
    segment = libc.shmget(key, 4096, 0o1666)
    assert segment >= 0
    try:
        code = "attempt('find', lib, 'shmget', int(extra[0]), 0, 0)"
        assert _verdicts(_attempt(stage, client, "NONE", code, str(key))) == {"find": "DONE"}
        assert _verdicts(_attempt(stage, client, "WWNET", code, str(key))) == {"find": "refused"}
    finally:
        libc.shmctl(segment, 0, None)


_LEFT_OPEN = """
import fcntl
for number in range(4096):
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        continue
    print(number)
"""


@pytest.mark.parametrize("terminal", [False, True], ids=["pipes", "terminal"])
def test_three_descriptors_are_open(stage: Stage, client: Client, terminal: bool) -> None:
    for name in ("WW", "RO", "MINW"):
        outcome = _attempt(stage, client, name, _LEFT_OPEN, tty=terminal)
        assert outcome.stdout.split() == ["0", "1", "2"]


_SEARCH = """
import glob
marker = extra[0].encode()
for path in glob.glob('/proc/[0-9]*/*') + glob.glob('/proc/[0-9]*/task/*/*'):
    try:
        with open(path, 'rb') as stream:
            if marker in stream.read(1 << 20) and '/cmdline' not in path:
                print('FOUND', path)
    except OSError:
        pass
with open('/proc/self/environ') as stream:
    print(sorted(variable.partition('=')[0] for variable in stream.read().split(chr(0))[:-1]))
"""


@pytest.mark.parametrize("name", ["WW", "WWNET", "MINW"])
def test_the_environment_of_the_server_is_nowhere(stage: Stage, client: Client, name: str) -> None:
    outcome = _attempt(stage, client, name, _SEARCH, MARKER)
    assert outcome.stdout == "['PATH', 'PWD']\n"


def test_devices_are_few_and_private(stage: Stage, client: Client) -> None:
    code = "for path in ('', '/shm', '/pts'): print(*os.listdir('/dev' + path), end='|')"
    devices, shared, terminals, _ = _attempt(stage, client, "WW", code).stdout.split("|")
    usual = "core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero"
    assert set(devices.split()) <= set(usual.split())
    assert (shared.split(), terminals.split()) == ([], ["ptmx"])


def test_there_is_no_terminal_but_ones_own(stage: Stage, client: Client) -> None:
    code = "attempt('terminal', opens, '/dev/tty'); print(os.isatty(0), end='||')"
    assert _attempt(stage, client, "WW", code).stdout == "terminal|refused|6\nFalse||"
    assert _attempt(stage, client, "WW", code, tty=True).stdout == "terminal|DONE|0\r\nTrue||"
