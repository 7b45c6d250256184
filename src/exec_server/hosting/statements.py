"""Every SQL statement of the registry, written once for both engines.

Engines translate the parameters `$1`, `$2` and `now()`, the database clock in Unix seconds.
Parameters in a SELECT list are cast, because PostgreSQL would take them for text there.
"""

from __future__ import annotations

from enum import StrEnum
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


_LIVE_HOLDER: Final = "nodes.id = environments.node AND nodes.expires > now()"
# The columns of `store.Limits`, in its order.
_LIMITS: Final = (
    "tenants.environments, tenants.sockets, tenants.bytes_per_second, tenants.handshakes_per_second"
)
# A tenant without an environment that is online: the rows of its tokens are how nodes learn that
# sockets are to be closed.
_REMOVABLE: Final = (
    "(SELECT tenants.id FROM tenants WHERE tenants.name = $1 AND NOT EXISTS"
    " (SELECT 1 FROM environments JOIN nodes"
    f" ON {_LIVE_HOLDER} WHERE environments.tenant = tenants.id))"
)
_NAME_OF_TENANT: Final = "(SELECT name FROM tenants WHERE tenants.id = environments.tenant)"


class Statement(StrEnum):
    """The statements; the name of each, in lower case, is a label of the metrics."""

    ADD_FIRST_TENANT = (
        "INSERT INTO tenants (id, name) SELECT CAST($1 AS text), CAST($2 AS text)"
        " WHERE NOT EXISTS (SELECT 1 FROM tenants) ON CONFLICT DO NOTHING"
    )
    HAS_TENANT = "SELECT EXISTS (SELECT 1 FROM tenants)"
    ADD_TENANT = "INSERT INTO tenants (id, name) VALUES ($1, $2) ON CONFLICT DO NOTHING"
    TENANT = f"SELECT id, {_LIMITS} FROM tenants WHERE name = $1"
    # Tokens that are valid, environments, and those of them that are online.
    TENANTS = (
        "SELECT tenants.id, tenants.name, (SELECT count(*) FROM tokens WHERE tokens.tenant ="
        " tenants.id AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())),"
        " (SELECT count(*) FROM environments WHERE environments.tenant = tenants.id),"
        " (SELECT count(*) FROM environments WHERE environments.tenant = tenants.id"
        f" AND EXISTS (SELECT 1 FROM nodes WHERE {_LIVE_HOLDER})), {_LIMITS} FROM tenants"
        " WHERE CAST($1 AS text) IS NULL OR tenants.name = $1 ORDER BY tenants.name"
    )
    # The steps of a removal, of which each one does nothing while an environment is online.
    REMOVE_TENANT_AUTHORIZATIONS = f"DELETE FROM authorizations WHERE tenant = {_REMOVABLE}"
    REMOVE_TENANT_TOKENS = f"DELETE FROM tokens WHERE tenant = {_REMOVABLE}"
    REMOVE_TENANT_ENVIRONMENTS = f"DELETE FROM environments WHERE tenant = {_REMOVABLE}"
    REMOVE_TENANT = (
        "DELETE FROM tenants WHERE name = $1 AND NOT EXISTS (SELECT 1 FROM tokens"
        " WHERE tokens.tenant = tenants.id) AND NOT EXISTS (SELECT 1 FROM environments"
        " WHERE environments.tenant = tenants.id) RETURNING id"
    )
    LIMIT_TENANT = (
        "UPDATE tenants SET environments = COALESCE($2, environments),"
        " sockets = COALESCE($3, sockets), bytes_per_second = COALESCE($4, bytes_per_second),"
        " handshakes_per_second = COALESCE($5, handshakes_per_second)"
        f" WHERE name = $1 RETURNING {_LIMITS}"
    )
    # Only if the tenant exists: of several nodes that start together one has made it.
    ADD_TOKEN = (
        "INSERT INTO tokens (id, hash, name, tenant, scopes, created_at, expires_at)"
        " SELECT CAST($1 AS text), CAST($2 AS text), CAST($3 AS text), tenants.id,"
        " CAST($5 AS text), now(), now() + CAST($6 AS double precision)"
        " FROM tenants WHERE tenants.id = $4 RETURNING expires_at"
    )
    TOKEN = (
        "SELECT tokens.id, tokens.tenant, tenants.name, tokens.scopes, revoked_at IS NOT NULL,"
        f" expires_at IS NOT NULL AND expires_at <= now(), {_LIMITS}"
        " FROM tokens JOIN tenants ON tenants.id = tokens.tenant WHERE hash = $1"
    )
    TOKENS = (
        "SELECT tokens.id, tokens.name, tenants.name, tokens.scopes, tokens.created_at,"
        " tokens.expires_at, tokens.last_used_at FROM tokens JOIN tenants"
        " ON tenants.id = tokens.tenant WHERE revoked_at IS NULL"
        " AND (CAST($1 AS text) IS NULL OR tenants.name = $1) ORDER BY tokens.created_at, tokens.id"
    )
    REVOKE_TOKEN = (
        "UPDATE tokens SET revoked_at = now() WHERE id = $1 AND revoked_at IS NULL RETURNING id"
    )
    # Also for a token that is revoked already: its clients' sessions may still be there.
    KILL_TOKEN = (
        "UPDATE tokens SET revoked_at = COALESCE(revoked_at, now()), killed_at = now()"
        " WHERE id = $1 RETURNING id"
    )
    REVOKE_AUTHORIZATIONS = "DELETE FROM authorizations WHERE token_id = $1"
    TOUCH_TOKEN = "UPDATE tokens SET last_used_at = now() WHERE id = $1"

    # A new registration, unless the tenant has no room ($7) or an executor with another key is
    # online and takeover ($6) is off.
    REGISTER = (
        "INSERT INTO environments (tenant, id, registration_id, executor_key, token_id, node,"
        " epoch, since, streams, bytes) SELECT CAST($1 AS text), CAST($2 AS text), CAST($3 AS"
        " text), CAST($4 AS text), CAST($5 AS text), NULL, 1, now(), 0, 0"
        " WHERE EXISTS (SELECT 1 FROM environments WHERE tenant = $1 AND id = $2)"
        " OR (SELECT count(*) FROM environments WHERE tenant = $1) < CAST($7 AS bigint)"
        " ON CONFLICT (tenant, id) DO UPDATE SET registration_id = excluded.registration_id,"
        " executor_key = excluded.executor_key, token_id = excluded.token_id, node = NULL,"
        " epoch = environments.epoch + 1, since = now(), streams = 0"
        " WHERE CAST($6 AS boolean) OR environments.executor_key = excluded.executor_key"
        f" OR NOT EXISTS (SELECT 1 FROM nodes WHERE {_LIVE_HOLDER})"
        " RETURNING registration_id, now()"
    )
    FORGET_AUTHORIZATIONS = (
        "DELETE FROM authorizations WHERE tenant = $1 AND environment_id = $2"
        " AND registration_id <> (SELECT registration_id FROM environments"
        " WHERE tenant = $1 AND id = $2)"
    )
    AUTHORIZE = (
        "INSERT INTO authorizations (hash, tenant, environment_id, registration_id, key_hash,"
        " token_id, expires) SELECT CAST($3 AS text), environments.tenant, environments.id,"
        " environments.registration_id, CAST($4 AS text), CAST($5 AS text),"
        " now() + CAST($6 AS double precision) FROM environments JOIN nodes"
        f" ON {_LIVE_HOLDER} WHERE environments.tenant = $1 AND environments.id = $2"
        " RETURNING registration_id, expires - CAST($6 AS double precision)"
    )
    ENVIRONMENT = (
        "SELECT registration_id, executor_key, nodes.id, nodes.expires FROM environments"
        f" LEFT JOIN nodes ON {_LIVE_HOLDER} WHERE environments.tenant = $1 AND environments.id ="
        " $2"
    )
    CONSUME = (
        "DELETE FROM authorizations WHERE hash = $1 AND tenant = $2 AND environment_id = $3"
        " AND registration_id = $4 AND key_hash = $5 AND expires > now() AND EXISTS"
        " (SELECT 1 FROM environments WHERE environments.tenant = $2 AND environments.id = $3"
        " AND environments.registration_id = $4) RETURNING 1"
    )

    # Everything that decides about the ticket $1 tenant, $2 id, $3 registration, $4 expiry, $5
    # token: whether it is expired, whether its token is revoked, and the holder.
    ADMISSION = (
        "SELECT CAST($4 AS double precision) <= now(),"
        " EXISTS (SELECT 1 FROM tokens WHERE id = $5 AND revoked_at IS NULL),"
        " EXISTS (SELECT 1 FROM environments WHERE tenant = $1 AND id = $2"
        " AND registration_id = $3), nodes.id, nodes.url, nodes.expires, tenants.name,"
        f" {_LIMITS} FROM tenants"
        " LEFT JOIN environments ON environments.tenant = tenants.id AND environments.id = $2"
        f" LEFT JOIN nodes ON {_LIVE_HOLDER} WHERE tenants.id = $1"
    )
    CLAIM = (
        "UPDATE environments SET node = $4, epoch = epoch + 1, since = now(), streams = 0"
        " WHERE tenant = $1 AND id = $2 AND registration_id = $3 RETURNING epoch"
    )
    # The write of a claim was lost with a crash of the database.
    RECLAIM = (
        "UPDATE environments SET node = $4, epoch = $5, since = now()"
        " WHERE tenant = $1 AND id = $2 AND registration_id = $3 AND epoch < $5 RETURNING epoch"
    )
    RELEASE = (
        "UPDATE environments SET node = NULL, since = now(), streams = 0"
        " WHERE tenant = $1 AND id = $2 AND node = $3 AND epoch = $4"
    )
    SPEND = (
        "INSERT INTO spent (nonce, expires) SELECT CAST($1 AS text), CAST($2 AS double precision)"
        " WHERE CAST($2 AS double precision) > now() ON CONFLICT DO NOTHING RETURNING 1"
    )

    RENEW = (
        "INSERT INTO nodes (id, url, draining, expires) VALUES ($1, $2, $3,"
        " now() + CAST($4 AS double precision)) ON CONFLICT (id) DO UPDATE SET url = excluded.url,"
        " draining = excluded.draining, expires = excluded.expires RETURNING now()"
    )
    REMOVE_NODE = "DELETE FROM nodes WHERE id = $1"
    HELD = "SELECT tenant, id, epoch, registration_id FROM environments WHERE node = $1"
    REVOKED = (
        "SELECT id, killed_at IS NOT NULL AND killed_at > $1 FROM tokens"
        " WHERE revoked_at > $1 OR killed_at > $1"
    )
    COUNT = (
        "UPDATE environments SET streams = $5, bytes = bytes + $6"
        " WHERE tenant = $1 AND id = $2 AND node = $3 AND epoch = $4"
    )
    FORGET_EXPIRED_AUTHORIZATIONS = "DELETE FROM authorizations WHERE expires <= now()"
    FORGET_EXPIRED_SPENT = "DELETE FROM spent WHERE expires <= now()"
    # A dead node may come back with its row, so the row stays for a while.
    FORGET_EXPIRED_NODES = "DELETE FROM nodes WHERE expires <= now() - 600"
    KEYS = "SELECT kid, secret FROM keys ORDER BY created DESC, kid DESC"
    ADD_KEY = (
        "INSERT INTO keys (kid, secret, created) VALUES ($1, $2, now()) ON CONFLICT DO NOTHING"
    )
    FORGET_KEYS = (
        "DELETE FROM keys WHERE kid NOT IN"
        " (SELECT kid FROM keys ORDER BY created DESC, kid DESC LIMIT 2)"
    )
    NOW = "SELECT now()"

    ENVIRONMENTS = (
        # A node that was killed has left its number of streams.
        "SELECT tenants.name, environments.id, nodes.id, environments.since,"
        " CASE WHEN nodes.id IS NULL THEN 0 ELSE environments.streams END,"
        " environments.bytes FROM environments JOIN tenants ON tenants.id = environments.tenant"
        f" LEFT JOIN nodes ON {_LIVE_HOLDER} ORDER BY tenants.name, environments.id"
    )
    REMOVE_ENVIRONMENT = (
        "DELETE FROM environments WHERE tenant = (SELECT id FROM tenants WHERE name = $1) AND id ="
        f" $2 AND NOT EXISTS (SELECT 1 FROM nodes WHERE {_LIVE_HOLDER}) RETURNING"
        f" {_NAME_OF_TENANT}, id"
    )
    # A node that ended without a release was there until its row expired, if the row still exists.
    REMOVE_UNSEEN = (
        "DELETE FROM environments WHERE COALESCE(since, 0) <= now() - CAST($1 AS double precision)"
        f" AND (CAST($2 AS text) IS NULL OR {_NAME_OF_TENANT} = $2)"
        " AND NOT EXISTS (SELECT 1 FROM nodes WHERE nodes.id = environments.node"
        " AND nodes.expires > now() - CAST($1 AS double precision))"
        f" RETURNING {_NAME_OF_TENANT}, id"
    )
    NODES = (
        "SELECT nodes.id, nodes.url, nodes.draining, (SELECT count(*) FROM environments"
        " WHERE environments.node = nodes.id) FROM nodes WHERE expires > now() ORDER BY nodes.id"
    )
