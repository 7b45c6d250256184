"""Takes the protections of the sandbox away, one after the other, and attacks again.

Each row is an attack and the protections that stop it. An untouched server refuses the attack.
Where there are several protections, a server that has kept any one of them still refuses it:
each is enough by itself. A server without all of them lets it succeed, so the attack is a real
one and nothing else stops it. All servers run for real; the protections are taken out of their
code before they start, in the server or in the launcher that forks the confined processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from circumstances import in_private_mounts, mount, unmount, user_id
from exec_server.sandbox import kernel
from inside import children, eventually, start_prepared
from sandboxing import (
    BASE_STEPS,
    MARKER,
    NEEDS_ROOT,
    PROTECTED,
    Json,
    Outcome,
    Scratch,
    Stage,
    entry,
    interpreter,
    run,
    workspace_write,
)
from wire import Client, RpcFailure, b64, uri

pytestmark = [pytest.mark.root, NEEDS_ROOT]

FORGED = "forged"
# The first version of Landlock that limits signals and abstract sockets.
_SCOPE_VERSION = 6


# ---- the protections ------------------------------------------------------------------


@dataclass(frozen=True)
class Removal:
    """Python that takes a protection out of the server or the launcher."""

    server: str = ""
    launcher: str = ""


_SERVER = """
import ctypes, dataclasses, os, subprocess
import msgspec
from exec_server.core import direct
from exec_server.sandbox import freshness, globs, kernel, launcher, layout, means, placeholders
from exec_server.sandbox import sandboxes
def change_view(change):
    lay_out = sandboxes.lay_out
    def changed(*arguments):
        view = lay_out(*arguments)
        return msgspec.structs.replace(view, **change(view))
    sandboxes.lay_out = changed
def change_means(**changes):
    sandboxes.BEST_MEANS = dataclasses.replace(sandboxes.BEST_MEANS, **changes)
"""
_LAUNCHER = """
import os
from exec_server.core import guard, system
from exec_server.core.filecalls import OpenHow
from exec_server.sandbox import child, confine, filter as filters, kernel, view
def nothing(*arguments, **options):
    pass
def never_set(attribute):
    set_mount = kernel.set_mount
    def changed(descriptor, attributes, *, below_too):
        set_mount(descriptor, attributes & ~attribute, below_too=below_too)
    kernel.set_mount = changed
"""
# Python in the confined processes, which are forked from the launcher.
_INSERT = """
begin, end = launcher._CODE.split("from ", 1)
launcher._CODE = begin + chr(10) + {code!r} + chr(10) + "from " + end
"""
_WITH_NEW_PRIVILEGES = """
def keep_new_privileges():
    drop, install = kernel.drop_capabilities, kernel.install_filter
    def changed(program):
        install(program)  # without the promise this needs a capability
        drop()
    kernel.install_filter = changed
    kernel.drop_capabilities = kernel.forbid_new_privileges = nothing
    kernel.has_no_new_privileges = lambda: True
keep_new_privileges()
"""
_HOST_DEVICES = """
def only_null(prefix, devices, **options):
    view._attach_to(devices['null'], kernel.open_entry('/dev/null'))
view._mount_devices = only_null
"""
_ANY_MOUNT = """
def any_clone(step):
    try:
        return view._clone_of(step.path)
    except OSError as error:
        raise view.StaleView(step.path) from error
view._clone = any_clone
"""
_ANY_UNIX_SOCKET = """
filters._socket_check_offline = lambda: [
    'socket',
    (filters._LOAD, filters._FIRST_ARGUMENT, '', ''),
    (filters._IF_EQUAL, filters._AF_UNIX, 'allow', 'refuse'),
]
"""
_ALSO_PASS_ONE = """
class Generous(subprocess.Popen):
    def __init__(self, *arguments, pass_fds=(), **options):
        super().__init__(*arguments, pass_fds=[*pass_fds, 99], **options)
