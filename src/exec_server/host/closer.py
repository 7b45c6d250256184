"""BackgroundCloser: closes descriptors of removed files in a thread.

The kernel deletes a removed file or directory when its last descriptor is closed. On ext4 the call
then waits for the disk, some milliseconds for each directory, and its caller learns nothing from
it.
"""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress
from typing import Final

# Descriptors that wait to be closed; further ones are closed by the caller, which is then as fast
# as the disk. A sixteenth of the descriptors that an ordinary process may have.
MAX_UNCLOSED: Final = 64


class BackgroundCloser:
    """Closes descriptors in a thread, which is started by the first one. Thread-safe."""

    def __init__(self) -> None:
        self._unclosed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _is_started
        self._is_started = False

    def close(self, descriptor: int) -> None:
        """Close a descriptor soon: at once if there is no thread, or too much for it to do."""
        if self._unclosed.qsize() < MAX_UNCLOSED and self._start():
            self._unclosed.put(descriptor)
        else:
            os.close(descriptor)

    def _start(self) -> bool:
        with self._lock:
            if not self._is_started:
                thread = threading.Thread(target=self._run, name="closer", daemon=True)
                with suppress(RuntimeError):  # no thread can be started now
                    thread.start()
                    self._is_started = True
            return self._is_started

    def _run(self) -> None:
        while True:
            with suppress(OSError):  # an error of the disk; the descriptor is closed
                os.close(self._unclosed.get())
