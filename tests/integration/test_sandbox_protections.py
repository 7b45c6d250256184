"""Takes the protections of the sandbox away, one after the other, and attacks again.

Each row is an attack and the protections that stop it. An untouched server refuses the attack.
Where there are several protections, a server that has kept any one of them still refuses it:
each is enough by itself. A server without any of them lets it succeed, so the attack is a real
one and nothing else stops it. All servers run for real; the protections are taken out of their
code before they start, in the server or in the launcher that forks the confined processes.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from circumstances import in_private_mounts, mount, unmount, user_id
from exec_server.sandbox import kernel
from inside import eventually, start_prepared
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

# The first version of Landlock that limits signals and abstract sockets.
_SCOPE_VERSION = 6
_FORGED = "forged"
_STEPS = (*BASE_STEPS, {"write": ["ws/sub/a.key", "secret"]})


# ---- the protections ------------------------------------------------------------------

_SERVER = """
import ctypes, dataclasses, os, subprocess
import msgspec
from exec_server.core import direct
from exec_server.sandbox import freshness, globs, kernel, launcher, layout, means, placeholders
from exec_server.sandbox import sandboxes, spares
base = os.environ['EXEC_SERVER_TEST_BASE']
def change_view(change):
    lay_out = sandboxes.lay_out
    def changed(*arguments):
        view = lay_out(*arguments)
        return msgspec.structs.replace(view, **change(view))
    sandboxes.lay_out = changed
def without_masks(view):
    return {'steps': tuple(step for step in view.steps if step.kind != 'mask')}
def change_means(**changes):
    sandboxes.BEST_MEANS = dataclasses.replace(sandboxes.BEST_MEANS, **changes)
class Generous(subprocess.Popen):
    def __init__(self, *arguments, pass_fds=(), **options):
        super().__init__(*arguments, pass_fds=[*pass_fds, 99], **options)
"""
_IN_SERVER = {
    "empty root": "change_view(lambda view: {'is_empty': False, 'links': ()})",
    "masks": "change_view(without_masks)",
    "protected names": "layout._protected = lambda *arguments: iter(())",
    "pins": "layout._pins = lambda *arguments: []",
    "distrust of links": "layout._writable_link = lambda *arguments: None",
    "search for patterns": "globs.scan = lambda *arguments: []",
    "placeholders": "placeholders.Placeholders.hold = lambda self, missing: []",
    "freshness": "freshness.Freshness.is_current = lambda self: True",
    "mount table": "freshness.Mounts.changes = lambda self: 0",
    "procfs kept from direct reads": "direct.is_proc = lambda device: False",
    "user namespace": "change_means(user_namespace=False)",
    "pid namespace": "means._ALL &= ~kernel.NEW_PIDS; change_means(own_proc=False)",
    "ipc namespace": "means._ALL &= ~kernel.NEW_IPC",
    "network namespace": "kernel.NEW_NETWORK = 0",
    "private /proc": "change_means(own_proc=False)",
    "clean environment": f"launcher._VARIABLES = ({MARKER!r},)",
    "none for the launcher": "subprocess.Popen = Generous",
}

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
def clone_whatever_is_there(step):
    try:
        return view._clone_of(step.path)
    except OSError as error:
        raise view.StaleView(step.path) from error
def show_host_devices(prefix, devices, **options):
    view._attach_to(devices['null'], kernel.open_entry('/dev/null'))
def allow_new_privileges():
    drop, install = kernel.drop_capabilities, kernel.install_filter
    def changed(program):
        install(program)  # without the promise this needs a capability
        drop()
    kernel.install_filter = changed
    kernel.drop_capabilities = kernel.forbid_new_privileges = nothing
def any_unix_socket():
    load = (filters._LOAD, filters._FIRST_ARGUMENT, '', '')
    return ['socket', load, (filters._IF_EQUAL, filters._AF_UNIX, 'allow', 'refuse')]
"""
_IN_LAUNCHER = {
    "read-only tree": "never_set(kernel.READ_ONLY)",
    "nodev": "never_set(kernel.NO_DEVICES)",
    "nosuid": "never_set(kernel.NO_SUID)",
    "identity of mounts": "view._clone = clone_whatever_is_there",
    "no links": "kernel._ENTRY = OpenHow(os.O_PATH, 0)",
    "missing names": "guard.keep_missing = nothing",
    "judge": "guard.judge_by = nothing",
    "Landlock": "kernel.landlock_version = lambda: 0",
    "no capabilities": "kernel.drop_bounding_set = kernel.drop_capabilities = nothing",
    "no new privileges": "allow_new_privileges()",
    "frozen /proc/sys": "view._freeze_parts = nothing",
    "hidden parts of /proc": "view._Stage.hide = nothing",
    "private /dev": "view._mount_devices = show_host_devices",
    "filter": "kernel.install_filter = nothing",
    "rule for sockets": "filters._socket_check_offline = any_unix_socket",
    "rule for connect": "del filters._OFFLINE['connect']",
    "rule for keys": "del filters._ALWAYS['keyctl']",
    "rule for cgroups": "filters._CLONE_NEWCGROUP = 0",
    "rule for terminals": "filters._TIOCSTI = 0",
    "rule for architectures": "filters._KILL = filters._ALLOW",
    "own keyring": "kernel.leave_keyring = nothing",
    "hidden memory": "system.hide_memory = nothing",
    "descriptors closed": "child._close_all_but = nothing",
}
# What a confined process asks the kernel about before it goes on, and what it says.
_VERIFIED = {
    "read-only tree": "the root is not read-only",
    "no capabilities": "capabilities are left",
    "no new privileges": "new privileges are not forbidden",
    "filter": "the system call filter is not in force",
}
_INSERT = """
begin, end = launcher._CODE.split("from ", 1)
launcher._CODE = begin + chr(10) + {code!r} + chr(10) + "from " + end
"""


