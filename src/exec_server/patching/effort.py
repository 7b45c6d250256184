"""Effort: bounds the processor time and the size of the texts of one patch or one list of edits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from exec_server.patching.model import PatchFailed

# Normal patches take milliseconds. Each search of a hostile one takes time in proportion to its
# file, and there may be a search for each line of the patch.
SECONDS: Final = 5.0
# Lines of a file that is patched, and of a patch: each one is an object of about 100 bytes.
MAX_LINES: Final = 1_000_000


class Effort:
    """The processor time since it was made, by a clock like `time.thread_time`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._end = clock() + SECONDS

    def check(self) -> None:
        """Raise PatchFailed if the time is over."""
        if self._clock() > self._end:
            raise PatchFailed(
                f"the change takes more than {SECONDS:g} s of processor time: split it, "
                "or write the whole file"
            )


# For programs that apply their own patches.
UNBOUNDED: Final = Effort(lambda: 0.0)


def check_lines(text: str, name: str) -> None:
    """Raise PatchFailed if the text has too many lines for a patch."""
    if text.count("\n") > MAX_LINES:
        raise PatchFailed(
            f"{name} has more than {MAX_LINES} lines: too many for a patch; "
            "write the whole file, or append to it"
        )