subprocess.Popen = Generous
"""

# With what refuses to go on when a protection is missing, see the last test but one.
_REMOVALS = {
    "read-only tree": Removal(
        launcher="never_set(kernel.READ_ONLY); confine._verify = nothing",
    ),
    "empty root": Removal("change_view(lambda view: {'is_empty': False, 'links': ()})"),
    "nodev": Removal(launcher="never_set(kernel.NO_DEVICES)"),
    "nosuid": Removal(launcher="never_set(kernel.NO_SUID)"),
    "masks": Removal(
        "change_view(lambda view: "
        "{'steps': tuple(step for step in view.steps if step.kind != 'mask')})"
    ),
    "protected names": Removal("layout._protected = lambda *arguments: iter(())"),
    "pins": Removal("layout._pins = lambda *arguments: []"),
    "distrust of links": Removal("layout._writable_link = lambda *arguments: None"),
    "search for patterns": Removal("globs.scan = lambda *arguments: []"),
    "identity of mounts": Removal(launcher=_ANY_MOUNT),
    "no links to mounts": Removal(launcher="kernel._ENTRY = OpenHow(os.O_PATH, 0)"),
    "freshness": Removal("freshness.Freshness.is_current = lambda self: True"),
    "placeholders": Removal("placeholders.Placeholders.hold = lambda self, missing: []"),
    "missing names": Removal(launcher="guard.keep_missing = nothing"),
    "judge": Removal(launcher="guard.judge_by = nothing"),
    "Landlock": Removal(launcher="kernel.landlock_version = lambda: 0"),
    "user namespace": Removal("change_means(user_namespace=False)"),
    "pid namespace": Removal("means._ALL &= ~kernel.NEW_PIDS; change_means(own_proc=False)"),
    "ipc namespace": Removal("means._ALL &= ~kernel.NEW_IPC"),
    "network namespace": Removal("kernel.NEW_NETWORK = 0"),
    "no capabilities": Removal(
        launcher="kernel.drop_bounding_set = kernel.drop_capabilities = nothing\n"
        "kernel.capabilities = lambda: ()",
    ),
    "no new privileges": Removal(launcher=_WITH_NEW_PRIVILEGES),
    "private /proc": Removal("change_means(own_proc=False)"),
    "frozen /proc/sys": Removal(launcher="view._freeze_parts = nothing"),
    "hidden parts of /proc": Removal(launcher="view._Stage.hide = nothing"),
    "private /dev": Removal(launcher=_HOST_DEVICES),
    "filter": Removal(
        launcher="kernel.install_filter = nothing; kernel.has_filter = lambda: True",
    ),
    "rule for sockets": Removal(launcher=_ANY_UNIX_SOCKET),
    "rule for connect": Removal(launcher="del filters._OFFLINE['connect']"),
    "rule for keys": Removal(launcher="del filters._ALWAYS['keyctl']"),
    "rule for cgroups": Removal(launcher="filters._CLONE_NEWCGROUP = 0"),
    "rule for terminals": Removal(launcher="filters._TIOCSTI = 0"),
    "rule for architectures": Removal(launcher="filters._KILL = filters._ALLOW"),
    "own keyring": Removal(launcher="kernel.leave_keyring = nothing"),
    "hidden memory": Removal(launcher="system.hide_memory = nothing"),
    "clean environment": Removal(f"launcher._VARIABLES = ({MARKER!r},)"),
    "no descriptors for the launcher": Removal(_ALSO_PASS_ONE),
    "descriptors closed": Removal(launcher="child._close_all_but = nothing"),
    "procfs kept from direct reads": Removal("direct.is_proc = lambda device: False"),
}


@dataclass(frozen=True)
class Scene:
    """A server to attack, and a connection to it."""

    stage: Stage
    client: Client

    @property
    def base(self) -> Path:
        return self.stage.base

    @property
    def ws(self) -> Path:
        return self.stage.ws

    def command(self, policy: str | Json, code: str, *extra: str, **params: Any) -> bool:
        """Whether Python inside the sandbox gets to its end."""
        outcome = self.outcome(policy, code, *extra, **params)
        assert outcome.refusal is None, outcome.refusal
        if outcome.exit_code == 128 + 31:  # SIGSYS
            return False
        verdict, *_ = outcome.stdout.split() or [""]
        assert verdict in ("done", "refused"), outcome
        print(outcome.stdout)
        return verdict == "done"

    def outcome(self, policy: str | Json, code: str, *extra: str, **params: Any) -> Outcome:
        lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
        program = _PRELUDE + lines + _POSTLUDE
        argv = [interpreter(), "-I", "-S", "-c", program, str(self.base), *extra]
        sandbox = self.stage.policy(policy) if isinstance(policy, str) else policy
        return run(self.client, sandbox, argv, **{"cwd": uri(self.ws)} | params)

    def request(self, policy: str, method: str, path: str | Path, **params: Any) -> Any:
        """The answer to a file operation; None if it is refused."""
        place = {"path": uri(self.base / path), "sandbox": self.stage.policy(policy)}
        try:
            return self.client.call(method, place | params)
        except RpcFailure:
            return None

    def write(self, policy: str, path: str) -> bool:
        """Whether fs/writeFile changes a file."""
        answer = self.request(policy, "fs/writeFile", path, dataBase64=b64(FORGED.encode()))
        assert (answer is not None) == self.is_forged(path)
        return answer is not None

    def is_forged(self, path: str) -> bool:
        """Whether somebody has written to a file of the host's."""
        place = self.base / path
        return place.is_file() and place.read_text() == FORGED


