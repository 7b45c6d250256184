"""WORKLOADS: the table of all measurements and their targets."""

from collections.abc import Callable
from dataclasses import dataclass

from bench import bare, commands, files, processes, resources, sandbox
from bench.stage import Stage

Turn = Callable[[Stage], list[float]]


@dataclass(frozen=True)
class Workload:
    """One row of the table.

    `ratio` is how many times better than the reference this server must be, `bare_ratio` how
    many times the bare kernel's time it may take, `limit` a bound in the unit of the row: the
    least rate, the most of anything else. An
    `isolated` workload gets a server of its own for each turn; one with `rounds` starts servers
    itself and takes at most so many turns. `awake` ones are timed with idle cores kept awake,
    `busy` ones while another program keeps a core busy. `relayed` ones reach a server in remote
    mode through a relay.
    """

    name: str
    title: str
    unit: str
    turn: Turn
    samples: int = 1
    bare: Turn | None = None
    ratio: float | None = None
    bare_ratio: float | None = None
    limit: float | None = None
    rounds: int | None = None
    isolated: bool = False
    connected: bool = True
    hang_is_result: bool = False
    awake: bool = False
    relayed: bool = False
    busy: bool = False

    @property
    def more_is_better(self) -> bool:
        """Whether samples are rates, not times or sizes."""
        return self.unit.endswith("/s")


# The factor from a sample (in seconds, bytes, or either per second) to its unit.
UNITS = {"µs": 1e6, "ms": 1e3, "MB": 1e-6, "KiB": 1 / 1024, "MB/s": 1e-6, "thousand/s": 1e-3}


def _request(
    name: str, title: str, turn: Turn, ratio: float, bare_turn: Turn | None = None
) -> Workload:
    """A row that times one small request after the other."""
    return Workload(name, title, "µs", turn, 1000, bare_turn, ratio, awake=True)


def _resource(
    name: str,
    title: str,
    unit: str,
    turn: Turn,
    *,
    limit: float | None = None,
    rounds: int = 5,
    bare_turn: Turn | None = None,
) -> Workload:
    """A row that starts its own servers, which takes too long for many rounds."""
    return Workload(
        name, title, unit, turn, bare=bare_turn, limit=limit, rounds=rounds, connected=False
    )


def _confined(name: str, title: str, turn: Turn, ratio: float) -> Workload:
    """A row of confined requests, of which the reference answers some twenty in a second."""
    return Workload(f"sandbox-{name}", title, "ms", turn, 6, ratio=ratio, awake=True)


def _confined_memory(name: str, title: str, turn: Turn) -> Workload:
    """A row about processes that are forked from one image: their memory hardly varies."""
    return _resource(f"sandbox-{name}", title, "MB", turn, rounds=1)


def _relayed(name: str, title: str, unit: str, turn: Turn, samples: int) -> Workload:
    """A row about clients that connect through a relay."""
    awake = unit != "MB/s"
    return Workload(
        f"relay-{name}", title, unit, turn, samples, ratio=1.2, awake=awake, relayed=True
    )


