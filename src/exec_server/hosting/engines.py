"""The database engine that a command line names; each one is imported only when it is used."""

from __future__ import annotations

from pathlib import Path

from exec_server.errors import StartupError
from exec_server.hosting.database import Database


def check_database_url(url: str) -> None:
    """Raise StartupError for a --database URL of an engine that is not supported."""
    if not url.startswith(("postgresql://", "postgres://")):
        # The text of a URL may hold a password, so it is not repeated.
        raise StartupError("--database: expected a URL that begins with postgresql://")


def may_hold_password(url: str) -> bool:
    """Whether a --database URL has a password, as far as its text shows; True if in doubt."""
    user = url.partition("://")[2].rpartition("@")[0]
    return ":" in user or "password" in url.lower()


def open_database(url: str | None, directory: Path) -> Database:
    """The engine for a --database URL, None for SQLite in a directory; raises StartupError."""
    if url is None:
        from exec_server.hosting.sqlite_database import SqliteDatabase

        return SqliteDatabase(directory / "registry.db")
    check_database_url(url)
    from exec_server.hosting.postgres_database import PostgresDatabase

    return PostgresDatabase(url)
