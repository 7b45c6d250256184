"""Calls of the C library, in processes of their own: they change the whole process."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from exec_server.core.system import KEPT_BYTES

_GLIBC = hasattr(ctypes.CDLL(None), "gnu_get_libc_version")

# Takes and frees what a few blocks of a file take, again and again.
_BLOCKS = """
import resource, sys
from exec_server.core import system
if sys.argv[1] == "keep":
    system.keep_freed_memory()
for round in range(210):
    if round == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * 1_400_000 for _ in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

# What is left of many blocks after they were freed.
_LEFT = """
import os
from exec_server.core import system
def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
system.keep_freed_memory()
before = used()
blocks = [b"x" * 1_000_000 for _ in range(100)]
assert used() - before > 90_000_000
del blocks
system.return_freed_memory()
print(used() - before)
"""


def _printed(program: str, *words: str) -> int:
    argv = [sys.executable, "-c", program, *words]
    return int(subprocess.run(argv, check=True, capture_output=True).stdout)


@pytest.mark.skipif(not _GLIBC, reason="about the allocator of glibc")
def test_freed_memory_is_used_again() -> None:
    """Pages that the kernel has to give us anew, for 200 times 4 blocks of 342 pages."""
    assert _printed(_BLOCKS, "leave") > 10_000
    assert _printed(_BLOCKS, "keep") < 1_000


@pytest.mark.skipif(not _GLIBC, reason="about the allocator of glibc")
def test_only_a_little_of_freed_memory_is_kept() -> None:
    assert _printed(_LEFT) < KEPT_BYTES + 2_000_000
