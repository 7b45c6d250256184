"""Ordinary work of commands that the restrictions of the sandbox must leave alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3

import pytest
from tests.support.client import Client
from tests.support.protections import with_landlock
from tests.support.sandbox import BASE_STEPS, MARKER, Scratch, Stage, interpreter
from tests.support.sandbox_attacks import run_attempts, verdicts
from tests.support.server_internals import start_prepared

_SHELL = """
set -e
exec 2>&1
mkdir -p made/one made/two
echo text > made/one/file
mv made/one/file made/two/moved
ln made/two/moved made/one/link
ln -s ../two/moved made/one/symlink
mv made/one made/two/inner
: > made/two/moved
truncate -s 100 made/two/inner/link
test "$(wc -c < made/two/moved)" = 100
mkfifo made/pipe
(echo through > made/pipe) & read line < made/pipe; test "$line" = through; wait
echo x > /dev/null; head -c 4 /dev/zero > /dev/full && exit 1
for device in /dev/stdout /dev/stderr /dev/fd/1 /proc/self/fd/2; do echo reopened > $device; done
echo shared > /dev/shm/file; rm /dev/shm/file
echo name > /proc/self/comm
rm -r made
echo finished
"""
_REPOSITORY = """
set -e
export HOME=$PWD GIT_CONFIG_NOSYSTEM=1
git init -q repository; cd repository
git config user.name N; git config user.email E
mkdir a b; echo 1 > a/file; git add .; git commit -qm one
git mv a/file b/file; git commit -qm two; git gc -q; git checkout -q HEAD~1
git worktree add -q ../tree; test -f ../tree/a/file; git status --porcelain
"""
_PYTHON = """
import multiprocessing, pty, tempfile, threading
def opened_terminal():
    master, slave = pty.openpty()
    os.write(os.open(os.ttyname(slave), os.O_RDWR | os.O_NOCTTY), b'typed')
    assert os.read(master, 9) == b'typed'
def unnamed_file():
    made = os.open(ws, os.O_TMPFILE | os.O_WRONLY)
    path = b'/proc/self/fd/%d' % made
    lib('linkat', -100, path, -100, b'linked', 0x400)  # AT_SYMLINK_FOLLOW
    lib('linkat', -100, path, -100, b'sub/linked', 0x400)
def unlinked_file():
    with tempfile.TemporaryFile(dir=ws) as made:
        os.close(os.open('/proc/self/fd/%d' % made.fileno(), os.O_RDWR))
def memory_file():
    made = os.memfd_create('made')
    os.close(os.open('/proc/self/fd/%d' % made, os.O_RDWR | os.O_TRUNC))
def processes():
    with multiprocessing.Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
def traced_child():
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    os.listdir('/proc/%d/root' % child)
    os.kill(child, 9)
def named_socket():
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind('socket')
        listener.listen()
        socket.socket(socket.AF_UNIX).connect('socket')
for work in (opened_terminal, unnamed_file, unlinked_file, memory_file, processes, traced_child):
    attempt(work.__name__, work)
if extra:
    attempt('named_socket', named_socket)
"""


@pytest.mark.parametrize("terminal", [False, True], ids=["pipes", "terminal"])
@pytest.mark.parametrize("name", ["WW", "WWNET", "MINW", "DENYSUBNET"])
def test_shell_commands(stage: Stage, client: Client, name: str, terminal: bool) -> None:
    outcome = stage.shell(client, name, _SHELL, tty=terminal)
    assert outcome.stdout.split()[-5:] == [*["reopened"] * 4, "finished"], outcome
    assert outcome.exit_code == 0


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
@pytest.mark.parametrize("name", ["WW", "MINWNET"])
def test_a_repository_in_the_workspace(stage: Stage, client: Client, name: str) -> None:
    outcome = stage.shell(client, name, _REPOSITORY)
    assert (outcome.exit_code, outcome.output) == (0, ""), outcome


@pytest.mark.parametrize("name", ["WW", "WWNET", "MINWNET"])
def test_files_and_processes_of_a_program(stage: Stage, client: Client, name: str) -> None:
    extra = ["network"] if name.endswith("NET") else []
    found = verdicts(run_attempts(stage, client, name, _PYTHON, *extra))
    assert found == dict.fromkeys(found, "DONE")
    assert len(found) == 6 + len(extra)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no compiler")
def test_a_compiler_with_its_own_temporary_directory(stage: Stage, client: Client) -> None:
    (stage.ws / "main.c").write_text("int main(void) { return 7; }")
    env = {"PATH": "/usr/bin:/bin", "TMPDIR": str(stage.ws)}
    outcome = stage.shell(client, "WW", "cc -g main.c -o main && ./main", env=env)
    assert outcome.exit_code == 7, outcome


@pytest.mark.parametrize("landlock", [0, 1, 2, 4])
@pytest.mark.parametrize("name", ["WW", "WWNET"])
def test_shell_commands_with_an_older_landlock(landlock: int, name: str) -> None:
    with (
        Scratch(os.geteuid()) as scratch,
        start_prepared(with_landlock(landlock), env={MARKER: MARKER, "TMPDIR": None}) as server,
        server.connect() as client,
    ):
        scratch.reset(BASE_STEPS)
        stage = Stage(server, scratch)
        assert stage.shell(client, name, _SHELL).stdout.endswith("finished\n")


_READ_DATABASE = """
import sqlite3
print(sqlite3.connect('data.db').execute('select a from t').fetchall())
"""


def test_locks(stage: Stage, client: Client) -> None:
    """Exclusive ones need something to write; readers share locks, of flock and of fcntl."""
    with contextlib.closing(sqlite3.connect(stage.ws / "data.db")) as database:
        database.executescript("create table t(a); insert into t values(1)")
    stage.scratch.give_away()
    assert stage.shell(client, "WW", "flock --nonblock a.txt true").exit_code == 0
    assert stage.shell(client, "RO", "flock --nonblock --shared a.txt true").exit_code == 0
    assert stage.shell(client, "RO", "flock --nonblock a.txt true").exit_code != 0
    for name in ("RO", "WW"):
        outcome = stage.run(client, name, [interpreter(), "-I", "-S", "-c", _READ_DATABASE])
        assert outcome.stdout == "[(1,)]\n", outcome
