"""The flags of `exec-server up`."""

from __future__ import annotations

import pytest

from exec_server.cli.up_arguments import build_parser


def test_the_registry_and_the_id_have_defaults() -> None:
    arguments = build_parser().parse_args([])
    assert (arguments.url, arguments.environment_id) == (None, None)


def test_lost_connections_are_told_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EXEC_SERVER_LOG", raising=False)
    assert build_parser().parse_args([]).log_level == "warning"
    monkeypatch.setenv("EXEC_SERVER_LOG", "error")
    assert build_parser().parse_args([]).log_level == "error"


def test_a_service_is_not_installed_and_removed_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--install", "--uninstall"])
    assert "exec-server up --help" in capsys.readouterr().err
