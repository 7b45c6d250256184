"""Workloads about confined file operations and commands, and the memory that confinement keeps.

Before anything is timed the server has to refuse a forbidden operation: a server that does not
confine would be fast.
"""

import base64
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.client import BenchError, Connection, HangError, uri
from bench.files import SMALL_BYTES
from bench.processes import start_params
from bench.remote import Relayed
from bench.servers import OURS, Running, running
from bench.stage import TURN_SECONDS, Stage, expect, sample, shared_file

Params = dict[str, Any]

DIRECTORY_ENTRIES = 20
# Requests after the first one under a new policy; their median is the time without set-up.
FOLLOWING = 5
# More policies than this server keeps workers and sandboxes for, so memory is at its limit.
MANY_POLICIES = 18
MANY_COMMANDS = 5

_CLOSED = b'{"method":"process/closed"'
_LAUNCHER = "exec-launcher"
_SLEEPER = ["/bin/sleep", "60"]
# Long enough to prebuild a sandbox after a command, and for helpers to end after a request.
_SETTLE_SECONDS = 0.3
# Between two commands of a client that thinks; longer than it takes to prebuild a sandbox.
_PAUSE_SECONDS = 0.1


# ---- policies ---------------------------------------------------------------------------


def _policy(*entries: Params, **more: object) -> Params:
    files = {"type": "restricted", "entries": entries}
    permissions = {"type": "managed", "file_system": files, "network": "restricted"}
    return {"permissions": permissions, "windowsSandboxLevel": "disabled", **more}


def _special(kind: str, access: str) -> Params:
    return {"path": {"type": "special", "value": {"kind": kind}}, "access": access}


def _read_only() -> Params:
    return _policy(_special("root", "read"))


def _workspace_write(workspace: str) -> Params:
    entries = _special("root", "read"), _special("project_roots", "write")
    return _policy(*entries, cwd=uri(workspace), workspaceRoots=[uri(workspace)])


def _restricted_read(workspace: str) -> Params:
    granted = {"path": {"type": "path", "path": uri(workspace)}, "access": "read"}
    return _policy(_special("minimal", "read"), granted)


def _workspace(stage: Stage) -> str:
    """The folder that the policies grant, made once per server and run."""
    workspace = os.path.join(stage.folder, "workspace")
    if not os.path.exists(workspace):
        os.makedirs(_directory(workspace))
        for number in range(DIRECTORY_ENTRIES):
            Path(_directory(workspace), f"file-{number:02}").write_bytes(bytes(SMALL_BYTES))
    return workspace


def _directory(workspace: str) -> str:
    return os.path.join(workspace, "directory")


def _file(workspace: str) -> str:
    return os.path.join(_directory(workspace), "file-00")


def _outside(stage: Stage) -> str:
    """A file that no policy of this module allows to be changed."""
    path = os.path.join(stage.folder, "outside")
    Path(path).write_bytes(b"untouched")
    return path


# ---- file operations --------------------------------------------------------------------


def write(stage: Stage) -> list[float]:
    """A small file of the workspace written again in place of its old content."""
    path = os.path.join(_workspace(stage), "over")
    taken = _change(stage, "fs/writeFile", _write_params, [path] * (stage.samples + 1))
    expect(os.path.getsize(path) == SMALL_BYTES, f"{path} is not complete")
    return taken


def create(stage: Stage) -> list[float]:
    """A small file of the workspace that did not exist before."""
    return _create(stage, "fs/writeFile", _write_params)


def copy(stage: Stage) -> list[float]:
    """A small file of the workspace copied to a name that did not exist before."""
    source = uri(_file(_workspace(stage)))

    def params(path: str) -> Params:
        return {"sourcePath": source, "destinationPath": uri(path), "recursive": False}

    return _create(stage, "fs/copy", params)


def remove(stage: Stage) -> list[float]:
    """A small file of the workspace removed."""
    with tempfile.TemporaryDirectory(dir=_workspace(stage)) as folder:
        paths = _new_names(stage, folder)
        for path in paths:
            Path(path).write_bytes(bytes(SMALL_BYTES))
        taken = _change(stage, "fs/remove", lambda path: {"path": uri(path)}, paths)
        left = len(os.listdir(folder))
        expect(left == len(paths) - len(taken) - 1, f"{left} of {len(paths)} files are left")
    return taken


def _create(stage: Stage, method: str, params: Callable[[str], Params]) -> list[float]:
    with tempfile.TemporaryDirectory(dir=_workspace(stage)) as folder:
        paths = _new_names(stage, folder)
        taken = _change(stage, method, params, paths)
        for path in paths[: len(taken) + 1]:
            expect(os.path.getsize(path) == SMALL_BYTES, f"{path} is not complete")
    return taken


def _new_names(stage: Stage, folder: str) -> list[str]:
    return [os.path.join(folder, f"new-{number}") for number in range(stage.samples + 1)]


def _write_params(path: str) -> Params:
    return {"path": uri(path), "dataBase64": base64.b64encode(bytes(SMALL_BYTES)).decode()}


