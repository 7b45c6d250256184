"""The tables of the registry as numbered migrations, in SQL that both engines understand.

`UNLOGGED` is for PostgreSQL: the rows of these tables live for seconds, and after a crash of the
database the nodes write them again.
"""

from __future__ import annotations

from typing import Final

# Each entry is applied once, in order, in one transaction. Entries are never changed, only added.
MIGRATIONS: Final = (
    (
        "CREATE TABLE tenants (id text PRIMARY KEY, name text NOT NULL UNIQUE,"
        " environments bigint, sockets bigint, bytes_per_second bigint)",
        "CREATE TABLE tokens (id text PRIMARY KEY, hash text NOT NULL UNIQUE, name text NOT NULL,"
        " tenant text NOT NULL REFERENCES tenants (id), scopes text NOT NULL,"
        " created_at double precision NOT NULL, expires_at double precision,"
        " last_used_at double precision, revoked_at double precision)",
        "CREATE TABLE environments (tenant text NOT NULL, id text NOT NULL,"
        " registration_id text NOT NULL, executor_key text NOT NULL, token_id text NOT NULL,"
        " node text, epoch bigint NOT NULL, since double precision,"
        " streams bigint NOT NULL, bytes bigint NOT NULL, PRIMARY KEY (tenant, id))",
        "CREATE INDEX environments_of_node ON environments (node)",
        "CREATE UNLOGGED TABLE authorizations (hash text PRIMARY KEY, tenant text NOT NULL,"
        " environment_id text NOT NULL, registration_id text NOT NULL, key_hash text NOT NULL,"
        " token_id text NOT NULL, expires double precision NOT NULL)",
        "CREATE UNLOGGED TABLE spent (nonce text PRIMARY KEY, expires double precision NOT NULL)",
        "CREATE UNLOGGED TABLE nodes (id text PRIMARY KEY, url text NOT NULL,"
        " draining bigint NOT NULL, expires double precision NOT NULL)",
        "CREATE TABLE keys (kid text PRIMARY KEY, secret text NOT NULL,"
        " created double precision NOT NULL)",
    ),
    (
        "ALTER TABLE tenants ADD COLUMN handshakes_per_second bigint",
        # When the commands of its clients were to end, if ever.
        "ALTER TABLE tokens ADD COLUMN killed_at double precision",
    ),
)
