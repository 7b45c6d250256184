"""World: the server, folders, counters and violations that the scenarios of one run share."""

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from exec_server import Environment, connect
from soak import footprint
from soak.accounting import Account, seeded_bytes

CHILD = str(Path(__file__).with_name("child.py"))
# How long processes may take to disappear after they were killed, on a machine that is busy.
GONE_SECONDS = 20.0
_POLL_SECONDS = 0.02


class Violation(Exception):
    """A guarantee was broken."""


def expect(condition: bool, text: str) -> None:
    """Raise Violation with this text unless the condition holds."""
    if not condition:
        raise Violation(text)


@dataclass(frozen=True)
class Finding:
    """A violation with the scenario and the seed that repeat it."""

    scenario: str
    case: int
    text: str


@dataclass
class World:
    """One server under test; `folder` is for the files of its clients.

    `token` is in the environment of the server and of all its descendants. Through a relay there
    is no `host` and no `port`.
    """

    label: str
    process: "subprocess.Popen[bytes]"
    host: str
    port: int
    folder: Path
    token: str
    origin: str  # the URL of the HTTP server that requests go to
    open_environment: Callable[[], Environment]
    tally: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    # Guards the helper processes of the server: one fault of them at a time.
    helper_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self.process.pid

    @property
    def is_direct(self) -> bool:
        """Whether clients can connect to the server itself."""
        return self.port != 0

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"ws://{self.host}:{self.port}"

    def environment(self, url: str | None = None) -> Environment:
        """A client of the server, or of a forwarder to it at this URL."""
        self.tally["clients"] += 1
        return self.open_environment() if url is None else connect(url)

    def name(self, kind: str) -> str:
        """A name that is used once; process titles and arguments of scenarios carry it."""
        return f"{kind}-{self.token}-{next(self._numbers)}"

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A folder of one scenario; nothing but its own files may be left in it."""
        path = Path(tempfile.mkdtemp(prefix="work-", dir=self.folder))
        try:
            yield path
        finally:
            shutil.rmtree(path)

    def printing(
        self,
        random: Random,
        size: int,
        *,
        piece: int = 65_536,
        pause: float = 0.0,
        errors: int | None = None,
    ) -> tuple[list[str], list[Account]]:
        """The argv of a command that prints, and accounts of its stdout and stderr."""
        seed = random.getrandbits(32)
        words = [str(seed), str(size), str(piece), str(pause)]
        accounts = [Account(seeded_bytes(seed, size))]
        if errors is not None:
            words += [str(seed + 1), str(errors)]
            accounts.append(Account(seeded_bytes(seed + 1, errors)))
        self.tally["commands"] += 1
        self.tally["bytes printed"] += size + (errors or 0)
        return self.child("print", *words), accounts

    def child(self, mode: str, *words: str) -> list[str]:
        """The argv of a command that runs `child.py`."""
        return [sys.executable, "-I", "-S", CHILD, mode, *words]

    def settle(self, *accounts: Account, abandoned: bool = False) -> None:
        """Close accounts and add them to the tally; an abandoned one may lack its end."""
        for account in accounts:
            self.tally["bytes received"] += account.received
            self.tally["bytes declared lost"] += account.declared
            if abandoned:
                self.tally["bytes of killed commands"] += account.missing
                continue
            account.close()

    async def gone(self, token: str, what: str) -> None:
        """Wait until no process holds the token; raises Violation if one stays."""
        deadline = time.monotonic() + GONE_SECONDS
        while left := await asyncio.to_thread(footprint.with_token, token):
            if time.monotonic() > deadline:
                names = ", ".join(f"{p.pid} {p.name}" for p in left)
                self.tally["processes left"] += len(left)
                for process in left:
                    _kill(process)
                raise Violation(f"{what}: still running after {GONE_SECONDS:.0f} s: {names}")
            await asyncio.sleep(_POLL_SECONDS)


def _kill(process: footprint.Process) -> None:
    """Kill a process that was found left behind, if it is still the same one."""
    if footprint.processes().get(process.pid) == process:
        os.kill(process.pid, 9)
