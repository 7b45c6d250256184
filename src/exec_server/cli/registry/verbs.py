"""The verbs of `exec-server registry`, which work on the database itself."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import secrets
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import asdict, fields
from typing import Any, Final, TypeVar

from exec_server.cli.errors import CommandError, UsageError
from exec_server.cli.registry.flags import (
    DEFAULT_LISTEN,
    checked_url,
    data_directory,
    database_url,
    normalised_url,
)
from exec_server.cli.streams import json_text, local_time, print_text
from exec_server.errors import printable
from exec_server.host.event_loop import run as run_loop
from exec_server.hosting.database import DatabaseUnavailable
from exec_server.hosting.engines import open_database
from exec_server.hosting.metrics import Metrics
from exec_server.hosting.rules import (
    SECRET_BYTES,
    Operation,
    check_scope,
    covers,
    is_environment_id,
    is_tenant_name,
    secret_hash,
    token_text,
)
from exec_server.hosting.service import (
    FIRST_TENANT,
    FirstStart,
    make_first_tenant,
    new_token_id,
)
from exec_server.hosting.store import (
    RENEWAL_SECONDS,
    EnvironmentFacts,
    Limits,
    NewToken,
    NodeFacts,
    Store,
    TenantFacts,
)

_CLEAR_SCREEN: Final = "\x1b[H\x1b[2J"
T = TypeVar("T")


def init(arguments: argparse.Namespace) -> int:
    """Make the first tenant, and print its tokens: the only time that they are shown."""
    checked_url("--public-url", arguments.public_url)
    url = normalised_url(arguments.public_url or f"http://{DEFAULT_LISTEN}")
    first: FirstStart | None = _with_store(arguments, make_first_tenant, may_create=True)
    if first is None:
        raise CommandError(
            "the registry has tokens already: `exec-server registry token create` makes others"
        )
    print_text(json_text(asdict(first)) if arguments.json else _welcome(url, first))
    return 0


def _welcome(url: str, first: FirstStart) -> str:
    quoted = shlex.quote(url)
    lines = [
        "The two tokens below are shown once; `exec-server registry token create` makes others.",
        "Run `exec-server registry` with the same --data or --database, if no node runs yet.",
        "",
        "On the machine to be reached (any name instead of my-machine):",
        f"  EXEC_SERVER_API_KEY={first.executor_token} \\",
        f"      exec-server --remote {quoted} --registry-auth api-key --environment-id my-machine",
        "",
        "On the client:",
        f"  export REGISTRY_TOKEN={first.client_token}",
        "  exec-server exec --token-env REGISTRY_TOKEN \\",
        f"      {shlex.quote(f'relay:{url}/my-machine')} -- uname -a",
        "",
        "Or store the tokens: run `exec-server login URL` on both machines and paste the token,",
        "then `exec-server up` on the machine to be reached.",
        "",
        "The registry hands out the keys of both sides, so it is trusted with them. A client that",
        "knows the executor's fingerprint (executor_key in targets.toml) trusts the registry for",
        "reachability only. `exec-server up` prints it; --log-level info lets the executor log it.",
    ]
    return "\n".join(lines) + "\n"


def create_token(arguments: argparse.Namespace) -> int:
    """Print a new token: the only time that it is shown."""
    tenant = _tenant(arguments) or FIRST_TENANT
    scopes = _scopes(arguments)
    text = token_text(secrets.token_bytes(SECRET_BYTES))

    async def create(store: Store) -> NewToken:
        found = await store.tenant(tenant, secrets.token_hex(8))
        assert found is not None
        token = NewToken(
            new_token_id(),
            secret_hash(text),
            arguments.name,
            found[0],
            scopes,
            arguments.expires,
        )
        expires.append(await store.add_token(token))
        return token

    expires: list[float | None] = []
    token = _with_store(arguments, create, may_create=True)
    [expires_at] = expires
    if arguments.credential is not None:
        _print_credential(arguments.credential, text, expires_at)
        return 0
    facts = {
        "id": token.id,
        "token": text,
        "tenant": tenant,
        "scopes": list(scopes),
        "expires_at": _seconds(expires_at),
    }
    if arguments.json:
        print_text(json_text(facts))
        return 0
    until = "" if expires_at is None else f", valid until {_time(expires_at)}"
    print_text(
        f"{text}\n\n{token.id} of tenant {tenant}: {' '.join(scopes)}{until}\n"
        "The token is not shown again.\n"
    )
    return 0


def _print_credential(environment_id: str, token: str, expires_at: float | None) -> None:
    """The line that an executor reads from stdin (`--executor-credential-stdin`)."""
    assert expires_at is not None
    line = {
        "version": 1,
        "environment_id": environment_id,
        "token": token,
        "expires_at": math.floor(expires_at),
    }
    print_text(json.dumps(line) + "\n")


def _scopes(arguments: argparse.Namespace) -> tuple[str, ...]:
    environment_id = arguments.credential
    if environment_id is not None:
        if not is_environment_id(environment_id):
            raise UsageError(f"--credential {environment_id}: not an environment id")
        if arguments.expires is None:
            raise UsageError("--credential needs --expires, such as --expires 12h")
        if not arguments.scope:
            return (f"executor:{environment_id}",)
    if not arguments.scope:
        raise UsageError("token create needs --scope executor:ID or --scope connect:ID")
    try:
        scopes = tuple(check_scope(text) for text in arguments.scope)
    except ValueError as error:
        raise UsageError(f"--scope: {error}") from None
    if environment_id is not None and not covers(scopes, Operation.EXECUTOR, environment_id):
        raise UsageError(
            f"no --scope lets an executor register as {environment_id}, so the credential would "
            f"be of no use: add --scope executor:{environment_id}, or give no --scope"
        )
    return scopes


def _tenant(arguments: argparse.Namespace) -> str | None:
    tenant: str | None = arguments.tenant
    if tenant is not None and not is_tenant_name(tenant):
        raise UsageError(f"--tenant {tenant}: expected 1 to 64 of A-Z a-z 0-9 . _ -")
    return tenant


def list_tokens(arguments: argparse.Namespace) -> int:
    """Print the tokens that are not revoked; their texts are not known."""
    tenant = _tenant(arguments)
    tokens = _with_store(arguments, lambda store: store.tokens(tenant))
    if arguments.json:
        facts = [asdict(token) for token in tokens]
        for token in facts:
            token["scopes"] = token["scopes"].split()
            for member in ("created_at", "expires_at", "last_used_at"):
                token[member] = _seconds(token[member])
        print_text(json_text({"tokens": facts}))
        return 0
    table = [
        (
            *(each.id, each.name, each.tenant, each.scopes, _time(each.created_at)),
            *(_time(each.expires_at), _time(each.last_used_at)),
        )
        for each in tokens
    ]
    print_text(_table(("ID", "NAME", "TENANT", "SCOPES", "CREATED", "EXPIRES", "USED"), table))
    return 0


def revoke_token(arguments: argparse.Namespace, token_id: str) -> int:
    """Refuse a token from now on, and close its sockets."""
    kill: bool = arguments.kill
    if not _with_store(arguments, lambda store: store.revoke_token(token_id, kill=kill)):
        raise CommandError(
            f"there is no token {token_id}, or it is revoked already: "
            "see `exec-server registry token list`"
        )
    facts = {"id": token_id, "revoked": True, **({"killed": True} if kill else {})}
    more = "; commands of its clients end within seconds" if kill else ""
    print_text(json_text(facts) if arguments.json else f"{token_id} is revoked{more}\n")
    return 0


# ---- tenants --------------------------------------------------------------------------


def list_tenants(arguments: argparse.Namespace) -> int:
    """Print the tenants with the numbers of their tokens and environments."""
    tenants = _with_store(arguments, lambda store: store.tenants())
    if arguments.json:
        print_text(json_text({"tenants": [_tenant_facts(tenant) for tenant in tenants]}))
    else:
        rows = [(each.name, each.tokens, each.environments, each.online) for each in tenants]
        print_text(_table(("TENANT", "TOKENS", "ENVIRONMENTS", "ONLINE"), rows))
    return 0


def show_tenant(arguments: argparse.Namespace, name: str) -> int:
    """Print the numbers and limits of one tenant."""
    tenants = _with_store(arguments, lambda store: store.tenants(name))
    if not tenants:
        raise _no_tenant(name)
    facts = _tenant_facts(tenants[0])
    if arguments.json:
        print_text(json_text(facts))
        return 0
    limits = facts.pop("limits")
    lines = {**facts, **{f"limit {key}": value for key, value in limits.items()}}
    print_text("".join(f"{key:29}{value}\n" for key, value in lines.items()))
    return 0


def remove_tenant(arguments: argparse.Namespace, name: str) -> int:
    """Remove a tenant that has nothing online."""

    async def remove(store: Store) -> tuple[bool, bool]:
        return bool(await store.tenants(name)), await store.remove_tenant(name)

    was_there, is_removed = _with_store(arguments, remove)
    if not was_there:
        raise _no_tenant(name)
    if not is_removed:
        raise CommandError(
            f"tenant {name} has an environment online: stop its executors, or revoke their tokens; "
            "see `exec-server registry status`"
        )
    facts = {"tenant": name, "removed": True}
    text = f"tenant {name} is removed with its tokens and environments\n"
    print_text(json_text(facts) if arguments.json else text)
    return 0


def _tenant_facts(tenant: TenantFacts) -> dict[str, Any]:
    facts = asdict(tenant)
    return {"tenant": facts.pop("name"), **facts}


def _no_tenant(name: str) -> CommandError:
    return CommandError(f"there is no tenant {printable(name)}: `token create --tenant` makes one")


def limit_tenant(arguments: argparse.Namespace, name: str) -> int:
    """Change or show the limits of a tenant."""
    values = tuple(getattr(arguments, field.name) for field in fields(Limits))
    limits: Limits | None = _with_store(arguments, lambda store: store.limit_tenant(name, values))
    if limits is None:
        raise _no_tenant(name)
    facts = {"tenant": name, **asdict(limits)}
    text = "".join(f"{key:23}{value}\n" for key, value in facts.items())
    print_text(json_text(facts) if arguments.json else text)
    return 0


# ---- environments ---------------------------------------------------------------------


def list_environments(arguments: argparse.Namespace) -> int:
    """Print the environments that count in the limit of a tenant."""
    tenant = _tenant(arguments)
    environments, _ = _with_store(arguments, lambda store: store.status())
    environments = [each for each in environments if tenant in (None, each.tenant)]
    if arguments.json:
        print_text(json_text({"environments": _status(environments, [])["environments"]}))
    else:
        print_text(_environment_table(environments))
    return 0


def remove_environments(arguments: argparse.Namespace, ids: list[str]) -> int:
    """Remove environments that are offline, by their ids or by the time when they were seen."""
    if bool(ids) == (arguments.unseen is not None):
        raise UsageError("environment remove needs ids, or --unseen TIME such as --unseen 30d")
    tenant = _tenant(arguments)
    if ids:
        owner = tenant or FIRST_TENANT
        removed = _with_store(arguments, lambda store: store.remove_environments(owner, ids))
        kept = [name for name in ids if (owner, name) not in removed]
    else:
        seconds = arguments.unseen
        removed = _with_store(arguments, lambda store: store.remove_unseen(seconds, tenant))
        kept = []
    if arguments.json:
        facts = [{"tenant": owner, "environment_id": name} for owner, name in removed]
        print_text(json_text({"removed": facts}))
    elif removed or not kept:
        lines = [f"{name} of tenant {owner} is removed" for owner, name in removed]
        print_text("\n".join(lines or ["nothing is removed"]) + "\n")
    if kept:
        raise CommandError(
            f"not removed, because online or unknown in tenant {tenant or FIRST_TENANT}: "
            f"{printable(' '.join(kept))}; see `exec-server registry environment list`"
        )
    return 0


# ---- status ---------------------------------------------------------------------------


def show_status(arguments: argparse.Namespace) -> int:
    """Print who is online; with --watch again and again."""
    if not arguments.watch:
        environments, nodes = _with_store(arguments, lambda store: store.status())
        print_text(_status_text(arguments, environments, nodes))
        return 0

    async def watch(store: Store) -> None:
        while True:
            text = _status_text(arguments, *await store.status())
            if os.isatty(1) and not arguments.json:
                os.write(1, _CLEAR_SCREEN.encode())
            print_text(text)
            await asyncio.sleep(RENEWAL_SECONDS)

    _with_store(arguments, watch)
    return 0


def _status_text(
    arguments: argparse.Namespace, environments: list[EnvironmentFacts], nodes: list[NodeFacts]
) -> str:
    if arguments.json:
        return json_text(_status(environments, nodes))
    of_nodes = [
        (node.node, node.url, "yes" if node.is_draining else "no", node.executors) for node in nodes
    ]
    table = _table(("NODE", "URL", "DRAINING", "EXECUTORS"), of_nodes)
    return f"{_environment_table(environments)}\n{table}"


def _environment_table(environments: list[EnvironmentFacts]) -> str:
    rows = [
        (
            *(each.tenant, each.environment_id, "yes" if each.node else "no", each.node or "-"),
            *(_time(each.since), each.streams if each.node else "-", each.bytes),
        )
        for each in environments
    ]
    titles = ("TENANT", "ENVIRONMENT", "ONLINE", "NODE", "SINCE", "STREAMS", "BYTES")
    return _table(titles, rows)


def _status(environments: list[EnvironmentFacts], nodes: list[NodeFacts]) -> dict[str, Any]:
    return {
        "environments": [
            {
                "tenant": each.tenant,
                "environment_id": each.environment_id,
                "online": each.node is not None,
                "node": each.node,
                "since": _seconds(each.since),
                "streams": each.streams,
                "bytes": each.bytes,
            }
            for each in environments
        ],
        "nodes": [
            {
                "node": each.node,
                "url": each.url,
                "draining": each.is_draining,
                "executors": each.executors,
            }
            for each in nodes
        ],
    }


def _seconds(at: float | None) -> int | None:
    return None if at is None else math.floor(at)


def _time(at: float | None) -> str:
    return "-" if at is None else local_time(at, "%Y-%m-%d %H:%M:%S %z")


def _table(titles: tuple[str, ...], rows: list[Any]) -> str:
    cells = [titles, *(tuple(printable(str(cell)) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    lines = []
    for row in cells:
        padded = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(padded).rstrip() + "\n")
    return "".join(lines)


# ---- the database ---------------------------------------------------------------------


def _with_store(
    arguments: argparse.Namespace,
    work: Callable[[Store], Awaitable[T]],
    *,
    may_create: bool = False,
) -> T:
    """Open the database, do the work, and close it; raises CommandError if there is none."""
    directory = data_directory(arguments)
    is_here = database_url(arguments) is not None or (directory / "registry.db").exists()
    if not is_here and not may_create:
        raise CommandError(
            f"there is no registry in {directory}: name its directory with --data, or its "
            "database with --database"
        )

    async def run() -> T:
        store = Store(open_database(database_url(arguments), directory), Metrics())
        try:
            await store.open()
            return await work(store)
        except DatabaseUnavailable as error:
            raise CommandError(f"cannot use the database: {error}") from None
        finally:
            await store.close()

    return run_loop(run())
