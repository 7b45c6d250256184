"""Members of archives that may be hostile: the rules of tarfile's data filter, and limits."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exec_server.client.exceptions import NotFound
from exec_server.client.transfer import archive as module
from exec_server.client.transfer.archive import ArchiveReader, ArchiveSource, Member, checked_member
from exec_server.client.transfer.batches import BATCH_BYTES, BATCH_FILES, FILE_BYTES
from exec_server.client.transfer.mirror import Item
from exec_server.client.transfer.open_file import BLOCK_BYTES
from exec_server.errors import InvalidRequest

pytestmark = pytest.mark.quick

LIMIT = 1 << 30


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def archive(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:  # noqa: A002
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=format) as file:
        for info, data in members:
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return made.getvalue()


def reader(data: bytes, limit: int = LIMIT) -> ArchiveReader:
    return ArchiveReader(ArchiveSource(data), limit)


def read(data: bytes, limit: int = LIMIT) -> list[Member]:
    found = reader(data, limit)
    members = []
    while group := found.next_group():
        members += group
    return members


# ---- the rules ------------------------------------------------------------------------

NAMES = [
    "a",
    "/a",
    "//a/b",
    "../a",
    "a/../b",
    "a/../../b",
    "..",
    ".",
    "./a",
    "...",
    "a/./b",
    "a//b",
]
LINKS = [
    *((name, target) for name in ("l", "d/l", "/d/l") for target in ("x", "../x", "../../x")),
    *(("l", target) for target in ("/x", "/etc/passwd", ".", "..", "d/../x", "a/../../x")),
]


def _verdict(info: tarfile.TarInfo, folder: Path) -> bool:
    """Whether tarfile accepts a member."""
    try:
        return tarfile.data_filter(info, str(folder)) is not None
    except tarfile.FilterError:
        return False


def _is_accepted(info: tarfile.TarInfo) -> bool:
    try:
        checked_member(info)
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_of_the_data_filter(name: str, tmp_path: Path) -> None:
    directory = member(name, tarfile.DIRTYPE)
    assert _is_accepted(directory) == _verdict(directory, tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize(("name", "target"), LINKS)
def test_links_are_those_of_the_data_filter(
    name: str, target: str, kind: bytes, tmp_path: Path
) -> None:
    info = member(name, kind, target)
    assert _is_accepted(info) == _verdict(info, tmp_path)


@pytest.mark.parametrize("mode", [0o644, 0o777, 0o6755, 0o1777, 0o4711, 0o022, 0o611, 0o000, 0o400])
def test_modes_are_those_of_the_data_filter(mode: int, tmp_path: Path) -> None:
    info = member("a", mode=mode)
    assert checked_member(info).mode == tarfile.data_filter(info, str(tmp_path)).mode


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"Z"])
def test_special_members_are_refused(kind: bytes) -> None:
    info = member("dev", kind)
    if kind != b"Z":
        assert not _verdict(info, Path("/none"))
        with pytest.raises(InvalidRequest, match="'dev' of the archive is refused: it is neither"):
            checked_member(info)
    else:
        assert not _is_accepted(info)


def test_members_without_a_name_are_refused() -> None:
    for info in (member("."), member("/"), member("l", tarfile.SYMTYPE), member("a\0b")):
        assert not _is_accepted(info)
    assert checked_member(member("./", tarfile.DIRTYPE)) == Item("", "d", None, 0, "")


def test_a_hard_link_names_a_member() -> None:
    assert checked_member(member("d/h", tarfile.LNKTYPE, "./d/../a")).target == "a"
    assert checked_member(member("d/s", tarfile.SYMTYPE, "../a")).target == "../a"


# ---- reading --------------------------------------------------------------------------

TREE = (
    (member("./d", tarfile.DIRTYPE), b""),
    (member("./d/a", mode=0o755), b"abc"),
    (member("d/é\udcff", mode=0o600), b""),
    (member("s", tarfile.SYMTYPE, "d/a"), b""),
)
ITEMS = [
    Member(Item("d", "d", None, 0, "")),
    Member(Item("d/a", "f", 0o755, 3, ""), b"abc"),
    Member(Item("d/é\udcff", "f", 0o600, 0, ""), b""),
    Member(Item("s", "l", 0o600 | 0o044, 0, "", "d/a")),
]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("packed", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_members_of_any_archive(format: int, packed: Callable[[bytes], bytes]) -> None:  # noqa: A002
    assert read(packed(archive(*TREE, format=format))) == ITEMS


def test_long_names_are_read() -> None:
    name = "/".join(["x" * 200] * 15)
    [found] = read(archive((member(name), b"1")))
    assert found.item.path == name


def test_a_large_file_is_read_in_blocks() -> None:
    large = bytes(range(256)) * (BLOCK_BYTES // 256 + 1)
    found = reader(archive((member("a"), b"1"), (member("l"), large), (member("z"), b"2")))
    first = found.next_group()
    assert [(each.item.path, each.data) for each in first] == [("a", b"1"), ("l", None)]
    assert found.next_block() == large[:BLOCK_BYTES]
    assert found.next_block() == large[BLOCK_BYTES:]
    assert found.next_block() == b""
    assert [each.item.path for each in found.next_group()] == ["z"]
    assert found.next_group() == []


def test_a_large_file_can_be_left_out() -> None:
    found = reader(archive((member("l"), bytes(FILE_BYTES + 1)), (member("z"), b"2")))
    found.next_group()
    found.skip_large()
    assert [each.item.path for each in found.next_group()] == ["z"]


def test_groups_are_limited() -> None:
    many = archive(*((member(str(number)), b"") for number in range(BATCH_FILES + 1)))
    found = reader(many)
    assert [len(found.next_group()) for _ in range(3)] == [BATCH_FILES, 1, 0]
    found = reader(archive(*((member(str(number)), bytes(FILE_BYTES)) for number in range(20))))
    assert len(found.next_group()) == BATCH_BYTES // FILE_BYTES


# ---- hostile and broken archives ------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"x" * 2000, gzip.compress(b"x" * 2000, mtime=0), b"\x1f\x8b12"],
    ids=["nothing", "a-byte", "bytes", "compressed-bytes", "half-a-head"],
)
def test_what_is_no_archive_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the archive cannot be read"):
        read(data)


def test_an_error_of_the_machine_that_has_the_archive_stays() -> None:
    def pieces() -> Iterator[bytes]:
        yield archive((member("a"), bytes(1000)))[:1000]
        raise NotFound("/a: No such file or directory")

    found = ArchiveReader(ArchiveSource(pieces()), LIMIT)
    with pytest.raises(NotFound, match="/a: No such file"):
        found.next_group()


def test_an_archive_that_ends_early_is_refused() -> None:
    whole = archive((member("a"), bytes(1000)))
    with pytest.raises(InvalidRequest, match="the archive cannot be read"):
        read(whole[:1000])
    whole = archive((member("a"), bytes(FILE_BYTES + 1)))
    found = reader(whole[:5000])
    assert len(found.next_group()) == 1
    for _ in range(2):  # the error stays
        with pytest.raises(InvalidRequest, match="the archive cannot be read"):
            found.skip_large()


@pytest.mark.parametrize("damage", [b"", b"x" * 512])
def test_a_damaged_header_is_not_the_end(damage: bytes) -> None:
    first, second = (member(name).tobuf() for name in "ab")
    data = first + (damage + second if damage else second[:300])
    with pytest.raises(InvalidRequest, match=r"the archive cannot be read: .* header"):
        read(data)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_many_headers_of_one_member_are_refused(kind: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the archive cannot be read"):
        read(member("x", kind).tobuf() * 1500 + member("a").tobuf())


def test_a_name_that_is_no_path_is_refused() -> None:
    longest = "a/" * (module.NAME_CHARACTERS // 2)
    assert len(read(archive((member(longest, tarfile.DIRTYPE), b"")))) == 1
    for info in (member(longest + "b"), member("l", tarfile.SYMTYPE, longest + "b")):
        with pytest.raises(InvalidRequest, match="a name has more than 4096 characters"):
            read(archive((info, b"")))


def test_the_sum_of_all_files_is_limited() -> None:
    data = archive((member("a"), bytes(10)), (member("b"), bytes(10)))
    assert len(read(data, limit=20)) == 2
    with pytest.raises(InvalidRequest, match="more than 19 bytes"):
        read(data, limit=19)
    claimed = member("a")
    claimed.size = 1 << 62
    with pytest.raises(InvalidRequest, match="more than"):
        read(claimed.tobuf(tarfile.GNU_FORMAT))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_huge_header_is_not_read_into_memory(kind: bytes) -> None:
    header = member("x", kind)
    header.size = 64 << 20
    pieces = iter([header.tobuf(tarfile.GNU_FORMAT), *[bytes(1 << 20)] * 64])
    found = ArchiveReader(ArchiveSource(pieces), LIMIT)
    with pytest.raises(InvalidRequest, match="a header of the archive has more than 1048576"):
        found.next_group()
    assert len(list(pieces)) > 55


def test_xz_data_is_read_like_that_of_its_command() -> None:
    data = archive((member("a"), bytes(range(256)) * 30))
    first, second = lzma.compress(data[:700]), lzma.compress(data[700:])
    assert [found.data for found in read(first + second)] == [bytes(range(256)) * 30]
    for broken in (first, first + b"\0\0", first + second[:100], first + b"x"):
        with pytest.raises(InvalidRequest, match="the archive cannot be read"):
            read(broken)


def test_a_decoder_of_xz_takes_little_memory() -> None:
    data = bytearray(lzma.compress(archive((member("a"), b"1"))))
    assert len(read(bytes(data))) == 1
    # The header of the first block: its size, flags, and a filter LZMA2 with its dictionary.
    end = 12 + (data[12] + 1) * 4 - 4
    assert data[14:16] == b"\x21\x01"
    data[16] = 40  # 4 GiB
    data[end : end + 4] = zlib.crc32(data[12:end]).to_bytes(4, "little")
    with pytest.raises(InvalidRequest, match="cannot be read: Memory usage limit exceeded"):
        read(bytes(data))


def test_the_number_of_members_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    assert len(read(archive(*TREE[:3]))) == 3
    with pytest.raises(InvalidRequest, match="more than 3 members"):
        read(archive(*TREE))
