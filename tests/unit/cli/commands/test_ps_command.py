"""`exec-server ps`: its arguments and both forms of its list."""

from __future__ import annotations

import json

import pytest
from tests.support.client_targets import TARGET, FakeEnvironment, listed

from exec_server.cli.commands import connection, ps_command


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_list(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    FakeEnvironment(listed()).open_in(monkeypatch, connection)
    monkeypatch.setattr(ps_command, "find_target", lambda *_: TARGET)
    assert ps_command.run(ps_command.build_parser().parse_words([*flags, "box"])) == 0
    printed = capfd.readouterr().out
    if flags:
        assert json.loads(printed)[0]["name"] == "web"
    else:
        assert printed.splitlines()[1].startswith("web   running")
