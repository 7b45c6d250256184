"""The access flags that the client commands share."""

from __future__ import annotations

import pytest

from exec_server.cli.commands.access_flags import access_options
from exec_server.cli.commands.errors import UsageError
from exec_server.cli.commands.info_command import build_parser


def test_token_flags_exclude_each_other() -> None:
    words = ["--token-file", "f", "--token-env", "E", "build"]
    with pytest.raises(UsageError, match="exclude each other"):
        access_options(build_parser().parse_words(words))


def test_a_pin_replaces_root_certificates() -> None:
    with pytest.raises(UsageError, match="--ca-file and --pin exclude each other"):
        access_options(build_parser().parse_words(["--pin", "a", "--ca-file", "f", "build"]))
    words = ["--pin", "a", "--pin", "b", "--allow-insecure-token", "build"]
    given = access_options(build_parser().parse_words(words))
    assert (given.pins, given.allow_insecure_token) == (("a", "b"), True)


def test_flags_become_options() -> None:
    words = ["--token-env", "E", "--ca-file", "c", "build"]
    given = access_options(build_parser().parse_words(words))
    assert (given.token_env, given.ca_file) == ("E", "c")
