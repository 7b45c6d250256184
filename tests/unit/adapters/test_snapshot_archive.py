"""Archives without special files."""

from __future__ import annotations

import io
import tarfile

import pytest

from exec_server.adapters.snapshot_archive import without_special_files

LONG = "./" + "directory/" * 30


def archive(*members: tuple[str, bytes, str]) -> io.BytesIO:
    """An archive of members: their names, types, and texts or link targets."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, kind, text in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind == tarfile.REGTYPE:
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))
            else:
                member.linkname = text
                tar.addfile(member)
    return made


FILES = (
    (".", tarfile.DIRTYPE, ""),
    ("./file", tarfile.REGTYPE, "x" * 1000),
    (f"{LONG}file", tarfile.REGTYPE, "deep"),
    ("./symlink", tarfile.SYMTYPE, "./pipe"),
    ("./hard link", tarfile.LNKTYPE, "./file"),
)


def test_an_archive_without_special_files_stays_as_it_is() -> None:
    made = archive(*FILES)
    assert without_special_files(made) is made
    assert made.tell() == 0
    empty = archive()
    assert without_special_files(empty).getvalue() == empty.getvalue()


def test_special_files_and_their_links_are_left_out() -> None:
    pipe = ("./pipe", tarfile.FIFOTYPE, "")
    device = (f"{LONG}device", tarfile.CHRTYPE, "")
    link = ("./link of pipe", tarfile.LNKTYPE, "./pipe")
    for members in ((pipe, *FILES, device, link), (*FILES[:3], device, pipe, link, *FILES[3:])):
        with tarfile.open(fileobj=without_special_files(archive(*members))) as tar:
            found = [
                (each.name, each.type, each.linkname or _text(tar, each))
                for each in tar.getmembers()
            ]
        assert found == list(FILES)


def _text(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = tar.extractfile(member)
    return "" if file is None else file.read().decode()


def test_a_damaged_archive_is_an_error() -> None:
    with pytest.raises(tarfile.TarError):
        without_special_files(io.BytesIO(b"x" * 512))
