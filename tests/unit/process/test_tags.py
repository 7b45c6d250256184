"""Tags and marks, against the kernel: how they are chosen, inherited, changed and read."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from unittest import mock

import pytest
from tests.support.forked import in_own_process

from exec_server.host import descriptor_limit
from exec_server.process import tags
from exec_server.process.tags import (
    LOCKS,
    NO_TAG,
    RSS,
    SERVER_TAG,
    SERVER_TAGS,
    UNLIMITED,
    Plan,
    TagCarrier,
    choose_plan,
    tag_of,
)

_ALL = 1 << 62
_NESTED = 1 << 50
_LOW = 1000
_RANGE = tags._RANGE_SIZE


def _limits(locks: int, rss: int) -> Callable[[TagCarrier], int]:
    return lambda carrier: locks if carrier is LOCKS else rss


@pytest.mark.parametrize(
    ("locks", "rss", "expected"),
    [
        (UNLIMITED, UNLIMITED, Plan(LOCKS, _ALL, UNLIMITED)),
        (UNLIMITED, 0, Plan(LOCKS, _ALL, UNLIMITED)),
        (_NESTED, UNLIMITED, Plan(RSS, _ALL, UNLIMITED)),
        (_LOW, UNLIMITED, Plan(RSS, _ALL, UNLIMITED)),
        (_NESTED, _NESTED, Plan(LOCKS, _NESTED, 0)),
        (_LOW, _NESTED, Plan(RSS, _NESTED, 0)),
        (2 * _RANGE, 0, Plan(LOCKS, 2 * _RANGE, 0)),
        (2 * _RANGE - 1, 0, Plan(LOCKS, 0, 2 * _RANGE - 1)),
        (_LOW, _LOW, Plan(LOCKS, 0, _LOW)),
        (0, _LOW, Plan(RSS, 0, _LOW)),
        (0, 0, None),
    ],
)
def test_plan_depends_on_the_limits_of_the_server(
    locks: int, rss: int, expected: Plan | None
) -> None:
    plan = choose_plan(_limits(locks, rss), lambda _: False)
    assert plan == expected


def test_low_limits_are_raised_by_root() -> None:
    for low in (_LOW, 0):
        plan = choose_plan(_limits(low, low), lambda _: True)
        assert plan is not None
        assert plan == Plan(LOCKS, _ALL, 0)


def test_ranges_are_random_and_above_the_limits_that_people_set() -> None:
    ranges = {tags._random_range(_ALL) for _ in range(20)}
    assert len(ranges) > 1
    assert all(tags._RANGE_SIZE <= each.start < each.stop <= _ALL for each in ranges)
    assert tags._random_range(2 * tags._RANGE_SIZE).start == tags._RANGE_SIZE


@in_own_process
def test_commands_inherit_tags_that_decrease() -> None:
    tags.mark_this_process()
    found = []
    for _ in range(2):
        with tags.Tagged() as tag:
            child = subprocess.Popen(["/bin/sleep", "1000"])
        assert tag_of(child.pid) == tag
        assert tags.is_of_this_server(child.pid)
        found.append(tag)
        child.kill()
        child.wait()
    first, second = found
    assert second < first < SERVER_TAG == SERVER_TAGS[-1]
    assert second in SERVER_TAGS


@in_own_process
def test_tag_is_the_hard_limit_if_the_soft_one_was_changed() -> None:
    tags.mark_this_process()
    with tags.Tagged() as tag:
        child = subprocess.Popen(["/bin/sleep", "1000"])
    assert tags._PLAN is not None
    for soft in (5, 0, tag - 1, tag):
        resource.prlimit(child.pid, tags._PLAN.carrier.number, (soft, tag))
        assert tag_of(child.pid) == (tag - 1 if soft == tag - 1 else tag)
    resource.prlimit(child.pid, tags._PLAN.carrier.number, (5, 5))
    assert tag_of(child.pid) == NO_TAG
    assert not tags.is_of_this_server(child.pid)
    assert tags.is_marked(child.pid) is (tags._PLAN.marks_below > 0)
    child.kill()
    child.wait()
    assert tag_of(child.pid) == NO_TAG
    assert not tags.is_marked(child.pid)


@in_own_process
def test_start_that_hangs_delays_the_tags_of_others_only_a_little() -> None:
    tags.mark_this_process()
    tags._TAGGING_SECONDS = 0.01
    with (
        tags.Tagged(),
        mock.patch.object(descriptor_limit, "restore") as restore,
        tags.Tagged() as tag,
    ):
        restore.assert_called_once_with()  # the server needs its descriptors meanwhile
        child = subprocess.Popen(["/bin/sleep", "1000"])
        assert tag_of(child.pid) != tag
        tags.tag_running(child.pid, tag)
        assert tag_of(child.pid) == tag
    child.kill()
    child.wait()
    tags.tag_running(child.pid, tag)  # ended


@in_own_process
def test_a_limit_that_cannot_be_set_fails_one_start_only() -> None:
    tags.mark_this_process()
    with (
        mock.patch("resource.setrlimit", side_effect=OSError(1, "no")),
        pytest.raises(OSError, match="no"),
        tags.Tagged(),
    ):
        raise AssertionError
    assert not tags._tagging_lock.locked()


@in_own_process
def test_helpers_are_told_from_commands() -> None:
    tags.mark_this_process()
    early = subprocess.Popen(["/bin/sleep", "1000"])
    with tags.Tagged():
        pass
    with tags.TaggedAsHelper():
        late = subprocess.Popen(["/bin/sleep", "1000"])
    assert tag_of(early.pid) == tag_of(late.pid) == SERVER_TAG
    for child in (early, late):
        child.kill()
        child.wait()
    for _ in range(200):
        with tags.TaggedAsHelper() as tag:
            pass
    assert tags._helper_tags[-1] == tag
    assert len(tags._helper_tags) == 64
    for _ in range(2):
        tags.forget_helper(tag)
        assert len(tags._helper_tags) == 63


def test_limits_of_a_process_that_is_no_server_are_left_alone() -> None:
    before = [resource.getrlimit(carrier.number) for carrier in (LOCKS, RSS)]
    with tags.Tagged() as tag:
        child = subprocess.Popen(["/bin/sleep", "1000"])
    assert [resource.getrlimit(carrier.number) for carrier in (LOCKS, RSS)] == before
    tags.tag_running(child.pid, tag)
    assert tag_of(child.pid) == tag
    child.kill()
    child.wait()


@in_own_process
def test_watchdog_is_a_helper_without_a_mark() -> None:
    pid = os.fork()
    if pid == 0:
        tags.tag_this_process()
        assert tags._PLAN is not None
        assert tag_of(os.getpid()) == SERVER_TAG
        assert not tags.is_marked(os.getpid())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@in_own_process
def test_limits_of_other_users_are_read_from_proc() -> None:
    assert tags._PLAN is not None
    for carrier in (LOCKS, RSS):
        assert tags._limits_in_proc(os.getpid(), carrier) == tags._from_kernel(
            resource.getrlimit(carrier.number)
        )
    if os.geteuid() != 0:
        return
    tags.mark_this_process()
    with tags.Tagged() as tag:
        child = subprocess.Popen(["/bin/sleep", "1000"], user=65533)
    os.seteuid(65534)
    assert tag_of(child.pid) == tag
    os.seteuid(0)
    child.kill()
    child.wait()
    assert tags._limits_in_proc(child.pid, LOCKS) is None


@in_own_process
def test_without_room_for_tags_helpers_have_names() -> None:
    tags._HAS_TAGS = False  # type: ignore[misc]
    before = [resource.getrlimit(carrier.number) for carrier in (LOCKS, RSS)]
    with tags.Tagged() as tag:
        child = subprocess.Popen(["/bin/sleep", "1000"])
    tags.tag_running(child.pid, tag)
    tags.tag_this_process()
    assert [resource.getrlimit(carrier.number) for carrier in (LOCKS, RSS)] == before
    assert tag_of(child.pid) == NO_TAG
    assert not tags.is_of_this_server(child.pid)
    with open(f"/proc/{os.getpid()}/comm", "w") as file:
        file.write("exec-launcher")
    assert tag_of(os.getpid()) == SERVER_TAG
    child.kill()
    child.wait()
    assert tag_of(child.pid) == NO_TAG


@in_own_process
def test_mark_without_tags_is_one_below_the_limit() -> None:
    tags._HAS_TAGS = False  # type: ignore[misc]
    tags._PLAN = Plan(LOCKS, 0, _LOW)  # type: ignore[misc]
    resource.setrlimit(LOCKS.number, (_LOW, _LOW))
    assert not tags.is_marked(os.getpid())
    tags.mark_this_process()
    assert resource.getrlimit(LOCKS.number) == (_LOW - 1, _LOW - 1)
    assert tags.is_marked(os.getpid())


@in_own_process
def test_without_any_limit_nothing_is_tagged_or_marked() -> None:
    tags._HAS_TAGS = False  # type: ignore[misc]
    tags._PLAN = None  # type: ignore[misc]
    tags.mark_this_process()
    tags.tag_this_process()
    with tags.Tagged():
        pass
    assert not tags.is_marked(os.getpid())
    assert not tags.is_of_this_server(os.getpid())


@in_own_process
def test_limits_can_be_raised_with_a_capability() -> None:
    with open("/proc/self/status") as file:
        (effective,) = (line.split()[1] for line in file if line.startswith("CapEff:"))
    resource.setrlimit(LOCKS.number, (5, 5))
    assert tags._can_raise(LOCKS) is bool(int(effective, 16) >> 24 & 1)  # CAP_SYS_RESOURCE
    if os.geteuid() == 0:
        os.setuid(65534)
    assert not tags._can_raise(LOCKS)
    assert resource.getrlimit(LOCKS.number) == (5, 5)