_PRELUDE = f"""
import ctypes, os, socket, sys
base, extra = sys.argv[1], sys.argv[2:]
ws, out = base + '/ws', base + '/outside'
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), 'call')
    return result
def forge(path):
    with open(path, 'w') as stream:
        stream.write({FORGED!r})
def content(path):
    with open(path, 'rb') as stream:
        data = stream.read(1 << 16)
    if not data:
        raise OSError('empty')
    return data
def opens(path, flags):
    os.close(os.open(path, flags))
def attack():
"""
_POSTLUDE = """
try:
    attack()
except OSError as error:
    print('refused', error)
else:
    print('done')
"""


# ---- attacks on files -----------------------------------------------------------------


def write_outside(scene: Scene) -> bool:
    """A command writes outside of its workspace."""
    done = scene.command("WW", "forge(out + '/o.txt')")
    assert done == scene.is_forged("outside/o.txt")
    return done


def write_outside_by_request(scene: Scene) -> bool:
    """A file operation writes outside of the workspace."""
    return scene.write("WW", "outside/o.txt")


def change_the_repository(scene: Scene) -> bool:
    """A command writes to what nobody has forbidden by name."""
    return scene.command("WW", "forge('.git/config')")


def forge_by_rename(scene: Scene) -> bool:
    """A command moves the parent of a read-only folder away and makes one of its own."""
    code = "os.rename('sub', 'moved'); os.makedirs('sub/deep'); forge('sub/deep/d.txt')"
    done = scene.command("RODEEP", code)
    assert done == scene.is_forged("ws/sub/deep/d.txt")
    return done


def make_a_missing_name(scene: Scene) -> bool:
    """A command makes a protected name that is not there."""
    done = scene.command("WW", "os.mkdir('.codex'); forge('.codex/config')")
    assert done == scene.is_forged("ws/.codex/config")
    return done


def make_a_missing_name_by_request(scene: Scene) -> bool:
    """A file operation makes a protected name that is not there."""
    scene.request("WW", "fs/createDirectory", "ws/.codex", recursive=False)
    return (scene.ws / ".codex").exists()


def read_what_is_denied(scene: Scene) -> bool:
    """A command reads a denied folder."""
    return scene.command("DENYSUB", "content('sub/s.txt')")


def read_what_is_denied_by_request(scene: Scene) -> bool:
    """A file operation reads a denied folder."""
    return scene.request("DENYSUB", "fs/readFile", "ws/sub/s.txt") is not None


def read_what_is_not_granted(scene: Scene) -> bool:
    """A command reads what a policy without the root does not mention."""
    return scene.command("MINW", "content(out + '/o.txt')")


def read_a_pattern(scene: Scene) -> bool:
    """A command reads a file that matches a denied pattern."""
    scene.stage.scratch.apply([{"write": ["ws/sub/a.key", "secret"]}])
    return scene.command("GLOB", "content('sub/a.key')")


