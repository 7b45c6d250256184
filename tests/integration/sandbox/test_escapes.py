"""Attempts of confined commands to leave the sandbox that need more than one command.

Nested namespaces, paths that cannot be examined, and the sockets, processes, memory, terminals
and environment of the host.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.client import Client, uri
from tests.support.sandbox import MARKER, Stage, guarded
from tests.support.sandbox_attacks import prepare_attacks, run_attempts, successes, verdicts

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


@pytest.mark.parametrize("name", ["RO", "READERS", "FILEROOT", "MINR"])
def test_nesting_works_offline_where_no_cover_is_in_a_writable_place(
    stage: Stage, client: Client, name: str
) -> None:
    code = """
attempt('nest', lib, 'unshare', 0x10020000)
attempt('mount', lib, 'mount', b'new', b'/dev/shm', b'tmpfs', 0, None)
"""
    outcome = run_attempts(stage, client, name, code)
    assert verdicts(outcome) == {"nest": "DONE", "mount": "DONE"}


@pytest.mark.parametrize("name", ["WW", "RODEEP", "GITW", "MINW", "GLOB"])
def test_nesting_is_refused_around_covers(stage: Stage, client: Client, name: str) -> None:
    _check_no_nesting(stage, client, name)


@pytest.mark.parametrize("name", ["WWNET", "RONET", "READERSNET", "FILEROOTNET", "MINRNET"])
def test_nesting_is_refused_with_network(stage: Stage, client: Client, name: str) -> None:
    _check_no_nesting(stage, client, name)


def _check_no_nesting(stage: Stage, client: Client, name: str) -> None:
    outcome = stage.shell(client, name, "unshare --user true")
    assert (outcome.exit_code, outcome.denied) == (1, True)
    assert "unshare failed: Operation not permitted" in outcome.output


# Policy, the closed directory and its mode, and the code of a command that reopens it.
_CLOSED: dict[str, tuple[str, str, int, str]] = {
    "workspace": ("WW", "", 0o000, "os.rename('.git', 'moved')"),
    "workspace-not-searchable": ("WW", "", 0o600, "os.rename('.git', 'moved')"),
    "workspace-of-missing-names": ("WW", "", 0o000, "os.mkdir('.codex')"),
    "workspace-not-writable": ("WW", "", 0o500, "os.mkdir('.codex')"),
    "parent-of-read-only": ("RODEEP", "/sub", 0o000, "os.rename('sub/deep', 'sub/moved')"),
    "parent-of-denied": ("DENYDEEP", "/sub", 0o000, "content('sub/deep/d.txt')"),
    "parent-of-denied-pattern": ("GLOB", "/sub", 0o000, "content('sub/a.key')"),
    "parent-of-missing": ("DENYLATER", "/sub", 0o500, "os.mkdir('sub/later')"),
}
_REOPEN = """
os.chmod(ws + extra[0], 0o755)
os.chdir(ws)
attempt('use', exec, extra[1])
"""


@pytest.mark.parametrize("by", ["host", "command"])
@pytest.mark.parametrize("name", _CLOSED)
def test_what_cannot_be_examined_is_not_missing(
    stage: Stage, client: Client, name: str, by: str
) -> None:
    policy, place, mode, code = _CLOSED[name]
    prepare_attacks(stage)
    if name == "workspace-of-missing-names":
        stage.scratch.apply([{"rm": "ws/.git"}])
    before = guarded(stage.base, "sub/deep", "sub/later")
    closed = Path(f"{stage.ws}{place}")
    elsewhere = {"cwd": uri(stage.base)}
    if by == "host":
        closed.chmod(mode)
    else:  # from then on a prebuilt sandbox may exist
        close = f"attempt('close', os.chmod, ws + '{place}', {mode})"
        outcome = run_attempts(stage, client, policy, close, **elsewhere)
        assert verdicts(outcome) == {"close": "DONE"}
    outcome = run_attempts(stage, client, policy, _REOPEN, place, code, **elsewhere)
    closed.chmod(0o755)
    if by == "host" and stage.scratch.owner != 0:  # root can examine everything
        assert outcome.refusal is not None
        assert str(closed) in outcome.refusal.message
    elif outcome.refusal is None:
        assert verdicts(outcome) == {"use": "refused"}
    # Placeholders that the server could not remove go with the next command.
    assert stage.shell(client, policy, "true").exit_code == 0
    assert guarded(stage.base, "sub/deep", "sub/later") == before


@pytest.mark.quick
def test_no_datagram_reaches_a_socket_of_the_host(stage: Stage, client: Client) -> None:
    abstract = f"exec-server-{uuid.uuid4()}"
    names = ("outside/d.sock", "ws/d.sock", f"@{abstract}")
    sockets = [stage.scratch.listen(name, socket.SOCK_DGRAM) for name in names]
    stage.scratch.give_away()
    assert successes(run_attempts(stage, client, "WW", _DATAGRAMS, abstract)) == []
    for listener in sockets:
        with pytest.raises(BlockingIOError):
            listener.recv(9, socket.MSG_DONTWAIT)
    assert len(successes(run_attempts(stage, client, "NONE", _DATAGRAMS, abstract))) == 15


_WRITE_TO_PIPES = """
for name in ('pipe', 'dir/pipe'):
    path = out + '/' + name
    attempt('path of ' + name, opens, path, os.O_WRONLY)
    attempt('both ways of ' + name, opens, path, os.O_RDWR)
    attempt('descriptor of ' + name, opens, '/proc/self/fd/%d' % os.open(path, os.O_PATH))
    os.symlink(path, '/dev/shm/link')
    attempt('link to ' + name, opens, '/dev/shm/link')
    os.unlink('/dev/shm/link')
