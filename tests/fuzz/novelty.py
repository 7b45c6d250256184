"""Which inputs reach code that no input has reached before.

From Python 3.12 on, sys.monitoring reports each line once and is then silent, which costs next to
nothing. Before, sys.settrace reports every line, which makes an input several times as slow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[2] / "src" / "exec_server")

# A function that runs an action and returns the number of lines that were new in it.
Count = Callable[[Callable[[], object]], int]


@contextmanager
def counting() -> Iterator[Count]:
    """Count new lines of the package during the block; 0 if another tool traces already."""
    if sys.version_info >= (3, 12) and sys.monitoring.get_tool(sys.monitoring.COVERAGE_ID) is None:
        with _monitoring() as count:
            yield count
    elif sys.version_info < (3, 12) and sys.gettrace() is None:
        yield _traced()
    else:
        yield _uncounted


def _uncounted(action: Callable[[], object]) -> int:
    action()
    return 0


def _traced() -> Count:
    seen: set[tuple[str, int]] = set()

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return local(frame, event, argument)
        return None

    def count(action: Callable[[], object]) -> int:
        before = len(seen)
        sys.settrace(trace)
        try:
            action()
        finally:
            sys.settrace(None)
        return len(seen) - before

    return count


@contextmanager
def _monitoring() -> Iterator[Count]:
    if sys.version_info < (3, 12):
        raise NotImplementedError
    monitoring, tool = sys.monitoring, sys.monitoring.COVERAGE_ID
    found = 0

    def line(code: CodeType, number: int) -> Any:
        nonlocal found
        found += code.co_filename.startswith(PACKAGE)
        return monitoring.DISABLE

    def count(action: Callable[[], object]) -> int:
        nonlocal found
        found = 0
        action()
        return found

    monitoring.use_tool_id(tool, "exec-server-fuzz")
    monitoring.register_callback(tool, monitoring.events.LINE, line)
    monitoring.set_events(tool, monitoring.events.LINE)
    try:
        yield count
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.LINE, None)
        monitoring.free_tool_id(tool)