# ---- a server to attack ---------------------------------------------------------------

_PROGRAM = f"""
import ctypes, fcntl, mmap, os, socket, sys
base, code, *extra = sys.argv[1:]
ws, out = base + '/ws', base + '/outside'
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), 'call')
def forge(path):
    with open(path, 'w') as stream:
        stream.write({_FORGED!r})
def content(path, part=''):
    with open(path, 'rb') as stream:
        data = stream.read(1 << 16)
    if not data or part.encode() not in data:
        raise OSError('not there')
def opens(path, flags=os.O_RDONLY):
    os.close(os.open(path, flags))
try:
    exec(code)
except OSError as error:
    print('refused', error)
else:
    print('done')
"""


@dataclass(frozen=True)
class Scene(Stage):
    """A server and a connection to it; not `confined` to see what works without a sandbox."""

    client: Client
    confined: bool = True

    def outcome(self, policy: str | Json, code: str, *extra: str, **params: Any) -> Outcome:
        """What becomes of Python inside the sandbox."""
        argv = [interpreter(), "-I", "-S", "-c", _PROGRAM, str(self.base), code, *extra]
        sandbox = self.policy(policy) if isinstance(policy, str) else policy
        sandbox = sandbox if self.confined else None
        return run(self.client, sandbox, argv, cwd=uri(self.ws), **params)

    def command(self, policy: str | Json, code: str, *extra: str, **params: Any) -> bool:
        """Whether Python inside the sandbox gets to its end."""
        outcome = self.outcome(policy, code, *extra, **params)
        assert outcome.exit_code is not None, outcome
        if outcome.exit_code > 128:  # killed by a signal
            return False
        verdict, *_ = outcome.stdout.split() or [""]
        assert verdict in ("done", "refused"), outcome
        return verdict == "done"

    def request(self, policy: str, method: str, path: str, **params: Any) -> Any:
        """The answer to a file operation; None if it is refused."""
        place = {"path": uri(self.base / path), "sandbox": self.policy(policy)}
        try:
            return self.client.call(method, place | params)
        except RpcFailure as refusal:
            if "sandbox" in refusal.message:  # it was not refused: no worker could be made
                raise
            return None

    def write(self, policy: str, path: str) -> bool:
        """Whether fs/writeFile succeeds; the host has to agree."""
        answer = self.request(policy, "fs/writeFile", path, dataBase64=b64(_FORGED.encode()))
        assert (answer is not None) == self.is_forged(path)
        return answer is not None

    def is_forged(self, path: str) -> bool:
        """Whether somebody has written to a file of the host's."""
        place = self.base / path
        return place.is_file() and place.read_text() == _FORGED


