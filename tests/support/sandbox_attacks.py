"""Attempts of a confined command to leave its sandbox, written as pieces of Python.

`PRELUDE` defines `attempt` and other functions for these pieces; each attempt prints one line
with its verdict, which `verdicts` and `successes` read.
"""

from __future__ import annotations

import uuid
from typing import Any

from tests.support.client import Client, uri
from tests.support.sandbox import Json, Outcome, Stage, finish, interpreter, start_process

PRELUDE = """
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


def run_attempts(
    stage: Stage, client: Client, name: str, code: str, *extra: str, **params: Any
) -> Outcome:
    """Run attempts under a policy."""
    argv = [interpreter(), "-I", "-S", "-c", PRELUDE + code, str(stage.base), *extra]
    return stage.run(client, name, argv, **params)


def start_attempts(stage: Stage, client: Client, name: str, code: str, *extra: str) -> Json:
    """Start attempts under a policy and wait for their first line of output."""
    argv = [interpreter(), "-I", "-S", "-c", PRELUDE + code, str(stage.base), *extra]
    started = start_process(client, stage.policy(name), argv, cwd=uri(stage.ws))
    client.call("process/read", {"processId": started["processId"], "waitMs": 60_000})
    return started


def verdicts(outcome: Outcome) -> dict[str, str]:
    """The verdict of each attempt, `refused` or `DONE`."""
    assert outcome.refusal is None, outcome.refusal
    lines = [line.split("|") for line in outcome.stdout.splitlines()]
    return {name: verdict for name, verdict, _ in lines}


def successes(outcome: Outcome) -> list[str]:
    """The attempts that were not refused."""
    found = verdicts(outcome)
    assert len(found) >= 3, outcome
    return [name for name, verdict in found.items() if verdict != "refused"]


def prepare_attacks(stage: Stage) -> None:
    """Add the files that attacks use to the tree of a stage."""
    steps: list[Json] = [
        {"mkdir": "outside/empty"},
        {"write": ["outside/spare.txt", "spare"]},
        {"symlink": [str(stage.base / "outside/o.txt"), "ws/out"]},
        {"write": ["ws/sub/a.key", "secret"]},
    ]
    stage.scratch.apply(steps)


# ---- two commands ---------------------------------------------------------------------

# Sends descriptors of directories to the first client of an abstract socket.
_SENDER = """
import array
descriptors = array.array('i', [os.open(path, os.O_RDONLY) for path in extra[1:]])
listener = socket.socket(socket.AF_UNIX)
listener.bind(chr(0) + extra[0])
listener.listen()
print('ready', flush=True)
peer, _ = listener.accept()
peer.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors.tobytes())])
peer.recv(1)
"""
_RECEIVER = """
peer = socket.socket(socket.AF_UNIX)
peer.connect(chr(0) + extra[0])
_, received, _, _ = socket.recv_fds(peer, 1, 9)
os.fchdir(received[0])
"""


def pass_descriptor(stage: Stage, client: Client, passed: tuple[str, str, str, str]) -> Outcome:
    """One command sends a descriptor of a directory, another one uses it as its cwd.

    `passed` are the policies of sender and receiver, the directory, and attempts of the receiver.
    """
    sender, receiver, path, code = passed
    name = f"exec-server-{uuid.uuid4()}"
    sending = start_attempts(stage, client, sender, _SENDER, name, str(stage.base / path))
    outcome = run_attempts(stage, client, receiver, _RECEIVER + code, name)
    finish(client, sending)
    return outcome


# Keeps a file of the workspace open until it is killed, and has an abstract socket.
VICTIM = """
import time
kept = open(ws + '/a.txt')
listener = socket.socket(socket.AF_UNIX)
listener.bind(chr(0) + extra[0])
listener.listen()
print('ready', flush=True)
time.sleep(600)
"""
# Attempts to reach all other processes: through /proc, by their numbers, and as the peer of a
# socket.
PEEK = """
import glob
def take():
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(chr(0) + extra[0])
        os.close(call(438, peer.getsockopt(socket.SOL_SOCKET, 77), 0, 0))  # SO_PEERPIDFD
def found(pattern, use):
    # Both numbers of this process: in the shared /proc and in its own pid namespace.
    own = (os.readlink('/proc/self'), str(os.getpid()))
    for path in glob.glob(pattern):
        if path.split('/')[2] not in own:
            try:
                return use(path)
            except OSError:
                pass
    raise OSError(13, 'nothing found')
def compare(path):
    call(312, os.getpid(), int(path.split('/')[2]), 0, 0, 0)  # kcmp
def trace(path):
    lib('ptrace', 0x4206, int(path.split('/')[2]), 0, 0)
def copy(path):
    local = (ctypes.c_size_t * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
    remote = (ctypes.c_size_t * 2)(4096, 8)
    try:
        lib('process_vm_readv', int(path.split('/')[2]), local, 1, remote, 1, 0)
    except OSError as error:
        if error.errno != 14:  # a bad address means that the process was reached
            raise
attempt('root', found, '/proc/[0-9]*/root' + ws + '/sub/s.txt', content)
attempt('thread', found, '/proc/[0-9]*/task/*/root' + ws + '/sub/s.txt', content)
attempt('cwd', found, '/proc/[0-9]*/cwd/sub/s.txt', content)
attempt('descriptor', found, '/proc/[0-9]*/fd/*', os.stat)
attempt('program', found, '/proc/[0-9]*/exe', os.readlink)
attempt('mapped files', found, '/proc/[0-9]*/map_files/*', os.lstat)
attempt('memory', found, '/proc/[0-9]*/mem', opens)
attempt('variables', found, '/proc/[0-9]*/environ', content)
attempt('maps', found, '/proc/[0-9]*/maps', content)
attempt('namespace', found, '/proc/[0-9]*/ns/mnt', os.readlink)
attempt('compare', found, '/proc/[0-9]*', compare)
attempt('trace', found, '/proc/[0-9]*', trace)
attempt('copy', found, '/proc/[0-9]*', copy)
attempt('take', take)
"""
