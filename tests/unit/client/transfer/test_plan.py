"""The parts of transfers that need no server."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any, cast

import pytest

from exec_server.client.exceptions import SandboxDenied
from exec_server.client.results import NotCopied, Progress, Transfer
from exec_server.client.transfer import local_scan, plan
from exec_server.client.transfer.mirror import Item
from exec_server.client.transfer.plan import (
    CopyOptions,
    Rate,
    Tally,
    TreeCopy,
    for_each,
    is_final,
    join,
    part_path,
)
from exec_server.errors import InternalError, InvalidRequest, StdinClosed


def item(path: str, kind: str = "f", size: int = 0, modified: str = "1") -> Item:
    return Item(path, kind, 0o644, size, modified)


def fail(path: str, error: OSError) -> None:
    raise error


def test_the_same_content_has_the_same_part() -> None:
    first = part_path("/a/b", item("b", size=3))
    assert first == part_path("/a/b", item("b", size=3))
    assert first.startswith("/a/.b.")
    assert first != part_path("/a/b", item("b", size=4))
    assert first != part_path("/a/b", item("b", size=3, modified="2"))
    assert part_path("b", item("b")).startswith(".b.")
    longest = part_path("/" + "ü" * 127, item("x"))
    assert len(os.fsencode(longest)) <= 256


def test_paths_below_a_top() -> None:
    assert (join("/a", ""), join("/a/", "b"), join("/", "b")) == ("/a", "/a/b", "/b")


def test_a_tally_counts() -> None:
    told: list[Progress] = []
    tally = Tally(told.append, clock=lambda: 0.0)
    items = [item("", "d"), item("a", size=10), item("b", size=5), item("c", "l")]
    tally.expect(items)
    tally.resume("a", 4)
    tally.advance("a", 6)
    tally.finish("a")
    tally.left_out.append("x")
    error = InvalidRequest("b: no")
    tally.fail("b", error)
    assert told[-1] == Progress("a", 10, 15, 4, 1, 2)
    assert tally.result(items) == Transfer(1, 1, 1, 6, 4, ("x",), (NotCopied("b", error),))


def test_skipped_files_and_resumed_bytes_do_not_count_for_the_rate() -> None:
    told: list[Progress] = []
    now = 0.0
    tally = Tally(told.append, clock=lambda: now)
    now = 1.0
    tally.skip("a", 1000)
    tally.finish("a")
    tally.advance("b", 50)
    assert (told[-1].skipped_files, told[-1].bytes_per_second) == (1, 50.0)
    assert told[-1].done_bytes == 1050


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate(now=0.0)
    for second in range(1, 51):
        assert rate.update(100 * second, now=float(second)) == 100
    assert rate.update(5000, now=60.0) < 100
    assert [rate.update(5000, now=second) for second in (66.0, 67.0)][-1] == 0
    for step in range(10_000):
        rate.update(5000, now=70 + step * 0.01)
    assert len(rate._samples) <= plan.RATE_SAMPLES


@pytest.mark.parametrize(
    ("error", "is_hopeless"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EDQUOT, "x"), True),
        (OSError(errno.EACCES, "x"), False),
        (InternalError("x: No space left on device (os error 28)"), True),
        (InternalError("x: Quota exceeded (os error 122)"), True),
        (InvalidRequest("x: Permission denied (os error 13)"), False),
        (SandboxDenied("x: denied"), False),
    ],
)
def test_a_full_disk_is_the_end(error: Exception, is_hopeless: bool) -> None:
    copy = TreeCopy(cast(Any, None), cast(Any, None), None, None)
    with pytest.raises(type(error)):
        copy._fail("", error)
    if is_hopeless:
        with pytest.raises(type(error)):
            copy._fail("a", error)
    else:
        copy._fail("a", error)
        copy._fail("a", error)
        assert copy._tally.failed == [NotCopied("a", error)]
        items = [item("", "d"), item("a", "d"), item("a/b", "d"), item("a/b/c"), item("ab")]
        assert list(copy._not_failed(items)) == [items[0], items[4]]
    assert is_final(error) == is_hopeless


def test_errors_are_about_what_was_asked_for() -> None:
    what = item("b")
    part = part_path("/t/b", what)
    for error, text in (
        (InvalidRequest(f"{part}: no"), "/t/b: no"),
        (InvalidRequest(f"{part} to /t/b: no"), "/t/b: no"),
        (InvalidRequest("/t/b: no"), "/t/b: no"),
        (SandboxDenied(f"{part}: no"), "/t/b: no"),
        (OSError(errno.EIO, "no", part_path("h/b", what)), "[Errno 5] no: 'h/b'"),
        (OSError(errno.EIO, "no"), "[Errno 5] no: 'h/b'"),
        (OSError(errno.EIO, "no", "other"), "[Errno 5] no: 'other'"),
        (StdinClosed("no"), "no"),
    ):
        plain = plan._with_final_path(error, what, "h/b", "/t/b")
        assert (type(plain), str(plain)) == (type(error), text)


def test_the_first_failure_is_raised_alone() -> None:
    done: list[int] = []

    async def work(number: int) -> None:
        if number == 3:
            raise InvalidRequest("three")
        await asyncio.sleep(0)
        done.append(number)

    with pytest.raises(InvalidRequest, match="three"):
        asyncio.run(for_each(range(1000), work, 2))
    assert len(done) < 10


def test_a_tree_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_scan, "MAX_ENTRIES", 3)
    for name in "abc":
        (tmp_path / name).touch()
    with pytest.raises(InvalidRequest, match="more than 3 entries"):
        local_scan.scan(str(tmp_path), fail)
    assert plan.MAX_ENTRIES > 3


def test_the_time_of_an_item() -> None:
    assert Item("", "f", None, 5, "5 1500000000").time == 1.5  # as uploads write it
    assert Item("", "f", None, 5, "1.5000000000").time == 1.5  # as find prints it
    assert Item("", "f", None, 5, "1700000000.1234567890").time_ns == 1_700_000_000_123_456_789
    assert Item("", "f", None, 5, "-1.5").time_ns == -1_500_000_000
    assert Item("", "f", None, 5, "7").time_ns == 7_000_000_000


def test_the_measure_of_a_sync_is_checked() -> None:
    assert CopyOptions(sync="checksum").keep_times is False
    with pytest.raises(ValueError, match="sync must be 'time' or 'checksum', not 'size'"):
        CopyOptions(sync="size")  # type: ignore[arg-type]
