"""A client that asks a busy server for nothing but its status; prints the times as JSON.

It is a process of its own, so that the load of the other clients does not delay its clock.
usage: python -m soak.probe HOST PORT, until its stdin has input or ends
"""

import json
import select
import sys
import time

from bench.client import BenchError, Connection

_PAUSE_SECONDS = 0.02


def main(host: str, port: str) -> None:
    """Ask until there is input."""
    seconds: list[float] = []
    error = ""
    try:
        connection = Connection(host, int(port))
        while not select.select([sys.stdin], [], [], _PAUSE_SECONDS)[0]:
            connection.deadline = time.monotonic() + 60
            began = time.perf_counter()
            connection.call("environment/status", {})
            seconds.append(time.perf_counter() - began)
        connection.close()
    except (BenchError, OSError) as failure:
        error = str(failure)
    print(json.dumps({"seconds": seconds, "error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
