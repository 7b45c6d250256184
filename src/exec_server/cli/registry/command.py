"""`exec-server registry`: run a registry and rendezvous, and administer its database."""

from __future__ import annotations

import argparse
from typing import Final

from exec_server.cli.errors import UsageError
from exec_server.cli.parser import CommandParser
from exec_server.cli.registry.flags import (
    VERBS,
    add_database_flags,
    add_node_flags,
    add_verb_flags,
    check_node,
    check_verb,
    hide_password,
    verb_parser,
)
from exec_server.cli.serve.arguments import add_logging_flags

_DESCRIPTION: Final = """\
Run a registry and rendezvous, so that machines behind a NAT can be reached through it. It relays
encrypted streams and cannot read them.

  exec-server registry init             make the first tokens, and print two commands to paste: one
                                        for the machine to be reached, one for its clients
  exec-server registry                  run it
  exec-server registry token create     make a token; list and revoke do what they say
  exec-server registry status           who is online, from the database
  exec-server registry environment remove --unseen 30d   make room for other machines
  exec-server registry tenant limit NAME   change the limits of a tenant; list, show and remove
                                        do what they say

The verbs work on the database itself (--data or --database, as given to the node), with or without
a running node. There is no administration over the network.
`exec-server registry VERB --help` shows the flags of one verb.
"""
_EPILOG: Final = """\
Several nodes: the same command on each machine with one --database postgresql://…, the URL of the
balancer as --public-url, and the address of the machine as --node-url (docs/hosting.md).

SIGTERM drains the node: its executors move to other nodes. A second signal ends it at once.

examples:
  exec-server registry init && exec-server registry
      on 127.0.0.1:7800, for trying it out on one machine
  exec-server registry --listen 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem
      for other machines, with TLS of its own; --public-url https://… says by which name
  exec-server registry token create --scope 'executor:build-*' --name builders --expires 30d
      a token for machines whose environment id begins with build-
  exec-server registry token create --scope connect:build-7 --tenant ops --json
      a token for clients of one environment, as JSON
  exec-server registry token revoke tok-0123456789ab
      refused at once; its sockets are closed on all nodes within 5 s
  exec-server registry status --watch
      a live table
"""
_VERB_WORDS: Final = ", ".join(f"`{name}{verb.operands}`" for name, verb in VERBS.items())


class _RegistryParser(CommandParser):
    """Flags may stand before, between and after the words; a verb has a help of its own."""

    verbs = tuple(VERBS)

    def parse_words(self, words: list[str]) -> argparse.Namespace:
        if "-h" in words or "--help" in words:
            names = (_verb_of(words[start:]) for start in range(len(words)))
            if (name := next(filter(None, names), None)) is not None:
                return verb_parser(name).parse_args(["--help"])
        return self.parse_intermixed_args(words)


def _verb_of(words: list[str]) -> str | None:
    names = (" ".join(words[:count]) for count in (2, 1))
    return next((name for name in names if name in VERBS), None)


def build_parser() -> CommandParser:
    parser = _RegistryParser("registry", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "words", metavar="VERB", nargs="*", help=f"nothing, or one of {_VERB_WORDS}"
    )
    add_database_flags(parser)
    add_node_flags(parser)
    add_verb_flags(parser)
    add_logging_flags(parser, level="warning")  # the level of refused requests
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run a node or one of the verbs; returns the exit code."""
    hide_password(arguments)
    words = arguments.words
    if not words:
        check_node(arguments)
        from exec_server.cli.registry.node import run_node

        return run_node(arguments)
    name = _verb_of(words)
    operands = words[0 if name is None else len(name.split()) :]
    if name is None or not VERBS[name].takes(len(operands)):
        raise UsageError(f"unknown words `{' '.join(words)}`: expected {_VERB_WORDS}")
    check_verb(arguments, name)
    from exec_server.cli.registry.verbs import FUNCTIONS

    FUNCTIONS[name](arguments, *operands)
    return 0
