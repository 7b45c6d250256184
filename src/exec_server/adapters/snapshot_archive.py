"""Archives of workspaces, for adapters whose framework stores them."""

from __future__ import annotations

import io
import tarfile


def without_special_files(archive: io.BytesIO) -> io.BytesIO:
    """A tar archive without FIFOs, devices, and hard links of them; it is not compressed.

    An archive with one of these would be refused when it is unpacked. Raises tarfile.TarError if it
    is damaged.
    """
    archive.seek(0)
    with tarfile.open(fileobj=archive, mode="r:") as tar:
        members = tar.getmembers()
        end = tar.offset
    special = {member.name for member in members if _is_special(member)}
    archive.seek(0)
    if not special:
        return archive
    data, kept = archive.getbuffer(), io.BytesIO()
    # The offset of a member is that of its first header: long names have headers of their own.
    ends = [*(member.offset for member in members[1:]), end]
    for member, member_end in zip(members, ends, strict=True):
        is_link_of_special = member.islnk() and member.linkname in special
        if member.name not in special and not is_link_of_special:
            kept.write(data[member.offset : member_end])
    kept.write(data[end:])
    kept.seek(0)
    return kept


def _is_special(member: tarfile.TarInfo) -> bool:
    return not (member.isreg() or member.isdir() or member.issym() or member.islnk())
