"""Runs a soak on one server: warm-up, traffic, the end by SIGTERM, then the end by SIGKILL."""

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from bench.remote import Service, executor
from bench.servers import OURS, Server, running

from exec_server import connect
from soak import checks, footprint, leftovers
from soak.accounting import WrongBytes
from soak.cutter import http_origin
from soak.footprint import Footprint
from soak.leftovers import Leftovers
from soak.outcome import Outcome, Plan
from soak.phases import busy, probing, sampling
from soak.scenarios import Scenario
from soak.world import Finding, World

# A scenario that takes longer hangs; the slowest takes seconds on an idle machine.
SCENARIO_SECONDS = 120.0
# Our server gets this flag; the reference has no such flag and keeps sessions for 80 s.
OUR_RETENTION_SECONDS = 15
_REFERENCE_RETENTION_SECONDS = 80
# The helpers that a server starts before they are needed are there after this time.
_FRESH_SECONDS = 2.0
# Idle workers end after 60 s, prebuilt sandboxes after 120 s; a timer looks for them.
_DRAIN_SECONDS = 150.0
_STOP_SECONDS = 30.0


class Soak:
    """One server under test, in folders of its own; through a relay if there is one."""

    def __init__(
        self, server: Server, folder: Path, plan: Plan, relay: Service | None = None
    ) -> None:
        self._plan = plan
        self._relay = relay
        self._is_ours = server.label == OURS
        self._token = f"soak{os.getpid()}x{os.urandom(3).hex()}"
        self._folders = {name: folder / name for name in ("work", "tmp", "home", "log")}
        for path in self._folders.values():
            path.mkdir(parents=True)
        self._server = self._prepared(server)
        self._mounts = leftovers.mount_points()
        self._own: set[int] = set()

    def _prepared(self, server: Server) -> Server:
        environment = {
            "EXEC_SERVER_SOAK": self._token,
            "TMPDIR": str(self._folders["tmp"]),
            "HOME": str(self._folders["home"]),
        }
        command = [*server.command]
        if self._is_ours:
            command += ["--session-retention", str(OUR_RETENTION_SECONDS)]
        return dataclasses.replace(
            server, command=command, environment={**server.environment, **environment}
        )

    async def run(self) -> Outcome:
        """Run all phases."""
        self._own = {process.pid for process in footprint.below(os.getpid())}
        async with http_origin() as origin:
            with self._started(origin) as world:
                outcome = Outcome(world.label, self._plan, world)
                await self._soak(outcome)
                await self._stop(outcome)
            with self._started(origin) as world:
                await self._kill(world, outcome)
        return outcome

    @contextlib.contextmanager
    def _started(self, origin: str) -> Iterator[World]:
        """A server during the block."""
        log, label = str(self._folders["log"]), self._server.label
        with contextlib.ExitStack() as stack:
            if self._relay is None:
                started = stack.enter_context(running(self._server, log))
                process, host, port = started.process, started.host, started.port
                open_environment = lambda: connect(f"ws://{host}:{port}")  # noqa: E731
            else:
                relay = self._relay
                process = stack.enter_context(executor(self._server, log, relay)).process
                label, host, port = f"{label}, relayed", "", 0
                open_environment = lambda: connect(  # noqa: E731
                    registry=relay.url, environment_id=self._server.label, token=relay.token
                )
            yield World(
                label=label,
                process=process,
                host=host,
                port=port,
                folder=self._folders["work"],
                token=self._token,
                origin=origin,
                open_environment=open_environment,
            )

    # ---- traffic ----------------------------------------------------------------------

    async def _soak(self, outcome: Outcome) -> None:
        world, plan = outcome.world, self._plan
        if plan.case is not None:
            for scenario in plan.scenarios:
                await self._one(scenario, plan.case, outcome)
            return
        # The launcher is started by the first request with a policy, and is then kept.
        async with world.environment() as env:
            await env.files.sandboxed("read-only").stat("/")
        await asyncio.sleep(_FRESH_SECONDS)
        outcome.fresh = footprint.measure(world.pid)
        await self._traffic("warm-up", plan.warm_up_seconds, outcome)
        outcome.warm = await self._settled(world)
        world.tally.clear()
        outcome.scenarios_run = 0
        began = time.monotonic()
        async with probing(world, outcome), sampling(world.pid, outcome):
            await self._traffic("traffic", plan.seconds - plan.warm_up_seconds, outcome)
        outcome.traffic_seconds = time.monotonic() - began
        outcome.end = await self._settled(world)
        for line in checks.not_flat(outcome.warm, outcome.end, is_quick=plan.is_quick):
            outcome.violate("flatness", line)
        if plan.drains:
            await asyncio.sleep(_DRAIN_SECONDS)
            outcome.drained = footprint.measure(world.pid)
            for line in checks.not_drained(outcome.fresh, outcome.drained):
                outcome.violate("drain", line)

    async def _traffic(self, phase: str, seconds: float, outcome: Outcome) -> None:
        deadline = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._plan.clients):
                random = Random(f"{self._plan.seed}/{phase}/{number}")
                tasks.create_task(self._client(random, deadline, outcome))

    async def _client(self, random: Random, deadline: float, outcome: Outcome) -> None:
        """Draw and run scenarios until the time is over."""
        scenarios = self._plan.scenarios
        weights = [scenario.weight for scenario in scenarios]
        while time.monotonic() < deadline:
            (scenario,) = random.choices(scenarios, weights)
            await self._one(scenario, random.getrandbits(32), outcome)

    async def _one(self, scenario: Scenario, case: int, outcome: Outcome) -> None:
        """Run one scenario; each exception is a finding."""
        world = outcome.world
        outcome.scenarios_run += 1
        text = ""
        began = time.monotonic()
        scope = asyncio.timeout(SCENARIO_SECONDS)
        try:
            async with scope:
                await scenario.action(world, Random(case))
        except Exception as error:
            text = f"{type(_first(error)).__name__}: {_first(error)}"
            world.tally["wrong outputs"] += isinstance(_first(error), WrongBytes)
            if scope.expired():
                text = f"took longer than {SCENARIO_SECONDS:.0f} s"
        if text:
            text += f", after {time.monotonic() - began:.1f} s"
            world.findings.append(Finding(scenario.name, case, text))
            print(f"{world.label}: {scenario.name} (case {case}): {text}", file=sys.stderr)

    async def _settled(self, world: World) -> Footprint:
        """Wait until sessions have expired and memory was given back, then measure."""
        retention = OUR_RETENTION_SECONDS if self._is_ours else _REFERENCE_RETENTION_SECONDS
        await asyncio.sleep(retention + self._plan.calm_seconds)
        footprint.reap_orphans(world.pid)
        return await asyncio.to_thread(footprint.measure, world.pid)

    # ---- the end ----------------------------------------------------------------------

    async def _stop(self, outcome: Outcome) -> None:
        """SIGTERM, with commands still running."""
        process = outcome.world.process
        try:
            async with busy(outcome.world):
                began = time.monotonic()
                process.terminate()
                code = await asyncio.to_thread(process.wait, _STOP_SECONDS)
                outcome.stop_seconds = time.monotonic() - began
                if code != 0 and self._is_ours:
                    outcome.violate("SIGTERM", f"the server ended with exit code {code}")
        except subprocess.TimeoutExpired:
            outcome.violate("SIGTERM", f"the server still runs {_STOP_SECONDS:.0f} s later")
            process.kill()
        except Exception as error:
            outcome.violate("SIGTERM", f"{type(error).__name__}: {error}")
            process.kill()
        outcome.after_stop = await self._leftovers(outcome.world, "SIGTERM", outcome)

    async def _kill(self, world: World, outcome: Outcome) -> None:
        """SIGKILL, with commands still running."""
        try:
            async with busy(world):
                world.process.kill()
                await asyncio.to_thread(world.process.wait)
        except Exception as error:
            outcome.violate("SIGKILL", f"{type(error).__name__}: {error}")
            world.process.kill()
        outcome.after_kill = await self._leftovers(world, "SIGKILL", outcome)

    async def _leftovers(self, world: World, phase: str, outcome: Outcome) -> Leftovers:
        folders = [self._folders["work"], self._folders["tmp"]]
        port = world.port if world.is_direct else None
        found = await asyncio.to_thread(
            leftovers.find, self._token, self._own, folders, port, self._mounts
        )
        for line in found.summary():
            outcome.violate(phase, f"left behind: {line}")
        leftovers.remove(self._token, self._own, folders)
        footprint.reap_orphans(0)
        return found


def _first(error: Exception) -> Exception:
    """The first exception of a group, or the exception itself."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
