"""Connections: the environments of a notebook, one for each target, open between its cells."""

from __future__ import annotations

import sys
import threading
from typing import Final

from exec_server import sync
from exec_server.cli.connection import describe_error, make_dialer
from exec_server.cli.targets import AccessOptions, Target
from exec_server.client.environment import Environment
from exec_server.errors import ExecServerError, StartupError
from exec_server.notebook.brief_errors import RemoteError
from exec_server.printable import printable

# More machines than a notebook works with; each has a thread and a connection.
MAX_OPEN: Final = 32

_Key = tuple[str, AccessOptions]


class Connections:
    """Opens environments at their first use, and again if their session was lost."""

    def __init__(self) -> None:
        self._open: dict[_Key, sync.Environment] = {}
        # Guards `_open`: kernels may run cells of one notebook in several threads (subshells).
        self._lock = threading.Lock()

    @property
    def labels(self) -> list[str]:
        """The TARGETs that are connected."""
        return sorted({label for label, _ in self._open})

    def get(self, target: Target) -> sync.Environment:
        """The environment of a target; raises UsageError or RemoteError."""
        try:
            with self._lock:
                return self._opened(target)
        except RemoteError:
            raise
        except StartupError as error:
            raise RemoteError(f"{target.label}: {error}") from None
        except ExecServerError as error:
            raise RemoteError(describe_error(error, target)) from None

    def _opened(self, target: Target) -> sync.Environment:
        key = (target.label, target.access)
        found = self._open.get(key)
        if found is not None and found.is_open:
            found.reconnect()
            return found
        if found is None and len(self._open) >= MAX_OPEN:
            raise RemoteError(f"{MAX_OPEN} targets are connected: close some by %remote_close")
        self._open[key] = sync.Environment(
            lambda: Environment(make_dialer(target, _print_line)),
            has_children=target.argv is not None,
        )
        return self._open[key]

    def close(self, labels: list[str]) -> list[str]:
        """Close the connections to these targets, or all; returns the names of the closed ones."""
        with self._lock:
            closed = [key for key in self._open if not labels or key[0] in labels]
            environments = [self._open.pop(key) for key in closed]
        for environment in environments:
            environment.close()
        return sorted({label for label, _ in closed})


def _print_line(line: str) -> None:
    """Show a line that a stdio target has written to its stderr."""
    print(printable(line), file=sys.stderr)
