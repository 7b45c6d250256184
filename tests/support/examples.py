"""How many examples a property is tried with."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """A quarter of them, or all if EXEC_SERVER_TEST_EXAMPLES is "all", as `.ci/run` sets it."""
    return count if os.environ.get("EXEC_SERVER_TEST_EXAMPLES") == "all" else max(1, count // 4)
