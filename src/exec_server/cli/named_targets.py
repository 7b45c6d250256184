"""`exec-server targets`: lists the targets of targets.toml."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.parser import CommandParser
from exec_server.cli.streams import json_text, print_status, print_text
from exec_server.client.configuration import targets_file
from exec_server.client.targets import load_targets

_DESCRIPTION: Final = """\
List the targets of ~/.config/exec-server/targets.toml (or $XDG_CONFIG_HOME/exec-server/
targets.toml). Create the file yourself; each table defines one target:

  [build]
  url = "wss://build.example.net:7700"
  token_file = "build.token"           # or token_env; relative to targets.toml
  ca_file = "build-ca.pem"             # root certificate of a private authority

  [self-signed]
  url = "wss://192.168.1.20:7700"
  token_file = "lan.token"
  pin = "sha256:…"                     # the fingerprint that `exec-server tls-init` prints

  [same-user]
  url = "unix:/run/user/1000/exec-server.sock"

  [lab]
  stdio = "ssh lab exec-server --listen stdio"

  [behind-nat]
  registry = "https://registry.example.net"
  environment_id = "build-7"
  token_env = "REGISTRY_TOKEN"
  executor_key = "sha256:…"            # accept this key only: the registry need not be trusted
"""
_EPILOG: Final = """\
examples:
  exec-server targets --names
  exec-server targets --json | jq -r '.[].address'
"""


def build_parser() -> CommandParser:
    parser = CommandParser("targets", _DESCRIPTION, _EPILOG)
    format_group = parser.add_mutually_exclusive_group()
    format_group.add_argument("--names", action="store_true", help="print only the names")
    format_group.add_argument(
        "--json", action="store_true", help="print a JSON list instead of text"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print name and address of each target; returns the exit code."""
    known = load_targets()
    if arguments.json:
        rows = [{"name": name, "address": known[name].address} for name in sorted(known)]
        print_text(json_text(rows))
        return 0
    width = max(map(len, known), default=0)
    for name, target in sorted(known.items()):
        print_text(f"{name}\n" if arguments.names else f"{name:{width}}  {target.address}\n")
    if not known and not arguments.names:
        print_status(f"{targets_file()} defines no targets; see `exec-server targets -h`")
    return 0
