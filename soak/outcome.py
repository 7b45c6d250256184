"""Plan and Outcome: the settings of a run and its results."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from soak.footprint import Footprint
from soak.leftovers import Leftovers
from soak.scenarios import Scenario
from soak.world import Finding, World

# After the last session has ended: timers, and memory that is given back within 10 s.
CALM_SECONDS = 12.0


@dataclass(frozen=True)
class Plan:
    """The settings of a run."""

    seconds: float
    seed: int
    clients: int
    scenarios: Sequence[Scenario]
    case: int | None = None  # the seed of a single scenario, to repeat a finding
    calm_seconds: float = CALM_SECONDS
    drains: bool = False  # wait until idle helpers have ended, too

    @property
    def is_quick(self) -> bool:
        """Whether the run is too short to judge memory and threads."""
        return self.seconds < 60

    @property
    def warm_up_seconds(self) -> float:
        """A sixth of the traffic, but enough to fill every pool and not an hour."""
        return min(60.0, max(3.0, self.seconds / 6))


@dataclass
class Outcome:
    """What one run has shown."""

    label: str
    plan: Plan
    world: World
    traffic_seconds: float = 0.0
    scenarios_run: int = 0
    fresh: Footprint | None = None  # after one request
    warm: Footprint | None = None
    end: Footprint | None = None
    drained: Footprint | None = None
    peak_resident: int = 0
    ping_seconds: list[float] = field(default_factory=list)
    stop_seconds: float = 0.0
    after_stop: Leftovers | None = None
    after_kill: Leftovers | None = None

    @property
    def findings(self) -> list[Finding]:
        """All violations."""
        return self.world.findings

    def violate(self, phase: str, text: str) -> None:
        """Record a violation outside of the scenarios."""
        self.world.findings.append(Finding(phase, 0, text))
