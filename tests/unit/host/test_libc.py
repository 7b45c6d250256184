"""Calls of the C library, in processes of their own: they change the whole process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from exec_server.host import libc
from exec_server.host.libc import KEPT_BYTES

_GLIBC = hasattr(ctypes.CDLL(None), "gnu_get_libc_version")

# Allocates and frees the memory of a few file blocks, again and again.
_BLOCKS = """
import resource, sys
from exec_server.host import libc
if sys.argv[1] == "keep":
    libc.keep_freed_memory()
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
from exec_server.host import libc
def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
libc.keep_freed_memory()
before = used()
blocks = [b"x" * 1_000_000 for _ in range(100)]
assert used() - before > 90_000_000
del blocks
libc.return_freed_memory()
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


@pytest.mark.parametrize("way", ["close_range", "listing", "no /proc"])
def test_inherited_descriptors_are_closed_on_exec(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "close_range":
        monkeypatch.setattr(libc, "_SYS_CLOSE_RANGE", -1)  # as on an old kernel
    if way == "no /proc":
        monkeypatch.setattr(os, "listdir", _raise_not_found)
    low = os.dup(0)
    high = os.dup2(low, 700)
    try:
        os.set_inheritable(low, True)
        libc.close_inherited_descriptors_on_exec()
        assert not os.get_inheritable(low)
        assert not os.get_inheritable(high)
        assert os.get_inheritable(1)
    finally:
        os.close(low)
        os.close(high)


def _raise_not_found(path: str) -> list[str]:
    raise FileNotFoundError(2, os.strerror(2), path)


_ERASED = """
import ctypes, os, sys
from exec_server.host import libc
libc.erase_environment_values({"SECRET", "EMPTY"})
with open("/proc/self/environ", "rb") as file:
    print(sorted(item for item in file.read().split(b"\\0") if item))
print(os.environ["SECRET"], os.environ["secret"])
del os.environ["SECRET"]
os.execv("/usr/bin/env", ["env"])
"""


def test_erased_values_are_gone_from_the_environment_of_the_process() -> None:
    variables = {"SECRET": "hush-1", "secret": "hush-2", "EMPTY": "", "SECRETS": "loud=1"}
    argv = [sys.executable, "-I", "-u", "-c", _ERASED]
    ended = subprocess.run(argv, env=variables, check=True, capture_output=True)
    shown, copies, *inherited = ended.stdout.decode().splitlines()
    assert shown == str([b"EMPTY=", b"SECRET=", b"SECRETS=loud=1", b"secret="])
    assert copies == "hush-1 hush-2"
    assert {"SECRETS=loud=1", "EMPTY=", "secret="} <= set(inherited)
    assert not any(line.startswith("SECRET=") for line in inherited)


_ERASED_ARGUMENT = """
import sys
from exec_server.host import libc
print(libc.erase_argument("hush"), libc.erase_argument("absent-" + "word"))
with open("/proc/self/cmdline", "rb") as file:
    print(file.read().split(b"\\0")[-5:-1])
print(sys.argv[1:])
"""


def test_an_erased_argument_is_gone_from_the_list_of_processes() -> None:
    argv = [sys.executable, "-I", "-c", _ERASED_ARGUMENT, "--a", "hush", "--b=a hush", "husch"]
    ended = subprocess.run(argv, check=True, capture_output=True)
    outcome, shown, kept = ended.stdout.decode().splitlines()
    assert outcome == "True False"
    assert shown == str([b"--a", b"****", b"--b=a ****", b"husch"])
    assert kept == str(["--a", "hush", "--b=a hush", "husch"])
