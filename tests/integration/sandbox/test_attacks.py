"""Attempts of confined commands to leave the sandbox: the table of attacks.

An attack is a piece of Python that makes attempts and prints the verdict of each. Inside the
sandbox every attempt must be refused and all guarded files must be unchanged. To prove that the
attempts are real, the harmless ones also run without a sandbox, as root, and must succeed
there. Attacks that need another process or socket of the host are in test_sandbox_escapes.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tests.support.client import Client, uri
from tests.support.sandbox import (
    NEEDS_ROOT,
    Stage,
    entry,
    glob,
    guarded,
    run,
    start_stage,
    workspace_write,
)
from tests.support.sandbox_attacks import prepare_attacks, run_attempts, successes, verdicts


@dataclass(frozen=True)
class Attack:
    """Attempts of a command; `harmless` ones also run without a sandbox."""

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
scratch = ws if os.access(ws, os.W_OK) else '/dev/shm'
other, merged = scratch + '/other', scratch + '/merged'
for name in ('other', 'merged', 'upper', 'work'):
    os.mkdir(f'{scratch}/{name}')
attributes = (ctypes.c_uint64 * 4)(0, 1, 0, 0)
for path in ('sub', '.git', ws, '/', '/proc', '/dev'):
    attempt('unmount ' + path, lib, 'umount2', path.encode(), 2)
for path in ('sub', '.git', '/'):
    attempt('remount ' + path, lib, 'mount', None, path.encode(), None, 0x1020, None)
    attempt('set attributes of ' + path, call, 442, -100, path.encode(), 0x8000, attributes, 32)
    attempt('clone with attributes of ' + path, call, 467, -100, path.encode(), 0x8001,
        attributes, 32)
for path in ('sub', '.git'):
    attempt('move ' + path, lib, 'mount', path.encode(), other.encode(), None, 8192, None)
attempt('plain bind', lib, 'mount', ws.encode(), other.encode(), None, 4096, None)
attempt('plain clone', call, 428, -100, ws.encode(), 1)
options = f'lowerdir={ws},upperdir={scratch}/upper,workdir={scratch}/work'.encode()
attempt('overlay', lambda: (lib('mount', b'o', merged.encode(), b'overlay', 0, options),
    content(merged + '/sub/s.txt')))
attempt('read', content, 'sub/s.txt')
attempt('write', opens, '.git/new', os.O_CREAT | os.O_RDWR)
attempt('write outside', opens, out + '/new', os.O_CREAT | os.O_RDWR)
attempt('device', os.mknod, 'device', 0o20666, os.makedev(1, 1))
attempt('kernel settings', opens, '/proc/sys/kernel/core_pattern', os.O_WRONLY)
"""
# Leaves the tree of the sandbox and keeps one descriptor: entries that are mount points only in
# other mount namespaces can be renamed.
_NESTED_ROOT = """
here = os.open(ws, os.O_RDONLY)
at = {'src_dir_fd': here, 'dst_dir_fd': here}
def leave():
    lib('mount', b'/usr', b'/usr', None, 0x5000, None)
    os.chdir('/usr')
    lib('pivot_root', b'.', b'.')
    lib('umount2', b'.', 2)
def by_clone():
    child = call(56 if os.uname().machine == 'x86_64' else 220, 0x10020011, 0, 0, 0, 0)
    if child:
        return os.waitpid(child, 0)
    try:
        leave()
        os.rename('.git', 'moved by clone', **at)
    finally:
        os._exit(0)
arguments = (ctypes.c_uint64 * 11)(0x10020000, 0, 0, 0, 17)
def by_clone3():
    if call(435, arguments, 88) == 0:
        os._exit(0)
attempt('clone', by_clone)
attempt('clone3', by_clone3)
attempt('unshare', lib, 'unshare', 0x10020000)
attempt('unshare mounts alone', lib, 'unshare', 0x20000)
for name in ('user', 'mnt'):
    attempt('join ' + name, lambda: lib('setns', os.open('/proc/self/ns/' + name, 0), 0))
    attempt('join by pid ' + name, lambda: lib('setns', call(434, os.getpid(), 0), 0x10020000))
attempt('leave', leave)
attempt('chroot', os.chroot, '/usr')
attempt('detach', lib, 'umount2', b'/', 2)
attempt('new file system', call, 430, b'tmpfs', 0)
attempt('new mount', call, 432, here, 0, 0)
attempt('detached tree', call, 428, here, b'', 0x9001)
attempt('move mount', call, 429, here, b'', -100, b'/dev/shm', 4)
for name in ('.git', '.codex', 'sub'):
    attempt('move ' + name, os.rename, name, 'moved ' + name, **at)
"""
_KERNEL_MOUNTS = """
os.chdir('/dev/shm')
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
    Attack("nested-namespaces-of-readers", "READERS", _NESTED, harmless=False),
    Attack("nested-root", "DENYSUB", _NESTED_ROOT, harmless=False),
    Attack("nested-root-with-network", "DENYSUBNET", _NESTED_ROOT, harmless=False),
    Attack("nested-root-and-patterns", "GLOB", _NESTED_ROOT, harmless=False),
    Attack("mounts-of-the-kernel", "RO", _KERNEL_MOUNTS, harmless=False),
    Attack("init", "WW", _INIT, harmless=False),
    Attack("init-with-network", "WWNET", _INIT, harmless=False),
    Attack("mounts", "WW", _MOUNTS, harmless=False),
    Attack("kernel-files", "WW", _KERNEL_FILES, harmless=False),
    Attack("hidden-places", "MINW", _HIDDEN, harmless=False),
]
_GUARDED = {
    "DENYSUB": ["sub"],
    "READERS": ["sub"],
    "GLOB": ["sub"],
    "RODEEP": ["sub/deep"],
    "DENYFILE": ["a.txt"],
}
_BY_NAME = {attack.name: attack for attack in _ATTACKS}


@pytest.mark.parametrize("terminal", [False, True], ids=["pipes", "terminal"])
@pytest.mark.parametrize("name", [attack.name for attack in _ATTACKS])
def test_every_attempt_is_refused(stage: Stage, client: Client, name: str, terminal: bool) -> None:
    attack = _BY_NAME[name]
    prepare_attacks(stage)
    names = _GUARDED.get(attack.policy.removesuffix("NET"), ())
    before = guarded(stage.base, *names)
    outcome = run_attempts(stage, client, attack.policy, attack.code, tty=terminal)
    assert successes(outcome) == []
    assert outcome.exit_code == 0, outcome
    assert guarded(stage.base, *names) == before


@pytest.mark.root
@NEEDS_ROOT
@pytest.mark.parametrize("name", [attack.name for attack in _ATTACKS if attack.harmless])
def test_harmless_attempts_succeed_without_a_sandbox(name: str) -> None:
    with start_stage("root") as stage, stage.server.connect() as client:
        prepare_attacks(stage)
        found = verdicts(run_attempts(stage, client, "NONE", _BY_NAME[name].code))
    assert found == dict.fromkeys(found, "DONE")
    assert len(found) >= 3


def test_a_directory_that_matches_a_glob_is_masked_but_for_grants_below_it(
    stage: Stage, client: Client
) -> None:
    stage.scratch.apply(
        [
            {"write": ["ws/secrets/deep/file", "HIDDEN"]},
            {"write": ["ws/secrets/out/plain", "open"]},
            {"write": ["ws/secrets/out/secret.txt", "HIDDEN"]},
        ]
    )
    denied = glob(f"{stage.ws}/**/secret*")
    sandbox = workspace_write(stage.ws, denied, entry(stage.ws / "secrets/out", "write"))
    script = """
    cat secrets/deep/file secrets/out/secret.txt; ls secrets/deep; mkdir secrets/new
    mv secrets other; mv secrets/out/secret.txt shown; cp -r secrets copy; cat copy/deep/file
    cat secrets/out/plain; echo new > secrets/out/made; exit 0
    """
    outcome = run(client, sandbox, ["/bin/sh", "-c", script], cwd=uri(stage.ws))
    assert outcome.stdout == "open", outcome
    assert "HIDDEN" not in outcome.output
    assert (stage.ws / "secrets/out/made").read_text() == "new\n"
    assert sorted(path.name for path in (stage.ws / "secrets").iterdir()) == ["deep", "out"]
    assert not (stage.ws / "other").exists()
    assert not (stage.ws / "shown").exists()