def _change(
    stage: Stage, method: str, params: Callable[[str], Params], paths: list[str]
) -> list[float]:
    """Times one request for each path but the first, under a policy that writes the workspace."""
    sandbox = {"sandbox": _workspace_write(_workspace(stage))}
    outside = _outside(stage)
    _expect_refusal(stage.connection, method, params(outside) | sandbox)
    expect(Path(outside).read_bytes() == b"untouched", f"{method} changed {outside}")
    return _timed(stage, method, [params(path) | sandbox for path in paths])


def restricted_read(stage: Stage) -> list[float]:
    """A small file under a policy that grants system folders and the workspace."""
    return _restricted(stage, "fs/readFile", _file, SMALL_BYTES * 4 // 3)


def restricted_metadata(stage: Stage) -> list[float]:
    """Metadata under the same policy."""
    return _restricted(stage, "fs/getMetadata", _file, 60)


def restricted_directory(stage: Stage) -> list[float]:
    """The entries of a small directory under the same policy."""
    return _restricted(stage, "fs/readDirectory", _directory, DIRECTORY_ENTRIES * 40)


def _restricted(stage: Stage, method: str, target: Callable[[str], str], least: int) -> list[float]:
    workspace = _workspace(stage)
    sandbox = {"sandbox": _restricted_read(workspace)}
    ungranted = shared_file(stage, "small", SMALL_BYTES)
    outside = os.path.dirname(ungranted) if method == "fs/readDirectory" else ungranted
    _expect_refusal(stage.connection, method, {"path": uri(outside)} | sandbox)
    params = {"path": uri(target(workspace))} | sandbox
    return _timed(stage, method, [params] * (stage.samples + 1), least)


def direct_read(stage: Stage) -> list[float]:
    """A small file under a policy that lets everything be read."""
    return _direct(stage, "fs/readFile", _file, SMALL_BYTES * 4 // 3)


def direct_metadata(stage: Stage) -> list[float]:
    """Metadata under the same policy."""
    return _direct(stage, "fs/getMetadata", _file, 60)


def direct_canonicalize(stage: Stage) -> list[float]:
    """The real path of a file under the same policy."""
    return _direct(stage, "fs/canonicalize", _file, 60)


def direct_directory(stage: Stage) -> list[float]:
    """The entries of a small directory under the same policy."""
    return _direct(stage, "fs/readDirectory", _directory, DIRECTORY_ENTRIES * 40)


def _direct(stage: Stage, method: str, target: Callable[[str], str], least: int) -> list[float]:
    params = {"path": uri(target(_workspace(stage))), "sandbox": _read_only()}
    return _timed(stage, method, [params] * (stage.samples + 1), least)


def _timed(stage: Stage, method: str, params: list[Params], least: int = 0) -> list[float]:
    """Times all requests but the first, which may have to build the sandbox of the others.

    No answer may have fewer bytes than `least`.
    """
    connection = stage.connection
    calls = [connection.prepare(method, each) for each in params]
    shortest = connection.exchange(*calls.pop(0))

    def operation(number: int) -> None:
        nonlocal shortest
        shortest = min(shortest, connection.exchange(*calls[number]))

    taken = sample(stage, operation)
    expect(shortest >= least, f"{method} answered with {shortest} bytes only")
    return taken


def _expect_refusal(connection: Connection | Relayed, method: str, params: Params) -> None:
    """Raises BenchError if the server permits an operation that the policy forbids."""
    try:
        connection.call(method, params)
    except HangError:
        raise
    except BenchError:
        return
    expect(False, f"{method} did what the policy forbids")


def first_of_policy(stage: Stage) -> list[float]:
    """The time of the first write under a policy minus the median of the following writes."""
    connection, extras = stage.connection, []

    def operation(_: int) -> None:
        with tempfile.TemporaryDirectory(dir=stage.folder) as workspace:
            params = _write_params(os.path.join(workspace, "file"))
            params["sandbox"] = _workspace_write(workspace)
            taken = []
            for call in [connection.prepare("fs/writeFile", params) for _ in range(1 + FOLLOWING)]:
                began = time.perf_counter()
                connection.exchange(*call)
                taken.append(time.perf_counter() - began)
            extras.append(taken[0] - statistics.median(taken[1:]))

    sample(stage, operation)
    return extras


# ---- commands ---------------------------------------------------------------------------


def spawn_pipe(stage: Stage) -> list[float]:
    """From process/start to process/closed of a confined program that does nothing, on pipes."""
    return _spawn(stage, tty=False)


def spawn_pty(stage: Stage) -> list[float]:
    """The same on a terminal."""
    return _spawn(stage, tty=True)


def spawn_paused(stage: Stage) -> list[float]:
    """The same on pipes, by a client that thinks between two commands."""
    return _spawn(stage, tty=False, pause=_PAUSE_SECONDS)


def _spawn(stage: Stage, *, tty: bool, pause: float = 0.0) -> list[float]:
    connection, workspace = stage.connection, _workspace(stage)
    _expect_confined(stage, workspace, tty=tty)
    calls = []
    for _ in range(stage.samples):
        params = _start(stage, ["/bin/true"], workspace, tty=tty)
        calls.append(connection.prepare("process/start", params)[0])
    return sample(stage, lambda number: connection.exchange(calls[number], _CLOSED), pause)


def _start(stage: Stage, argv: list[str], workspace: str, *, tty: bool = False) -> Params:
    """The parameters of process/start for a command that may write in the workspace alone."""
    params = start_params(stage.fresh_name("confined"), argv, workspace, tty=tty)
    return params | {"sandbox": _workspace_write(workspace)}


def _expect_confined(stage: Stage, workspace: str, *, tty: bool) -> None:
    """Raises BenchError if commands do not run, or can change a protected file."""
    inside, outside = os.path.join(workspace, "inside"), _outside(stage)
    script = f"echo changed >{inside}; echo changed >{outside}"
    params = _start(stage, ["/bin/sh", "-c", script], workspace, tty=tty)
    stage.connection.exchange(stage.connection.prepare("process/start", params)[0], _CLOSED)
    expect(os.path.exists(inside), "a confined command changed nothing in its workspace")
    os.unlink(inside)
    expect(Path(outside).read_bytes() == b"untouched", f"a confined command changed {outside}")


# ---- memory -----------------------------------------------------------------------------


def launcher_memory(stage: Stage) -> list[float]:
    """Proportional memory of the process that forks confined ones; 0 if there is none."""
    assert stage.server is not None
    with running(stage.server, stage.folder) as server:
        found = [pid for pid in _prepared(server) if _name(pid) == _LAUNCHER]
        expect(bool(found) or stage.server.label != OURS, f"no process is named {_LAUNCHER}")
        return [_proportional(found)]


def worker_memory(stage: Stage) -> list[float]:
    """Proportional memory of the processes kept after one confined file operation."""

    def use(stage: Stage, connection: Connection) -> None:
        _use_files(connection, _workspace(stage))

    return _kept(stage, use)


def prebuilt_memory(stage: Stage) -> list[float]:
    """Proportional memory of the processes kept after one confined command has ended."""

    def use(stage: Stage, connection: Connection) -> None:
        _use_command(stage, connection, _workspace(stage))

    return _kept(stage, use)


def limit_memory(stage: Stage) -> list[float]:
    """Proportional memory of the processes kept after more policies than the server keeps."""

    def use(stage: Stage, connection: Connection) -> None:
        for number in range(MANY_POLICIES):
            workspace = os.path.join(stage.folder, f"workspace-{number}")
            os.makedirs(workspace, exist_ok=True)
            _use_files(connection, workspace)
            if number < MANY_COMMANDS:
                _use_command(stage, connection, workspace)

    return _kept(stage, use)


def init_memory(stage: Stage) -> list[float]:
    """Proportional memory of the processes between a server and a running confined command."""
    assert stage.server is not None
    workspace = _workspace(stage)
    with running(stage.server, stage.folder) as server:
        before = _prepared(server)
        connection = _connected(server)
        connection.call("process/start", _start(stage, _SLEEPER, workspace))
        time.sleep(_SETTLE_SECONDS)
        after = _descendants(server.process.pid)
        sleeper = next((pid for pid in after if _name(pid) == "sleep"), None)
        expect(sleeper is not None, "the confined command does not run")
        between = [pid for pid in after if pid not in before and sleeper in _descendants(pid)]
        memory = _proportional(between)
        connection.close()
    return [memory]


def _kept(stage: Stage, use: Callable[[Stage, Connection], None]) -> list[float]:
    """Proportional memory of the processes that some use has added to a server."""
    assert stage.server is not None
    with running(stage.server, stage.folder) as server:
        before = _prepared(server)
        connection = _connected(server)
        use(stage, connection)
        memory = _proportional(set(_settled(server)) - set(before))
        connection.close()
    return [memory]


def _connected(server: Running) -> Connection:
    connection = server.connect()
    connection.deadline = time.monotonic() + TURN_SECONDS
    return connection


def _use_files(connection: Connection, workspace: str) -> None:
    params = _write_params(os.path.join(workspace, "file"))
    connection.call("fs/writeFile", params | {"sandbox": _workspace_write(workspace)})


def _use_command(stage: Stage, connection: Connection, workspace: str) -> None:
    params = _start(stage, ["/bin/true"], workspace)
    connection.exchange(connection.prepare("process/start", params)[0], _CLOSED)


def _prepared(server: Running) -> list[int]:
    """The processes of a server that has had a request with a policy, but none to confine."""
    connection = _connected(server)
    connection.call("fs/getMetadata", {"path": uri("/"), "sandbox": _read_only()})
    connection.close()
    return _settled(server)


def _settled(server: Running) -> list[int]:
    time.sleep(_SETTLE_SECONDS)
    return _descendants(server.process.pid)


def _descendants(pid: int) -> list[int]:
    """The descendants of a process, without those that ended meanwhile."""
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    except OSError:
        pass
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _proportional(pids: Iterable[int]) -> float:
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except PermissionError:
            raise BenchError("the kernel does not tell; needs root") from None
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total
