"""Servers without some of the protections of the sandbox.

A protection is removed by code that runs before the server, or the launcher that forks the
confined processes, starts; the code replaces internals by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.client import Client, RpcFailure, b64, uri
from tests.support.sandbox import (
    BASE_STEPS,
    MARKER,
    Json,
    Outcome,
    Scratch,
    Stage,
    interpreter,
    run,
)
from tests.support.server_internals import start_prepared

_FORGED = "forged"
STEPS = (*BASE_STEPS, {"write": ["ws/sub/a.key", "secret"]}, {"write": ["ws/d.key/file", "secret"]})


_SERVER = """
import ctypes, dataclasses, os, subprocess, sys
import msgspec
from exec_server.filesystem import placeholder, syscalls
from exec_server.host import interpreter
from exec_server.proxy import certificate_file
from exec_server.sandbox import builder, commands
from exec_server.sandbox.policy import layout, resolver
from exec_server.sandbox.runtime import capabilities, disk, kernel, launcher
from exec_server.sandbox.runtime import placeholders
base = os.environ['EXEC_SERVER_TEST_BASE']
def change_view(change):
    lay_out = builder.lay_out
    def changed(*arguments):
        view = lay_out(*arguments)
        return msgspec.structs.replace(view, **change(view))
    builder.lay_out = changed
def without_masks(view):
    return {'steps': tuple(step for step in view.steps if step.kind != 'mask')}
def ignore_closed_paths():
    status = disk.HostDisk.status
    def changed(self, path):
        try:
            return status(self, path)
        except resolver.Unexaminable:
            return None
    disk.HostDisk.status = changed
def ignore_closed_directories():
    make = placeholder.make
    def changed(directory, name):
        try:
            return make(directory, name)
        except PermissionError:
            return None
    placeholder.make = changed
def use_changed_views():
    dependencies = builder.ViewDependencies
    changed_path = dependencies.changed_path
    def is_current(self):
        unchanged = self._pinned is not None and self._mounts.count() == self._changes
        return unchanged and changed_path(self) is None
    dependencies.is_current = is_current
    dependencies.changed_path = lambda self: None
def ignore_unreadable_pointers():
    head = disk.HostDisk.head
    def changed(self, path, limit):
        try:
            return head(self, path, limit)
        except resolver.Unexaminable:
            return b''
    disk.HostDisk.head = changed
def ignore_unclear_pointers():
    targets = layout._git_file_targets
    def changed(path, resolver_of_layout):
        try:
            return list(targets(path, resolver_of_layout))
        except resolver.Unexaminable:
            return []
    layout._git_file_targets = changed
def ignore_unsearchable():
    search = disk._entries
    def changed(path):
        try:
            return list(search(path))
        except disk.InternalError:
            return []
    disk._entries = changed
def ignore_matching_directories():
    denied = layout._denied_paths
    def changed(paths, resolver_of_layout):
        return denied([path for path in paths if not os.path.isdir(path)], resolver_of_layout)
    layout._denied_paths = changed
def forget_mounts():
    is_proc = syscalls.MountTable.is_proc
    def changed(self, device):
        return is_proc(self, device) and self._proc_devices is not None
    syscalls.MountTable.is_proc = changed
def refuse_claims():
    def refuse(descriptor):
        raise BlockingIOError(11, 'locked')
    placeholder._create_claim = refuse
def keep_closed_directories():
    def changed(directory, act):
        try:
            return act()
        except PermissionError:
            return False
    placeholder._with_rights = changed
def change_confinement(**changes):
    changed = dataclasses.replace(capabilities.BEST_CONFINEMENT, **changes)
    capabilities.BEST_CONFINEMENT = changed
    capabilities.find_confinement = lambda launcher: changed
def ignore_shared_processes():
    choose = capabilities.choose_restrictions
    def changed(*given, **found):
        return choose(*given, **found)._replace(is_separate=True)
    capabilities.choose_restrictions = changed
class LeakingPopen(subprocess.Popen):
    def __init__(self, *arguments, pass_fds=(), **options):
        super().__init__(*arguments, pass_fds=[*pass_fds, 99], **options)
