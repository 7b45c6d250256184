"""The attacks of test_protections: each tells whether it succeeded on a server.

An attack is a function of a Scene. Texts in capitals are code: of a command that attacks, or of the
server whose attack needs special circumstances.
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
from collections.abc import Callable
from typing import Any

from exec_server.filesystem.placeholder import MARK_NS
from tests.support.barriers import mount, unmount, user_id
from tests.support.client import RpcFailure
from tests.support.network import network_proxy
from tests.support.protections import Scene
from tests.support.sandbox import (
    MARKER,
    PROTECTED,
    Json,
    entry,
    finish,
    policy,
    run,
    special,
    start_process,
    workspace_write,
)
from tests.support.sandbox_attacks import pass_descriptor
from tests.support.server_internals import eventually

_BIND = 0x1000

Attack = Callable[[Scene], bool]


def by_command(code: str, policy: str = "WW", **params: Any) -> Attack:
    """An attack by a command, with the server's pid as its argument."""
    return lambda scene: scene.command(policy, code, str(scene.server.process.pid), **params)


def forge(path: str, policy: str = "WW", *, before: str = "pass") -> Attack:
    """An attack by a command that changes a file; the file on the host must agree."""

    def attack(scene: Scene) -> bool:
        done = scene.command(policy, f"{before}; forge(base + '/{path}')")
        assert done == scene.is_forged(path)
        return done

    return attack


def write(path: str) -> Attack:
    return lambda scene: scene.write("WW", path)


def read(policy: str, path: str, part: str = "") -> Attack:
    """An attack by reading a file with some text in it."""

    def attack(scene: Scene) -> bool:
        answer = scene.request(policy, "fs/readFile", path) or {"dataBase64": ""}
        data = base64.b64decode(answer["dataBase64"])
        return bool(data) and part.encode() in data

    return attack


_MASKED = network_proxy(domains={"*": "allow"}, credentialMasking=True)
_TRUSTED = ["/bin/sh", "-c", 'echo "$SSL_CERT_FILE"; cat "$SSL_CERT_FILE"']


def _trusted(scene: Scene, sandbox: Json | None = None) -> list[str]:
    """The file of a masked command, and its lines; unconfined ones have a file of the host."""
    return run(scene.client, sandbox, _TRUSTED, networkProxy=_MASKED).stdout.splitlines()


def _forge_trusted(scene: Scene, sandbox: Json | None) -> list[str]:
    """Add a line to the file of masked commands; what an unconfined one finds in it at once."""
    path = _trusted(scene)[0]
    run(scene.client, sandbox, ["/bin/sh", "-c", f"echo forged >> {path}"])
    with open(path) as file:
        return file.read().splitlines()


def forge_certificates(scene: Scene) -> bool:
    """A confined command that may write where the file is adds an authority to it."""
    everything = policy(special("root", "write"), entry(scene.ws / "sub", "deny"))
    return "forged" in _forge_trusted(scene, everything)


def trust_forged_certificates(scene: Scene) -> bool:
    """A masked command trusts what an unconfined one has added before its start."""
    assert "forged" in _forge_trusted(scene, None)
    return "forged" in _trusted(scene)


def trust_later_certificates(scene: Scene) -> bool:
    """A masked, confined command trusts what an unconfined one adds after its start."""
    path = _trusted(scene)[0]
    script = f'mkfifo {scene.ws}/go; echo; read line < {scene.ws}/go; cat "$SSL_CERT_FILE"'
    sandbox = workspace_write(scene.ws)
    argv = ["/bin/sh", "-c", script]
    start = start_process(scene.client, sandbox, argv, networkProxy=_MASKED)
    scene.client.notice("process/output", start["processId"])
    run(scene.client, None, ["/bin/sh", "-c", f"echo forged >> {path}; echo > {scene.ws}/go"])
    return "forged" in finish(scene.client, start).stdout.splitlines()


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
SIGNALLING = """
build_one = commands.PrebuiltPool._build_one
def signalling(self, policy):
    build_one(self, policy)
    open(base + '/prebuilt', 'w').close()
commands.PrebuiltPool._build_one = signalling
"""


def use_a_stale_prebuilt_sandbox(scene: Scene) -> bool:
    """A command writes to a repository that is newer than its prebuilt sandbox."""
    assert scene.command("WW", "pass")
    eventually("a prebuilt sandbox", (scene.base / "prebuilt").exists)
    _replace_repository(scene)
    return forge("ws/.git/config")(scene)


def work_below_a_new_mount(scene: Scene) -> bool:
    """A file operation writes to a directory that the host has mounted over since."""
    assert scene.write("WW", "ws/sub/deep/old.txt")
    mount("tmpfs", scene.ws / "sub/deep", "tmpfs")
    try:
        assert scene.request("WW", "fs/writeFile", "ws/sub/deep/new.txt", dataBase64="") == {}
    finally:
        unmount(scene.ws / "sub/deep")
    return (scene.ws / "sub/deep/new.txt").exists()


# The log of the server has some text.
LOGGING = f"os.write(2, {MARKER.encode()!r})"


