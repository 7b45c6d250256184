"""Tests inside a virtual machine with a kernel of Debian: `make test-kernel`.

`packages` makes a root file system and fetches a kernel, `archive` writes them as an initial
ramfs, `machine` boots it in qemu, and `guest` is its first process, which runs pytest.
"""
