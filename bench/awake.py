"""Keeps the processor cores awake while something is measured.

A core with nothing to do halts, and on a virtual machine waking it costs up to 100 µs: more than
a whole request, different each time, and the same for every server. A loop of the scheduling
class SCHED_IDLE on each core prevents that; it gives way at once to whoever else wants to run.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Ends by itself when the benchmark is gone, however that ended.
_LOOP = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = int(sys.argv[2])
while os.getppid() == parent:
    for _ in range(100000):
        pass
"""


@contextmanager
def cores_awake() -> Iterator[None]:
    """Runs one such loop on each core while the block lasts."""
    loops = []
    try:
        for core in sorted(os.sched_getaffinity(0)):
            command = [sys.executable, "-S", "-c", _LOOP, str(core), str(os.getpid())]
            loops.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