"""
IN_SERVER = {
    "empty root": "change_view(lambda view: {'is_empty': False, 'links': ()})",
    "masks": "change_view(without_masks)",
    "protected names": "layout._protected = lambda *arguments: iter(())",
    "pins": "layout._pins = lambda *arguments: []",
    "refusal of writable links": "layout._writable_link = lambda *arguments: None",
    "search for globs": "disk.scan = lambda *arguments: []",
    "directories that match globs": "ignore_matching_directories()",
    "closed paths refused": "ignore_closed_paths()",
    "closed directories refused": "ignore_closed_directories()",
    "placeholders": "placeholders.Placeholders.hold = lambda self, missing: []",
    "claims in placeholders": "refuse_claims()",
    "rights to remove placeholders": "keep_closed_directories()",
    "check after the build": "use_changed_views()",
    "unreadable pointers refused": "ignore_unreadable_pointers()",
    "unclear pointers refused": "ignore_unclear_pointers()",
    "pointers as git reads them": "layout._literal = lambda target: target.strip()",
    "unsearchable directories refused": "ignore_unsearchable()",
    "directories passed by name refused": "disk._is_passable = lambda path: False",
    "fixed entries left alone": "layout._is_fixed = lambda *arguments: False",
    "unknown mounts refused": "forget_mounts()",
    "view dependencies": "builder.ViewDependencies.is_current = lambda self: True",
    "mount table": "builder.MountChanges.count = lambda self: 0",
    "procfs kept from direct reads": "syscalls.MountTable.is_proc = lambda self, device: False",
    "user namespace": "change_confinement(user_namespace=False)",
    "pid namespace": (
        "capabilities._NAMESPACES &= ~kernel.CLONE_NEWPID; change_confinement(private_proc=False)"
    ),
    "ipc namespace": "capabilities._NAMESPACES &= ~kernel.CLONE_NEWIPC",
    "network namespace": "kernel.CLONE_NEWNET = 0",
    "private /proc": "change_confinement(private_proc=False)",
    "refusal of shared processes": "ignore_shared_processes()",
    "clean environment": f"launcher._VARIABLES = ({MARKER!r},)",
    "no descriptors for the launcher": "subprocess.Popen = LeakingPopen",
    "files of the server read-only": "commands._protect = lambda policy, paths: policy",
    "verified certificates": "certificate_file.CertificateFile._is_intact = lambda *given: True",
    "module path of helpers": "interpreter.trusted = lambda: [base + '/ws', *sys.path]",
    "programs of the system": "interpreter.find_system_program = lambda name: base + '/ws/bin/rg'",
    "certificates in the view": (
        "commands._with_certificates_in_view = lambda command, file: command"
    ),
}

_LAUNCHER = """
import os
from exec_server.filesystem import safe_write
from exec_server.filesystem.syscalls import OpenHow
from exec_server.host import libc
from exec_server.sandbox.policy import access, seccomp
from exec_server.sandbox.runtime import child, confine, kernel, view, worker
def nothing(*arguments, **options):
    pass
def never_set(attribute):
    set_attributes = kernel.set_mount_attributes
    def changed(descriptor, attributes, *, recursive):
        set_attributes(descriptor, attributes & ~attribute, recursive=recursive)
    kernel.set_mount_attributes = changed
def clone_unchecked(step):
    try:
        return view._clone_path(step.path)
    except OSError as error:
        raise view.StaleView(step.path) from error
def show_host_devices(prefix, devices, **options):
    view._attach_to(devices['null'], kernel.open_entry('/dev/null'))
def allow_new_privileges():
    drop, install = kernel.drop_capabilities, kernel.install_filter
    def changed(program, **options):
        listener = install(program, **options)  # without no_new_privs this needs a capability
        drop()
        return listener
    kernel.install_filter = changed
    kernel.drop_capabilities = kernel.set_no_new_privileges = nothing
def any_unix_socket():
    load = (seccomp._LOAD, seccomp._FIRST_ARGUMENT, '', '')
    any_kind = (seccomp._RETURN, seccomp._ALLOW, '', '')
    return [load, (seccomp._IF_EQUAL, seccomp._AF_UNIX, '', 'refuse'), 'kind', any_kind]
def change_restrictions(**changes):
    choose = child.choose_restrictions
    def changed(*given, **found):
        return choose(*given, **found)._replace(**changes)
    child.choose_restrictions = changed
def ignore_covered_host():
    build = view.build
    def changed(*arguments, **options):
        return build(*arguments, **options)._replace(covers_host=False)
    view.build = changed
def match_alone():
    access.deepest_match = lambda glob, path: path if access.matches(glob, path) else None
def share_top():
    lower_root = kernel.lower_root
    def changed(path, name):
        lower_root(path, name)
        return kernel.open_entry('/')
    kernel.lower_root = changed
"""
IN_LAUNCHER = {
    "read-only tree": "never_set(kernel.MOUNT_ATTR_RDONLY)",
    "nodev": "never_set(kernel.MOUNT_ATTR_NODEV)",
    "nosuid": "never_set(kernel.MOUNT_ATTR_NOSUID)",
    "identity checks of mounts": "view._clone = clone_unchecked",
    "no links": "kernel._ENTRY = OpenHow(os.O_PATH, 0)",
    "missing names": "safe_write.PathGuard.forbid_name = nothing",
    "path checks": "safe_write.PathGuard.add_path_check = nothing",
    "Landlock": "kernel.landlock_version = lambda: 0",
    "no capabilities": "kernel.drop_bounding_set = kernel.drop_capabilities = nothing",
    "no new privileges": "allow_new_privileges()",
    "read-only /proc/sys": "view._make_read_only = nothing",
    "hidden parts of /proc": "view._StagingArea.hide = nothing",
    "private /dev": "view._mount_devices = show_host_devices",
    "filter": "kernel.install_filter = nothing",
    "rule for sockets": "seccomp._connected_unix_check = any_unix_socket",
    "rule for connect": "del seccomp._OFFLINE['connect']",
    "rule for keys": "del seccomp._ALWAYS['keyctl']",
    "rule for cgroups": "seccomp._CLONE_NEWCGROUP = 0",
    "rule for nesting": "seccomp._NESTING_FLAGS = 0",
    "no nesting above the host": "ignore_covered_host()",
    "rule for joining": "seccomp._NOT_NESTING.clear()",
    "rule for terminals": "seccomp._TIOCSTI = 0",
    "rule for leases": "seccomp._F_SETLEASE = 0xFFFF",
    "rule for locks": "seccomp._LOCK_EX = 0",
    "rule for architectures": "seccomp._KILL = seccomp._ALLOW",
    "rule for unix sockets": "change_restrictions(unix_sockets=True)",
    "refusal of shared processes": "change_restrictions(is_separate=True)",
    "directory above the root": "share_top()",
    "own keyring": "kernel.leave_keyring = nothing",
    "hidden memory": "libc.hide_memory = nothing",
    "log left": "child._leave_log = nothing",
    "parents that match globs": "match_alone()",
    "own process of a worker": "worker._is_process = lambda path: False",
    "descriptors closed": "child._close_all_but = nothing",
}
# The root cannot be moved, as on the initial ramfs.
FIXED_ROOT = """
from exec_server.sandbox.runtime import kernel
def refuse(*arguments):
    raise OSError(22, 'Invalid argument')
