"""SQLite: its settings, and a file that another program has locked."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from exec_server.hosting import sqlite_database
from exec_server.hosting.database import DatabaseUnavailable
from exec_server.hosting.sqlite_database import SqliteDatabase

INSERT = "INSERT INTO numbers (number) VALUES ($1)"


def play(path: Path, scene: Callable[[SqliteDatabase], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        database = SqliteDatabase(path)
        try:
            await database.migrate([["CREATE TABLE numbers (number bigint)"]])
            await scene(database)
        finally:
            await database.close()

    asyncio.run(run())


async def setting(database: SqliteDatabase, name: str) -> Any:
    [[(value,)]] = await database.run([(f"PRAGMA {name}", ())])
    return value


def test_the_settings_let_other_programs_write_beside_it(tmp_path: Path) -> None:
    async def scene(database: SqliteDatabase) -> None:
        assert await setting(database, "journal_mode") == "wal"
        assert await setting(database, "synchronous") == 1  # NORMAL
        assert await setting(database, "busy_timeout") == 3000
        await database.run([(INSERT, (1,))], durable=True)
        assert await setting(database, "synchronous") == 1

    play(tmp_path / "registry.db", scene)


def test_calls_in_a_queue_wait_for_a_lock_together_and_are_not_made_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "registry.db"
    other = sqlite3.connect(path, isolation_level=None)
    failed: list[str] = []

    async def scene(database: SqliteDatabase) -> None:
        async def insert(number: int) -> None:
            try:
                await database.run([(INSERT, (number,))])
            except DatabaseUnavailable as error:
                failed.append(str(error))

        other.execute("BEGIN IMMEDIATE")
        # One after the other they would wait 25 s.
        async with asyncio.timeout(15), asyncio.TaskGroup() as tasks:
            for number in range(50):
                tasks.create_task(insert(number))

    monkeypatch.setattr(sqlite_database, "STATEMENT_SECONDS", 0.5)
    try:
        play(path, scene)  # closes the database after the call that is being made
        other.execute("ROLLBACK")
        assert other.execute("SELECT count(*) FROM numbers").fetchone() == (0,)
    finally:
        other.close()
    assert len(failed) == 50
    assert set(failed) <= {"SQLite: another program has locked it", "SQLite: database is locked"}


def test_a_call_that_has_waited_for_its_turn_waits_less_for_a_lock(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "registry.db")
    connection = sqlite3.connect(":memory:", timeout=3)
    try:
        for left, expected in ((2.9, 3000), (1.2, 1500), (-1.0, 500), (3.0, 3000)):
            database._limit_wait(connection, left)
            assert connection.execute("PRAGMA busy_timeout").fetchone() == (expected,)
    finally:
        connection.close()
        asyncio.run(database.close())
