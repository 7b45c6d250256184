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
    open_database,
)
from exec_server.cli.streams import json_text, local_time, print_text
from exec_server.errors import printable
from exec_server.host.event_loop import run as run_loop
from exec_server.hosting.database import DatabaseUnavailable
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
from exec_server.hosting.service import FIRST_TENANT, FirstStart, make_first_tenant, new_token_id
from exec_server.hosting.store import (
    RENEWAL_SECONDS,
    EnvironmentFacts,
    Limits,
    NewToken,
    Store,
    TenantFacts,
)

_CLEAR_SCREEN: Final = "\x1b[H\x1b[2J"
T = TypeVar("T")


def init(arguments: argparse.Namespace) -> None:
    """Make the first tenant, and print its tokens: the only time that they are shown."""
    checked_url("--public-url", arguments.public_url)
    url = normalised_url(arguments.public_url or f"http://{DEFAULT_LISTEN}")
    first: FirstStart | None = _with_store(arguments, make_first_tenant, may_create=True)
    if first is None:
        raise CommandError(
            "the registry has tokens already: `exec-server registry token create` makes others"
        )
    _print(arguments, asdict(first), _welcome(url, first))


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


def create_token(arguments: argparse.Namespace) -> None:
    """Print a new token: the only time that it is shown."""
    tenant = _tenant(arguments) or FIRST_TENANT
    scopes = _scopes(arguments)
    text = token_text(secrets.token_bytes(SECRET_BYTES))

    token_id = new_token_id()

    async def create(store: Store) -> float | None:
        record = await store.tenant(tenant, secrets.token_hex(8))
        assert record is not None
        values = (arguments.name, record[0], scopes, arguments.expires)
        return await store.add_token(NewToken(token_id, secret_hash(text), *values))

    expires_at = _with_store(arguments, create, may_create=True)
    expires = {"expires_at": _seconds(expires_at)}
    if arguments.credential is not None:
        # The line that an executor reads from stdin (`--executor-credential-stdin`).
        line = {"version": 1, "environment_id": arguments.credential, "token": text, **expires}
        print_text(json.dumps(line) + "\n")
        return
    until = "" if expires_at is None else f", valid until {_time(expires_at)}"
    _print(
        arguments,
        {"id": token_id, "token": text, "tenant": tenant, "scopes": list(scopes), **expires},
        f"{text}\n\n{token_id} of tenant {tenant}: {' '.join(scopes)}{until}\n"
        "The token is not shown again.\n",
    )


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


def list_tokens(arguments: argparse.Namespace) -> None:
    """Print the tokens that are not revoked; their texts are not known."""
    tenant = _tenant(arguments)
    tokens = _with_store(arguments, lambda store: store.tokens(tenant))
    facts = [asdict(token) for token in tokens]
    for token in facts:
        token["scopes"] = token["scopes"].split()
        for member in ("created_at", "expires_at", "last_used_at"):
            token[member] = _seconds(token[member])
    table = [
        (
            *(each.id, each.name, each.tenant, each.scopes, _time(each.created_at)),
            *(_time(each.expires_at), _time(each.last_used_at)),
        )
        for each in tokens
    ]
    titles = ("ID", "NAME", "TENANT", "SCOPES", "CREATED", "EXPIRES", "USED")
    _print(arguments, {"tokens": facts}, _table(titles, table))


def revoke_token(arguments: argparse.Namespace, token_id: str) -> None:
    """Refuse a token from now on, and close its sockets."""
    kill: bool = arguments.kill
    if not _with_store(arguments, lambda store: store.revoke_token(token_id, kill=kill)):
        raise CommandError(
            f"there is no token {token_id}, or it is revoked already: "
            "see `exec-server registry token list`"
        )
    facts = {"id": token_id, "revoked": True, **({"killed": True} if kill else {})}
    more = "; commands of its clients end within seconds" if kill else ""
    _print(arguments, facts, f"{token_id} is revoked{more}\n")


def list_tenants(arguments: argparse.Namespace) -> None:
    """Print the tenants with the numbers of their tokens and environments."""
    tenants = _with_store(arguments, lambda store: store.tenants())
    rows = [(each.name, each.tokens, each.environments, each.online) for each in tenants]
    table = _table(("TENANT", "TOKENS", "ENVIRONMENTS", "ONLINE"), rows)
    _print(arguments, {"tenants": [_tenant_facts(tenant) for tenant in tenants]}, table)


def show_tenant(arguments: argparse.Namespace, name: str) -> None:
    """Print the numbers and limits of one tenant."""
    tenants = _with_store(arguments, lambda store: store.tenants(name))
    if not tenants:
        raise _no_tenant(name)
    facts = _tenant_facts(tenants[0])
    lines = {**facts, **{f"limit {key}": value for key, value in facts["limits"].items()}}
    del lines["limits"]
    _print(arguments, facts, "".join(f"{key:29}{value}\n" for key, value in lines.items()))


