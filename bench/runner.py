"""Runs each workload on all servers in turns."""

import gc
import os
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field

from bench.awake import cores_awake
from bench.busy import core_busy
from bench.client import BenchError, HangError
from bench.remote import Executor, Service, executor, service
from bench.servers import Running, Server, running
from bench.stage import Stage
from bench.workloads import Workload

BARE = "bare"
_RELAYED = " behind the relay"

# Rounds and seconds per turn: enough samples for a steady median in bounded time.
FULL_SECONDS, QUICK_SECONDS = 1.0, 0.3
_WARM_UP_SECONDS = 0.3


@dataclass
class Result:
    """The result of one workload: samples by label, and the reason where there are none."""

    workload: Workload
    samples: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    failed: bool = False


class Runner:
    """Keeps one running server of each kind and runs the workloads on them in turns."""

    def __init__(
        self, servers: list[Server], folder: str, rounds: int, *, quick: bool, awake: bool
    ) -> None:
        self._servers = servers
        self._folder = folder
        self._rounds = rounds
        self._quick = quick
        self._awake = awake
        self._running: dict[str, tuple[Running | Executor, ExitStack]] = {}
        self._relay: tuple[Service, ExitStack] | None = None
        self.versions: dict[str, str] = {}

    def close(self) -> None:
        """Stops all servers."""
        for label in list(self._running):
            self._discard(label)
        if self._relay is not None:
            self._relay[1].close()

    def measure(self, workload: Workload) -> Result:
        """Runs one workload on every server and on the bare kernel, in turns."""
        result = Result(workload)
        stages = {label: self._stage(label) for label in [BARE] if workload.bare}
        stages |= {server.label: self._stage(server.label, server) for server in self._servers}
        rounds = min(self._rounds, workload.rounds or self._rounds)
        awake = self._awake and workload.awake
        surroundings = core_busy if workload.busy else cores_awake if awake else nullcontext
        # Round 0 warms up: pages, caches and the server's lazy parts.
        for number in range(rounds + 1):
            for label, stage in list(stages.items()):
                stage.samples = workload.samples if number else max(1, workload.samples // 10)
                if not number:
                    stage.seconds = _WARM_UP_SECONDS
                else:
                    stage.seconds = QUICK_SECONDS if self._quick else FULL_SECONDS
                try:
                    with surroundings():
                        taken = self._turn(workload, stage)
                except (BenchError, OSError) as error:
                    self._fail(result, label, error)
                    del stages[label]
                    continue
                if number:
                    result.samples.setdefault(label, []).extend(taken)
        for stage in stages.values():
            if stage.link is not None:
                stage.link.close()
        return result

    def _stage(self, label: str, server: Server | None = None) -> Stage:
        shared = os.path.join(self._folder, "shared")
        own = os.path.join(self._folder, label)
        os.makedirs(shared, exist_ok=True)
        os.makedirs(own, exist_ok=True)
        return Stage(shared, own, self._quick, server)

    def _turn(self, workload: Workload, stage: Stage) -> list[float]:
        gc.collect()
        gc.disable()
        try:
            if stage.server is None:
                assert workload.bare is not None
                return workload.bare(stage)
            if workload.isolated:
                return self._isolated_turn(workload, stage, stage.server)
            if workload.rounds is None:
                find = self._executor if workload.relayed else self._server
                stage.running = find(stage.server)
                if workload.connected and stage.link is None:
                    stage.link = stage.running.connect()
            return workload.turn(stage)
        finally:
            gc.enable()

    def _isolated_turn(self, workload: Workload, stage: Stage, server: Server) -> list[float]:
        with running(server, stage.folder) as stage.running:
            stage.link = stage.running.connect()
            try:
                return workload.turn(stage)
            finally:
                stage.link.close()
                stage.link = None

    def _server(self, server: Server) -> Running | Executor:
        if server.label not in self._running:
            stack = ExitStack()
            started = stack.enter_context(running(server, self._folder))
            self._running[server.label] = started, stack
            connection = started.connect()
            self.versions[server.label] = connection.version()
            connection.close()
        return self._running[server.label][0]

    def _executor(self, server: Server) -> Running | Executor:
        """The same server in remote mode, at a relay that all of them share."""
        label = server.label + _RELAYED
        if self._relay is None:
            stack = ExitStack()
            self._relay = stack.enter_context(service()), stack
        if label not in self._running:
            stack = ExitStack()
            started = stack.enter_context(executor(server, self._folder, self._relay[0]))
            self._running[label] = started, stack
        return self._running[label][0]

    def _discard(self, label: str) -> None:
        if label in self._running:
            self._running.pop(label)[1].close()

    def _fail(self, result: Result, label: str, error: Exception) -> None:
        """Records that a server failed; the next workload gets a new one."""
        hangs = isinstance(error, HangError)
        result.notes[label] = "hangs" if hangs else "fails"
        result.samples.pop(label, None)
        if not (hangs and result.workload.hang_is_result):
            result.failed = True
            print(f"{result.workload.name}: {label}: {error}", file=sys.stderr)
        self._discard(label + _RELAYED if result.workload.relayed else label)
