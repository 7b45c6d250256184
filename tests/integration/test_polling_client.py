"""Clients before 0.143 fetch the output of a command with process/read, and come late.

The notifications of the output only wake them up. They lose nothing of a burst.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.client import Server
from tests.support.polling_client import PollingClient

_BURST = 8_000_000
_BURSTS = 100
_LATE_SECONDS = 0.02


def test_bursts_are_read_whole_by_a_client_that_polls(server: Server, tmp_path: Path) -> None:
    burst = os.urandom(_BURST)
    (tmp_path / "burst").write_bytes(burst)
    with PollingClient(server.url) as client:
        for number in range(_BURSTS):
            start = {
                "processId": f"burst-{number}",
                "argv": ["cat", str(tmp_path / "burst")],
                "cwd": str(tmp_path),
                "env": {"PATH": os.environ["PATH"]},
                "tty": False,
                "pipeStdin": False,
                "arg0": None,
            }
            output = client.output(start, delay=_LATE_SECONDS)
            assert output == burst, f"{len(output)} bytes of burst {number}"
