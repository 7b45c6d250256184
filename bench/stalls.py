"""The command `python -m bench.stalls`: how long one hostile message delays other clients.

One client sends a hostile message and waits until the server has dealt with it. Another client
makes the smallest request over and over; its longest wait is the time for which the event loop
did nothing else. Of several rounds the shortest is printed, because everything else that the
machine does can only make it longer. `cpu` is the processor time that the server used during
such a wait: on a busy machine it is the better figure.
"""

import argparse
import socket
import sys
import tempfile
import threading
import time

from bench import hostile
from bench.client import BenchError, Connection, frame
from bench.servers import Running, Server, custom_server, default_servers, running

_ROUNDS = 5
_MIB = 1_048_576
# A server that has not dealt with a message by then counts as stalled for this long.
_LIMIT_SECONDS = 9.0
# Work that the server puts off is measured too.
_SETTLE_SECONDS = 0.05
# clock_getcpuclockid(3): a clock of another process is its pid and this number.
PROCESS_CLOCK = 2
_END = frame(b'{"id":"end","method":"environment/status"}')


def main() -> int:
    """Measures the selected kinds on all servers in turns and prints the table."""
    options = _parse()
    servers = {server.label: server for server in [*default_servers(), *options.server]}
    wanted = options.servers.split(",") if options.servers else list(servers)
    worst = dict.fromkeys(wanted, (0.0, 0.0))
    size = int(options.mib * _MIB)
    print(f"longest wait of another client in ms, message of {options.mib:g} MiB\n")
    print(f"{'':48}" + "".join(f"{label:>12}{'cpu':>8}" for label in wanted))
    with tempfile.TemporaryDirectory(prefix="exec-server-stalls-") as folder:
        for group, kinds in hostile.KINDS.items():
            for name, build in kinds.items():
                if options.only not in f"{group}: {name}":
                    continue
                data = build(size)
                row = f"{group + ': ' + name:48}"
                for label in wanted:
                    wait, cpu = _measure(servers[label], folder, data, options.rounds)
                    worst[label] = max(worst[label][0], wait), max(worst[label][1], cpu)
                    row += f"{wait * 1000:12.1f}{cpu * 1000:8.1f}"
                print(row, flush=True)
    longest = "".join(f"{wait * 1000:12.1f}{cpu * 1000:8.1f}" for wait, cpu in worst.values())
    print(f"\n{'longest':48}{longest}")
    return 0


def _measure(server: Server, folder: str, data: bytes, rounds: int) -> tuple[float, float]:
    stalls = []
    with running(server, folder) as started:
        victim = started.connect()
        request = victim.prepare("environment/status", {})
        for _ in range(rounds):
            attack = threading.Thread(target=_attack, args=(started, data))
            attack.start()
            stalls.append(_longest_wait(started, victim, request, attack))
            attack.join()
        victim.socket.close()
    return min(wait for wait, _ in stalls), min(cpu for _, cpu in stalls)


def _attack(started: Running, data: bytes) -> None:
    """Sends the bytes, and waits until the server has read all of them or hung up."""
    try:
        attacker = started.connect()
    except BenchError:
        return
    reader = threading.Thread(target=_read_all, args=(attacker,))
    reader.start()
    try:
        attacker.socket.sendall(data + _END)
    except OSError:
        pass  # the server has hung up
    reader.join(_LIMIT_SECONDS)
    try:
        attacker.socket.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    reader.join()
    attacker.socket.close()


def _read_all(attacker: Connection) -> None:
    """Reads until the answer to the last request."""
    tail = b""
    try:
        while data := attacker.socket.recv(_MIB):
            tail = (tail + data)[-200:]
            if b'"id":"end"' in tail:
                return
    except OSError:
        pass


def _longest_wait(
    started: Running, victim: Connection, request: tuple[bytes, bytes], attack: threading.Thread
) -> tuple[float, float]:
    """The longest wait until the attack is over, and the most processor time in a wait."""
    clock = time.perf_counter
    processor = ~started.process.pid << 3 | PROCESS_CLOCK
    longest = most = until = 0.0
    victim.deadline = time.monotonic() + 2 * _LIMIT_SECONDS
    while not until or clock() < until:
        used = time.clock_gettime(processor)
        began = clock()
        victim.exchange(*request)
        longest = max(longest, clock() - began)
        most = max(most, time.clock_gettime(processor) - used)
        if not until and not attack.is_alive():
            until = clock() + _SETTLE_SECONDS
    return longest, most


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.stalls",
        description="Measures for how long one hostile message delays other clients.",
    )
    parser.add_argument("--mib", type=float, default=1.0, help="size of a message, default 1")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help=f"default {_ROUNDS}")
    parser.add_argument("--only", default="", metavar="TEXT", help="kinds whose name contains it")
    parser.add_argument("--servers", metavar="LABEL,...", help="default: all that are known")
    parser.add_argument(
        "--server", action="append", default=[], type=custom_server, metavar="LABEL=COMMAND"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
