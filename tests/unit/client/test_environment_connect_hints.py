"""Texts of failed connections: the address, the reason, and what to try."""

from __future__ import annotations

import pytest

from exec_server.client.environment import explain
from exec_server.errors import ConnectFailed

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectFailed("HTTP error: 401", 401), "token="),
        (ConnectFailed("HTTP error: 404", 404), "another kind of server"),
        (ConnectFailed("IO error: Connection refused"), "check that the server is running"),
        (ConnectFailed("failed to lookup address"), "spelling"),
        (ConnectFailed("certificate verify failed"), "ca_file="),
        (ConnectFailed("certificate … is not pinned"), "new fingerprint as pin="),
        (ConnectFailed("certificate verify failed: it has expired"), "clocks"),
        (ConnectFailed("certificate verify failed: IP address mismatch"), "a name of the cert"),
        (ConnectFailed("connection ended"), "wss://"),
        (ConnectFailed("the server does not speak TLS at this port"), "ws://"),
        (ConnectFailed("IO error: No such file or directory"), "path"),
        (ConnectFailed("timed out after 10 s"), "firewall"),
    ],
)
def test_hints(error: ConnectFailed, words: str) -> None:
    assert str(error) == error.reason
    explain(error, "ws://h")
    assert (error.url, words in error.hint) == ("ws://h", True)
    assert str(error) == f"cannot connect to ws://h: {error.reason}; {error.hint}"


@pytest.mark.parametrize("error", [ConnectFailed("403", 403), ConnectFailed("Permission denied")])
def test_unix_sockets_are_for_one_user(error: ConnectFailed) -> None:
    explain(error, "unix:/run/s")
    assert error.hint == "only the user of the server and root may use its unix socket"


def test_a_unix_socket_has_a_path_and_no_port() -> None:
    error = ConnectFailed("IO error: Connection refused")
    explain(error, "unix:/run/s")
    assert error.hint.startswith("check that the server is running and that the path is right")


def test_an_unknown_reason_has_no_hint() -> None:
    error = ConnectFailed("strange\x1b")
    explain(error, "ws://h")
    assert str(error) == "cannot connect to ws://h: strange\\x1b"