@contextlib.contextmanager
def _start(
    scratch: Scratch, removed: Sequence[str] = (), given: str = "", *, verified: bool = False
) -> Iterator[Scene]:
    """A server without some protections."""
    server = [_SERVER, given, *(_IN_SERVER[name] for name in removed if name in _IN_SERVER)]
    launcher = [_IN_LAUNCHER[name] for name in removed if name in _IN_LAUNCHER]
    if not verified and not _VERIFIED.keys().isdisjoint(removed):
        launcher.append("confine._verify = nothing")
    if launcher:
        server.append(_INSERT.format(code="\n".join([_LAUNCHER, *launcher])))
    env = {MARKER: MARKER, "TMPDIR": None, "EXEC_SERVER_TEST_BASE": str(scratch.base)}
    scratch.reset(_STEPS)
    with start_prepared("\n".join(server), env=env) as running, running.connect() as client:
        yield Scene(running, scratch, client)


# ---- attacks --------------------------------------------------------------------------

Attack = Callable[[Scene], bool]


def _command(code: str, policy: str = "WW", **params: Any) -> Attack:
    """An attack by a command, which knows the server's pid."""
    return lambda scene: scene.command(policy, code, str(scene.server.process.pid), **params)


def _forge(path: str, policy: str = "WW", *, before: str = "pass") -> Attack:
    """An attack by a command that changes a file; the host has to agree."""

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


# Says when a sandbox has been built ahead.
_TELLING = """
add = spares.Spares._add
def telling(self, policy):
    add(self, policy)
    open(base + '/spare', 'w').close()
spares.Spares._add = telling
"""


def use_a_stale_spare(scene: Scene) -> bool:
    """A command writes to a repository that is newer than the sandbox built ahead for it."""
    assert scene.command("WW", "pass")
    eventually("a spare", (scene.base / "spare").exists)
    _replace_repository(scene)
    return _forge("ws/.git/config")(scene)


def work_below_a_new_mount(scene: Scene) -> bool:
    """A file operation writes to what the host has covered since its worker was made."""
    assert scene.write("WW", "ws/sub/deep/old.txt")
    mount("tmpfs", scene.ws / "sub/deep", "tmpfs")
    try:
        assert scene.request("WW", "fs/writeFile", "ws/sub/deep/new.txt", dataBase64="") == {}
    finally:
        unmount(scene.ws / "sub/deep")
    return (scene.ws / "sub/deep/new.txt").exists()


# While a view is built somebody replaces the workspace.
_SWAPPING = """
lay_out = sandboxes.lay_out
def swapping(*arguments):
    view = lay_out(*arguments)
    if os.path.lexists(base + '/next'):
        os.rename(base + '/ws', base + '/was')
        os.rename(base + '/next', base + '/ws')
    return view
sandboxes.lay_out = swapping
"""


def _swap(name: str) -> Attack:
    """Both workspaces have all protected names, but the repository of one is elsewhere."""
    folders = [f"{place}/{protected}" for place in ("ws", name) for protected in PROTECTED]
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
    """Somebody has put it into the workspace."""
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
# Something in the server has left a folder of the host's open, for everybody to inherit.
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