def read_a_pattern_by_request(scene: Scene) -> bool:
    """A file operation reads a file that was made after its worker."""
    assert scene.write("GLOB", "ws/new.txt")
    scene.stage.scratch.apply([{"write": ["ws/sub/a.key", "secret"]}])
    return scene.request("GLOB", "fs/readFile", "ws/sub/a.key") is not None


def be_granted_a_link(scene: Scene) -> bool:
    """A command makes a link that leads outside where the next one is granted a folder."""
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


def use_a_stale_spare(scene: Scene) -> bool:
    """A command writes to a repository that is newer than the sandbox built ahead for it."""
    assert scene.command("WW", "pass")
    pid = scene.stage.server.process.pid
    # Of two, the one that has ended may not have been reaped yet.
    eventually("a spare", lambda: any(_is_idle_init(child) for child in children(pid)))
    _replace_repository(scene)
    return scene.command("WW", "forge('.git/config')")


def _is_idle_init(pid: int) -> bool:
    with contextlib.suppress(OSError):
        is_init = Path(f"/proc/{pid}/comm").read_text() == "exec-init\n"
        return is_init and Path(f"/proc/{pid}/wchan").exists() and not children(pid)
    return False


# While a view is built somebody replaces the workspace; both have all protected names.
_SWAPPING = """
lay_out = sandboxes.lay_out
def swapping(*arguments):
    view = lay_out(*arguments)
    base = os.environ['EXEC_SERVER_TEST_BASE']
    if os.path.lexists(base + '/next'):
        os.rename(base + '/ws', base + '/was')
        os.rename(base + '/next', base + '/ws')
    return view
sandboxes.lay_out = swapping
"""


def _prepare_swap(scene: Scene, name: str) -> None:
    folders = [f"{place}/{protected}" for place in ("ws", name) for protected in PROTECTED]
    scene.stage.scratch.apply(
        [
            *({"mkdir": folder} for folder in folders),
            {"mkdir": f"{name}/repository/hooks"},
            {"write": [f"{name}/.git", "gitdir: repository"]},
        ]
    )


def swap_the_workspace(scene: Scene) -> bool:
    """A workspace is replaced by another one whose repository is elsewhere."""
    _prepare_swap(scene, "next")
    return scene.command("WW", "forge('repository/hooks/pre-commit')")


def swap_the_workspace_for_a_link(scene: Scene) -> bool:
    """A workspace is replaced by a link to another one."""
    _prepare_swap(scene, "other")
    scene.stage.scratch.apply([{"symlink": ["other", "next"]}])
    return scene.command("WW", "forge('repository/hooks/pre-commit')")


def read_the_server(scene: Scene) -> bool:
    """A read that the server performs itself, because all reads are allowed, is of itself."""
    answer = scene.request("RO", "fs/readFile", "/proc/self/environ")
    return answer is not None and b64(MARKER.encode())[:-4] in answer["dataBase64"]


# ---- attacks on the machine -----------------------------------------------------------


def unmount_a_cover(scene: Scene) -> bool:
    """A command takes the mount away that makes a repository read-only."""
    code = "check(libc.umount2(b'.git', 2)); forge('.git/config')"
    return scene.command("WW", code)


def read_a_file_of_another_user(scene: Scene) -> bool:
    """A command of root's reads what only another user may read."""
    path = scene.base / "outside/o.txt"
    path.chmod(0o600)
    os.chown(path, user_id("ordinary"), user_id("ordinary"))
    return scene.command("RO", "content(out + '/o.txt')")


def become_another_user(scene: Scene) -> bool:
    """A command becomes the owner of a program that is made for that."""
    program = scene.ws / "id"
    shutil.copy(shutil.which("id") or "/usr/bin/id", program)
    os.chown(program, user_id("ordinary"), user_id("ordinary"))
    program.chmod(0o4755)
    outcome = scene.stage.run(scene.client, "WW", [str(program), "-u"])
    assert outcome.exit_code == 0, outcome
    return outcome.stdout == f"{user_id('ordinary')}\n"


