"""The address and the hint in the text of a failed connection. Pure."""

from __future__ import annotations

from typing import Final

from exec_server.errors import ConnectFailed

# Words of the operating system, of resolvers and of OpenSSL, and what to try after them.
_HINTS: Final = (
    ("refused", "check that the server is running and that the port is right: it prints its URL"),
    ("lookup", "check the spelling of the host name"),
    ("not speak tls", "use ws:// for a server without TLS"),
    ("not pinned", "if the certificate was replaced, pass its new fingerprint as pin="),
    ("expired", "renew the certificate of the server, and check the clocks of both machines"),
    ("mismatch", "use a name of the certificate in the URL, or pin the certificate with pin="),
    (
        "certificate",
        "pass the root certificate as ca_file=, or the fingerprint as pin=",
    ),
    ("timed out", "check the address, and whether a firewall is in between"),
    ("no such file", "check the path, and that the server is running"),
)


def explain(error: ConnectFailed, address: str | None) -> None:
    """Add the address and a hint to an error."""
    error.url = address
    scheme = (address or "").partition(":")[0]
    reason = error.reason.lower()
    if scheme == "unix" and (error.status == 403 or "permission denied" in reason):
        error.hint = "only the user of the server and root may use its unix socket"
    elif scheme == "unix" and "refused" in reason:
        error.hint = "check that the server is running and that the path is right"
    elif scheme == "ws" and reason == "connection ended":
        error.hint = "if the server has TLS, use wss://"  # it hangs up on a plain request
    else:
        error.hint = _hint(error)


def shown_address(
    target: str | None, registry: str | None = None, environment_id: str | None = None
) -> str:
    """The address in error texts, without passwords and without the arguments of a command."""
    if target is None:
        return f"environment {environment_id} of {_without_user(registry or '')}"
    if target.startswith("stdio:"):
        return " ".join(target.split()[:1])
    return _without_user(target)


def _without_user(url: str) -> str:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _hint(error: ConnectFailed) -> str:
    if error.status in (401, 403):
        return "pass the token that the server expects: connect(..., token=...)"
    if error.status is not None:
        return "another kind of server answers there: check host, port and path"
    return next((hint for word, hint in _HINTS if word in error.reason.lower()), "")
