"""Shared by the tests of the filesystem package."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exec_server.filesystem import nonblocking
from exec_server.filesystem.syscalls import RESOLVE_NO_MAGIC_LINKS, MountTable


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with one entry of every type."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"abc")
    Path("dir").mkdir()
    os.mkfifo("fifo")
    for name, target in {"flink": "file", "dlink": "dir", "dangling": "no", "loop": "loop"}.items():
        os.symlink(target, name)
    return tmp_path


class LocalMounts(MountTable):
    """The mount table of a machine without network or userspace file systems."""

    def slow_mounts(self) -> tuple[str, ...]:
        return ()


@pytest.fixture
def kernel_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups never need the disk.

    With RESOLVE_CACHED the kernel may refuse any lookup at any time, for example while memory
    is short or another process renames something; without the flag it always answers. A slow
    file system of the machine would make `nonblocking` leave links to threads.
    """
    monkeypatch.setattr(nonblocking, "_UNCONFINED", nonblocking._OpenModes(0))
    monkeypatch.setattr(nonblocking, "_CONFINED", nonblocking._OpenModes(RESOLVE_NO_MAGIC_LINKS))
    monkeypatch.setattr(nonblocking, "MOUNTS", LocalMounts())
    # A busy machine makes single writes slow.
    monkeypatch.setattr(nonblocking, "SLOW_WRITE_SECONDS", 60.0)
    monkeypatch.setattr(nonblocking, "_WRITE_GUARD", nonblocking.WriteGuard())
    monkeypatch.setattr(nonblocking, "_RECENT", nonblocking.RecentUses())
