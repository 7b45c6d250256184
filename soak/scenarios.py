"""SCENARIOS: the table of everything that clients do during a soak."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from soak import commands, confined, files, helpers, links, programs
from soak.world import World

Action = Callable[[World, Random], Awaitable[None]]


@dataclass(frozen=True)
class Scenario:
    """A row of the table.

    `weight` is how often it is drawn. A `direct` one needs the address of the server, so it does
    not run through a relay. One that is `ours` is about processes that other servers do not have.
    """

    action: Action
    weight: int
    direct: bool = False
    ours: bool = False

    @property
    def name(self) -> str:
        """The name on the command line and in findings."""
        return self.action.__name__.replace("_", "-")


SCENARIOS = (
    Scenario(commands.small_output, 10),
    Scenario(commands.parallel_output, 4),
    Scenario(commands.large_output, 5),
    Scenario(commands.slow_reader, 4),
    Scenario(commands.trickle, 3),
    Scenario(commands.killed_output, 5),
    Scenario(commands.stdin, 5),
    Scenario(commands.unread_stdin, 3),
    Scenario(commands.terminal, 4),
    Scenario(commands.terminal_session, 3),
    Scenario(commands.tree, 4),
    Scenario(commands.stubborn, 2),
    Scenario(files.whole_files, 6),
    Scenario(files.file_blocks, 4),
    Scenario(files.walks, 3),
    Scenario(files.transfers, 3),
    Scenario(files.half_written, 3, direct=True),
    Scenario(files.watches, 3, direct=True),
    Scenario(files.errors, 3),
    Scenario(links.cut_output, 5, direct=True),
    Scenario(links.cut_input, 3, direct=True),
    Scenario(links.cut_files, 3, direct=True),
    Scenario(links.resumed_session, 4, direct=True),
    Scenario(links.poller, 4, direct=True),
    Scenario(links.stalled_client, 4, direct=True),
    Scenario(links.vanished_client, 4, direct=True),
    Scenario(links.crowd, 3, direct=True),
    Scenario(links.garbage, 4, direct=True),
    Scenario(links.http, 4),
    Scenario(confined.confined_commands, 5),
    Scenario(confined.read_only_commands, 4),
    Scenario(confined.confined_trees, 3),
    Scenario(confined.confined_files, 6),
    Scenario(helpers.killed_helper, 2, ours=True),
    Scenario(helpers.stopped_helper, 2, ours=True),
    Scenario(programs.blocking_client, 2, direct=True),
    Scenario(programs.exec_command, 2, direct=True),
    Scenario(programs.copy_command, 2, direct=True),
    Scenario(programs.server_on_pipes, 1, ours=True),
)
