"""How many examples a property is tried with."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """All of them if CI is set; a quarter on the machine of a developer."""
    return count if os.environ.get("CI") else max(1, count // 4)
