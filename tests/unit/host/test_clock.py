"""The clock that runs during suspend, and durations in words."""

from __future__ import annotations

import sys
import time

import pytest

from exec_server.host import clock
from exec_server.host.clock import SleepDetector, boot_time, duration


def test_the_clock_is_that_of_the_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= boot_time() <= before + 60
    monkeypatch.setattr(clock, "_BOOT_CLOCK", None)
    before = time.monotonic()
    assert before <= boot_time() <= before + 60


def test_the_clock_of_each_system_includes_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock._boot_clock() == time.CLOCK_BOOTTIME
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert clock._boot_clock() == time.CLOCK_MONOTONIC  # time.monotonic is another one there
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(time, "CLOCK_MONOTONIC")
    assert clock._boot_clock() is None


def test_a_sleep_is_noticed_once() -> None:
    detector = SleepDetector(10.0, 1010.0)
    assert not detector.has_slept(11.0, 1011.5)
    assert detector.has_slept(11.1, 4000.0)
    assert not detector.has_slept(12.0, 4001.0)


def test_durations() -> None:
    texts = ("0", "90", "90s", "30m", "8h", "1d")
    assert [duration(text) for text in texts] == [0, 90, 90, 1800, 28_800, 86_400]
    for text in ("", "h", "-1", "1.5h", "8 h", "1w", "1234567890"):
        with pytest.raises(ValueError):
            duration(text)