_NAME = f"@exec-server-{uuid.uuid4()}"
_RENAME = "os.rename('sub', 'moved'); os.makedirs('sub/deep')"
_UNMOUNT = "check(libc.umount2(b'.git', 2))"
_OPEN_CGROUPS = """
os.mkdir('groups')
check(libc.unshare(0x7e020000))
if libc.mount(b'x', b'groups', b'cgroup2', 0, None) < 0:
    check(libc.mount(b'x', b'groups', b'cgroup', 0, b'memory'))
opens('groups/cgroup.procs', os.O_WRONLY)
"""
_OPEN_SETTINGS = "opens('/proc/sys/kernel/core_pattern', os.O_WRONLY)"
_TYPE = "fcntl.ioctl(0, 0x5412, b' ')"
_FIND_VARIABLE = f"content('/proc/1/environ', {MARKER!r})"
_USE_99 = "opens('/proc/self/fd/99/o.txt', os.O_WRONLY)"
_OLD_ENTRY = """
# socket(AF_INET, SOCK_STREAM, 0), asked for as 32-bit programs of x86 do
code = bytes.fromhex('53' 'b867010000' 'bb02000000' 'b901000000' 'ba00000000' 'cd80' '5b' 'c3')
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
check(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""


# ---- the table ------------------------------------------------------------------------

# Attacks, and by what each is stopped; where there are several, each one is enough.
_ROWS: dict[str, tuple[Attack, str]] = {
    "write outside": (_forge("outside/o.txt"), "read-only tree"),
    "write outside by request": (_write("outside/o.txt"), "read-only tree, judge, Landlock"),
    "write to the repository": (_forge("ws/.git/config"), "protected names"),
    "forge by rename": (_forge("ws/sub/deep/d.txt", "RODEEP", before=_RENAME), "pins"),
    "make a missing name": (_forge("ws/.codex/a", before="os.mkdir('.codex')"), "placeholders"),
    "make a missing name by request": (make_a_missing_name_by_request, "missing names, judge"),
    "read a denied folder": (_command("content('sub/s.txt')", "DENYSUB"), "masks"),
    "read a denied folder by request": (_read("DENYSUB", "ws/sub/s.txt"), "masks, judge"),
    "read a denied pattern": (_command("content('sub/a.key')", "GLOB"), "search for patterns"),
    "read a denied pattern by request": (_read("GLOB", "ws/sub/a.key"), "judge"),
    "read what is not granted": (_command("content(out + '/o.txt')", "MINW"), "empty root"),
    "be granted a link": (be_granted_a_link, "distrust of links"),
    "use a stale worker": (use_a_stale_worker, "freshness, judge"),
    "use a stale spare": (use_a_stale_spare, "freshness"),
    "swap the workspace": (_swap("next"), "identity of mounts"),
    "swap it for a link": (_swap("other"), "identity of mounts, no links"),
    "read the server": (_read("RO", "/proc/self/environ", MARKER), "procfs kept from direct reads"),
    "unmount a cover": (_forge("ws/.git/config", before=_UNMOUNT), "no capabilities"),
    "read another user's file": (read_another_users_file, "user namespace, no capabilities"),
    "become another user": (become_another_user, "user namespace, nosuid, no new privileges"),
    "open a device": (open_a_device, "nodev"),
    "write to a terminal of the host": (write_to_a_terminal_of_the_host, "private /dev, nodev"),
    "type into the own terminal": (_command(_TYPE, tty=True), "rule for terminals"),
    "open settings of the kernel": (_command(_OPEN_SETTINGS), "frozen /proc/sys"),
    "read about hardware": (_command("content('/proc/interrupts')"), "hidden parts of /proc"),
    "open cgroups": (_command(_OPEN_CGROUPS), "rule for cgroups"),
    "signal the server": (_command("os.kill(int(extra[0]), 0)"), "pid namespace, Landlock"),
    "see the server": (_command("content('/proc/%s/cmdline' % extra[0])"), "private /proc"),
    "find shared memory": (find_shared_memory_of_the_host, "ipc namespace"),
    "find a key": (_command(_FIND_KEY), "own keyring, rule for keys"),
    "read variables of the init": (_command(_FIND_VARIABLE), "clean environment, hidden memory"),
    "open the memory of the init": (_command("opens('/proc/1/mem')"), "hidden memory"),
    "use an open descriptor": (_command(_USE_99), "none for the launcher, descriptors closed"),
    "open a socket": (_command("socket.socket().close()"), "filter"),
    "reach a listener": (reach_a_listener_of_the_host, "filter, network namespace"),
    "connect to a socket": (connect_to_a_socket_of_the_host, "rule for connect"),
    "send a datagram to a path": (_send("outside/d.sock"), "rule for sockets"),
    "send it to a name": (_send(_NAME), "rule for sockets, network namespace, Landlock"),
    "use the entry for 32 bits": (_command(_OLD_ENTRY), "rule for architectures"),
}
# What the servers do besides, whatever protects them.
_GIVEN = {
    "use a stale spare": _TELLING,
    "swap the workspace": _SWAPPING,
    "swap it for a link": _SWAPPING,
    "find a key": _WITH_KEY,
    "use an open descriptor": _LEFT_OPEN,
}
# Not every machine allows these even without a sandbox.
_OPTIONAL = {"become another user", "open a device", "type into the own terminal"}
_OPTIONAL |= {"open cgroups", "find a key", "use the entry for 32 bits"}


@pytest.fixture(scope="module")
def scratch() -> Iterator[Scratch]:
    """One tree for all servers; root's."""
    with Scratch(0) as tree:
        yield tree


