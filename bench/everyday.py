"""The client compared with OpenSSH on loopback: `python -m bench.everyday`.

Both have one connection that stays open (for ssh a multiplexed one, without a password or a
configuration of the machine) and take turns at the same jobs: a command that does nothing, one
large file in both directions, and a tree of small files, which is in memory (/dev/shm) so that the
journal of a disk is not measured. The memory of our two sides is sampled meanwhile.

The commands are compared too, each a process and a connection of its own: `exec-server exec` on
every kind of target and others, ssh, and ssh with the connection that stays open (ControlMaster).
Then 200 MiB are piped through a command, up, down and both ways, with the default cipher of ssh.
At last a step of an agent goes through every adapter of `bench.agent_steps` whose framework is
installed. All of it takes some two minutes.
"""

import argparse
import asyncio
import os
import pwd
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import agent_steps, bare, commands, piping
from bench.servers import OURS, Server, stop
from exec_server import Environment, connect
from exec_server.host import libc

COMMANDS = 60
# Starts of each command line program; the quickest ones show its own time on a busy machine.
STARTS = 20
FILE_BYTES = 1 << 29
ROUNDS = 3
# How many times faster than scp copies have to be: of one large file, of many small ones.
BULK_RATIO = 1.0
SMALL_RATIO = 10.0
SMALL_FILES = 1000
SMALL_BYTES = 1000
FILES_IN_DIRECTORY = 50
_SAMPLE_SECONDS = 0.05
_PROGRAMS = ("sshd", "ssh", "scp", "ssh-keygen")
_HELP = "there are no rows for ssh and copies without {}; on Debian: apt-get install openssh-server"


class Ssh:
    """A private ssh server and one connection to it that later ones share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "control"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        for name in ("host_key", "user_key"):
            _quietly("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        (folder / "authorized_keys").chmod(0o600)
        self._user = pwd.getpwuid(os.getuid()).pw_name
        settings = {
            "ListenAddress": f"127.0.0.1:{self._port}",
            "HostKey": folder / "host_key",
            "AuthorizedKeysFile": folder / "authorized_keys",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
            "Subsystem": "sftp internal-sftp",
        }
        (folder / "sshd_config").write_text("".join(f"{k} {v}\n" for k, v in settings.items()))

    @contextmanager
    def running(self) -> Iterator["Ssh"]:
        """Starts the server and the shared connection; both end with the block."""
        server = _find("sshd")
        assert server is not None
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # the directory that sshd changes its root to
        process = subprocess.Popen(
            [server, "-D", "-e", "-f", str(self._folder / "sshd_config")],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._wait()
            _quietly("ssh", "-M", "-N", "-f", *self._options(), self._where)
            yield self
        finally:
            subprocess.run(
                ["ssh", "-O", "exit", *self._options(), self._where],
                capture_output=True,
                check=False,
            )
            stop(process)

    @property
    def _where(self) -> str:
        return f"{self._user}@127.0.0.1"

    def _options(self) -> list[str]:
        options = {
            "ControlPath": self._socket,
            "Port": self._port,
            "IdentityFile": self._folder / "user_key",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": self._folder / "known_hosts",
            "StrictHostKeyChecking": "no",
            "LogLevel": "ERROR",
        }
        words = ["-F", "none"]
        for name, value in options.items():
            words += ["-o", f"{name}={value}"]
        return words

    def _wait(self) -> None:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def run(self) -> None:
        """One command that does nothing."""
        _quietly("ssh", *self._options(), self._where, "true")

    def alone(self) -> list[str]:
        """The words before a command that has a connection of its own."""
        return ["ssh", *self._options(), "-o", "ControlPath=none", self._where]

    def run_alone(self) -> None:
        """One command that does nothing, with a connection of its own."""
        _quietly(*self.alone(), "true")

    def copy(self, source: Path, target: Path, *, up: bool) -> None:
        """Copies a file or a tree up or down."""
        remote = f"{self._where}:"
        words = [str(source), remote + str(target)] if up else [remote + str(source), str(target)]
        _quietly("scp", "-q", "-r", *self._options(), *words)


def _find(program: str) -> str | None:
    """The path of a program; sshd is often not on the path of a user."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _quietly(*argv: str) -> None:
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


