"""Archives that are unpacked on a machine that is the test."""

from __future__ import annotations

import asyncio
import errno
import os
import tarfile
from typing import Any, cast

import pytest
from tests.unit.client.transfer.test_archive import archive, member

from exec_server.client.exceptions import IsADirectory, NoSpace, SandboxDenied
from exec_server.client.results import Result, Stat, Transfer
from exec_server.client.transfer import archive as module
from exec_server.client.transfer.archive import ArchiveUpload
from exec_server.client.transfer.batches import FILE_BYTES
from exec_server.errors import InvalidRequest, NotFound, ProgramNotFound, Unsupported
from exec_server.protocol.files import WriteFilesResult

pytestmark = pytest.mark.quick

LARGE = bytes(FILE_BYTES + 1)


class Writer:
    def __init__(self, machine: Machine, path: str) -> None:
        self._machine, self._path, self._data = machine, path, b""

    async def __aenter__(self) -> Writer:
        self._machine.check(self._path)
        return self

    async def write(self, data: bytes) -> None:
        self._data += data

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._machine.files[self._path] = self._data


class Machine:
    """Files, directories and commands; it is `files`, `commands` and `session` of an upload."""

    def __init__(self, *present: str, links: bytes = b"") -> None:
        self.directories = {"/", *present}
        self.files: dict[str, bytes] = {}
        self.modes: dict[str, str] = {}
        self.symlinks: dict[str, str] = {}
        self.requests: list[str] = []
        self.refused: dict[str, Exception] = {}
        self.found = Result(("find",), links, b"", 0, 0.0)

    def check(self, path: str) -> None:
        if path in self.refused:
            raise self.refused[path]
        if os.path.dirname(path) not in self.directories:
            raise NotFound(f"{path}: no such file")
        if path in self.directories:
            raise IsADirectory(f"{path}: is a directory")

    async def stat(self, path: str) -> Stat:
        if path not in self.directories:
            raise NotFound(path)
        return Stat(True, False, False, 0, 0.0, None)

    async def mkdir(self, path: str, *, parents: bool, exist_ok: bool) -> None:
        self.requests.append(f"mkdir {path}")
        if path in self.refused:
            raise self.refused[path]
        while path not in self.directories:
            self.directories.add(path)
            path = os.path.dirname(path)

    async def write(self, path: str, data: bytes) -> None:
        self.requests.append(f"write {path}")
        self.check(path)
        self.files[path] = data

    async def copy(self, source: str, target: str) -> None:
        self.check(target)
        self.files[target] = self.files[source]

    async def remove(self, path: str, *, missing_ok: bool) -> None:
        self.requests.append(f"remove {path}")
        self.check(path)

    def open(self, path: str, mode: str) -> Writer:
        if path in self.refused and isinstance(self.refused[path], Unsupported):
            raise self.refused[path]
        return Writer(self, path)

    async def call(self, call: Any, params: Any, *, is_retryable: bool) -> WriteFilesResult:
        self.requests.append(call.name)
        rest, failed = params.data, []
        for position, file in enumerate(params.value.files):
            path = file.path.native()
            try:
                self.check(path)
                self.files[path], self.modes[path] = rest[: file.size], f"{file.mode:o}"
            except Exception:  # the file is repeated by itself
                failed.append(position)
            rest = rest[file.size :]
        return WriteFilesResult(failed)

    async def run(self, argv: list[str], *, input: bytes = b"", **_: Any) -> Result:  # noqa: A002
        if argv[0] == "find":
            if isinstance(self.found, Exception):
                raise self.found
            return self.found
        words = [word.decode() for word in input.split(b"\0") if word]
        if "chmod" in argv:
            self.modes |= dict.fromkeys(words, argv[-1])
        else:
            self.symlinks |= dict(zip(words[1::2], words[::2], strict=True))
        return Result(tuple(argv), b"", b"", 0, 0.0)

    def unpack(
        self, *members: tuple[tarfile.TarInfo, bytes], batches: bool = True, limit: int = 1 << 30
    ) -> Transfer:
        this = cast(Any, self)
        upload = ArchiveUpload(this, this, None, None, "/t", session=this if batches else None)
        return asyncio.run(upload.unpack(archive(*members), limit))


