"""Environment variables that hold credentials and are never passed on."""

from __future__ import annotations

# Credentials of the server or of its parent: kept from children and from HTTP requests.
STRIPPED_NAMES = frozenset(
    {
        "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
        "NODE_REPL_AUTH_TOKEN",
        "OPENAI_FEDERATION_RULE_ID",
        "OPENAI_IDENTITY_TOKEN_FILE",
        "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
        "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE",
    }
)
# Credentials for a registry, which the environment of a machine may hold whether or not its server
# uses a registry. Children do not inherit them and HTTP requests cannot name them. A client may
# still pass such a variable of its own to a command.
REGISTRY_NAMES = frozenset({"EXEC_SERVER_API_KEY", "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN"})
