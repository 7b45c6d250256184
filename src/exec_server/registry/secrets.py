"""The environment variables that hold secrets for a registry."""

from __future__ import annotations

OWN_API_KEY = "EXEC_SERVER_API_KEY"
API_KEY = "CODEX_API_KEY"
ACCESS_TOKEN = "CODEX_ACCESS_TOKEN"
BEARER_TOKEN = "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN"

# Never passed on to children in remote mode. The server removes them from its own environment
# after the credential is chosen, because botocore reads its keys there.
SECRET_NAMES = frozenset(
    {
        OWN_API_KEY,
        API_KEY,
        ACCESS_TOKEN,
        BEARER_TOKEN,
        "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_SECURITY_TOKEN",
    }
)