def open_a_device(scene: Scene) -> bool:
    """A command opens a device that somebody has put into its workspace."""
    os.mknod(scene.ws / "device", 0o20666, os.makedev(1, 5))
    return scene.command("WW", "opens('device', os.O_RDONLY)")


def type_into_a_terminal(scene: Scene) -> bool:
    """A command writes to a terminal of the host's."""
    master, slave = os.openpty()
    try:
        code = "os.write(os.open(extra[0], os.O_WRONLY | os.O_NOCTTY), b'typed')"
        done = scene.command("WW", code, os.ttyname(slave))
        os.set_blocking(master, False)
        with contextlib.suppress(BlockingIOError):
            assert done, os.read(master, 9)
        return done
    finally:
        os.close(master)
        os.close(slave)


def inject_input(scene: Scene) -> bool:
    """A command types into its own terminal, for whoever reads it next."""
    code = "import fcntl; fcntl.ioctl(0, 0x5412, b' ')"
    return scene.command("WW", code, tty=True)


def open_kernel_settings(scene: Scene) -> bool:
    """A command of root's opens a setting of the kernel for writing; it writes nothing."""
    return scene.command("WW", "opens('/proc/sys/kernel/core_pattern', os.O_WRONLY)")


def read_about_hardware(scene: Scene) -> bool:
    """A command reads what the kernel says of the hardware."""
    return scene.command("WW", "content('/proc/interrupts')")


def open_cgroups(scene: Scene) -> bool:
    """A command of root's mounts the cgroups of the machine; it writes nothing."""
    code = """
os.mkdir('groups')
check(libc.unshare(0x7e020000))
if libc.mount(b'x', b'groups', b'cgroup2', 0, None) < 0:
    check(libc.mount(b'x', b'groups', b'cgroup', 0, b'memory'))
opens('groups/cgroup.procs', os.O_WRONLY)
"""
    return scene.command("WW", code)


def signal_the_host(scene: Scene) -> bool:
    """A command sends the server a signal: none, to see whether it could."""
    return scene.command("WW", "os.kill(int(extra[0]), 0)", str(scene.stage.server.process.pid))


def look_at_the_host(scene: Scene) -> bool:
    """A command reads about a process of the host's."""
    code = "content('/proc/%s/cmdline' % extra[0])"
    return scene.command("WW", code, str(scene.stage.server.process.pid))


def find_shared_memory(scene: Scene) -> bool:
    """A command opens shared memory of the host's."""
    libc = ctypes.CDLL(None, use_errno=True)
    key = int.from_bytes(os.urandom(3), "little") + 1
    segment = libc.shmget(key, 4096, 0o1666)
    assert segment >= 0
    try:
        return scene.command("WW", "check(libc.shmget(int(extra[0]), 0, 0))", str(key))
    finally:
        libc.shmctl(segment, 0, None)


_WITH_KEY = """
libc = ctypes.CDLL(None)
assert libc.syscall(250, 1, None) >= 0
assert libc.syscall(248, b'user', b'exec-server', b'secret', 6, -3) >= 0
"""


def find_a_key(scene: Scene) -> bool:
    """A command finds a key in the keyring of the server's session."""
    code = "check(libc.syscall(250, 10, -3, b'user', b'exec-server', 0))"
    return scene.command("WW", code)


def read_the_environment(scene: Scene) -> bool:
    """A command reads the environment of its init, which came from the server's."""
    code = f"if b'{MARKER}' not in content('/proc/1/environ'): raise OSError('clean')"
    return scene.command("WW", code)


def read_the_memory(scene: Scene) -> bool:
    """A command opens the memory of its init, which is not confined by the same filter."""
    return scene.command("WW", "opens('/proc/1/mem', os.O_RDONLY)")


# Something in the server has left a folder of the host's open, for everybody to inherit.
_LEFT_OPEN = """
os.dup2(os.open(os.environ['EXEC_SERVER_TEST_BASE'], os.O_PATH), 99)
"""


def use_a_left_descriptor(scene: Scene) -> bool:
    """A command writes outside by a descriptor that the server has left open."""
    flags = "os.O_WRONLY | os.O_CREAT"
    return scene.command("WW", f"os.close(os.open('outside/new', {flags}, dir_fd=99))")


