"""Times of a server: in the calendar, and out of its range."""

from __future__ import annotations

import math
import time

import pytest

from exec_server.cli.commands.local_time import local_time


def test_a_time_of_the_calendar() -> None:
    moment = time.mktime((2024, 5, 6, 7, 8, 9, 0, 0, -1))
    assert local_time(moment, "%Y-%m-%d %H:%M:%S") == "2024-05-06 07:08:09"


@pytest.mark.parametrize("seconds", [-(10**27), 10**400, math.inf, math.nan, 2.0**62])
def test_a_time_out_of_range(seconds: float) -> None:
    assert local_time(seconds, "%Y-%m-%d") == "?"