def read_the_log(scene: Scene) -> bool:
    """A file operation follows a link to the standard error of its worker."""
    scene.scratch.apply([{"symlink": ["/proc/self/fd/2", "ws/log"]}])
    return read("MINW", "ws/log", MARKER)(scene)


def open_the_memory_of_a_worker(scene: Scene) -> bool:
    """A file operation may write to the code that checks it."""
    params = {"handleId": "memory", "mode": "replace"}
    return scene.request("ROOTW", "fs/open", "/proc/self/mem", **params) is not None


# Replaces the workspace between the layout and the building of a view.
SWAPPING = """
lay_out = builder.lay_out
def swapping(*arguments):
    view = lay_out(*arguments)
    if os.path.lexists(base + '/next'):
        os.rename(base + '/ws', base + '/was')
        os.rename(base + '/next', base + '/ws')
    return view
builder.lay_out = swapping
"""


def swap(name: str) -> Attack:
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


# A new /proc in a nested pid namespace, read-only as the one of the host is below the view.
MOUNT_PROC = """
check(libc.unshare(0x30020000))
child = os.fork()
if child == 0:
    try:
        check(libc.mount(b'new', b'/proc', b'proc', 15, None))
        content('/proc/interrupts')
    except OSError:
        os._exit(1)
    os._exit(0)
if os.waitpid(child, 0)[1]:
    raise OSError('not mounted')
"""


def forge_by_leaving(scene: Scene) -> bool:
    """A command moves the repository away and makes another one."""
    code = f"{_LEAVE}os.rename('.git', 'moved'); os.mkdir('.git'); forge('.git/config')"
    done = scene.command("WW", code)
    assert done == scene.is_forged("ws/.git/config")
    return done


def read_by_leaving(policy: str, code: str, path: str) -> Attack:
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
LIKE_ORDINARY_USERS = """
libc = ctypes.CDLL(None)
header, capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
for number in (1, 2):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    libc.prctl(24, number, 0, 0, 0)
libc.capget(header, capabilities)
capabilities[0] &= ~6
capabilities[1] &= ~6
assert libc.capset(header, capabilities) == 0
"""


def reopen(place: str, mode: int, policy: str, code: str) -> Attack:
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


def forge_behind_pointer(content: str, name: str = "real") -> Attack:
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
RELINKING = """
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
WITH_KEY = """
keyctl = kernel._NUMBERS[kernel.MACHINE].keyctl
ctypes.CDLL(None).syscall(keyctl, 1, None)
ctypes.CDLL(None).syscall(keyctl - 2, b'user', b'exec-server', b'secret', 6, -3)
"""
FIND_KEY = """
keyctl = 250 if os.uname().machine == 'x86_64' else 219
check(libc.syscall(keyctl, 10, -3, b'user', b'exec-server', 0))
"""
# The server has no descriptor left to read the mount table.
NO_MOUNT_TABLE = """
def refuse(*arguments):
    raise OSError(24, 'Too many open files')
syscalls.open = refuse
"""
# The server has an inheritable descriptor of a folder of the host.
LEAVE_OPEN = "os.dup2(os.open(base + '/outside', os.O_PATH), 99)"


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


def send(name: str) -> Attack:
    def attack(scene: Scene) -> bool:
        listener = scene.scratch.listen(name, socket.SOCK_DGRAM)
        listener.setblocking(False)
        done = scene.command("WW", _SEND, name if name[0] == "@" else str(scene.base / name))
        assert not done or listener.recv(9) == b"datagram"
        return done

    return attack


def use_descriptor(sender: str, receiver: str, path: str, code: str) -> Attack:
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


ABSTRACT_NAME = f"@exec-server-{uuid.uuid4()}"
RENAME = "os.rename('sub', 'moved'); os.makedirs('sub/deep')"
UNMOUNT = "check(libc.umount2(b'.git', 2))"
OPEN_CGROUPS = """
check(libc.unshare(0x7e020000))
if libc.mount(b'x', b'/dev/shm', b'cgroup2', 0, None) < 0:
    check(libc.mount(b'x', b'/dev/shm', b'cgroup', 0, b'memory'))
opens('/dev/shm/cgroup.procs', os.O_WRONLY)
"""
LEASE = """
leased = os.open(out + '/o.txt', os.O_RDONLY)
fcntl.fcntl(leased, fcntl.F_SETSIG, 23)  # SIGURG, ignored by default
fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
"""
LOCK = "fcntl.flock(os.open(out + '/o.txt', os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
OPEN_SETTINGS = "opens('/proc/sys/kernel/core_pattern', os.O_WRONLY)"
TYPE = "fcntl.ioctl(0, 0x5412, b' ')"
FIND_VARIABLE = f"content('/proc/1/environ', {MARKER!r})"
USE_99 = "opens('/proc/self/fd/99/o.txt', os.O_WRONLY)"
USE_OLD_ENTRY = """
# socket(AF_INET, SOCK_STREAM, 0) by the system call entry of 32-bit x86 programs
code = bytes.fromhex('53' 'b867010000' 'bb02000000' 'b901000000' 'ba00000000' 'cd80' '5b' 'c3')
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
check(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""
