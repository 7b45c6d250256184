"""The flags of `exec-server forward`."""

from __future__ import annotations

import re
import shlex

from exec_server.cli import server_arguments
from exec_server.cli.forward_arguments import build_parser


def test_the_server_knows_every_flag() -> None:
    known = server_arguments.build_parser()._option_string_actions
    assert set(build_parser()._option_string_actions) <= set(known)


def test_examples_parse() -> None:
    examples = re.findall(r"^  exec-server (forward .*)$", build_parser().format_help(), re.M)
    assert len(examples) == 2
    for example in examples:
        assert server_arguments.parse(shlex.split(example)).forward
