"""Removes the protections of the sandbox one by one and repeats the attacks.

Each row is an attack and the protections that stop it. A server with all protections refuses the
attack. With several protections, a server that keeps any one of them still refuses it: each is
sufficient. Without all of them the attack succeeds, so it is real and nothing else stops it. All
servers are real; tests.support.protections removes the protections from their code.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.support.barriers import in_private_mounts, mount, unmount, user_id
from tests.support.client import RpcFailure, uri
from tests.support.protections import IN_LAUNCHER, IN_SERVER, STEPS, VERIFIED, Scene, start_without
from tests.support.sandbox import (
    MARKER,
    NEEDS_ROOT,
    PROTECTED,
    Json,
    Scratch,
    entry,
    finish,
    start_process,
    workspace_write,
)
from tests.support.sandbox_attacks import pass_descriptor
from tests.support.server_internals import eventually

from exec_server.filesystem.placeholder import MARK_NS
from exec_server.sandbox.runtime import kernel

pytestmark = [pytest.mark.root, NEEDS_ROOT]

# The first version of Landlock that limits signals and abstract sockets.
_SCOPE_VERSION = 6
_BIND = 0x1000


Attack = Callable[[Scene], bool]


def _command(code: str, policy: str = "WW", **params: Any) -> Attack:
    """An attack by a command, with the server's pid as its argument."""
    return lambda scene: scene.command(policy, code, str(scene.server.process.pid), **params)


def _forge(path: str, policy: str = "WW", *, before: str = "pass") -> Attack:
    """An attack by a command that changes a file; the file on the host must agree."""

    def attack(scene: Scene) -> bool:
        done = scene.command(policy, f"{before}; forge(base + '/{path}')")
        assert done == scene.is_forged(path)
        return done

    return attack


def _write(path: str) -> Attack:
    return lambda scene: scene.write("WW", path)


def _read(policy: str, path: str, part: str = "") -> Attack:
    """An attack by reading a file with some text in it."""

    def attack(scene: Scene) -> bool:
        answer = scene.request(policy, "fs/readFile", path) or {"dataBase64": ""}
        data = base64.b64decode(answer["dataBase64"])
        return bool(data) and part.encode() in data

    return attack


def make_a_missing_name_by_request(scene: Scene) -> bool:
    return scene.request("WW", "fs/createDirectory", "ws/.codex", recursive=False) is not None


def be_granted_a_link(scene: Scene) -> bool:
    """A command creates a link to the outside where the next one is granted a folder."""
    assert scene.command("WW", "os.symlink(out, 'cache')")
    granted = workspace_write(scene.ws, entry(scene.ws / "cache", "write"))
    return scene.command(granted, "forge('cache/o.txt')")


def _replace_repository(scene: Scene) -> None:
    (scene.ws / ".git").rename(scene.ws / "old")
    (scene.ws / ".git").mkdir()


def use_a_stale_worker(scene: Scene) -> bool:
    """A file operation writes to a repository that is newer than its worker."""
    assert scene.write("WW", "ws/new.txt")
    _replace_repository(scene)
    return scene.write("WW", "ws/.git/config")


# Creates a file when a sandbox has been prebuilt.
_SIGNALLING = """
build_one = prebuilt.PrebuiltPool._build_one
def signalling(self, policy):
    build_one(self, policy)
    open(base + '/prebuilt', 'w').close()
prebuilt.PrebuiltPool._build_one = signalling
"""


def use_a_stale_prebuilt_sandbox(scene: Scene) -> bool:
    """A command writes to a repository that is newer than its prebuilt sandbox."""
    assert scene.command("WW", "pass")
    eventually("a prebuilt sandbox", (scene.base / "prebuilt").exists)
    _replace_repository(scene)
    return _forge("ws/.git/config")(scene)


def work_below_a_new_mount(scene: Scene) -> bool:
    """A file operation writes to a directory that the host has mounted over since."""
    assert scene.write("WW", "ws/sub/deep/old.txt")
    mount("tmpfs", scene.ws / "sub/deep", "tmpfs")
    try:
        assert scene.request("WW", "fs/writeFile", "ws/sub/deep/new.txt", dataBase64="") == {}
    finally:
        unmount(scene.ws / "sub/deep")
    return (scene.ws / "sub/deep/new.txt").exists()


