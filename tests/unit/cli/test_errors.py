"""Exit codes of the client commands."""

from __future__ import annotations

import pytest

from exec_server.cli.errors import command_code


@pytest.mark.parametrize(("reported", "code"), [(0, 0), (137, 137), (256, 0), (-1, 128)])
def test_a_signal_that_the_server_does_not_name_is_no_lost_connection(
    reported: int, code: int
) -> None:
    assert command_code(reported) == code
