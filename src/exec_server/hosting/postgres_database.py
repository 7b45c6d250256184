"""PostgreSQL as the database of a site of several nodes, by asyncpg (extra `cluster`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from exec_server.errors import StartupError, missing_package
from exec_server.hosting.database import DatabaseUnavailable, Row, Step, newer_database

# Connections of one node: statements take less than a millisecond, so more would only queue in
# the server instead of here.
POOL_CONNECTIONS: Final = 8
# The longest time for a connection and for a transaction. Clients wait 6 s for an answer.
CONNECT_SECONDS: Final = 3.0
STATEMENT_SECONDS: Final = 3.0
# Prepared statements of a connection: each statement of the registry once.
PREPARED: Final = 128

_NOW: Final = "(extract(epoch from clock_timestamp())::double precision)"
# Any number that no other program of the database uses for its own lock.
_MIGRATION_LOCK: Final = 7_311_048_221


class PostgresDatabase:
    """A pool of connections, opened with the first statement and again after each loss."""

    def __init__(self, url: str) -> None:
        try:
            import asyncpg
        except ImportError:
            text = missing_package("--database postgresql://…", "asyncpg", "cluster")
            raise StartupError(text) from None
        self._asyncpg: Any = asyncpg
        self._url = url
        self._pool: Any = None
        self._opening = asyncio.Lock()  # guards the creation of the pool
        self._failures = (
            OSError,
            TimeoutError,
            asyncpg.PostgresError,
            asyncpg.InterfaceError,
            asyncpg.InternalClientError,
        )

    async def run(self, steps: Sequence[Step], *, durable: bool = False) -> list[list[Row]]:
        try:
            async with asyncio.timeout(STATEMENT_SECONDS):
                pool = await self._open_pool()
                async with pool.acquire() as connection:
                    return await _run(connection, steps, durable=durable)
        except self._failures as error:
            raise _unavailable(error) from None

    async def migrate(self, migrations: Sequence[Sequence[str]]) -> None:
        try:
            pool = await self._open_pool()
            async with pool.acquire() as connection, connection.transaction():
                await _migrate(connection, migrations)
        except self._failures as error:
            raise _unavailable(error) from None
        except ValueError:
            # Its text and its traceback quote parts of the URL, which may be of the password.
            raise StartupError(
                "--database: the URL cannot be read; in a password write / as %2F, ? as %3F, "
                "# as %23 and [ as %5B"
            ) from None

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.terminate()

    async def _open_pool(self) -> Any:
        async with self._opening:
            if self._pool is None:
                self._pool = await self._asyncpg.create_pool(
                    self._url,
                    min_size=0,  # asyncpg would log tracebacks while the database is away
                    max_size=POOL_CONNECTIONS,
                    timeout=CONNECT_SECONDS,
                    command_timeout=STATEMENT_SECONDS,
                    statement_cache_size=PREPARED,
                    server_settings={
                        "application_name": "exec-server registry",
                        # A crash of the database may undo the last moments: nodes write their
                        # rows again. Tokens and registrations are committed with it on.
                        "synchronous_commit": "off",
                    },
                )
        return self._pool


async def _run(connection: Any, steps: Sequence[Step], *, durable: bool) -> list[list[Row]]:
    if len(steps) == 1 and not durable:
        [(statement, values)] = steps
        return [_rows(await connection.fetch(translate(statement), *values))]
    async with connection.transaction():
        if durable:
            await connection.execute("SET LOCAL synchronous_commit = on")
        return [_rows(await connection.fetch(translate(s), *v)) for s, v in steps]


def _rows(records: Sequence[Any]) -> list[Row]:
    return [tuple(record) for record in records]


async def _migrate(connection: Any, migrations: Sequence[Sequence[str]]) -> None:
    await connection.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
    await connection.execute("SET LOCAL synchronous_commit = on")
    await connection.execute("CREATE TABLE IF NOT EXISTS meta (version bigint NOT NULL)")
    version = await connection.fetchval("SELECT version FROM meta") or 0
    if version > len(migrations):
        raise newer_database(version, len(migrations))
    for statements in migrations[version:]:
        for text in statements:
            await connection.execute(text)
    await connection.execute("DELETE FROM meta")
    await connection.execute("INSERT INTO meta (version) VALUES ($1)", len(migrations))


def _unavailable(error: Exception) -> DatabaseUnavailable:
    # The text of the error may quote the URL, so only its class is told.
    name = type(error).__name__
    hint = _HINTS.get(name)
    return DatabaseUnavailable(f"PostgreSQL: {name}" + (f": {hint}" if hint else ""))


# What to do about the errors of a first start.
_HINTS: Final = {
    "InvalidPasswordError": "the user or the password is refused; the password is read from "
    "PGPASSFILE or PGPASSWORD",
    "InvalidAuthorizationSpecificationError": "the server does not let this user in",
    "InvalidCatalogNameError": "the server has no such database; `createdb` makes one",
    "InsufficientPrivilegeError": "the user may not create tables there",
    "ConnectionRefusedError": "no server answers at this host and port",
    "gaierror": "the name of the host is not known",
}


@lru_cache(128)
def translate(text: str) -> str:
    """A statement in PostgreSQL's spelling."""
    return text.replace("now()", _NOW)
