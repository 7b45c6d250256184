"""The parser of `exec-server forward`, which shows only the flags of the server that it uses."""

from __future__ import annotations

from exec_server.cli.server_arguments import (
    ServerParser,
    add_logging_flags,
    add_registry_credentials,
    add_remote_flags,
)

_DESCRIPTION = """\
Serve clients of a relay on behalf of another server: register with a registry, and forward
messages between the relay and the server of --connect. No port is opened on this machine.
"""

_EPILOG = """\
examples:
  exec-server forward --connect ws://127.0.0.1:7700 --remote URL --environment-id build-7
  exec-server forward --connect wss://inner.example.net --remote URL --environment-id build-7
"""


def build_parser() -> ServerParser:
    """For help and completion; `server_arguments.parse` accepts all flags of the server."""
    parser = ServerParser("exec-server forward", description=_DESCRIPTION, epilog=_EPILOG)
    add_remote_flags(parser)
    add_registry_credentials(parser)
    add_logging_flags(parser)
    return parser