"""
_NESTING = pytest.mark.xfail(reason="nested mounts work only without Landlock", strict=True)
_WITH_FILE_RIGHTS = ["WW", "WWNET", "RONET", "READERSNET", "FILEROOTNET", "DENYSUB", "GITW", "GLOB"]


@pytest.mark.parametrize("name", [*_WITH_FILE_RIGHTS, pytest.param("RO", marks=_NESTING)])
def test_a_pipe_of_the_host_cannot_be_written(stage: Stage, client: Client, name: str) -> None:
    stage.scratch.apply([{"fifo": "outside/pipe"}, {"fifo": "outside/dir/pipe"}])
    reader = os.open(stage.base / "outside/pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert stage.shell(client, name, "echo x > ../outside/pipe").exit_code != 0
        assert os.read(reader, 9) == b""
        assert successes(run_attempts(stage, client, name, _WRITE_TO_PIPES)) == []
    finally:
        os.close(reader)


def test_no_file_is_opened_by_its_handle(stage: Stage, client: Client) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    handle = ctypes.create_string_buffer((128).to_bytes(4, "little"), 136)
    path = os.fsencode(stage.base / "outside/o.txt")
    assert libc.name_to_handle_at(-100, path, handle, ctypes.byref(ctypes.c_int()), 0) == 0
    for name in ("MINW", "WW"):
        assert successes(run_attempts(stage, client, name, _HANDLE, handle.raw.hex())) == []


_INT_80 = """
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
    assert run_attempts(stage, client, "NONE", _INT_80).exit_code == 0
    for name in ("WW", "WWNET"):
        outcome = run_attempts(stage, client, name, _INT_80)
        assert (outcome.exit_code, outcome.denied, outcome.stdout) == (159, True, "")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 has these numbers")
def test_numbers_of_the_x32_interface_open_nothing(stage: Stage, client: Client) -> None:
    code = "print('result', libc.syscall(0x40000000 | 41, 2, 1, 0), ctypes.get_errno())"
    outcome = run_attempts(stage, client, "WW", code)
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
    pass  # the init and this process are the only ones
os.setpriority(os.PRIO_USER, os.getuid(), 19)  # the lowest: it can always be set
attempt('still here', os.stat, '/')
"""


@pytest.fixture
def bystander(stage: Stage) -> Iterator[int]:
    """A process of the same user outside of the sandbox."""
    user = stage.scratch.owner if os.geteuid() == 0 else None
    with subprocess.Popen(["sleep", "60"], user=user) as process:
        try:
            yield process.pid
            assert process.poll() is None
        finally:
            process.kill()


def test_signals_stay_inside(stage: Stage, client: Client, bystander: int) -> None:
    pids = (str(stage.server.process.pid), str(bystander))
    assert verdicts(run_attempts(stage, client, "WW", _SIGNALS, *pids)) == {
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
        assert verdicts(run_attempts(stage, client, "NONE", code, str(key))) == {"find": "DONE"}
        assert verdicts(run_attempts(stage, client, "WWNET", code, str(key))) == {"find": "refused"}
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
        outcome = run_attempts(stage, client, name, _LEFT_OPEN, tty=terminal)
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
    outcome = run_attempts(stage, client, name, _SEARCH, MARKER)
    assert outcome.stdout == "['PATH', 'PWD']\n"


def test_devices_are_few_and_private(stage: Stage, client: Client) -> None:
    code = "for path in ('', '/shm', '/pts'): print(*os.listdir('/dev' + path), end='|')"
    devices, shared, terminals, _ = run_attempts(stage, client, "WW", code).stdout.split("|")
    usual = "core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero"
    assert set(devices.split()) <= set(usual.split())
    assert (shared.split(), terminals.split()) == ([], ["ptmx"])


def test_there_is_no_terminal_but_ones_own(stage: Stage, client: Client) -> None:
    code = "attempt('terminal', opens, '/dev/tty'); print(os.isatty(0), end='||')"
    assert run_attempts(stage, client, "WW", code).stdout == "terminal|refused|6\nFalse||"
    assert run_attempts(stage, client, "WW", code, tty=True).stdout == "terminal|DONE|0\r\nTrue||"