def remove_tenant(arguments: argparse.Namespace, name: str) -> None:
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
    text = f"tenant {name} is removed with its tokens and environments\n"
    _print(arguments, {"tenant": name, "removed": True}, text)


def _tenant_facts(tenant: TenantFacts) -> dict[str, Any]:
    facts = asdict(tenant)
    return {"tenant": facts.pop("name"), **facts}


def _no_tenant(name: str) -> CommandError:
    return CommandError(f"there is no tenant {printable(name)}: `token create --tenant` makes one")


def limit_tenant(arguments: argparse.Namespace, name: str) -> None:
    """Change or show the limits of a tenant."""
    values = tuple(getattr(arguments, field.name) for field in fields(Limits))
    limits: Limits | None = _with_store(arguments, lambda store: store.limit_tenant(name, values))
    if limits is None:
        raise _no_tenant(name)
    facts = {"tenant": name, **asdict(limits)}
    _print(arguments, facts, "".join(f"{key:23}{value}\n" for key, value in facts.items()))


def list_environments(arguments: argparse.Namespace) -> None:
    """Print the environments that count in the limit of a tenant."""
    tenant = _tenant(arguments)
    environments, _ = _with_store(arguments, lambda store: store.status())
    environments = [each for each in environments if tenant in (None, each.tenant)]
    _print(arguments, _environment_facts(environments), _environment_table(environments))


def remove_environments(arguments: argparse.Namespace, *ids: str) -> None:
    """Remove environments that are offline, by their ids or by the time when they were seen."""
    if bool(ids) == (arguments.unseen is not None):
        raise UsageError("environment remove needs ids, or --unseen TIME such as --unseen 30d")
    tenant = _tenant(arguments)
    if ids:
        owner = tenant or FIRST_TENANT
        removed = _with_store(arguments, lambda store: store.remove_environments(owner, ids))
        remaining = [name for name in ids if (owner, name) not in removed]
    else:
        seconds = arguments.unseen
        removed = _with_store(arguments, lambda store: store.remove_unseen(seconds, tenant))
        remaining = []
    if arguments.json or removed or not remaining:
        facts = [{"tenant": owner, "environment_id": name} for owner, name in removed]
        lines = [f"{name} of tenant {owner} is removed" for owner, name in removed]
        _print(arguments, {"removed": facts}, "\n".join(lines or ["nothing is removed"]) + "\n")
    if remaining:
        raise CommandError(
            f"not removed, because online or unknown in tenant {tenant or FIRST_TENANT}: "
            f"{printable(' '.join(remaining))}; see `exec-server registry environment list`"
        )


def show_status(arguments: argparse.Namespace) -> None:
    """Print who is online; with --watch again and again."""

    async def show(store: Store) -> None:
        while True:
            environments, nodes = await store.status()
            rows = [
                (each.node, each.url, "yes" if each.draining else "no", each.executors)
                for each in nodes
            ]
            table = _table(("NODE", "URL", "DRAINING", "EXECUTORS"), rows)
            facts = {**_environment_facts(environments), "nodes": [asdict(each) for each in nodes]}
            if arguments.watch and os.isatty(1) and not arguments.json:
                os.write(1, _CLEAR_SCREEN.encode())
            _print(arguments, facts, f"{_environment_table(environments)}\n{table}")
            if not arguments.watch:
                return
            await asyncio.sleep(RENEWAL_SECONDS)

    _with_store(arguments, show)


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


def _environment_facts(environments: list[EnvironmentFacts]) -> dict[str, Any]:
    return {
        "environments": [
            {**asdict(each), "online": each.node is not None, "since": _seconds(each.since)}
            for each in environments
        ]
    }


def _print(arguments: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    print_text(json_text(facts) if arguments.json else text)


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
        store = Store(open_database(arguments), Metrics())
        try:
            await store.open()
            return await work(store)
        except DatabaseUnavailable as error:
            raise CommandError(f"cannot use the database: {error}") from None
        finally:
            await store.close()

    return run_loop(run())


FUNCTIONS: Final[dict[str, Callable[..., None]]] = {
    "init": init,
    "token create": create_token,
    "token list": list_tokens,
    "token revoke": revoke_token,
    "environment list": list_environments,
    "environment remove": remove_environments,
    "status": show_status,
    "tenant list": list_tenants,
    "tenant show": show_tenant,
    "tenant remove": remove_tenant,
    "tenant limit": limit_tenant,
}
