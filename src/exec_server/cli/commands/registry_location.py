"""Where a registry listens and keeps its data, as the flags of `exec-server registry` say."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from exec_server.cli.commands.errors import UsageError
from exec_server.errors import StartupError
from exec_server.hosting.engines import check_database_url, may_hold_password

if TYPE_CHECKING:
    from exec_server.protocol.urls import Url

_HTTP: Final = frozenset({"http", "https"})


def data_directory(arguments: argparse.Namespace) -> Path:
    """The directory of the SQLite database."""
    if arguments.data is not None:
        return Path(arguments.data).absolute()
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(base) / "exec-server" / "registry"


def hide_password(arguments: argparse.Namespace) -> None:
    """Erase a --database with a password from the list of processes, which all users can read.

    Raises UsageError where this is not possible.
    """
    url: str | None = arguments.database
    if url is None or not may_hold_password(url):
        return
    if not _erase_argument(url):
        raise UsageError(
            "--database: other users could read its password in the list of processes; use "
            "--database-url-file, or keep the password in PGPASSFILE"
        )


def _erase_argument(text: str) -> bool:
    try:
        from exec_server.host.libc import erase_argument
    except (ImportError, OSError, AttributeError):  # not Linux
        return False
    return erase_argument(text)


def database_url(arguments: argparse.Namespace) -> str | None:
    """The URL of the database, None for SQLite; raises UsageError for another database."""
    url: str | None = arguments.database
    if arguments.database_url_file is not None:
        try:
            url = Path(arguments.database_url_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            text = f"--database-url-file {arguments.database_url_file}: {error}"
            raise UsageError(text) from None
    if url is not None:
        try:
            check_database_url(url)
        except StartupError as error:
            raise UsageError(str(error)) from None
    return url


def checked_url(flag: str, text: str | None) -> Url | None:
    """The URL of a flag; raises UsageError."""
    if text is None:
        return None
    from exec_server.protocol.urls import parse_url

    try:
        url = parse_url(text, _HTTP)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
    if "?" in text or "#" in text:
        raise UsageError(f"{flag}: the URL must not have a query")
    return url


def normalised_url(url: str) -> str:
    """Rendezvous URLs begin with `ws` and the rest of the scheme, so it is in lower case."""
    scheme, separator, rest = url.partition("://")
    return scheme.lower() + separator + rest.rstrip("/")
