"""Keeps idle processor cores awake while single requests are timed.

A core with nothing to do halts, and on a virtual machine waking it costs up to 100 µs: more than
a whole request, different each time, and the same for every server. The kernel lets root ask
for idle cores that poll instead, for as long as a file is open.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_REQUEST_FILE = "/dev/cpu_dma_latency"


def can_keep_awake() -> bool:
    """Whether the kernel accepts the request from this user."""
    return os.access(_REQUEST_FILE, os.W_OK)


@contextmanager
def cores_awake() -> Iterator[None]:
    """Asks for a wake-up latency of zero while the block lasts; does nothing without root."""
    if not can_keep_awake():
        yield
        return
    request = os.open(_REQUEST_FILE, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(request, struct.pack("i", 0))
        yield
    finally:
        os.close(request)