TREE = (
    (member("./", tarfile.DIRTYPE), b""),
    (member("./d/e", tarfile.DIRTYPE), b""),
    (member("./a", mode=0o4755), b"1"),
    (member("./d/b"), b"2"),
    (member("./x/y/c"), b"3"),
    (member("./l", tarfile.SYMTYPE, "d/b"), b""),
    (member("./h", tarfile.LNKTYPE, "./a", mode=0o755), b""),
    (member("./large"), LARGE),
)


@pytest.mark.parametrize("batches", [True, False])
def test_all_kinds_of_members(batches: bool) -> None:
    machine = Machine()
    done = machine.unpack(*TREE, batches=batches)
    assert machine.files == {
        "/t/a": b"1",
        "/t/d/b": b"2",
        "/t/x/y/c": b"3",
        "/t/h": b"1",
        "/t/large": LARGE,
    }
    assert machine.directories == {"/", "/t", "/t/d", "/t/d/e", "/t/x", "/t/x/y"}
    assert machine.symlinks == {"/t/l": "d/b"}
    assert machine.modes == {
        "/t/a": "755",
        "/t/h": "755",
        **dict.fromkeys(("/t/d/b", "/t/x/y/c", "/t/large"), "644"),
    }
    assert (done.files, done.directories, done.links) == (5, 5, 1)
    assert done.copied_bytes == 3 + len(LARGE)
    assert (done.left_out, done.failed) == ((), ())
    assert ("fs/writeFiles" in machine.requests) == batches


def test_of_members_with_one_name_the_last_one_counts() -> None:
    machine = Machine()
    link = (member("a", tarfile.SYMTYPE, "x"), b"")
    machine.unpack((member("a"), b"1"), link, (member("a"), b"2"), (member("b"), b"1"))
    assert (machine.files["/t/a"], machine.symlinks) == (b"2", {})
    machine.unpack((member("a"), b"1"), (member("b"), b""), link)
    assert machine.symlinks == {"/t/a": "x"}


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([(member("../x"), b"")], "leads out of the directory"),
        ([(member("dev", tarfile.CHRTYPE), b"")], "neither file, directory nor link"),
        ([(member("l", tarfile.SYMTYPE, "/etc"), b"")], "an absolute path"),
        ([(member("l", tarfile.SYMTYPE, "."), b""), (member("l/x"), b"")], "'l' is a symlink"),
        ([(member("h", tarfile.LNKTYPE, "x"), b"")], "no file of the archive before it"),
        (
            [(member("l", tarfile.SYMTYPE, "x"), b""), (member("h", tarfile.LNKTYPE, "l"), b"")],
            "no file of the archive before it",
        ),
    ],
)
def test_hostile_members_are_refused(
    members: list[tuple[tarfile.TarInfo, bytes]], reason: str
) -> None:
    machine = Machine()
    with pytest.raises(InvalidRequest, match=reason):
        machine.unpack(*members)
    assert (machine.files, machine.symlinks) == ({}, {})


def _links(*pairs: tuple[str, str]) -> list[tuple[tarfile.TarInfo, bytes]]:
    return [(member(path, tarfile.SYMTYPE, target), b"") for path, target in pairs]


@pytest.mark.parametrize(
    "links",
    [
        [("a/b/c", "../.."), ("d", "a/b/c/../..")],
        [("d", "a/b/c/../.."), ("a/b/c", "../..")],
        [("a/b", ".."), ("c", "a/b"), ("d", "a/x/../../c/..")],
        [("present/d", "../l/.."), ("l", "there")],  # `there` is in the directory
    ],
)
def test_a_link_that_leads_out_through_others_is_refused(links: list[tuple[str, str]]) -> None:
    machine = Machine("/t", links=b"/t/there\0")
    with pytest.raises(InvalidRequest, match=r"'.*d' of the archive is refused: it leads out"):
        machine.unpack((member("f"), b"1"), *_links(*links))
    assert machine.symlinks == {}


def test_links_that_stay_inside_are_made() -> None:
    links = {"a/b/c": "../..", "d": "a/b/c/a/b/../x", "e": "d", "s": "s", "p": "there/x"}
    machine = Machine("/t", links=b"/t/there\0/t/d\0")
    machine.unpack(*_links(*links.items()))
    assert machine.symlinks == {f"/t/{path}": target for path, target in links.items()}