# Replaces the workspace between the layout and the building of a view.
_SWAPPING = """
lay_out = builder.lay_out
def swapping(*arguments):
    view = lay_out(*arguments)
    if os.path.lexists(base + '/next'):
        os.rename(base + '/ws', base + '/was')
        os.rename(base + '/next', base + '/ws')
    return view
builder.lay_out = swapping
"""


def _swap(name: str) -> Attack:
    """Both workspaces have all protected names, but the repository of one is elsewhere."""
    folders = [f"{root}/{protected}" for root in ("ws", name) for protected in PROTECTED]
    steps: list[Json] = [{"mkdir": folder} for folder in (*folders, f"{name}/repository/hooks")]
    steps.append({"write": [f"{name}/.git", "gitdir: repository"]})
    if name != "next":
        steps.append({"symlink": [name, "next"]})

    def attack(scene: Scene) -> bool:
        scene.scratch.apply(steps)
        return scene.command("WW", "forge('repository/hooks/pre-commit')")

    return attack


def read_another_users_file(scene: Scene) -> bool:
    path = scene.base / "outside/o.txt"
    path.chmod(0o600)
    os.chown(path, user_id("ordinary"), user_id("ordinary"))
    return scene.command("RO", "content(out + '/o.txt')")


def become_another_user(scene: Scene) -> bool:
    """A command runs a program that changes the user."""
    program = scene.ws / "id"
    shutil.copy(shutil.which("id") or "/usr/bin/id", program)
    os.chown(program, user_id("ordinary"), user_id("ordinary"))
    program.chmod(0o4755)
    argv = [str(program), "-u"]
    outcome = scene.run(scene.client, "WW" if scene.confined else "NONE", argv)
    assert outcome.exit_code == 0, outcome
    return outcome.stdout == f"{user_id('ordinary')}\n"


def open_a_device(scene: Scene) -> bool:
    """The device is in the workspace, created by the host."""
    with contextlib.suppress(PermissionError):  # in some containers not even root may
        os.mknod(scene.ws / "device", 0o20666, os.makedev(1, 5))
    return scene.command("WW", "opens('device')")


def write_to_a_terminal_of_the_host(scene: Scene) -> bool:
    master, slave = os.openpty()
    try:
        code = "os.write(os.open(extra[0], os.O_WRONLY | os.O_NOCTTY), b'written')"
        return scene.command("WW", code, os.ttyname(slave))
    finally:
        os.close(master)
        os.close(slave)


def find_shared_memory_of_the_host(scene: Scene) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    key = int.from_bytes(os.urandom(3), "little") + 1
    segment = libc.shmget(key, 4096, 0o1666)
    assert segment >= 0
    try:
        return scene.command("WW", "check(libc.shmget(int(extra[0]), 0, 0))", str(key))
    finally:
        libc.shmctl(segment, 0, None)


# Pivots to a root outside of the sandbox's tree and keeps one descriptor of the workspace.
_LEAVE = """
here = os.open(ws, os.O_RDONLY)
check(libc.unshare(0x10020000))
check(libc.mount(b'/usr', b'/usr', None, 0x5000, None))
os.chdir('/usr')
check(libc.pivot_root(b'.', b'.'))
check(libc.umount2(b'.', 2))
os.fchdir(here)
"""


def forge_by_leaving(scene: Scene) -> bool:
    """A command moves the repository away and makes another one."""
    code = f"{_LEAVE}os.rename('.git', 'moved'); os.mkdir('.git'); forge('.git/config')"
    done = scene.command("WW", code)
    assert done == scene.is_forged("ws/.git/config")
    return done


def _read_by_leaving(policy: str, code: str, path: str) -> Attack:
    """A command moves a denied file to a path that the next command may read."""

    def attack(scene: Scene) -> bool:
        done = scene.command(policy, _LEAVE + code)
        assert scene.command(policy, f"content({path!r})") == done
        return done

    return attack


