"""RefusalLog: a line in the log for each refused request, within a bound.

A line has the id of the token, never the token. Peers decide how many requests are refused, and a
flood would fill the disk or hide the lines of others, so each tenant has its own number of lines a
minute, and the requests without a known token have one together. The rest is counted in one line.
"""

from __future__ import annotations

import json
import logging
from typing import Final

from exec_server.hosting.rules import is_environment_id

log = logging.getLogger(__name__)

# Lines of one tenant, and of all requests without a known token, in one period.
PERIOD_SECONDS: Final = 60.0
LINES_A_PERIOD: Final = 60
# Tenants with lines of their own in one period. Further ones share those of the unknown tokens.
TENANTS: Final = 1024
# An id that a peer invents may be as long as a request head.
SHOWN_CHARACTERS: Final = 128


class RefusalLog:
    """Counts the lines of one node in the current period."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(
        self,
        endpoint: str,
        status: int,
        reason: str,
        *,
        token_id: str = "",
        tenant: str = "",
        environment_id: str = "",
        peer: str = "",
    ) -> None:
        """Log one refusal; empty values are not known."""
        has_lines = tenant in self._counts or len(self._counts) < TENANTS
        owner = tenant if has_lines else ""
        count = self._counts[owner] = self._counts.get(owner, 0) + 1
        if count > LINES_A_PERIOD:
            return
        log.warning(
            "%s refused: %d reason=%s token=%s tenant=%s environment=%s peer=%s",
            endpoint,
            status,
            reason,
            token_id or "-",
            tenant or "-",
            _shown(environment_id),
            peer or "-",
        )

    def end_period(self) -> None:
        """Log how many refusals had no line, and begin anew."""
        counts, self._counts = self._counts, {}
        for tenant, count in counts.items():
            if count > LINES_A_PERIOD:
                log.warning(
                    "%d more requests were refused within %d s: tenant=%s",
                    *(count - LINES_A_PERIOD, PERIOD_SECONDS, tenant or "-"),
                )


def _shown(environment_id: str) -> str:
    """An id that is none is quoted, so that it cannot pose as another field of the line."""
    if not environment_id:
        return "-"
    if is_environment_id(environment_id):
        return environment_id
    return json.dumps(environment_id[:SHOWN_CHARACTERS])
