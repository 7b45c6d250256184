"""The limits of one patch or one list of edits."""

from __future__ import annotations

import pytest

from exec_server.errors import InvalidRequest, PatchDoesNotApply
from exec_server.patching import hunks
from exec_server.patching.hunks import Effort, check_lines

pytestmark = pytest.mark.quick


def test_the_processor_time_is_bounded() -> None:
    now = 100.0
    spent = Effort(lambda: now)
    now = 100.0 + hunks.SECONDS
    spent.check()
    now += 0.1
    with pytest.raises(InvalidRequest, match="more than 5 s of processor time: split it"):
        spent.check()


def test_the_lines_of_a_text_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunks, "MAX_LINES", 2)
    check_lines("a\nb\n", "f")
    with pytest.raises(PatchDoesNotApply, match="f has more than 2 lines"):
        check_lines("a\nb\nc\n", "f")