def join_a_user_namespace(scene: Scene) -> bool:
    """A process of root outside of the sandbox owns another user namespace."""
    words = ["unshare", "--user", "sh", "-c", "echo; exec sleep 60"]
    target = scene.base / "outside/namespace"
    with subprocess.Popen(words, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        target.touch()
        mount(f"/proc/{holder.pid}/ns/user", target, None, _BIND)
        try:
            code = "check(libc.setns(os.open(out + '/namespace', os.O_RDONLY), 0x10000000))"
            return scene.command("WW", code)
        finally:
            unmount(target)
            holder.kill()


# The server has the same rights on its files as an ordinary user.
_LIKE_ORDINARY_USERS = """
libc = ctypes.CDLL(None)
header, capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
for number in (1, 2):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    libc.prctl(24, number, 0, 0, 0)
libc.capget(header, capabilities)
capabilities[0] &= ~6
capabilities[1] &= ~6
assert libc.capset(header, capabilities) == 0
"""


def _reopen(place: str, mode: int, policy: str, code: str) -> Attack:
    """A command reopens a directory that an earlier one has closed to the server."""

    def attack(scene: Scene) -> bool:
        closed = scene.base / place
        closed.chmod(mode)
        code_after = f"os.chmod(base + '/{place}', 0o755); os.chdir(ws); {code}"
        outcome = scene.outcome(policy, code_after, cwd="file:///")
        closed.chmod(0o755)
        assert outcome.refusal is None or str(closed) in outcome.refusal.message
        return outcome.refusal is None and outcome.stdout.split()[:1] == ["done"]

    return attack


def _forge_behind_pointer(content: str, name: str = "real") -> Attack:
    """A command writes to the repository that a `.git` file names."""
    steps: list[Json] = [{"mv": ["ws/.git", f"ws/{name}"]}, {"write": ["ws/.git", content]}]

    def attack(scene: Scene) -> bool:
        scene.scratch.apply(steps)
        path = f"ws/{name}/config"
        outcome = scene.outcome("WW", f"forge(base + '/{path}')")
        assert outcome.refusal is None or str(scene.ws / ".git") in outcome.refusal.message
        return scene.is_forged(path)

    return attack


def forge_behind_a_lease(scene: Scene) -> bool:
    """The server cannot read the `.git` file while a process has a lease on it."""
    scene.scratch.apply([{"mv": ["ws/.git", "ws/real"]}, {"write": ["ws/.git", "gitdir: real"]}])
    lease = os.open(scene.ws / ".git", os.O_RDONLY)
    fcntl.fcntl(lease, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default
    fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        outcome = scene.outcome("WW", "forge('real/config')")
        assert outcome.refusal is None or str(scene.ws / ".git") in outcome.refusal.message
        return scene.is_forged("ws/real/config")
    finally:
        os.close(lease)


def _closed_by_name(scene: Scene) -> str:
    """A denied file in a directory of another user that can be passed through but not listed."""
    secret = scene.ws / "other/a.key"
    secret.parent.mkdir()
    secret.write_text("secret")
    os.chown(secret.parent, user_id("ordinary"), user_id("ordinary"))
    secret.parent.chmod(0o711)
    return str(secret)


def read_by_name(scene: Scene) -> bool:
    outcome = scene.outcome("GLOB", f"content({_closed_by_name(scene)!r})")
    assert outcome.refusal is None or "other cannot be searched" in outcome.refusal.message
    return outcome.stdout.startswith("done")


def read_beyond_the_longest_path(scene: Scene) -> bool:
    """A command reads a denied file whose path is too long for the search."""
    enter = "os.chdir(ws)\nfor _ in range(20):\n    {}os.chdir('d' * 250)\n"
    assert scene.command("WW", enter.format("os.mkdir('d' * 250); ") + "forge('a.key')")
    outcome = scene.outcome("GLOB", enter.format("") + "content('a.key')")
    shutil.rmtree(scene.ws / ("d" * 250))
    assert outcome.refusal is None or "too long" in outcome.refusal.message
    return outcome.stdout.startswith("done")


# Moves a link to a denied directory between the layout and the building of a view.
_RELINKING = """
lay_out = builder.lay_out
def relinking(*arguments):
    view = lay_out(*arguments)
    if os.path.lexists(base + '/next'):
        os.rename(base + '/next', base + '/link')
    return view
builder.lay_out = relinking
"""


def read_behind_a_new_link(scene: Scene) -> bool:
    """A denied path leads elsewhere when the command starts."""
    steps: list[Json] = [{"symlink": ["ws/sub/deep", "link"]}, {"symlink": ["ws/sub", "next"]}]
    scene.scratch.apply(steps)
    denied = workspace_write(scene.ws, entry(scene.base / "link", "deny"))
    return scene.command(denied, "content(base + '/link/s.txt')")


def _leave_placeholder(scene: Scene) -> str:
    path = scene.ws / ".codex"
    path.mkdir()
    os.utime(path, ns=(MARK_NS, MARK_NS))
    return str(path)


def stop_a_start_by_a_lock(scene: Scene) -> bool:
    """A process locks a placeholder that a dead server has left behind."""
    lock = os.open(_leave_placeholder(scene), os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        return scene.outcome("WW", "pass").refusal is not None
    finally:
        os.close(lock)


def stop_a_start_by_a_link(scene: Scene) -> bool:
    """Another user makes a link in a directory with the sticky bit."""
    link = scene.ws / ".codex"
    link.symlink_to("sub")
    os.chown(link, user_id("ordinary"), user_id("ordinary"), follow_symlinks=False)
    os.chown(scene.ws, user_id("ordinary") + 1, -1)
    scene.ws.chmod(0o1777)
    return scene.outcome("WW", "pass").refusal is not None


def leave_a_placeholder(scene: Scene) -> bool:
    """A command closes the directory in which its placeholders are."""
    assert scene.command("WW", "os.chmod(ws, 0o500)")
    return (scene.ws / ".codex").exists()


# The server's session has a key.
_WITH_KEY = """
keyctl = kernel._NUMBERS[kernel.MACHINE].keyctl
ctypes.CDLL(None).syscall(keyctl, 1, None)
ctypes.CDLL(None).syscall(keyctl - 2, b'user', b'exec-server', b'secret', 6, -3)
"""
_FIND_KEY = """
keyctl = 250 if os.uname().machine == 'x86_64' else 219
check(libc.syscall(keyctl, 10, -3, b'user', b'exec-server', 0))
"""
# The server has no descriptor left to read the mount table.
_NO_MOUNT_TABLE = """
def refuse(*arguments):
    raise OSError(24, 'Too many open files')
mounts.open = refuse
"""
# The server has an inheritable descriptor of a folder of the host.
_LEFT_OPEN = "os.dup2(os.open(base + '/outside', os.O_PATH), 99)"


def reach_a_listener_of_the_host(scene: Scene) -> bool:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = "socket.create_connection(('127.0.0.1', int(extra[0]))).close()"
        return scene.command("WW", code, str(listener.getsockname()[1]))


def connect_to_a_socket_of_the_host(scene: Scene) -> bool:
    scene.scratch.listen("outside/s.sock", socket.SOCK_STREAM)
    return scene.command("WW", "socket.socket(socket.AF_UNIX).connect(out + '/s.sock')")


_SEND = """
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
one.sendmsg([b'datagram'], [], 0, extra[0].replace('@', chr(0)))
"""


def _send(name: str) -> Attack:
    def attack(scene: Scene) -> bool:
        listener = scene.scratch.listen(name, socket.SOCK_DGRAM)
        listener.setblocking(False)
        done = scene.command("WW", _SEND, name if name[0] == "@" else str(scene.base / name))
        assert not done or listener.recv(9) == b"datagram"
        return done

    return attack


def _use_descriptor(sender: str, receiver: str, path: str, code: str) -> Attack:
    """A command changes a directory by a descriptor that another command has sent."""

    def attack(scene: Scene) -> bool:
        attempt = f"attempt('use', lambda: exec({code!r}))"
        outcome = pass_descriptor(scene, scene.client, (sender, receiver, path, attempt))
        return "use|DONE" in outcome.stdout

    return attack


_REACH = """
import glob
for path in glob.glob('/proc/[0-9]*/root' + ws + '/a.txt'):
    content(path)
    break
else:
    raise OSError('not found')
"""


def reach_another_command(scene: Scene) -> bool:
    """A command reads a file that only another command may read."""
    try:
        victim = start_process(scene.client, scene.policy("WW"), ["sleep", "600"])
    except RpcFailure:
        return False
    try:
        return scene.command("MINELSEWHERE", _REACH)
    finally:
        scene.client.call("process/terminate", {"processId": victim["processId"]})
        finish(scene.client, victim)


def write_to_a_pipe_of_the_host(scene: Scene) -> bool:
    pipe = scene.base / "outside/pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        done = scene.command("WW", "forge(out + '/pipe')")
        assert done == (os.read(reader, 9) != b"")
        return done
    finally:
        os.close(reader)


_NAME = f"@exec-server-{uuid.uuid4()}"
_RENAME = "os.rename('sub', 'moved'); os.makedirs('sub/deep')"
_UNMOUNT = "check(libc.umount2(b'.git', 2))"
_OPEN_CGROUPS = """
check(libc.unshare(0x7e020000))
if libc.mount(b'x', b'/dev/shm', b'cgroup2', 0, None) < 0:
    check(libc.mount(b'x', b'/dev/shm', b'cgroup', 0, b'memory'))
opens('/dev/shm/cgroup.procs', os.O_WRONLY)
"""
_OPEN_SETTINGS = "opens('/proc/sys/kernel/core_pattern', os.O_WRONLY)"
_TYPE = "fcntl.ioctl(0, 0x5412, b' ')"
_FIND_VARIABLE = f"content('/proc/1/environ', {MARKER!r})"
_USE_99 = "opens('/proc/self/fd/99/o.txt', os.O_WRONLY)"
_OLD_ENTRY = """
# socket(AF_INET, SOCK_STREAM, 0) by the system call entry of 32-bit x86 programs
code = bytes.fromhex('53' 'b867010000' 'bb02000000' 'b901000000' 'ba00000000' 'cd80' '5b' 'c3')
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
check(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""


# Attacks and the protections that stop them; each of several protections is sufficient.
_ROWS: dict[str, tuple[Attack, str]] = {
    "write outside": (_forge("outside/o.txt"), "read-only tree, Landlock"),
    "write outside by request": (_write("outside/o.txt"), "read-only tree, path checks, Landlock"),
    "write to the repository": (_forge("ws/.git/config"), "protected names"),
    "forge by rename": (_forge("ws/sub/deep/d.txt", "RODEEP", before=_RENAME), "pins"),
    "make a missing name": (_forge("ws/.codex/a", before="os.mkdir('.codex')"), "placeholders"),
    "make a missing name by request": (
        make_a_missing_name_by_request,
        "missing names, path checks",
    ),
    "read a denied folder": (_command("content('sub/s.txt')", "DENYSUB"), "masks"),
    "read a denied folder by request": (_read("DENYSUB", "ws/sub/s.txt"), "masks, path checks"),
    "read a denied pattern": (_command("content('sub/a.key')", "GLOB"), "search for globs"),
    "read a denied pattern by request": (_read("GLOB", "ws/sub/a.key"), "path checks"),
    "read what is not granted": (_command("content(out + '/o.txt')", "MINW"), "empty root"),
    "be granted a link": (be_granted_a_link, "refusal of writable links"),
    "use a stale worker": (use_a_stale_worker, "view dependencies, path checks"),
    "use a stale prebuilt sandbox": (use_a_stale_prebuilt_sandbox, "view dependencies"),
    "swap the workspace": (_swap("next"), "identity checks of mounts, check after the build"),
    "swap it for a link": (
        _swap("other"),
        "identity checks of mounts, no links, check after the build",
    ),
    "read behind a new link": (read_behind_a_new_link, "check after the build"),
    "forge behind a lease": (forge_behind_a_lease, "unreadable pointers refused"),
    "forge behind a null byte": (
        _forge_behind_pointer("gitdir: real\0x"),
        "unclear pointers refused",
    ),
    "forge behind a long pointer": (
        _forge_behind_pointer("gitdir: real" + "\n" * 9999),
        "unclear pointers refused",
    ),
    "forge behind a blank": (
        _forge_behind_pointer("gitdir: real \n", "real "),
        "pointers as git reads them",
    ),
    "read a denied pattern by name": (
        read_by_name,
        "directories passed by name refused",
    ),
    "read a denied pattern beyond the longest path": (
        read_beyond_the_longest_path,
        "unsearchable directories refused",
    ),
    "stop a start by a lock": (stop_a_start_by_a_lock, "claims in placeholders"),
    "stop a start by a link": (stop_a_start_by_a_link, "fixed entries left alone"),
    "leave a placeholder": (leave_a_placeholder, "rights to remove placeholders"),
    "read the server without a mount table": (
        _read("RO", "/proc/self/environ", MARKER),
        "unknown mounts refused",
    ),
    "read the server": (_read("RO", "/proc/self/environ", MARKER), "procfs kept from direct reads"),
    "unmount a cover": (_forge("ws/.git/config", before=_UNMOUNT), "no capabilities, Landlock"),
    "forge by leaving": (forge_by_leaving, "rule for nesting, Landlock"),
    "read a denied folder by leaving": (
        _read_by_leaving("DENYSUB", "os.rename('sub', 'moved')", "moved/s.txt"),
        "rule for nesting, Landlock",
    ),
    "read a denied pattern by leaving": (
        _read_by_leaving("GLOB", "os.rename('sub/a.key', 'sub/moved')", "sub/moved"),
        "rule for nesting, Landlock",
    ),
    "forge in a closed workspace": (
        _reopen("ws", 0o000, "WW", "os.rename('.git', 'moved')"),
        "closed paths refused, closed directories refused, check after the build",
    ),
    "make a name in a closed workspace": (
        _reopen("ws", 0o500, "WW", "os.mkdir('.codex')"),
        "closed directories refused",
    ),
    "rename in a closed folder": (
        _reopen("ws/sub", 0o000, "RODEEP", "os.rename('sub/deep', 'sub/moved')"),
        "closed paths refused, closed directories refused, check after the build",
    ),
    "forge by a descriptor": (
        _use_descriptor("WWNET", "RONET", "ws", "os.rename('.git', 'moved'); os.mkdir('.git')"),
        "Landlock, rule for unix sockets",
    ),
    "forge hooks by a descriptor": (
        _use_descriptor("HOOKSNET", "WWNET", "ws/.git", "os.rename('hooks', 'moved')"),
        "directory above the root",
    ),
    "reach another command": (
        reach_another_command,
        "user namespace, private /proc, Landlock, refusal of shared processes",
    ),
    "write to a pipe of the host": (write_to_a_pipe_of_the_host, "Landlock"),
    "join a user namespace": (join_a_user_namespace, "user namespace, rule for joining"),
    "read another user's file": (read_another_users_file, "user namespace, no capabilities"),
    "become another user": (become_another_user, "user namespace, nosuid, no new privileges"),
    "open a device": (open_a_device, "nodev"),
    "write to a terminal of the host": (write_to_a_terminal_of_the_host, "private /dev, nodev"),
    "type into the own terminal": (_command(_TYPE, tty=True), "rule for terminals"),
    "open settings of the kernel": (_command(_OPEN_SETTINGS), "read-only /proc/sys"),
    "read about hardware": (_command("content('/proc/interrupts')"), "hidden parts of /proc"),
    "open cgroups": (_command(_OPEN_CGROUPS, "RO"), "rule for cgroups"),
    "signal the server": (_command("os.kill(int(extra[0]), 0)"), "pid namespace, Landlock"),
    "see the server": (_command("content('/proc/%s/cmdline' % extra[0])"), "private /proc"),
    "find shared memory": (find_shared_memory_of_the_host, "ipc namespace"),
    "find a key": (_command(_FIND_KEY), "own keyring, rule for keys"),
    "read variables of the init": (_command(_FIND_VARIABLE), "clean environment, hidden memory"),
    "open the memory of the init": (_command("opens('/proc/1/mem')"), "hidden memory"),
    "use an open descriptor": (
        _command(_USE_99),
        "no descriptors for the launcher, descriptors closed, Landlock",
    ),
    "open a socket": (_command("socket.socket().close()"), "filter"),
    "reach a listener": (reach_a_listener_of_the_host, "filter, network namespace"),
    "connect to a socket": (connect_to_a_socket_of_the_host, "rule for connect"),
    "send a datagram to a path": (_send("outside/d.sock"), "rule for sockets"),
    "send it to a name": (_send(_NAME), "rule for sockets, network namespace, Landlock"),
    "use the entry for 32 bits": (_command(_OLD_ENTRY), "rule for architectures"),
}
# More code for the servers of an attack, with and without protections.
_GIVEN = {
    "use a stale prebuilt sandbox": _SIGNALLING,
    "swap the workspace": _SWAPPING,
    "swap it for a link": _SWAPPING,
    "forge in a closed workspace": _LIKE_ORDINARY_USERS,
    "make a name in a closed workspace": _LIKE_ORDINARY_USERS,
    "rename in a closed folder": _LIKE_ORDINARY_USERS,
    "read a denied pattern by name": _LIKE_ORDINARY_USERS,
    "leave a placeholder": _LIKE_ORDINARY_USERS,
    "read behind a new link": _RELINKING,
    "read the server without a mount table": _NO_MOUNT_TABLE,
    "find a key": _WITH_KEY,
    "use an open descriptor": _LEFT_OPEN,
}
# Not possible on every machine, even without a sandbox.
_OPTIONAL = {"become another user", "open a device", "type into the own terminal"}
_OPTIONAL |= {"open cgroups", "find a key", "use the entry for 32 bits"}


@pytest.fixture(scope="module")
def scratch() -> Iterator[Scratch]:
    """One tree of root for all servers."""
    with Scratch(0) as tree:
        yield tree


@pytest.fixture(scope="module")
def untouched(scratch: Scratch) -> Iterator[Scene]:
    """A server with all protections."""
    with start_without(scratch) as scene:
        yield scene


@pytest.mark.parametrize("name", _ROWS)
def test_an_attack_succeeds_only_without_its_protections(
    name: str, scratch: Scratch, untouched: Scene
) -> None:
    attack, protections = _ROWS[name][0], _ROWS[name][1].split(", ")
    given = _GIVEN.get(name, "")
    with start_without(scratch, (), given) if given else contextlib.nullcontext(untouched) as scene:
        scratch.reset(STEPS)
        if name in _OPTIONAL and not attack(replace(scene, confined=False)):
            pytest.skip("not possible here even without a sandbox")
        scratch.reset(STEPS)
        assert not attack(scene), "with all protections"
    for kept in protections if len(protections) > 1 else ():
        if kept == "Landlock" and kernel.landlock_version() < _SCOPE_VERSION:
            continue  # on such a kernel Landlock alone is not sufficient
        with start_without(
            scratch, [other for other in protections if other != kept], given
        ) as scene:
            assert not attack(scene), f"with nothing but: {kept}"
    with start_without(scratch, protections, given) as scene:
        assert attack(scene), "without any"


@pytest.mark.quick
@pytest.mark.parametrize(("removed", "is_hit"), [((), False), (("mount table",), True)])
def test_new_mounts_are_missed_only_without_the_mount_table(
    removed: Sequence[str], is_hit: bool
) -> None:
    def attack() -> None:
        with Scratch(0) as tree, start_without(tree, removed) as scene:
            assert work_below_a_new_mount(scene) == is_hit

    in_private_mounts(attack)


@pytest.mark.parametrize("name", VERIFIED)
def test_nothing_runs_when_a_restriction_has_no_effect(scratch: Scratch, name: str) -> None:
    with start_without(scratch, [name], verified=True) as scene:
        outcome = scene.outcome("WW", "forge('made')")
        assert outcome.refusal is not None
        assert VERIFIED[name] in outcome.refusal.message
        params = {"path": uri(scene.ws / "made"), "sandbox": scene.policy("WW"), "dataBase64": ""}
        assert VERIFIED[name] in scene.client.failure("fs/writeFile", params)[1]
        assert not (scene.ws / "made").exists()


def test_every_protection_has_its_attack() -> None:
    attacked = {name for _, names in _ROWS.values() for name in names.split(", ")} | {"mount table"}
    assert attacked == IN_SERVER.keys() | IN_LAUNCHER.keys()
