"""Scratch trees, policies and confined commands for the tests of the sandbox.

A `Scratch` is a tree on the real file system, built from the steps of `sandbox_cases.json`. A
`Stage` is a server with such a tree and the policies that tests name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import barriers
from tests.support.barriers import User, mount, start_server_as, unmount, user_id
from tests.support.client import (
    DEFAULT_TIMEOUT,
    Client,
    RpcFailure,
    Server,
    b64,
    scaled,
    server_command,
    server_environment,
    uri,
)

Json = dict[str, Any]

# Not below /tmp, which some policies grant: no policy may grant the scratch tree.
SCRATCH_PARENT = "/var/tmp"
# Attempts: a child of a failed test may still be writing into the tree.
DELETIONS = 20


def special(kind: str, access: str, **more: Any) -> Json:
    """An entry for a special path, like `root` or `project_roots`."""
    return {"path": {"type": "special", "value": {"kind": kind} | more}, "access": access}


def entry(path: str | os.PathLike[str], access: str) -> Json:
    """An entry for one path and everything below it."""
    return {"path": {"type": "path", "path": uri(path)}, "access": access}


def glob(pattern: str) -> Json:
    """An entry that denies the files matching a pattern."""
    return {"path": {"type": "glob_pattern", "pattern": pattern}, "access": "deny"}


def policy(*entries: Json, network: str = "restricted", **more: Any) -> Json:
    """A `sandbox` object with a restricted file system."""
    permissions = {
        "type": "managed",
        "file_system": {"type": "restricted", "entries": list(entries)},
        "network": network,
    }
    return {"permissions": permissions, "windowsSandboxLevel": "disabled"} | more


def read_only() -> Json:
    """Everything can be read and nothing written."""
    return policy(special("root", "read"))


def workspace_write(workspace: Path, *entries: Json, network: str = "restricted") -> Json:
    """Everything can be read; the workspace, except for the entries given, can be written."""
    roots = {"cwd": uri(workspace), "workspaceRoots": [uri(workspace)]}
    grants = (special("root", "read"), special("project_roots", "write"))
    return policy(*grants, *entries, network=network, **roots)


class Scratch:
    """A tree of the host that belongs to one user and is deleted at the end."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        # Without the word sandbox: output that contains it makes a failure a denial.
        self._parent = Path(tempfile.mkdtemp(prefix="exec-server-tree-", dir=SCRATCH_PARENT))
        self._parent.chmod(0o755)
        self.base = self._parent.resolve() / "base"
        self._sockets: list[socket.socket] = []
        self._mounts: list[Path] = []

    def __enter__(self) -> Scratch:
        self.base.mkdir()
        self.give_away()
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()
        shutil.rmtree(self._parent)

    def _clear(self) -> None:
        for listener in self._sockets:
            listener.close()
        self._sockets.clear()
        while self._mounts:
            unmount(self._mounts.pop())
        for attempt in range(DELETIONS):
            try:
                shutil.rmtree(self.base)
                return
            except FileNotFoundError:
                return
            except OSError:
                if attempt == DELETIONS - 1:
                    raise
                # An overlay leaves a folder that not even its owner may list.
                for folder in self.base.rglob("*"):
                    if folder.is_dir() and not folder.is_symlink():
                        folder.chmod(0o700)
                time.sleep(0.05)

    def reset(self, steps: Sequence[Json] = ()) -> None:
        """Delete the tree and build it from these steps."""
        self._clear()
        self.base.mkdir()
        self.apply(steps)

    def path(self, name: str) -> Path:
        """The absolute path of a name in a step or a fact."""
        return self.base / name

    def apply(self, steps: Sequence[Json]) -> None:
        """Perform steps, each of them an object with one member."""
        for step in steps:
            ((verb, argument),) = step.items()
            getattr(self, f"_{verb}")(argument)
        self.give_away()

    def give_away(self) -> None:
        """Give everything in the tree to the owner."""
        if os.geteuid() == self.owner:
            return
        for folder, folders, files in os.walk(self.base):
            for name in (".", *folders, *files):
                os.chown(os.path.join(folder, name), self.owner, self.owner, follow_symlinks=False)

    def _mkdir(self, name: str) -> None:
        self.path(name).mkdir(parents=True, exist_ok=True)

    def _write(self, argument: tuple[str, str]) -> None:
        path = self.path(argument[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(argument[1])

    def _symlink(self, argument: tuple[str, str]) -> None:
        self.path(argument[1]).symlink_to(argument[0])

    def _hardlink(self, argument: tuple[str, str]) -> None:
        self.path(argument[1]).hardlink_to(self.path(argument[0]))

    def _fifo(self, name: str) -> None:
        os.mkfifo(self.path(name))

    def _rm(self, name: str) -> None:
        path = self.path(name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def _mv(self, argument: tuple[str, str]) -> None:
        self.path(argument[0]).rename(self.path(argument[1]))

    def _unix_listen(self, name: str) -> None:
        self.listen(name, socket.SOCK_STREAM)

    def listen(self, name: str, kind: socket.SocketKind) -> socket.socket:
        """A socket of the host, open until the tree is reset; `@x` is the abstract name x."""
        listener = socket.socket(socket.AF_UNIX, kind)
        self._sockets.append(listener)
        # The address holds a descriptor: a path has at most 108 bytes.
        if name.startswith("@"):
            listener.bind("\0" + name[1:])
        else:
            path = self.path(name)
            folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
            try:
                listener.bind(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
        if kind != socket.SOCK_DGRAM:
            listener.listen()
        return listener

    def _mount_tmpfs(self, name: str) -> None:
        self._mkdir(name)
        mount("tmpfs", self.path(name), "tmpfs")
        self._mounts.append(self.path(name))


BASE_STEPS: tuple[Json, ...] = (
    {"mkdir": "ws/.git/hooks"},
    {"mkdir": "ws/sub/deep"},
    {"mkdir": "outside/dir"},
    {"write": ["ws/a.txt", "hello"]},
    {"write": ["ws/.git/config", "[core]\n"]},
    {"write": ["ws/sub/s.txt", "sub"]},
    {"write": ["ws/sub/deep/d.txt", "deep"]},
    {"write": ["outside/o.txt", "outside"]},
    {"write": ["outside/dir/x.txt", "x"]},
)


@dataclass
class Outcome:
    """The end of a confined command, or the error that prevented its start."""

    refusal: RpcFailure | None = None
    start: Json = field(default_factory=dict)
    exit_code: int | None = None
    denied: bool | None = None
    denial: Json | None = None
    stdout: str = ""
    output: str = ""


def run(client: Client, sandbox: Json | None, argv: Sequence[str], **params: Any) -> Outcome:
    """Run a command to its end under a policy; both reports of a denial must agree."""
    try:
        start = start_process(client, sandbox, argv, **params)
    except RpcFailure as refusal:
        return Outcome(refusal)
    return finish(client, start)


_numbers = itertools.count()


def start_process(client: Client, sandbox: Json | None, argv: Sequence[str], **params: Any) -> Json:
    """process/start with a unique id; returns the result."""
    request: Json = {
        "processId": f"sandboxed-{next(_numbers)}",
        "argv": list(argv),
        "cwd": "file:///",
        "env": {"PATH": "/usr/bin:/bin"},
        "tty": False,
        "pipeStdin": False,
        "arg0": None,
    }
    if sandbox is not None:
        request["sandbox"] = sandbox
    result: Json = client.call("process/start", request | params)
    return result


def finish(client: Client, start: Json) -> Outcome:
    """Collect the output of a started command until it has closed."""
    ended = client.collect(start["processId"])
    report = client.call("process/read", {"processId": start["processId"]})
    assert report["sandboxDenied"] == ended.sandbox_denied, report
    assert report.get("sandboxDenial") == ended.sandbox_denial, report
    assert report["exitCode"] == ended.exit_code, report
    stdout = (ended.stdout + ended.pty).decode(errors="replace")
    return Outcome(
        None,
        start,
        ended.exit_code,
        ended.sandbox_denied,
        ended.sandbox_denial,
        stdout,
        stdout + ended.stderr.decode(errors="replace"),
    )


def interpreter() -> str:
    """A Python that every user can run, for code inside the sandbox."""
    system = Path("/usr/bin/python3")
    return str((system if system.exists() else Path(sys.executable)).resolve())


NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a server of root")
USERS = [pytest.param("root", marks=[pytest.mark.root, NEEDS_ROOT]), "ordinary"]
# The name of an environment variable that only the server has.
MARKER = "EXEC_SERVER_TEST_ENVIRONMENT_MARKER"
PROTECTED = (".codex", ".agents", ".aws")

_CARVE_OUTS: Mapping[str, Sequence[tuple[str, str]]] = {
    "WW": (),
    "DENYSUB": (("sub", "deny"),),
    "DENYDEEP": (("sub/deep", "deny"),),
    "DENYLATER": (("sub/later", "deny"),),
    "DENYFILE": (("a.txt", "deny"),),
    "DENYMISSING": ((".env", "deny"),),
    "ROSUB": (("sub", "read"),),
    "RODEEP": (("sub/deep", "read"),),
    "REOPEN": (("sub", "deny"), ("sub/deep", "write")),
    "REREAD": (("sub", "deny"), ("sub/deep", "read")),
    "GITW": ((".git", "write"),),
    "HOOKS": ((".git", "write"), (".git/hooks", "read")),
}


@dataclass(frozen=True)
class Stage:
    """A server with its scratch tree."""

    server: Server
    scratch: Scratch

    @property
    def base(self) -> Path:
        return self.scratch.base

    @property
    def ws(self) -> Path:
        return self.scratch.base / "ws"

    def policy(self, name: str) -> Json | None:
        """A policy by its name; with NET at the end, the network is enabled."""
        if name == "NONE":
            return None
        network = "enabled" if name.endswith("NET") else "restricted"
        name = name.removesuffix("NET")
        everything, programs = special("root", "read"), special("minimal", "read")
        others: dict[str, tuple[Json, ...]] = {
            "RO": (everything,),
            "READERS": (everything, entry(self.ws / "sub", "deny")),
            "ROOTW": (special("root", "write"), entry(self.ws / "sub", "deny")),
            "FILEROOT": (everything, entry(self.ws / "a.txt", "write")),
            "ELSEWHERE": (everything, entry(self.base / "outside", "write")),
            "MINR": (programs, entry(self.ws, "read")),
            "MINW": (programs, entry(self.ws, "write")),
            "MINELSEWHERE": (programs, entry(self.base / "outside", "write")),
        }
        if name in others:
            return policy(*others[name], network=network)
        if name == "GLOB":
            return workspace_write(self.ws, glob(f"{self.ws}/**/*.key"), network=network)
        entries = [entry(self.ws / path, access) for path, access in _CARVE_OUTS[name]]
        return workspace_write(self.ws, *entries, network=network)

    def run(self, client: Client, name: str, argv: Sequence[str], **params: Any) -> Outcome:
        """Run a command in the workspace."""
        return run(client, self.policy(name), argv, **{"cwd": uri(self.ws)} | params)

    def shell(self, client: Client, name: str, script: str, **params: Any) -> Outcome:
        """Run a shell script in the workspace."""
        return self.run(client, name, ["/bin/sh", "-c", script], **params)


@contextlib.contextmanager
def start_stage(user: User, *flags: str, **options: Any) -> Iterator[Stage]:
    """Our server with a scratch tree of BASE_STEPS."""
    with (
        Scratch(user_id(user)) as scratch,
        start_server_as(
            "ours", user, *flags, env={MARKER: MARKER, "TMPDIR": None}, **options
        ) as server,
    ):
        scratch.reset(BASE_STEPS)
        yield Stage(server, scratch)


def snapshot(*roots: Path) -> dict[str, tuple[object, ...]]:
    """Status and content of everything in these trees, without access times."""
    seen: dict[str, tuple[object, ...]] = {}
    for root in roots:
        for path in [root, *root.rglob("*")]:
            if not os.path.lexists(path):
                seen[str(path)] = ()
                continue
            info = path.lstat()
            seen[str(path)] = (
                (info.st_mode, info.st_uid, info.st_gid, info.st_ino, info.st_nlink)
                + (info.st_size, info.st_mtime_ns, info.st_ctime_ns)
                + ((path.read_bytes(),) if path.is_file() else ())
            )
    return seen


def guarded(base: Path, *names: str) -> dict[str, tuple[object, ...]]:
    """A snapshot of the files that no policy of a stage lets change, and of more names."""
    names = (".git", *PROTECTED, *names)
    return snapshot(base / "outside", *(base / "ws" / name for name in names))


def assert_serves(client: Client, workspace: Path) -> None:
    """Commands and file operations work, with and without a sandbox."""
    argv = ["sh", "-c", "readlink /proc/self/fd/0; ls /proc/self/fd | head -n 3; echo bad >&2"]
    run = client.run(argv)
    assert (run.stdout, run.stderr) == (b"/dev/null\n0\n1\n2\n", b"bad\n")
    sandbox = workspace_write(workspace)
    run = client.run(["sh", "-c", "echo good; echo bad >&2"], sandbox=sandbox)
    assert (run.stdout, run.stderr) == (b"good\n", b"bad\n")
    written = {"path": uri(workspace / "file"), "dataBase64": b64("text"), "sandbox": sandbox}
    assert client.call("fs/writeFile", written) == {}
    assert (workspace / "file").read_text() == "text"


# Runs `exec-server sandbox` in a workspace, as root or as an ordinary user.


# The exit code if the command was not run.
NOT_RUN = 125


class SandboxCommand:
    """Runs `exec-server sandbox` in a workspace."""

    def __init__(self, user: User, scratch: Scratch) -> None:
        self.user: User = user
        self.scratch = scratch
        self.ws = scratch.base / "ws"

    def words(self, *words: str, barrier: str = "none") -> list[str]:
        """The command line as this user."""
        become = barriers.behind_barrier(self.user, barrier)
        return [*become, *server_command("ours"), "sandbox", *words]

    def __call__(
        self, *words: str, barrier: str = "none", **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command line to its end."""
        return run_to_end(self.words(*words, barrier=barrier), cwd=self.ws, **options)

    def run(self, policy_name: str, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command under a policy."""
        return self("run", "--policy", policy_name, "--", *argv, **options)

    @contextlib.contextmanager
    def start(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Start a command line in its own process group, and wait until the command is ready."""
        with subprocess.Popen(
            self.words(*words),
            env=environment(),
            cwd=self.ws,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    pytest.fail(str(process.communicate(timeout=scaled(DEFAULT_TIMEOUT))))
                yield process
            finally:
                process.kill()

    def file(self, value: Json | str) -> str:
        """The path of a file with a policy, which is writable under no policy."""
        path = self.scratch.base / "policy.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    def placeholders(self) -> list[str]:
        """The protected names that exist."""
        return [name for name in PROTECTED if (self.ws / name).exists()]


def environment() -> dict[str, str]:
    """The environment of the test without TMPDIR."""
    return server_environment("ours", {"TMPDIR": None})


def run_to_end(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command line and capture its output."""
    return subprocess.run(
        words,
        env=environment(),
        **{"stdin": None if "input" in options else subprocess.DEVNULL} | options,
        capture_output=True,
        text=True,
        timeout=scaled(DEFAULT_TIMEOUT),
        check=False,
    )
