"""SQLite as the database of one node, with all calls on one thread of its own."""

from __future__ import annotations

import asyncio
import math
import os
import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

from exec_server.errors import StartupError
from exec_server.hosting.database import DatabaseUnavailable, Row, Step, newer_database

# The longest time for a transaction, with the wait for those before it and for other programs that
# have locked the file: the token commands write beside a running node. Peers wait 10 s for an
# answer, which may take several transactions.
STATEMENT_SECONDS: Final = 3.0
# The lock is waited for until the end of that time, in steps, because each new one is a statement.
_BUSY_STEP_SECONDS: Final = 0.5
# The first version with RETURNING.
LEAST_VERSION: Final = (3, 35, 0)

_NOW: Final = "((julianday('now') - 2440587.5) * 86400.0)"
T = TypeVar("T")


class SqliteDatabase:
    """One file; the directory is made if it is missing."""

    def __init__(self, path: Path) -> None:
        if sqlite3.sqlite_version_info < LEAST_VERSION:
            raise StartupError(
                f"SQLite {sqlite3.sqlite_version} is too old: version 3.35 or newer is needed"
            )
        self._path = path
        self._thread = ThreadPoolExecutor(1, "registry-database")
        self._connection: sqlite3.Connection | None = None
        self._busy_seconds = STATEMENT_SECONDS

    async def run(self, steps: Sequence[Step], *, durable: bool = False) -> list[list[Row]]:
        try:
            # A call whose time is over while it waits for its turn is not made at all.
            async with asyncio.timeout(STATEMENT_SECONDS):
                return await self._call(lambda connection: _run(connection, steps, durable=durable))
        except TimeoutError:
            raise DatabaseUnavailable("SQLite: another program has locked it") from None

    async def migrate(self, migrations: Sequence[Sequence[str]]) -> None:
        await self._call(lambda connection: _migrate(connection, migrations))

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + STATEMENT_SECONDS
        return await loop.run_in_executor(self._thread, self._work, work, deadline)

    def _work(self, work: Callable[[sqlite3.Connection], T], deadline: float) -> T:
        try:
            if self._connection is None:
                self._connection = _connect(self._path)
            self._limit_wait(self._connection, deadline - time.monotonic())
            return work(self._connection)
        except sqlite3.Error as error:
            raise DatabaseUnavailable(f"SQLite: {error}") from None

    def _limit_wait(self, connection: sqlite3.Connection, seconds: float) -> None:
        """Wait for a lock no longer than the call that has been waiting for its turn may take."""
        steps = max(math.ceil(seconds / _BUSY_STEP_SECONDS), 1)
        busy_seconds = steps * _BUSY_STEP_SECONDS
        if busy_seconds != self._busy_seconds:
            connection.execute(f"PRAGMA busy_timeout = {busy_seconds * 1000:.0f}")
            self._busy_seconds = busy_seconds


def _connect(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The mode is set by the creation, so that other users never see the file.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StartupError(f"cannot open {path}: {error.strerror}") from None
    connection = sqlite3.connect(
        path, timeout=STATEMENT_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _run(
    connection: sqlite3.Connection, steps: Sequence[Step], *, durable: bool
) -> list[list[Row]]:
    if len(steps) == 1 and not durable:
        [(statement, values)] = steps
        return [_execute(connection, statement, values)]
    if durable:
        connection.execute("PRAGMA synchronous = FULL")
    try:
        # IMMEDIATE: a transaction that reads first and writes later could not wait for the lock.
        connection.execute("BEGIN IMMEDIATE")
        try:
            rows = [_execute(connection, *step) for step in steps]
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        return rows
    finally:
        if durable:
            connection.execute("PRAGMA synchronous = NORMAL")


def _execute(connection: sqlite3.Connection, text: str, values: Sequence[Any]) -> list[Row]:
    # By name: Python 3.12 warns about a sequence of values for numbered parameters.
    named = {f"p{number}": value for number, value in enumerate(values, 1)}
    return connection.execute(translate(text), named).fetchall()


def _migrate(connection: sqlite3.Connection, migrations: Sequence[Sequence[str]]) -> None:
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute("CREATE TABLE IF NOT EXISTS meta (version bigint NOT NULL)")
        rows = connection.execute("SELECT version FROM meta").fetchall()
        version = rows[0][0] if rows else 0
        if version > len(migrations):
            raise newer_database(version, len(migrations))
        for statements in migrations[version:]:
            for text in statements:
                connection.execute(translate(text))
        connection.execute("DELETE FROM meta")
        connection.execute("INSERT INTO meta (version) VALUES (?)", (len(migrations),))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    finally:
        connection.execute("PRAGMA synchronous = NORMAL")


@lru_cache(128)
def translate(text: str) -> str:
    """A statement in SQLite's spelling."""
    text = text.replace("now()", _NOW).replace("CREATE UNLOGGED TABLE", "CREATE TABLE")
    return re.sub(r"\$(\d+)", r":p\1", text)
