"""Stage: the server, connection, folder and budget of one turn of a workload."""

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.client import BenchError, Connection
from bench.remote import Executor, Relayed
from bench.servers import Running, Server

# The limit of one turn.
TURN_SECONDS = 60.0


@dataclass
class Stage:
    """Everything a turn may use; `connection` and `running` are None for the bare kernel.

    `shared` is the folder that all servers read, `folder` the one that this server writes.
    """

    shared: str
    folder: str
    quick: bool
    server: Server | None = None
    running: Running | Executor | None = None
    link: Connection | Relayed | None = None
    samples: int = 1
    seconds: float = 1.0
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def connection(self) -> Connection | Relayed:
        """The open connection of a workload that needs one."""
        assert self.link is not None
        return self.link

    def fresh_name(self, kind: str) -> str:
        """Makes a name that this stage has not used before."""
        return f"{kind}-{next(self.numbers)}"


def sample(stage: Stage, operation: Callable[[int], object], pause: float = 0.0) -> list[float]:
    """Times the operation until the stage's samples or seconds are used up.

    `pause` is the time before each operation, which does not count.
    """
    if stage.link is not None:
        stage.link.deadline = time.monotonic() + TURN_SECONDS
    clock = time.perf_counter
    deadline = clock() + stage.seconds
    taken = []
    for number in range(stage.samples):
        if pause:
            time.sleep(pause)
        began = clock()
        operation(number)
        ended = clock()
        taken.append(ended - began)
        if ended > deadline:
            break
    return taken


def expect(condition: bool, what: str) -> None:
    """Raises BenchError if an answer is wrong; `what` names the request."""
    if not condition:
        raise BenchError(f"wrong answer: {what}")


def shared_file(stage: Stage, name: str, size: int) -> str:
    """Makes, once per run, a file of text lines that all servers read."""
    path = os.path.join(stage.shared, name)
    if not os.path.exists(path):
        line = b"the quick brown fox jumps over the lazy dog and then does it once more, ok\n"
        with open(path, "wb") as file:
            file.write((line * (size // len(line) + 1))[:size])
    return path