# ---- attacks on the network -----------------------------------------------------------


def open_a_socket(scene: Scene) -> bool:
    """A command opens a socket of the network, though it leads nowhere."""
    return scene.command("WW", "socket.socket().close()")


def reach_a_listener(scene: Scene) -> bool:
    """A command talks to a server of the host's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        code = "socket.create_connection(('127.0.0.1', int(extra[0]))).close()"
        return scene.command("WW", code, port)


_SEND = """
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
one.sendmsg([b'datagram'], [], 0, extra[0].replace('@', chr(0)))
"""


def _send_datagram(scene: Scene, name: str, address: str) -> bool:
    listener = scene.stage.scratch.listen(name, socket.SOCK_DGRAM)
    done = scene.command("WW", _SEND, address)
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        assert done, listener.recv(9)
    return done


def send_a_datagram(scene: Scene) -> bool:
    """A command sends a datagram to a socket of the host's that has a path."""
    return _send_datagram(scene, "outside/d.sock", str(scene.base / "outside/d.sock"))


def send_a_datagram_to_a_name(scene: Scene) -> bool:
    """A command sends a datagram to a socket of the host's that has an abstract name."""
    name = f"@exec-server-{uuid.uuid4()}"
    return _send_datagram(scene, name, name)


def connect_to_a_socket(scene: Scene) -> bool:
    """A command connects to a socket of the host's that has a path."""
    scene.stage.scratch.listen("outside/s.sock", socket.SOCK_STREAM)
    return scene.command("WW", "socket.socket(socket.AF_UNIX).connect(out + '/s.sock')")


_OLD_ENTRY = """
import mmap
# socket(AF_INET, SOCK_STREAM, 0), asked for as 32-bit programs do
code = bytes.fromhex('53' 'b867010000' 'bb02000000' 'b901000000' 'ba00000000' 'cd80' '5b' 'c3')
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
check(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""


def use_the_old_entry(scene: Scene) -> bool:
    """A command calls the kernel by a convention in which numbers mean something else."""
    return scene.command("WW", _OLD_ENTRY)


# ---- the table ------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """An attack and the protections that stop it, each of which is enough.

    given: what every server of this row is made to do. needs: a reason to skip it, if any.
    """

    attack: Callable[[Scene], bool]
    protections: tuple[str, ...]
    given: str = ""
    needs: Callable[[], str] = str


def _needs_x86() -> str:
    return "" if platform.machine() == "x86_64" else "written for x86"


def _needs_old_entry() -> str:
    if platform.machine() != "x86_64":
        return "only x86 has this entry"
    # The kernel says so in the vsyscall-free way: it lists the 32-bit interface as a personality.
    return "" if os.path.exists("/proc/sys/abi/vsyscall32") else "no 32-bit programs here"


def _needs_suid_programs() -> str:
    is_quiet = os.statvfs("/var/tmp").f_flag & os.ST_NOSUID
    return "no setuid programs in /var/tmp" if is_quiet else ""


def _needs_injection() -> str:
    setting = Path("/proc/sys/dev/tty/legacy_tiocsti")
    refused = setting.exists() and setting.read_text() == "0\n"
    return "the kernel lets nobody type into terminals" if refused else ""


_ROWS = [
    Row(write_outside, ("read-only tree",)),
    Row(write_outside_by_request, ("read-only tree", "judge", "Landlock")),
    Row(change_the_repository, ("protected names",)),
    Row(forge_by_rename, ("pins",)),
    Row(make_a_missing_name, ("placeholders",)),
    Row(make_a_missing_name_by_request, ("missing names", "judge")),
    Row(read_what_is_denied, ("masks",)),
    Row(read_what_is_denied_by_request, ("masks", "judge")),
    Row(read_what_is_not_granted, ("empty root",)),
    Row(read_a_pattern, ("search for patterns",)),
    Row(read_a_pattern_by_request, ("judge",)),
    Row(be_granted_a_link, ("distrust of links",)),
    Row(use_a_stale_worker, ("freshness", "judge")),
    Row(use_a_stale_spare, ("freshness",)),
    Row(swap_the_workspace, ("identity of mounts",), _SWAPPING),
    Row(
        swap_the_workspace_for_a_link, ("identity of mounts", "no links to mounts"), _SWAPPING
    ),
    Row(read_the_server, ("procfs kept from direct reads",)),
    Row(unmount_a_cover, ("no capabilities",)),
    Row(read_a_file_of_another_user, ("user namespace", "no capabilities")),
    Row(
        become_another_user,
        ("user namespace", "nosuid", "no new privileges"),
        needs=_needs_suid_programs,
    ),
    Row(open_a_device, ("nodev",)),
    Row(type_into_a_terminal, ("private /dev", "nodev")),
    Row(inject_input, ("rule for terminals",), needs=_needs_injection),
    Row(open_kernel_settings, ("frozen /proc/sys",)),
    Row(read_about_hardware, ("hidden parts of /proc",)),
    Row(open_cgroups, ("rule for cgroups",)),
    Row(signal_the_host, ("pid namespace", "Landlock")),
    Row(look_at_the_host, ("private /proc",)),
    Row(find_shared_memory, ("ipc namespace",)),
    Row(find_a_key, ("own keyring", "rule for keys"), _WITH_KEY, _needs_x86),
    Row(read_the_environment, ("clean environment", "hidden memory")),
    Row(read_the_memory, ("hidden memory",)),
    Row(
        use_a_left_descriptor, ("no descriptors for the launcher", "descriptors closed"), _LEFT_OPEN
    ),
    Row(open_a_socket, ("filter",)),
    Row(reach_a_listener, ("filter", "network namespace")),
    Row(send_a_datagram, ("rule for sockets",)),
    Row(send_a_datagram_to_a_name, ("rule for sockets", "network namespace", "Landlock")),
    Row(connect_to_a_socket, ("rule for connect",)),
    Row(use_the_old_entry, ("rule for architectures",), needs=_needs_old_entry),
]


@pytest.fixture(scope="module")
def scratch() -> Iterator[Scratch]:
    """One tree for all servers; root's."""
    with Scratch(0) as tree:
        yield tree


