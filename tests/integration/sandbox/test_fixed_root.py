"""A restricted root where the kernel does not move the root, as on the initial ramfs.

The refusal of pivot_root is imitated here; `make test-kernel` has the initial ramfs itself. In a
chroot the kernel moves the root if it is a mount, and the sandbox refuses all requests if not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.support.barriers import behind_barrier, user_id
from tests.support.client import Client, b64, uri
from tests.support.protections import FIXED_ROOT, before_launcher
from tests.support.sandbox import (
    BASE_STEPS,
    MARKER,
    NEEDS_ROOT,
    USERS,
    Scratch,
    Stage,
    policy,
    run_to_end,
    special,
)
from tests.support.sandbox_attacks import run_attempts, successes
from tests.support.server_internals import start_prepared

# Ways to what is below the root: each in a process of its own, in nested namespaces if it can.
_WAYS_BELOW = """
def apart(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except OSError as error:
            os._exit(error.errno)
        except BaseException:
            os._exit(255)
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError(code, 'in a process of its own')
def nest():
    libc.unshare(0x10020000)  # also without a map, the process has all capabilities inside
def climb():
    nest()
    os.mkdir('/dev/shm/jail')
    top = os.open('/', os.O_RDONLY)
    os.chroot('/dev/shm/jail')
    os.fchdir(top)
    for _ in range(32):
        os.chdir('..')
    os.chroot('.')
    content(out + '/o.txt')
def uncover():
    nest()
    lib('umount2', b'/', 2)
    os.chdir('/..')
    os.chroot('.')
    content(out + '/o.txt')
def pivot():
    nest()
    lib('mount', b'/usr', b'/usr', None, 0x5000, None)
    os.chdir('/usr')
    lib('pivot_root', b'.', b'.')
    lib('umount2', b'.', 2)
    lib('umount2', b'/', 2)
    os.chdir('/..')
    os.chroot('.')
    content(out + '/o.txt')
def join():
    nest()
    lib('setns', os.open('/proc/self/ns/mnt', os.O_RDONLY), 0x20000)
    content(out + '/o.txt')
def move():
    nest()
    os.mkdir('/dev/shm/moved')
    lib('mount', b'/', b'/dev/shm/moved', None, 8192, None)
    content(out + '/o.txt')
attempt('name', content, out + '/o.txt')
attempt('above', content, '/..' + out + '/o.txt')
attempt('init', content, '/proc/1/root' + out + '/o.txt')
for work in (climb, uncover, pivot, join, move):
    attempt(work.__name__, apart, work)
"""

_ENTER_JAIL = """
{bind}
for path in /*; do
    if test -L "$path"; then cp -P "$path" {jail}
    elif test -d "$path"; then mkdir {jail}"$path" && mount --rbind "$path" {jail}"$path"
    fi
done
exec chroot {jail} "$@"
"""


@pytest.fixture(scope="module", params=USERS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A server of root, then of a user."""
    prefix = behind_barrier(request.param, "none")
    with (
        Scratch(user_id(request.param)) as scratch,
        start_prepared(
            before_launcher(FIXED_ROOT), prefix=prefix, env={MARKER: MARKER, "TMPDIR": None}
        ) as server,
    ):
        scratch.reset(BASE_STEPS)
        yield Stage(server, scratch)


@pytest.mark.parametrize("policy", ["MINR", "MINW", "MINWNET"])
def test_commands_see_what_their_policy_names(stage: Stage, client: Client, policy: str) -> None:
    outcome = stage.shell(client, policy, f"cat a.txt; ls {stage.base}; test ! -e /var/log")
    assert (outcome.exit_code, outcome.stdout) == (0, "hellows\n"), outcome
    outcome = stage.shell(client, policy, "echo new > new")
    assert (outcome.exit_code == 0) == (policy != "MINR"), outcome
    assert (stage.ws / "new").exists() == (policy != "MINR")


def test_file_operations_see_what_their_policy_names(stage: Stage, client: Client) -> None:
    def params(path: str) -> dict[str, object]:
        return {"path": uri(stage.base / path), "sandbox": stage.policy("MINW")}

    assert client.call("fs/readFile", params("ws/a.txt")) == {"dataBase64": b64("hello")}
    assert client.call("fs/writeFile", params("ws/new") | {"dataBase64": b64("new")}) == {}
    assert (stage.ws / "new").read_text() == "new"
    for path in ("outside/o.txt", "../base/outside/o.txt"):
        client.failure("fs/readFile", params(path))


@pytest.mark.parametrize("policy", ["MINR", "MINW", "MINWNET"])
def test_nothing_below_the_root_is_reached(stage: Stage, client: Client, policy: str) -> None:
    outcome = run_attempts(stage, client, policy, _WAYS_BELOW)
    assert successes(outcome) == []
    assert outcome.exit_code == 0, outcome


@pytest.mark.parametrize("works", [True, False], ids=["moved-over", "refused"])
def test_check_runs_a_command_with_a_restricted_root(tmp_path: Path, works: bool) -> None:
    code = FIXED_ROOT if works else f"{FIXED_ROOT}\nkernel.replace_root = refuse"
    words = ["-c", f"{before_launcher(code)}\nfrom exec_server.cli.main import main\nmain()"]
    ended = run_to_end([sys.executable, *words, "sandbox", "check", "--json"], cwd=tmp_path)
    value = json.loads(ended.stdout)
    assert value["offers"]["restricted root"]["works"] is works
    assert value["offers"]["whole root"]["works"]
    assert value["refused"] == ([] if works else ["requests whose policy does not grant all reads"])
    assert ended.returncode == (0 if works else 1)


def _in_chroot(jail: Path, words: Sequence[str], *, is_mount: bool) -> CompletedProcess[str]:
    """Run exec-server as root in a chroot to a new directory with everything of this machine."""
    jail.mkdir()
    enter = _ENTER_JAIL.format(jail=jail, bind=f"mount --bind {jail} {jail}" if is_mount else "")
    server = [sys.executable, "-P", "-m", "exec_server"]
    return run_to_end(["unshare", "--mount", "sh", "-c", enter, "sh", *server, *words], cwd="/")


@pytest.mark.root
@NEEDS_ROOT
def test_a_chroot_to_a_mount_has_restricted_roots(tmp_path: Path) -> None:
    workspace = tmp_path / "ws"
    workspace.mkdir()
    (tmp_path / "outside").write_text("outside")
    permissions = policy(special("minimal", "read"), special("project_roots", "write"))
    (tmp_path / "policy.json").write_text(json.dumps(permissions["permissions"]))
    script = f"echo new > new; ls {tmp_path}; cat /..{tmp_path}/outside; unshare --mount true"
    words = ["--policy", str(tmp_path / "policy.json"), "--cwd", str(workspace)]
    words = ["sandbox", "run", *words, "--", "sh", "-c", script]
    ended = _in_chroot(tmp_path / "jail", words, is_mount=True)
    assert ended.stdout == "ws\n", ended
    assert "No such file" in ended.stderr
    assert "Operation not permitted" in ended.stderr
    assert (workspace / "new").read_text() == "new\n"


@pytest.mark.root
@NEEDS_ROOT
def test_check_names_the_way_out_of_a_chroot_to_no_mount(tmp_path: Path) -> None:
    ended = _in_chroot(tmp_path / "jail", ["sandbox", "check"], is_mount=False)
    assert ended.returncode == 1
    assert "`mount --bind DIR DIR`" in ended.stdout
    assert "boot another one" not in ended.stdout