WORKLOADS = [
    _request("round-trip", "round trip", processes.round_trip, 1.5, bare.loopback),
    Workload(
        "busy-round-trip",
        "busy machine: round trip",
        "µs",
        processes.round_trip,
        1000,
        bare.loopback,
        1.2,
        busy=True,
    ),
    Workload("connect", "connect and initialize", "ms", processes.connect, 100),
    Workload(
        "pipelined",
        "5,000 pipelined requests",
        "thousand/s",
        processes.pipelined,
        limit=80,
        isolated=True,
        hang_is_result=True,
    ),
    Workload("spawn-pipe", "spawn on pipes", "ms", processes.spawn_pipe, 200, bare.spawn, 25, 1.7),
    Workload("spawn-pty", "spawn on a PTY", "ms", processes.spawn_pty, 200, bare.spawn, 25, 1.7),
    Workload("login-first", "first login shell, slow profile", "ms", processes.login_first, 3),
    Workload("login-again", "next login shell, slow profile", "ms", processes.login_again, 20),
    Workload(
        "spawn-parallel",
        "32 parallel spawns",
        "ms",
        processes.spawn_parallel,
        20,
        bare.spawn_parallel,
        3,
    ),
    Workload(
        "stream-pipe", "output stream", "MB/s", processes.stream_pipe, 1, bare.stream_pipe, 2.6
    ),
    Workload("stream-pty", "PTY stream", "MB/s", processes.stream_pty, 3, bare.stream_pty, 1.05),
    Workload(
        "small-chunks",
        "20,000 one-line writes",
        "thousand/s",
        processes.small_chunks,
        5,
        bare.small_chunks,
        1.5,
    ),
    _request("echo", "stdin to output", processes.echo, 100, bare.echo),
    _request("read-small", "read 1 KiB", files.read_small, 1.45),
    _request("metadata", "metadata", files.metadata, 1.45),
    _request("write-over", "overwrite 1 KiB", files.write_over, 2.8),
    _request("write-new", "create 1 KiB", files.write_new, 1.2),
    Workload("read-large", "read 32 MiB", "MB/s", files.read_large, 5, bare.read_large, 1.5),
    Workload("read-blocks", "32 MiB in blocks", "MB/s", files.read_blocks, 5, bare.read_large),
    Workload("directory", "directory of 2,000", "ms", files.directory, 50, ratio=1.6),
    Workload("walk", "walk of 5,000", "ms", files.walk, 20, ratio=2.7),
    _resource("listen", "start until URL", "ms", resources.listen, limit=75),
    _resource("first-answer", "start until first answer", "ms", resources.first_answer, limit=200),
    _resource(
        "stdio-answer",
        "start until first answer, on pipes",
        "ms",
        commands.stdio_answer,
        limit=commands.ANSWER_SECONDS * 1e3,
        bare_turn=bare.interpreter,
    ),
    *(
        _resource(
            f"exec-{kind}",
            f"exec true, {kind}",
            "ms",
            commands.exec_true(kind),
            limit=commands.EXEC_SECONDS * 1e3,
            bare_turn=bare.interpreter,
        )
        for kind in commands.KINDS
    ),
    _resource("idle-rss", "idle memory, RSS", "MB", resources.idle_resident, limit=38, rounds=3),
    _resource(
        "idle-pss", "idle memory, PSS", "MB", resources.idle_proportional, limit=23, rounds=3
    ),
    _resource("used-rss", "memory after first use, RSS", "MB", resources.used_resident, rounds=3),
    _resource(
        "idle-connection",
        "memory per idle connection",
        "KiB",
        resources.idle_connections,
        limit=10,
        rounds=2,
    ),
    _confined("write", "confined overwrite 1 KiB", sandbox.write, 60),
    _confined("create", "confined create 1 KiB", sandbox.create, 25),
    _confined("copy", "confined copy 1 KiB", sandbox.copy, 25),
    _confined("remove", "confined remove", sandbox.remove, 25),
    _confined("read", "restricted read 1 KiB", sandbox.restricted_read, 20),
    _confined("metadata", "restricted metadata", sandbox.restricted_metadata, 20),
    _confined("directory", "restricted directory of 20", sandbox.restricted_directory, 20),
    _request("sandbox-direct-read", "direct read 1 KiB", sandbox.direct_read, 1.2),
    _request("sandbox-direct-metadata", "direct metadata", sandbox.direct_metadata, 1.2),
    _request("sandbox-direct-path", "direct canonicalize", sandbox.direct_canonicalize, 1.2),
    _request("sandbox-direct-directory", "direct directory of 20", sandbox.direct_directory, 1.2),
    Workload("sandbox-spawn-pipe", "confined spawn on pipes", "ms", sandbox.spawn_pipe, 6, ratio=7),
    Workload("sandbox-spawn-pty", "confined spawn on a PTY", "ms", sandbox.spawn_pty, 6, ratio=7),
    Workload(
        "sandbox-spawn-paused",
        "confined spawn on pipes, with pauses",
        "ms",
        sandbox.spawn_paused,
        4,
        ratio=9,
    ),
    Workload(
        "sandbox-first",
        "first write of a policy, above the next",
        "ms",
        sandbox.first_of_policy,
        2,
        limit=15,
    ),
    _confined_memory("launcher-pss", "launcher, PSS", sandbox.launcher_memory),
    _confined_memory("worker-pss", "idle file worker, PSS", sandbox.worker_memory),
    _confined_memory("prebuilt-pss", "prebuilt sandbox, PSS", sandbox.prebuilt_memory),
    _confined_memory("init-pss", "init of a running command, PSS", sandbox.init_memory),
    _confined_memory("limit-pss", "all workers and prebuilt sandboxes, PSS", sandbox.limit_memory),
    _relayed("connect", "relay: connect and initialize", "ms", processes.connect, 50),
    _relayed("round-trip", "relay: round trip", "µs", processes.round_trip, 1000),
    _relayed("read-small", "relay: read 1 KiB", "µs", files.read_small, 1000),
    _relayed("read-large", "relay: read 32 MiB", "MB/s", files.read_large, 5),
    _relayed("stream", "relay: output stream", "MB/s", processes.stream_pipe, 1),
]