def test_the_names_of_an_archive_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    # The directories above it have ten times as many characters as the name.
    deep = (member("a/" * 20 + "f"), b"1")
    machine = Machine()
    machine.unpack(deep)
    monkeypatch.setattr(module, "NAMES_CHARACTERS", 420)
    with pytest.raises(InvalidRequest, match="the names of the archive have more than 420"):
        machine.unpack(deep)
    machine.unpack(*_links(("a", "b" * 419)))
    with pytest.raises(InvalidRequest, match="the names of the archive have more than 420"):
        machine.unpack(*_links(("a", "b" * 420)))


# ---- a directory that exists ----------------------------------------------------------


def test_nothing_is_written_through_a_link_that_is_there() -> None:
    machine = Machine("/t", links=b"/t/out\0/t/d/l\0")
    for name, kind in (("out/x", tarfile.REGTYPE), ("out", tarfile.DIRTYPE), ("d/l/y/z", b"0")):
        with pytest.raises(InvalidRequest, match="is a symlink"):
            machine.unpack((member(name, kind), b""))
    machine.unpack((member("d/l"), b"1"))
    assert "remove /t/d/l" in machine.requests  # a link itself is replaced
    assert machine.files == {"/t/d/l": b"1"}
    machine.refused["/t/out"] = SandboxDenied("no", None)
    assert [each.path for each in machine.unpack((member("out"), b"")).failed] == ["out"]


@pytest.mark.parametrize(
    "found",
    [
        ProgramNotFound("find: not found"),
        Unsupported("sandbox", ""),
        Result(("find",), b"", b"find: /t/x: Permission denied\n", 1, 0.0),
        Result(("find",), b"", b"", 0, 0.0, lost_bytes=1),
    ],
)
def test_a_directory_whose_links_are_unknown_is_refused(found: Any) -> None:
    machine = Machine("/t")
    machine.found = found
    with pytest.raises(InvalidRequest, match=f"/t: {module._NEEDS_FIND}"):
        machine.unpack(*TREE)
    assert machine.files == {}


# ---- failures -------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [True, False])
def test_the_other_members_are_written(batches: bool) -> None:
    machine = Machine()
    machine.refused = {
        f"/t/{name}": SandboxDenied(f"/t/{name}: no", None) for name in ("a", "large", "d/e", "h")
    }
    more = (member("d/e/below"), b"4")
    done = machine.unpack(*TREE[:2], more, *TREE[2:], (member("z"), b"5"), batches=batches)
    assert sorted(each.path for each in done.failed) == ["a", "d/e", "h", "large"]
    assert sorted(machine.files) == ["/t/d/b", "/t/x/y/c", "/t/z"]


def test_a_directory_below_one_that_fails_is_left_out() -> None:
    machine = Machine()
    machine.refused["/t/d"] = SandboxDenied("/t/d: no", None)
    machine.refused["/t/d/e"] = machine.refused["/t/d"]
    members = [(member("d/e/b"), b"1"), (member("d/large"), LARGE), (member("c"), b"2")]
    hard = (member("d/h", tarfile.LNKTYPE, "c"), b"")
    done = machine.unpack(*members, hard)
    assert [each.path for each in done.failed] == ["d"]
    assert machine.files == {"/t/c": b"2"}


def test_a_large_file_that_cannot_be_written_in_blocks_is_left_out() -> None:
    machine = Machine()
    machine.refused["/t/large"] = Unsupported("fileWriteStreaming", "")
    done = machine.unpack((member("large"), LARGE), (member("b"), b"2"))
    assert [each.path for each in done.failed] == ["large"]
    assert machine.files == {"/t/b": b"2"}


def test_a_full_disk_ends_it() -> None:
    machine = Machine()
    full = NoSpace("/t/a: no space left on device (os error 28)")
    full.errno = errno.ENOSPC
    machine.refused["/t/a"] = full
    with pytest.raises(NoSpace):
        machine.unpack((member("a"), b"1"))


def test_an_archive_that_ends_early_leaves_no_part_of_a_file() -> None:
    machine = Machine()
    whole = archive((member("a"), b"1"), (member("large"), LARGE))
    upload = ArchiveUpload(cast(Any, machine), cast(Any, machine), None, None, "/t")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        asyncio.run(upload.unpack(whole[:4000], 1 << 30))
    assert machine.files == {"/t/a": b"1"}
    with pytest.raises(InvalidRequest, match="more than 5 bytes"):
        machine.unpack((member("b"), b"123456"), limit=5)