class Memory:
    """The peak memory of processes, sampled at intervals."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.most: dict[str, int] = dict.fromkeys(pids, 0)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(_SAMPLE_SECONDS):
            for name, pid in self._pids.items():
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                self.most[name] = max(self.most[name], pages * os.sysconf("SC_PAGE_SIZE"))


@contextmanager
def _our_server() -> Iterator[tuple[str, int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "exec_server", "--listen", "ws://127.0.0.1:0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip(), process.pid
    finally:
        stop(process)


async def _timed(work: Callable[[], Coroutine[Any, Any, object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


def _timed_blocking(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


async def _commands(env: Environment, ssh: Ssh) -> tuple[list[float], list[float]]:
    ours, theirs = [], []
    for _ in range(COMMANDS):
        ours.append(await _timed(lambda: env.run(["true"])))
        theirs.append(_timed_blocking(ssh.run))
    return ours, theirs


async def _transfers(
    env: Environment, ssh: Ssh, source: Path, *, up: bool
) -> tuple[list[float], list[float]]:
    """The times of copies of a file or a tree, ours and those of scp."""
    target = source.parent / "target"
    whole = _size(source)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        for copy, taken in (("ours", ours), ("theirs", theirs)):
            _remove(target)
            os.sync()  # so that this copy does not wait for the dirty pages of the previous one
            if copy == "theirs":
                taken.append(_timed_blocking(lambda: ssh.copy(source, target, up=up)))
            elif up:
                taken.append(await _timed(lambda: env.files.upload(source, str(target))))
            else:
                taken.append(await _timed(lambda: env.files.download(str(source), target)))
            if _size(target) != whole:
                raise SystemExit(f"{copy}: the copy is not whole")
    _remove(target)
    return ours, theirs


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


async def _copy_small_files(env: Environment, ssh: Ssh) -> None:
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="exec-server-bench-", dir=where) as name:
        tree = Path(name) / "tree"
        for number in range(SMALL_FILES):
            path = tree / str(number // FILES_IN_DIRECTORY) / str(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(SMALL_BYTES))
        for title, up in (("upload", True), ("download", False)):
            taken = await _transfers(env, ssh, tree, up=up)
            middle = [statistics.median(samples) * 1e3 for samples in taken]
            print(_row(f"{title} of {SMALL_FILES:,} files", *middle, "ms", SMALL_RATIO))


def _row(title: str, ours: float, theirs: float, unit: str, target: float) -> str:
    # Above 1 this client is faster. Times for commands, rates for files.
    ratio = theirs / ours if unit == "ms" else ours / theirs
    met = "yes" if ratio >= target else "no"
    return (
        f"{title:<24}{ours:>10.4g}{theirs:>10.4g} {unit:<5}{ratio:>7.2f}x  ≥ {target:.2f}x  {met}"
    )


def _program() -> str:
    return os.path.join(os.path.dirname(sys.executable), "exec-server")


def _starts(url: str, ssh: Ssh | None) -> str:
    """The times of whole commands, from the start of the program to its end."""
    program = _program()
    server = Server(OURS, [program, "--listen", "ws://127.0.0.1:0"])
    jobs: dict[str, Callable[[], object]] = {
        "a bare interpreter": lambda: _quietly(sys.executable, "-c", "pass"),
        "… with an event loop": lambda: _quietly(*bare.INTERPRETER),
        "exec-server exec -t": lambda: _quietly(program, "exec", "-t", "-n", url, "true"),
        "exec-server ls": lambda: _quietly(program, "ls", f"{url}:/"),
        "exec-server version": lambda: _quietly(program, "version"),
    }
    if ssh is not None:
        jobs |= {"ssh": ssh.run_alone, "ssh with ControlMaster": ssh.run}
    limits = {f"exec, {kind}": commands.EXEC_SECONDS for kind in commands.KINDS}
    limits["first answer, stdio"] = commands.ANSWER_SECONDS
    taken: dict[str, list[float]] = {name: [] for name in (*jobs, *limits)}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="exec-server-bench-"))
        for kind in commands.KINDS:
            run = stack.enter_context(commands.target(kind, server, folder))
            run()  # the first command loads parts of the server
            jobs[f"exec, {kind}"] = run
        for _ in range(STARTS):
            for name, job in jobs.items():
                taken[name].append(_timed_blocking(job))
            taken["first answer, stdio"].append(commands.first_answer(server))
    least = {name: min(samples) for name, samples in taken.items()}
    lines = []
    for name, samples in taken.items():
        middle = statistics.median(samples)
        line = f"{name:<24}{least[name] * 1e3:>10.4g} ms   p50 {middle * 1e3:.4g} ms"
        if name in limits:
            met = "yes" if least[name] <= limits[name] else "no"
            line += f"   ≤ {limits[name] * 1e3:.0f} ms  {met}"
        lines.append(line)
    return "\n".join(lines)


async def _measure(size: int) -> None:
    with tempfile.TemporaryDirectory(prefix="exec-server-bench-") as name:
        folder = Path(name)
        with open(folder / "source", "wb") as file:
            for _ in range(size // (1 << 20)):
                file.write(os.urandom(1 << 20))
        with Ssh(folder).running() as ssh, _our_server() as (url, pid):
            async with connect(url) as env:
                await env.run(["true"])
                ours, theirs = await _commands(env, ssh)
                middle = [statistics.median(samples) * 1e3 for samples in (ours, theirs)]
                print(f"{'':<24}{'ours':>10}{'ssh':>10}       {'ratio':>7}  target   met")
                print(_row("run true, p50", *middle, "ms", 1.0))
                print(f"\n{_starts(url, ssh)}\n")
                for title, *rates in piping.rates(_program(), folder, ssh.alone()):
                    print(_row(title, *rates, "MB/s", BULK_RATIO))
                print()
                with Memory({"client": os.getpid(), "server": pid}) as memory:
                    for title, up in (("upload", True), ("download", False)):
                        taken = await _transfers(env, ssh, folder / "source", up=up)
                        rates = [size / statistics.median(samples) / 1e6 for samples in taken]
                        whole = f"{title} of {size >> 20} MiB"
                        print(_row(whole, *rates, "MB/s", BULK_RATIO))
                await _copy_small_files(env, ssh)
                for side, most in memory.most.items():
                    print(f"most memory of our {side} meanwhile: {most / 1e6:.1f} MB")


def main() -> int:
    """Measures both and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.everyday", description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=FILE_BYTES >> 20, help="size of the file")
    options = parser.parse_args()
    missing = [program for program in _PROGRAMS if _find(program) is None]
    if missing:
        with _our_server() as (url, _):
            print(_starts(url, None))
            agent_steps.print_rows(url)
        print(_HELP.format(", ".join(missing)), file=sys.stderr)
        return 1
    libc.keep_freed_memory()  # as `exec-server cp` does, the counterpart of scp
    asyncio.run(_measure(options.mebibytes << 20))
    with _our_server() as (url, _):
        agent_steps.print_rows(url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
