"""Listings of operands, with a target in memory."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from exec_server.cli.files.ls import Lister
from exec_server.cli.files.operands import Operand
from exec_server.client.results import Entry, Stat
from exec_server.errors import InvalidRequest, NotFound


class Files:
    """The directory `d` with the link `lost`, which leads nowhere, and the file `f`."""

    def __init__(self, *, can_list: bool = True) -> None:
        self._can_list = can_list

    async def stat(self, path: str) -> Stat:
        if path == "d/f":
            return Stat(False, True, False, 3, 0.0, None)
        raise NotFound(f"{path}: no such file")

    async def list(self, path: str, *, owners: bool) -> list[Entry]:
        if not self._can_list:
            raise InvalidRequest("no")
        assert path == "d"
        assert owners
        link = Entry("/d/lost", False, False, 7, 0.0, 0o777, "nowhere", "ann", "staff")
        return [Entry("/d/f", False, True, 3, 0.0, 0o644, None, "root", "0"), link]


def _operand(path: str, files: Files) -> Operand:
    class Environment:
        def __init__(self) -> None:
            self.files = files

    return Operand(cast(Any, Environment()), path, f"box:{path}")


@pytest.mark.parametrize(
    ("path", "is_long", "words"),
    [
        ("d/lost", False, ["d/lost"]),
        ("d/lost", True, ["lrwxrwxrwx", "ann", "staff", "7", "d/lost", "->", "nowhere"]),
        ("d/f", True, ["-rw-r--r--", "root", "0", "3", "d/f"]),
    ],
)
def test_an_operand_that_is_no_directory(
    path: str, is_long: bool, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    lister = Lister(is_long=is_long)
    asyncio.run(lister(_operand(path, Files())))
    shown = capfd.readouterr().out.split()
    assert [*shown[:4], *shown[6:]] == words if is_long else shown == words


def test_sizes_with_units(capfd: pytest.CaptureFixture[str]) -> None:
    lister = Lister(is_long=True, has_units=True)
    asyncio.run(lister(_operand("d/f", Files())))
    assert capfd.readouterr().out.split()[3:5] == ["3", "B"]


@pytest.mark.parametrize(
    ("is_symlink", "is_file", "mode"),
    [(False, True, "-?????????"), (True, True, "l?????????"), (False, False, "??????????")],
)
def test_what_a_server_does_not_tell_is_a_question_mark(
    is_symlink: bool, is_file: bool, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    class Older(Files):
        async def stat(self, path: str) -> Stat:
            return Stat(False, is_file, is_symlink, 3, 0.0, None)

    asyncio.run(Lister(is_long=True)(_operand("d/f", Older(can_list=False))))
    assert capfd.readouterr().out.split()[:4] == [mode, "?", "?", "3"]


def test_columns_are_aligned(capfd: pytest.CaptureFixture[str]) -> None:
    class Directory(Files):
        async def stat(self, path: str) -> Stat:
            return Stat(True, False, False, 0, 0.0, None)

    asyncio.run(Lister(is_long=True)(_operand("d", Directory())))
    first, second = capfd.readouterr().out.splitlines()
    assert first.startswith("-rw-r--r-- root 0     ")
    assert second.startswith("lrwxrwxrwx ann  staff ")
    assert first.index("3  ") == second.index("7  ")


def test_the_members_of_a_link_that_leads_nowhere() -> None:
    lister = Lister(as_json=True)
    asyncio.run(lister(_operand("d/lost", Files())))
    [entry] = lister.members
    assert (entry["kind"], entry["symlink"], entry["target"]) == ("other", True, "nowhere")
    assert (entry["mode"], entry["owner"], entry["group"]) == ("0777", "ann", "staff")


@pytest.mark.parametrize("can_list", [True, False])
def test_a_missing_operand_is_an_error(can_list: bool) -> None:
    operand = _operand("d/missing", Files(can_list=can_list))
    with pytest.raises(NotFound, match="d/missing: no such file"):
        asyncio.run(Lister(as_json=True)(operand))
