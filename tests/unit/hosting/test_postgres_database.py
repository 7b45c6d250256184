"""Failures of PostgreSQL: they say what to do, and no part of a password."""

from __future__ import annotations

import asyncio
import socket
import traceback

import pytest

from exec_server.errors import StartupError
from exec_server.hosting import postgres_database
from exec_server.hosting.postgres_database import PostgresDatabase


@pytest.mark.parametrize("password", ["hush/hush", "hush#hush", "hush?hush", "hush[hush"])
def test_no_part_of_a_password_is_told(password: str) -> None:
    async def migrate() -> None:
        database = PostgresDatabase(f"postgresql://user:{password}@127.0.0.1:1/registry")
        try:
            await database.migrate([])
        finally:
            await database.close()

    with pytest.raises(StartupError, match="the URL cannot be read; in a password write") as caught:
        asyncio.run(migrate())
    assert "hush" not in "".join(traceback.format_exception(caught.value))


class InvalidPasswordError(Exception):
    """As asyncpg's."""


def test_failures_say_what_to_do_and_repeat_no_text() -> None:
    texts = {
        InvalidPasswordError("postgresql://u:secret@h/d"): "read from PGPASSFILE or PGPASSWORD",
        ConnectionRefusedError(111, "h:5432"): "ConnectionRefusedError: no server answers",
        socket.gaierror(-2, "h"): "the name of the host is not known",
    }
    for error, part in texts.items():
        text = str(postgres_database._unavailable(error))
        assert part in text
        assert "secret" not in text
    assert str(postgres_database._unavailable(KeyError("secret"))) == "PostgreSQL: KeyError"
