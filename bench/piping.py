"""Much data through whole commands: `exec-server exec TARGET cat` beside `ssh HOST cat`."""

import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench import commands
from bench.servers import Server

PIPED_BYTES = 200 << 20
KINDS = ("ws", "unix")
_ROUNDS = 7
# What runs there, and whether it gets input.
_DIRECTIONS = {
    "up": ("cat >/dev/null", True),
    "down": (f"head -c {PIPED_BYTES} /dev/zero", False),
    "both ways": ("cat", True),
}


def rates(program: str, folder: Path, ssh: list[str]) -> Iterator[tuple[str, float, float]]:
    """A title and the rates of ours and of ssh in MB/s, for each direction and kind of target.

    `ssh` are the words before the command; they open a connection of their own, as ours does.
    """
    source = folder / "piped"
    with open(source, "wb") as file:
        for _ in range(PIPED_BYTES >> 20):
            file.write(os.urandom(1 << 20))
    server = Server("ours", [program, "--listen", "ws://127.0.0.1:0"])
    with ExitStack() as stack:
        clients = {"ssh": ssh}
        for kind in KINDS:
            words = stack.enter_context(commands.words(kind, server, str(folder), {}))
            clients[kind] = [program, "exec", *words, "sh", "-c"]
        for direction, (command, has_input) in _DIRECTIONS.items():
            seconds: dict[str, list[float]] = {name: [] for name in clients}
            for _ in range(_ROUNDS):
                for name, client in clients.items():
                    seconds[name].append(_timed([*client, command], source if has_input else None))
            middle = {name: statistics.median(taken) for name, taken in seconds.items()}
            rate = {name: PIPED_BYTES / taken / 1e6 for name, taken in middle.items()}
            for kind in KINDS:
                yield f"pipe {direction}, {kind}", rate[kind], rate["ssh"]
    source.unlink()


def _timed(argv: list[str], source: Path | None) -> float:
    """The seconds of a command between two pipes; raises SystemExit if bytes are missing."""
    began = time.perf_counter()
    feeder = None
    if source is not None:
        feeder = subprocess.Popen(["cat", str(source)], stdout=subprocess.PIPE)
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL if feeder is None else feeder.stdout, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    if feeder is not None:
        assert feeder.stdout is not None
        feeder.stdout.close()
    received, buffer = 0, bytearray(1 << 20)
    with process.stdout:
        while count := os.readv(process.stdout.fileno(), [buffer]):
            received += count
    code = process.wait()
    taken = time.perf_counter() - began
    if feeder is not None:
        feeder.wait()
    expected = 0 if argv[-1] == _DIRECTIONS["up"][0] else PIPED_BYTES
    if code or received != expected:
        raise SystemExit(f"{argv[0]}: exit code {code}, {received} bytes")
    return taken