@contextlib.contextmanager
def _start(scratch: Scratch, removed: Sequence[str] = (), given: str = "") -> Iterator[Scene]:
    """A server without some protections."""
    removals = [_REMOVALS[name] for name in removed]
    server = [_SERVER, given, *(removal.server for removal in removals)]
    launcher = [removal.launcher for removal in removals if removal.launcher]
    if launcher:
        server.append(_INSERT.format(code="\n".join([_LAUNCHER, *launcher])))
    env = {MARKER: MARKER, "TMPDIR": None, "EXEC_SERVER_TEST_BASE": str(scratch.base)}
    scratch.reset(BASE_STEPS)
    with start_prepared("\n".join(server), env=env) as running, running.connect() as client:
        yield Scene(Stage(running, scratch), client)


@pytest.fixture(scope="module")
def untouched(scratch: Scratch) -> Iterator[Scene]:
    """A server with all protections."""
    with _start(scratch) as scene:
        yield scene


@pytest.mark.parametrize("row", [pytest.param(row, id=row.attack.__name__) for row in _ROWS])
def test_an_attack_succeeds_only_without_its_protections(
    row: Row, scratch: Scratch, untouched: Scene
) -> None:
    if reason := row.needs():
        pytest.skip(reason)
    if row.given:
        with _start(scratch, (), row.given) as scene:
            assert not row.attack(scene), "with all protections"
    else:
        scratch.reset(BASE_STEPS)
        assert not row.attack(untouched), "with all protections"
    for kept in row.protections if len(row.protections) > 1 else ():
        if kept == "Landlock" and kernel.landlock_version() < _SCOPE_VERSION:
            continue  # on this kernel the others have to do
        removed = [name for name in row.protections if name != kept]
        with _start(scratch, removed, row.given) as scene:
            assert not row.attack(scene), f"with nothing but {kept}"
    with _start(scratch, row.protections, row.given) as scene:
        assert row.attack(scene), "without any protection"


def test_every_protection_has_its_attack() -> None:
    assert {name for row in _ROWS for name in row.protections} == set(_REMOVALS)