kernel._sys_pivot_root = refuse
"""
# The restrictions that a confined process verifies with the kernel, and its errors.
VERIFIED = {
    "read-only tree": "the root is not read-only",
    "no capabilities": "capabilities are left",
    "no new privileges": "new privileges are not forbidden",
    "filter": "the system call filter is not in force",
}
_INSERT = """
from exec_server.sandbox.runtime import launcher
begin, end = launcher._CODE.split("from ", 1)
launcher._CODE = begin + chr(10) + {code!r} + chr(10) + "from " + end
"""


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
    """A server and a connection to it; `confined` is False to attack without a sandbox."""

    client: Client
    confined: bool = True

    def outcome(self, policy: str | Json, code: str, *extra: str, **params: Any) -> Outcome:
        """Run Python inside the sandbox."""
        argv = [interpreter(), "-I", "-S", "-c", _PROGRAM, str(self.base), code, *extra]
        sandbox = self.policy(policy) if isinstance(policy, str) else policy
        sandbox = sandbox if self.confined else None
        return run(self.client, sandbox, argv, **{"cwd": uri(self.ws)} | params)

    def command(self, policy: str | Json, code: str, *extra: str, **params: Any) -> bool:
        """Whether Python inside the sandbox runs to its end."""
        outcome = self.outcome(policy, code, *extra, **params)
        assert outcome.exit_code is not None, outcome
        if outcome.exit_code > 128:  # killed by a signal
            return False
        verdict, *_ = outcome.stdout.split() or [""]
        assert verdict in ("done", "refused"), outcome
        return verdict == "done"

    def request(self, policy: str, method: str, path: str, **params: Any) -> Any:
        """The result of a file operation; None if it is refused."""
        target = {"path": uri(self.base / path), "sandbox": self.policy(policy)}
        try:
            return self.client.call(method, target | params)
        except RpcFailure as refusal:
            if "sandbox" in refusal.message:  # not refused: no worker could be built
                raise
            return None

    def write(self, policy: str, path: str) -> bool:
        """Whether fs/writeFile succeeds; the file on the host must agree."""
        answer = self.request(policy, "fs/writeFile", path, dataBase64=b64(_FORGED.encode()))
        assert (answer is not None) == self.is_forged(path)
        return answer is not None

    def is_forged(self, path: str) -> bool:
        """Whether an attack has written to a file of the host."""
        target = self.base / path
        return target.is_file() and target.read_text() == _FORGED


def before_launcher(code: str) -> str:
    """Code for a server, that lets its launcher run `code` first."""
    return _INSERT.format(code=code)


def with_landlock(version: int) -> str:
    """Code for a server on a kernel with at most this version of Landlock.

    Rulesets of an older version are the same system calls with fewer rights.
    """
    code = "from exec_server.sandbox.runtime import kernel\n"
    code += f"kernel.landlock_version = lambda: {version}"
    return f"{code}\n{before_launcher(code)}"


@contextlib.contextmanager
def start_without(
    scratch: Scratch, removed: Sequence[str] = (), given: str = "", *, verified: bool = False
) -> Iterator[Scene]:
    """A server without some protections; `given` is more code to run in the server."""
    server = [_SERVER, given, *(IN_SERVER[name] for name in removed if name in IN_SERVER)]
    launcher = [IN_LAUNCHER[name] for name in removed if name in IN_LAUNCHER]
    if not verified and not VERIFIED.keys().isdisjoint(removed):
        launcher.append("confine._verify = nothing")
    if launcher:
        server.append(before_launcher("\n".join([_LAUNCHER, *launcher])))
    env = {MARKER: MARKER, "TMPDIR": None, "EXEC_SERVER_TEST_BASE": str(scratch.base)}
    scratch.reset(STEPS)
    with start_prepared("\n".join(server), env=env) as running, running.connect() as client:
        yield Scene(running, scratch, client)
