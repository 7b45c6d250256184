"""The servers to compare: finding, starting and ending them, and measuring their memory."""

import compileall
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.client import RECEIVE_BYTES, BenchError, Connection

OURS = "ours"
REFERENCE = "reference"
DISTRIBUTION = "distribution"

INSTALL_HELP = (
    "the reference server is not installed, so only ours is measured; `make conformance` "
    "installs it, or: npm install --prefix {cache} @openai/codex@0.169.0"
)

# A server that prints no URL within this time counts as broken.
_START_SECONDS = 20.0
# After SIGTERM a server may take this long before it is killed.
_STOP_SECONDS = 5.0

# The Python of the distribution: how it was built differs from one built by hand.
_DISTRIBUTION_PYTHON = "/usr/bin/python3"

_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Server:
    """How to start one server; `label` is its name in the tables."""

    label: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Running:
    """A started server that has printed its URL."""

    server: Server
    process: subprocess.Popen[bytes]
    host: str
    port: int
    listen_seconds: float

    def connect(self, capacity: int = RECEIVE_BYTES) -> Connection:
        """Opens an initialized connection."""
        try:
            return Connection(self.host, self.port, capacity)
        except OSError as error:
            raise BenchError(f"cannot connect to {self.server.label}: {error}") from error

    def prepare(self) -> None:
        """Does nothing: a direct connection needs no keys."""

    def memory(self) -> tuple[int, int | None]:
        """Sums resident and proportional bytes over all processes of the server.

        The second is None where the kernel denies it.
        """
        resident = 0
        proportional: int | None = 0
        for pid in _family(self.process.pid):
            try:
                resident += _kilobytes(f"/proc/{pid}/status", "VmRSS:") * 1024
            except OSError:
                continue  # It ended while the others were counted.
            try:
                share = _kilobytes(f"/proc/{pid}/smaps_rollup", "Pss:") * 1024
                proportional = None if proportional is None else proportional + share
            except OSError:
                proportional = None  # Not dumpable, and this is not root.
        return resident, proportional


def reference_cache() -> Path:
    """Names the folder that the reference is installed in."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "exec-server-reference"


def compile_sources() -> None:
    """Compiles the package of this checkout, as the installation of a wheel does.

    Without it a server compiles its modules at every start where PYTHONDONTWRITEBYTECODE is set.
    """
    compileall.compile_dir(_ROOT / "src", quiet=2)


def default_servers() -> list[Server]:
    """The reference, if it is installed, and the server of this checkout."""
    listen = ["--listen", "ws://127.0.0.1:0"]
    servers = []
    pattern = "node_modules/@openai/codex-linux-x64/vendor/*/bin/codex"
    for binary in sorted(reference_cache().glob(pattern))[:1]:
        servers.append(Server(REFERENCE, [str(binary), "exec-server", *listen], _codex_home()))
    search = os.pathsep.join(filter(None, [str(_ROOT / "src"), os.environ.get("PYTHONPATH")]))
    arguments = ["-m", "exec_server", *listen]
    servers.append(Server(OURS, [sys.executable, *arguments], {"PYTHONPATH": search}))
    if _can_serve(_DISTRIBUTION_PYTHON):
        command = [_DISTRIBUTION_PYTHON, *arguments]
        servers.append(Server(DISTRIBUTION, command, {"PYTHONPATH": search}))
    return servers


def _can_serve(interpreter: str) -> bool:
    """Whether there is such an interpreter, another one than this, with all dependencies."""
    if not os.path.exists(interpreter) or os.path.samefile(interpreter, sys.executable):
        return False
    code = "import cryptography, msgspec, pybase64, uvloop, websockets"
    return (
        subprocess.run([interpreter, "-c", code], capture_output=True, check=False).returncode == 0
    )


def custom_server(text: str) -> Server:
    """Reads a `label=command` option."""
    label, equals, command = text.partition("=")
    argv = shlex.split(command)
    if not (label and equals and argv):
        raise ValueError(f"expected label=command, got {text!r}")
    # Without a module path: another checkout would run the modules of this one.
    return Server(label, argv, _codex_home())


def _codex_home() -> dict[str, str]:
    """Creates the home folder that the reference requires, which may not be a temporary one."""
    home = Path(os.environ.get("CODEX_HOME") or reference_cache() / "codex-home")
    home.mkdir(parents=True, exist_ok=True)
    return {"CODEX_HOME": str(home)}


@contextmanager
def running(server: Server, folder: str) -> Iterator[Running]:
    """Starts a server in the folder; stops it and its descendants when the block ends."""
    log_path = os.path.join(folder, f"{server.label}.stderr")
    with open(log_path, "wb") as log:
        began = time.perf_counter()
        try:
            process = subprocess.Popen(
                server.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env={**os.environ, **server.environment},
                start_new_session=True,
            )
        except OSError as error:
            raise BenchError(f"cannot start {server.label}: {error}") from error
    try:
        host, port = _read_url(process, server, log_path)
        yield Running(server, process, host, port, time.perf_counter() - began)
    finally:
        stop(process)


def _read_url(process: subprocess.Popen[bytes], server: Server, log: str) -> tuple[str, int]:
    assert process.stdout is not None
    line = b""
    deadline = time.monotonic() + _START_SECONDS
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
        piece = os.read(process.stdout.fileno(), 4096) if ready else b""
        if not piece:
            said = Path(log).read_text(errors="replace").strip()[-500:]
            raise BenchError(f"{server.label} printed no URL; stderr: {said or 'empty'}")
        line += piece
    host, _, port = line.decode().strip().removeprefix("ws://").rpartition(":")
    return host.strip("[]"), int(port)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a server and its descendants."""
    family = _family(process.pid)
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
    # A hung server may leave helpers; those that are still in its session are killed.
    for pid in family:
        try:
            if pid != process.pid and os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _family(root: int) -> list[int]:
    """Lists the server, its descendants and the other processes of its session."""
    parents: dict[int, int] = {}
    family = {root}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            # The command name may hold spaces and brackets; the fields follow the last one.
            text = Path("/proc", name, "stat").read_text(errors="replace")
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        parents[int(name)] = int(fields[1])
        if int(fields[3]) == root:
            family.add(int(name))
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sorted(family)


def _kilobytes(path: str, name: str) -> int:
    with open(path) as lines:
        for line in lines:
            if line.startswith(name):
                return int(line.split()[1])
    return 0
