"""The layers of the package as data: which module may import which.

A module may import its own layer and the layers that its layer names. The numbers are those of
docs/architecture.md: a layer names only layers with the same or a lower number.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

_IO = {"asyncio", "os", "socket", "subprocess", "threading", "time", "random", "signal", "select"}


@dataclass(frozen=True)
class Layer:
    """Modules with the layers that they may import beside their own, and banned imports."""

    number: int  # as docs/architecture.md counts them, from the ground up
    name: str
    modules: tuple[str, ...]
    below: tuple[str, ...]
    banned: frozenset[str] = frozenset()


_PURE = frozenset(_IO | {"websockets"})
_BELOW_SANDBOX = (*("errors", "protocol", "process", "filesystem", "portable", "host"),)

LAYERS = [
    Layer(0, "errors", ("errors",), (), frozenset(_PURE | {"msgspec"})),
    # Used by every layer that reads URLs, so that all of them name the same host.
    Layer(1, "urls", ("protocol.urls",), (), _PURE),
    Layer(1, "protocol", ("protocol", "protocol.*"), ("errors", "urls"), _PURE),
    Layer(1, "relay", ("relay", "relay.*"), ("errors",), _PURE),
    # The server patches files, and so does the client of a server that cannot.
    Layer(1, "patching", ("patching", "patching.*"), ("errors",), _PURE),
    # The client narrows by it the results of a command on a server without fs/grep.
    Layer(2, "line patterns", ("filesystem.line_patterns",), ("errors",), _PURE),
    Layer(2, "output", ("process.output", "process.retention"), ("errors", "protocol"), _PURE),
    # The client and its commands import these modules of `host`, which need no Linux.
    Layer(2, "portable", ("host.clock", "host.event_loop", "host.interpreter", "host.pipes"), ()),
    Layer(
        2,
        "host",
        ("host", "host.*"),
        ("errors", "urls", "protocol", "portable", "version"),
        frozenset({"websockets"}),
    ),
    Layer(
        2,
        "process",
        ("process", "process.*"),
        ("errors", "protocol", "output", "portable", "host"),
        frozenset({"websockets"}),
    ),
    Layer(
        2,
        "filesystem",
        ("filesystem", "filesystem.*"),
        ("errors", "protocol", "portable", "host", "patching", "line patterns"),
        frozenset({"websockets"}),
    ),
    # Reads the files of Codex; the server alone knows what they are for.
    Layer(
        2,
        "codex",
        ("codex", "codex.*"),
        ("errors", "protocol", "host", "filesystem"),
        frozenset({"websockets"}),
    ),
    # A policy is compiled without looking at the machine.
    Layer(3, "policy", ("sandbox.policy", "sandbox.policy.*"), ("errors", "protocol"), _PURE),
    Layer(
        3,
        "sandbox",
        ("sandbox", "sandbox.*"),
        (*_BELOW_SANDBOX, "policy"),
        frozenset({"websockets"}),
    ),
    Layer(
        4,
        "stream",
        ("net.stream", "net.port_stream"),
        (),
        frozenset({"websockets", "msgspec", *_IO}),
    ),
    # Used by all ends of HTTP, also by the proxies. Its `time` only formats a given one.
    Layer(4, "http1", ("net.http1",), (), frozenset({"websockets", "msgspec", *_IO} - {"time"})),
    Layer(4, "socket options", ("net.socket_options",), ("errors",)),
    Layer(
        4,
        "net",
        ("net", "net.*"),
        ("errors", "urls", "relay", "stream", "http1", "socket options", "portable"),
    ),
    # The rules of a process's network are applied without looking at the machine.
    Layer(
        4,
        "network policy",
        (*("proxy.credentials", "proxy.datagrams", "proxy.hosts", "proxy.policy"),),
        ("errors", "urls", "protocol"),
        _PURE,
    ),
    Layer(
        4,
        "proxy",
        ("proxy", "proxy.*"),
        (
            *("errors", "urls", "protocol", "host", "network policy", "http1"),
            *("socket options", "portable"),
        ),
        frozenset({"websockets", "subprocess"}),
    ),
    Layer(
        4, "registry", ("registry", "registry.*"), ("errors", "urls", "relay", "net", "portable")
    ),
    Layer(
        5,
        "remote",
        ("server.remote",),
        ("errors", "relay", "stream", "net", "registry", "portable"),
    ),
    # Builds the parts of a server; the one module that knows both transports and connections.
    Layer(
        5,
        "serve",
        ("server.serve",),
        (
            *_BELOW_SANDBOX,
            "output",
            "sandbox",
            "stream",
            "server",
            "net",
            "registry",
            "remote",
            "proxy",
        ),
    ),
    # Lanes count and queue; they run nothing.
    Layer(5, "lanes", ("server.lanes",), ("protocol", "server"), _PURE),
    Layer(
        5,
        "server",
        ("server", "server.*"),
        (
            *(*_BELOW_SANDBOX, "codex", "output", "sandbox", "stream", "lanes"),
            *("network policy", "proxy"),
        ),
        frozenset({"websockets", "subprocess", "socket"}),
    ),
    # The decisions of the hosted service, and the SQL text of its storage.
    Layer(
        5,
        "hosting rules",
        tuple(
            f"hosting.{name}"
            for name in (
                *("rules", "tickets", "envelope", "bodies", "metrics", "schema", "statements"),
                "http_messages",
            )
        ),
        ("errors", "relay", "http1"),
        _PURE,
    ),
    Layer(
        5,
        "hosting",
        ("hosting", "hosting.*"),
        (
            *("errors", "urls", "relay", "net", "http1", "socket options", "hosting rules"),
            "portable",
        ),
        frozenset({"websockets", "subprocess"}),
    ),
    Layer(5, "handle", ("client.handle",), ("portable",)),
    # Files of the user, without a connection; `up` reads them too.
    Layer(
        5,
        "configuration",
        ("client.configuration", "client.logins", "client.targets"),
        ("errors", "urls", "registry"),
    ),
    Layer(5, "local server", ("client.local_server",), ("errors", "handle", "portable")),
    Layer(
        5,
        "client",
        ("client", "client.*"),
        (
            *("errors", "urls", "protocol", "relay", "patching", "line patterns", "stream"),
            *("net", "registry", "handle", "local server", "portable"),
            "configuration",
            "network policy",  # tells whether patterns match the secrets of a start
        ),
    ),
    Layer(
        6,
        "sync",
        ("sync", "sync.*"),
        ("errors", "protocol", "handle", "client", "local server", "portable"),
    ),
    # Each module imports its framework. `exec-server mcp` imports one of them, on demand.
    Layer(
        6,
        "adapters",
        ("adapters", "adapters.*"),
        ("errors", "protocol", "patching", "client", "sync", "local server", "version"),
    ),
    Layer(6, "logs", ("cli.logs",), ("errors",)),
    Layer(
        6,
        "arguments",
        ("cli.errors", "cli.parser", "cli.serve.arguments"),
        ("logs", "portable", "version"),
    ),
    # The watchdog stays small: its imports are limited.
    Layer(
        6,
        "watchdog",
        ("cli.serve.watchdog",),
        ("process", "filesystem", "host"),
        frozenset({"asyncio", "msgspec"}),
    ),
    # The one client command that runs a service: it starts no processes and knows no methods.
    Layer(
        6,
        "registry command",
        ("cli.registry", "cli.registry.*"),
        (
            *("errors", "urls", "host", "portable", "net", "hosting rules", "hosting"),
            *("arguments", "logs", "commands"),
        ),
    ),
    # Runs a client command, or the server with a watchdog; builds the server from its arguments.
    Layer(
        6,
        "cli",
        (*("cli.main", "cli.serve", "cli.serve.*", "cli.sandbox", "cli.sandbox.*"), "__main__"),
        (
            *_BELOW_SANDBOX,
            "urls",
            "portable",
            "policy",
            "sandbox",
            "net",
            "registry",
            "configuration",
            "remote",
            "serve",
            "logs",
            "arguments",
            "watchdog",
            "commands",
        ),
    ),
    # The client commands know the client, and of the server only its flags.
    Layer(
        6,
        "commands",
        ("cli", "cli.*"),
        (
            *("errors", "urls", "protocol", "net", "registry", "client", "adapters", "arguments"),
            *("configuration", "portable", "version"),
        ),
    ),
    # The magics for notebooks: a front end beside the command. `jupyter` alone imports IPython.
    Layer(
        6,
        "notebook",
        ("notebook", "notebook.*", "jupyter"),
        ("errors", "configuration", "client", "sync", "adapters", "arguments", "commands"),
    ),
    # Every module may import the package for its version, users for the names it loads lazily.
    Layer(0, "version", ("",), ("errors", "protocol", "client", "local server")),
]


def layer_of(module: str) -> Layer:
    """The layer of a module, which is named like `net.stream`."""
    for layer in LAYERS:
        if any(fnmatchcase(module, pattern) for pattern in layer.modules):
            return layer
    raise AssertionError(f"{module} belongs to no layer")
