"""The flags of `exec-server registry` and its verbs, and the database that they name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from exec_server.cli.errors import UsageError
from exec_server.cli.parser import CommandParser, positive_number, positive_seconds, seconds
from exec_server.host.clock import duration

if TYPE_CHECKING:
    from exec_server.hosting.database import Database
    from exec_server.protocol.urls import Url


# Where a node listens by default.
DEFAULT_LISTEN: Final = "127.0.0.1:7800"

# Far above every useful limit of a tenant, and within the integers of both databases.
_MOST: Final = 10**15
_PUBLIC_URL: Final = "--public-url"
_OF_ALL_VERBS: Final = "--json"
_HTTP: Final = frozenset({"http", "https"})


def lifetime(text: str) -> float:
    """Seconds of `90`, `90s`, `15m`, `12h` or `30d`."""
    if duration(text) == 0:
        raise ValueError(text)
    return duration(text)


lifetime.__name__ = "lifetime (90s, 12h, 30d)"


def _limit(text: str) -> int:
    number = positive_number(text)
    if number > _MOST:
        raise ValueError(text)
    return number


_limit.__name__ = f"limit (1 to {_MOST})"
_LIMIT: Final[dict[str, Any]] = {"metavar": "N", "type": _limit}


class Verb(NamedTuple):
    """A verb: the operands after it, its help, and the flags that it takes."""

    operands: str
    summary: str
    flags: tuple[str, ...]
    examples: tuple[str, ...]

    def takes(self, count: int) -> bool:
        """Whether the verb takes so many operands."""
        return self.operands.endswith("...]") or count == len(self.operands.split())


VERBS: Final = {
    "init": Verb(
        "",
        "Make the tenant `default` of a new registry with two tokens, and print them: the only\n"
        "time that they are shown. A node prints none, because the output of a service is a log.",
        (_PUBLIC_URL,),
        ("", "--public-url https://registry.example.net"),
    ),
    "token create": Verb(
        "",
        "Make a token and print it: the only time that it is shown.",
        ("--scope", "--tenant", "--name", "--expires", "--credential"),
        (
            "--scope 'executor:build-*' --name builders --expires 30d",
            "--scope connect:build-7 --tenant ops --json",
            "--credential build-7 --expires 12h",
        ),
    ),
    "token list": Verb(
        "",
        "List the tokens that are not revoked; their texts are not known.",
        ("--tenant",),
        ("", "--tenant ops --json"),
    ),
    "token revoke": Verb(
        " ID",
        "Refuse a token at once, and close its sockets within 5 s. With --kill the commands\n"
        "of its clients end as well, instead of after the 80 s in which a client may come back.",
        ("--kill",),
        ("tok-0123456789ab", "tok-0123456789ab --kill"),
    ),
    "environment list": Verb(
        "",
        "List the environments, online or not, with the time since when.",
        ("--tenant",),
        ("", "--tenant ops --json"),
    ),
    "environment remove": Verb(
        " [ID...]",
        "Remove environments that are offline, so that they do not count in the limit of their\n"
        "tenant. A machine that comes back registers again.",
        ("--tenant", "--unseen"),
        ("build-7 build-8", "--unseen 30d"),
    ),
    "status": Verb("", "Show who is online, from the database.", ("--watch",), ("", "--watch")),
    "tenant list": Verb(
        "",
        "List the tenants, with the numbers of their tokens and environments.",
        (),
        ("", "--json"),
    ),
    "tenant show": Verb(" NAME", "Show a tenant: its numbers and its limits.", (), ("ops",)),
    "tenant remove": Verb(
        " NAME",
        "Remove a tenant with its tokens and environments, if none of these is online.",
        (),
        ("ops",),
    ),
    "tenant limit": Verb(
        " NAME",
        "Change the limits of a tenant, or show them.",
        ("--environments", "--sockets", "--bytes-per-second", "--handshakes-per-second"),
        ("ops --environments 50 --bytes-per-second 10000000",),
    ),
}
_VERB_FLAGS: Final[dict[str, dict[str, Any]]] = {
    _OF_ALL_VERBS: {"action": "store_true", "help": "print JSON instead of text"},
    "--scope": {
        "metavar": "S",
        "action": "append",
        "default": [],
        "help": "executor:ID or connect:ID; ID may be a prefix and *; may be repeated",
    },
    "--tenant": {
        "metavar": "T",
        "help": "the tenant of a token or environment (default: `default`, for lists all); "
        "`token create` makes one that does not exist",
    },
    "--name": {"metavar": "N", "default": "", "help": "a name for the list of tokens"},
    "--expires": {
        "metavar": "TIME",
        "type": lifetime,
        "help": "such as 90s, 12h or 30d (default: never)",
    },
    "--credential": {
        "metavar": "ENV",
        "help": "print the line that --executor-credential-stdin of an executor reads",
    },
    "--kill": {
        "action": "store_true",
        "help": "of token revoke: let executors end the commands of the token's clients at once",
    },
    "--unseen": {
        "metavar": "TIME",
        "type": lifetime,
        "help": "of environment remove: all that were not online for this time, such as 30d; "
        "without --tenant those of all tenants",
    },
    "--watch": {"action": "store_true", "help": "of status: show it again every two seconds"},
    "--environments": _LIMIT | {"help": "limit of environments of the tenant (default: 1000)"},
    "--sockets": _LIMIT | {"help": "limit of its sockets on each node (default: 2000)"},
    "--bytes-per-second": _LIMIT
    | {"help": "limit of its relayed bytes on each node (default: 50000000)"},
    "--handshakes-per-second": _LIMIT
    | {
        "help": "connections that one of its tokens may begin with one executor in any second, on "
        "each node (default: 20, which are 1200 a minute)"
    },
}


def add_database_flags(parser: CommandParser) -> None:
    group = parser.add_argument_group("database")
    group.add_argument(
        "--data",
        metavar="DIR",
        help="directory of the SQLite database registry.db (default: "
        "$XDG_DATA_HOME/exec-server/registry)",
    )
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--database",
        metavar="URL",
        help="postgresql://…, shared by all nodes; keep the password in PGPASSFILE or PGPASSWORD "
        "(one in the URL is readable in the list of processes for the first moment)",
    )
    where.add_argument(
        "--database-url-file", metavar="FILE", help="read the URL of --database from a file"
    )


def add_node_flags(parser: CommandParser) -> None:
    group = parser.add_argument_group("running a node")
    group.add_argument(
        "--listen", metavar="HOST:PORT", help=f"default {DEFAULT_LISTEN}; port 0 takes a free one"
    )
    group.add_argument(
        "--public-url",
        metavar="URL",
        help="what clients and executors use (default: http://LISTEN, https with --tls-cert)",
    )
    group.add_argument(
        "--node-url",
        metavar="URL",
        help="how other nodes reach this one (default: as --listen; needed with --database and "
        "a --listen on all addresses)",
    )
    group.add_argument(
        "--tls-cert", metavar="FILE", help="certificate chain; SIGHUP reads it again"
    )
    group.add_argument("--tls-key", metavar="FILE", help="its private key")
    group.add_argument(
        "--insecure-listen",
        action="store_true",
        help="listen beyond loopback without TLS, although tokens cross the network readable",
    )
    group.add_argument(
        "--metrics-listen",
        metavar="HOST:PORT",
        help="serve /metrics there instead, without TLS; on another address than loopback it needs "
        "--metrics-token-file, or --insecure-listen",
    )
    group.add_argument(
        "--metrics-token-file",
        metavar="FILE",
        help="/metrics asks for the bearer token in this file; without it a --listen with TLS or "
        "beyond loopback does not serve /metrics",
    )
    group.add_argument(
        "--print-json", action="store_true", help="print one JSON line instead of text"
    )
    _add_times(group)
    group.add_argument(
        "--trust-forwarded",
        metavar="CIDR",
        action="append",
        default=[],
        help="believe X-Forwarded-For of proxies in this network; may be repeated",
    )
    group.add_argument(
        "--takeover",
        choices=("allow", "refuse"),
        default="allow",
        help="a second executor with another key for an environment that is online: it replaces "
        "the first, or waits (default: allow)",
    )


def _add_times(group: argparse._ArgumentGroup) -> None:
    for name, default, text in (
        ("--ticket-seconds", 60, "life of the address that a client gets"),
        ("--authorization-seconds", 60, "life of a client's authorization"),
    ):
        group.add_argument(
            name,
            metavar="N",
            type=positive_number,
            default=default,
            help=f"{text} (default: {default})",
        )
    group.add_argument(
        "--stall-seconds",
        metavar="N",
        type=positive_seconds,
        default=2.0,
        help="how long a client that does not read may hold up its executor (default: 2)",
    )
    group.add_argument(
        "--drain-seconds",
        metavar="N",
        type=seconds,
        default=20.0,
        help="how long a drain may take (default: 20)",
    )


def add_verb_flags(parser: CommandParser, verb: Verb | None = None) -> None:
    """The flags of one verb, or of all."""
    group = parser.add_argument_group("flags of verbs" if verb is None else "flags")
    for name, options in _VERB_FLAGS.items():
        if verb is None or name == _OF_ALL_VERBS or name in verb.flags:
            group.add_argument(name, **options)


def verb_parser(name: str) -> CommandParser:
    """A parser with the help of one verb."""
    verb = VERBS[name]
    examples = [f"  exec-server registry {name} {each}".rstrip() for each in verb.examples]
    parser = CommandParser(
        f"registry {name}", description=verb.summary, epilog="\n".join(["examples:", *examples, ""])
    )
    parser.usage = f"exec-server registry {name}{verb.operands} [flags]"
    add_verb_flags(parser, verb)
    if _PUBLIC_URL in verb.flags:
        parser.add_argument(
            _PUBLIC_URL, metavar="URL", help=f"as of the node (default: http://{DEFAULT_LISTEN})"
        )
    add_database_flags(parser)
    return parser


def check_node(arguments: argparse.Namespace) -> None:
    """Raise UsageError if a verb was forgotten, instead of running a node."""
    for flag in _used(arguments, _VERB_FLAGS):
        if flag == _OF_ALL_VERBS:
            raise UsageError("--json belongs to `status` and other verbs; a node has --print-json")
        raise UsageError(f"{flag} belongs to {_owners(flag)}")


def check_verb(arguments: argparse.Namespace, name: str) -> None:
    """Raise UsageError for a flag that the verb would ignore."""
    for flag in _used(arguments, _VERB_FLAGS):
        if flag != _OF_ALL_VERBS and flag not in VERBS[name].flags:
            raise UsageError(f"`{name}` takes no {flag}, which belongs to {_owners(flag)}")
    parser = CommandParser("registry", description="")
    add_node_flags(parser)
    for action in parser._actions:
        flag = action.option_strings[-1]
        value = getattr(arguments, action.dest, action.default)
        if value != action.default and flag not in VERBS[name].flags:
            hint = "; use --json" if action.dest == "print_json" else ""
            raise UsageError(f"`{name}` takes no {flag}, which is for running a node{hint}")


def _used(arguments: argparse.Namespace, flags: dict[str, dict[str, Any]]) -> list[str]:
    return [flag for flag in flags if getattr(arguments, flag[2:].replace("-", "_"))]


def _owners(flag: str) -> str:
    owners = [f"{name}{verb.operands}" for name, verb in VERBS.items() if flag in verb.flags]
    return " and ".join(f"`exec-server registry {owner}`" for owner in owners)


def data_directory(arguments: argparse.Namespace) -> Path:
    """The directory of the SQLite database."""
    if arguments.data is not None:
        return Path(arguments.data).absolute()
    base = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(base) / "exec-server" / "registry"


def hide_password(arguments: argparse.Namespace) -> None:
    """Erase a --database password from the process list; UsageError where that is impossible."""
    url: str | None = arguments.database
    if url is None:
        return
    user = url.partition("://")[2].rpartition("@")[0]
    may_hold_password = ":" in user or "password" in url.lower()
    if may_hold_password and not _erase_argument(url):
        raise UsageError(
            "--database: other users could read its password in the list of processes; use "
            "--database-url-file, or keep the password in PGPASSFILE"
        )


def _erase_argument(text: str) -> bool:
    try:
        from exec_server.host.libc import erase_argument
    except (ImportError, OSError, AttributeError):  # not Linux
        return False
    return erase_argument(text)


def database_url(arguments: argparse.Namespace) -> str | None:
    """The URL of the database, None for SQLite; raises UsageError for another database."""
    url: str | None = arguments.database
    if arguments.database_url_file is not None:
        try:
            url = Path(arguments.database_url_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            text = f"--database-url-file {arguments.database_url_file}: {error}"
            raise UsageError(text) from None
    if url is not None and not url.startswith(("postgresql://", "postgres://")):
        # The text of a URL may hold a password, so it is not repeated.
        raise UsageError("--database: expected a URL that begins with postgresql://")
    return url


def open_database(arguments: argparse.Namespace) -> Database:
    """The database that the flags name; its engine is imported only here."""
    url = database_url(arguments)
    if url is None:
        from exec_server.hosting.sqlite_database import SqliteDatabase

        return SqliteDatabase(data_directory(arguments) / "registry.db")
    from exec_server.hosting.postgres_database import PostgresDatabase

    return PostgresDatabase(url)


def checked_url(flag: str, text: str | None) -> Url | None:
    """The URL of a flag; raises UsageError."""
    if text is None:
        return None
    from exec_server.protocol.urls import parse_url

    try:
        url = parse_url(text, _HTTP)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
    if "?" in text or "#" in text:
        raise UsageError(f"{flag}: the URL must not have a query")
    return url


def normalised_url(url: str) -> str:
    """Rendezvous URLs begin with `ws` and the rest of the scheme, so it is in lower case."""
    scheme, separator, address = url.partition("://")
    return scheme.lower() + separator + address.rstrip("/")