@pytest.fixture(scope="module")
def untouched(scratch: Scratch) -> Iterator[Scene]:
    """A server with all protections."""
    with _start(scratch) as scene:
        yield scene


@pytest.mark.parametrize("name", _ROWS)
def test_an_attack_succeeds_only_without_its_protections(
    name: str, scratch: Scratch, untouched: Scene
) -> None:
    attack, protections = _ROWS[name][0], _ROWS[name][1].split(", ")
    given = _GIVEN.get(name, "")
    with _start(scratch, (), given) if given else contextlib.nullcontext(untouched) as scene:
        scratch.reset(_STEPS)
        if name in _OPTIONAL and not attack(replace(scene, confined=False)):
            pytest.skip("not possible here even without a sandbox")
        scratch.reset(_STEPS)
        assert not attack(scene), "with all protections"
    for kept in protections if len(protections) > 1 else ():
        if kept == "Landlock" and kernel.landlock_version() < _SCOPE_VERSION:
            continue  # on such a kernel the others have to do
        with _start(scratch, [other for other in protections if other != kept], given) as scene:
            assert not attack(scene), f"with nothing but: {kept}"
    with _start(scratch, protections, given) as scene:
        assert attack(scene), "without any"


@pytest.mark.parametrize(("removed", "is_hit"), [((), False), (("mount table",), True)])
def test_new_mounts_are_overlooked_only_without_the_mount_table(
    removed: Sequence[str], is_hit: bool
) -> None:
    def attack() -> None:
        with Scratch(0) as tree, _start(tree, removed) as scene:
            assert work_below_a_new_mount(scene) == is_hit

    in_private_mounts(attack)


@pytest.mark.parametrize("name", _VERIFIED)
def test_nothing_runs_when_a_restriction_has_no_effect(scratch: Scratch, name: str) -> None:
    with _start(scratch, [name], verified=True) as scene:
        outcome = scene.outcome("WW", "forge('made')")
        assert outcome.refusal is not None
        assert _VERIFIED[name] in outcome.refusal.message
        params = {"path": uri(scene.ws / "made"), "sandbox": scene.policy("WW"), "dataBase64": ""}
        assert _VERIFIED[name] in scene.client.failure("fs/writeFile", params)[1]
        assert not (scene.ws / "made").exists()


def test_every_protection_has_its_attack() -> None:
    attacked = {name for _, names in _ROWS.values() for name in names.split(", ")} | {"mount table"}
    assert attacked == _IN_SERVER.keys() | _IN_LAUNCHER.keys()
