"""Credentials for a registry in the environment of a server that listens."""

from __future__ import annotations

from tests.support.client import Client, Server, start_server

from exec_server.client.targets import TARGET_VARIABLE
from exec_server.host.interpreter import REGISTRY_NAMES
from exec_server.registry.credentials import BEARER_TOKEN, OWN_API_KEY

_POLICY = {"inherit": "all", "ignoreDefaultExcludes": True, "exclude": [], "set": {}} | {
    "includeOnly": []
}


def test_the_names_are_those_of_the_registry_and_of_the_default_target() -> None:
    assert {OWN_API_KEY, BEARER_TOKEN, TARGET_VARIABLE} == REGISTRY_NAMES


def test_neither_children_nor_requests_get_them() -> None:
    env = {name: f"hush-{name}" for name in REGISTRY_NAMES} | {"HARMLESS": "yes"}
    with start_server("ours", env=env) as server, server.connect() as client:
        shown = client.run(["/usr/bin/env"], env={}, envPolicy=_POLICY).stdout
        assert b"HARMLESS=yes" in shown
        assert b"hush" not in shown
        _check_proc(client, server)
        for name in REGISTRY_NAMES:
            _check_refused(client, name)
            # A variable that the client itself passes to a command is the client's.
            assert client.run(["printenv", name], env={"PATH": "/bin:/usr/bin", name: "own"}).stdout


def _check_proc(client: Client, server: Server) -> None:
    environ = f"/proc/{server.process.pid}/environ"
    assert b"hush" not in client.run(["/bin/sh", "-c", f"cat {environ}"]).stdout


def _check_refused(client: Client, name: str) -> None:
    header = {"name": "Authorization", "value": "Bearer ", "valueEnvVar": name}
    params = {"requestId": "r", "method": "GET", "url": "http://127.0.0.1:1/", "headers": [header]}
    _, message = client.failure("http/request", params)
    assert name in message
    assert "hush" not in message
    assert "Connection refused" not in message
