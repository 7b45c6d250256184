"""The interface of a database engine.

SQLAlchemy takes 80 times as long to import as sqlite3 (`python -m bench.alternatives`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from exec_server.errors import ExecServerError, StartupError

Row = tuple[Any, ...]
Step = tuple[str, tuple[Any, ...]]  # a statement and its values


class DatabaseUnavailable(ExecServerError):
    """The database cannot be reached or does not answer; the text names no address."""


class Database(Protocol):
    """One engine. All methods raise DatabaseUnavailable."""

    async def run(self, steps: Sequence[Step], *, durable: bool = False) -> list[list[Row]]:
        """Run statements in one transaction and return the rows of each.

        `durable`: on disk when this returns. Otherwise a crash of the machine may undo it.
        """
        ...

    async def migrate(self, migrations: Sequence[Sequence[str]]) -> None:
        """Apply the migrations that the database lacks; raises StartupError if it is newer."""
        ...

    async def close(self) -> None: ...


def newer_database(found: int, known: int) -> StartupError:
    return StartupError(
        f"the database has version {found}, this program knows versions up to {known}: "
        "install the newer exec-server that wrote it"
    )
