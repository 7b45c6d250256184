"""A download whose source is not what it seems."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from exec_server.client.results import Stat
from exec_server.client.transfer.download import Download
from exec_server.client.transfer.mirror import Item
from exec_server.client.transfer.remote_tree import Listing, RemoteTree
from exec_server.errors import InvalidRequest


class FakeFiles:
    async def stat(self, path: str) -> Stat:
        return Stat(True, False, False, 0, 1.5, None)


def test_a_top_that_is_called_a_symlink_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has followed it before; the next download would write through it."""

    async def scan(self: RemoteTree, source: str, *_: object, **options: object) -> Listing:
        listing = Listing(source)
        listing.add([Item("", "l", None, 1, "1", "/etc")])
        return listing

    monkeypatch.setattr(RemoteTree, "scan", scan)
    files: Any = FakeFiles()
    target = tmp_path / "x"
    with pytest.raises(InvalidRequest, match="/s: the file was changed"):
        asyncio.run(Download(files, files, None, None).copy("/s", str(target)))
    assert not target.is_symlink()
