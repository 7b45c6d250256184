"""enforceManagedNetwork: the proxies are the only way out of a sandbox, for root and for a user."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.client import Client, ProcessRun
from tests.support.network import PATH, WebOrigin, network_proxy, start_proxies, web_origin
from tests.support.sandbox import Stage, interpreter, workspace_write

_PROXY = network_proxy(domains={"127.0.0.1": "allow", "bad.test": "deny"})
_UNLIMITED = [
    {"type": "disabled"},
    {"type": "external", "network": "restricted"},
    {"type": "managed", "file_system": {"type": "unrestricted"}, "network": "enabled"},
]


@pytest.fixture(scope="module")
def origin() -> Iterator[WebOrigin]:
    with web_origin() as running:
        yield running


def _sandbox(stage: Stage, permissions: dict[str, Any] | None) -> dict[str, Any]:
    sandbox = workspace_write(stage.scratch.base, network="enabled")
    return sandbox if permissions is None else sandbox | {"permissions": permissions}


def _run(client: Client, stage: Stage, script: str, **params: Any) -> ProcessRun:
    defaults: dict[str, Any] = {
        "env": {"PATH": PATH},
        "sandbox": _sandbox(stage, None),
        "enforceManagedNetwork": True,
        "networkProxy": _PROXY,
    }
    return client.run(["/bin/sh", "-c", script], **defaults | params)


@pytest.mark.parametrize("permissions", [None, *_UNLIMITED])
def test_only_the_proxies_lead_out(
    client: Client, stage: Stage, origin: WebOrigin, permissions: dict[str, Any] | None
) -> None:
    script = f"""
        curl -s -m 5 {origin.url}/; echo
        curl -s -m 5 -x $ALL_PROXY {origin.url}/; echo
        curl -s -m 5 -o /dev/null -w '%{{http_code}}\\n' http://bad.test/
        curl -s -m 5 --noproxy '*' {origin.url}/ || echo direct $?
        curl -s -m 5 --noproxy '*' {stage.server.url.replace("ws", "http", 1)}/readyz || echo own $?
        tail -n +3 /proc/net/dev | cut -d: -f1
    """
    ended = _run(client, stage, script, sandbox=_sandbox(stage, permissions))
    assert ended.stdout.decode().split() == [
        *("origin", "origin", "403"),
        *("direct", "7", "own", "7", "lo"),
    ]


def test_a_host_that_the_proxy_refuses_is_the_denial(client: Client, stage: Stage) -> None:
    ended = _run(client, stage, "curl -sS -m 5 https://localhost/ https://bad.test/")
    assert ended.exit_code == 56
    assert ended.sandbox_denial == {
        "text": "curl: (56) CONNECT tunnel failed, response 403",
        "path": None,
        "operation": "network",
        "rule": "the network proxy refuses localhost:443 (localhost is a local address: "
        "allowLocalBinding or a rule for exactly it permits it), bad.test:443 (a rule denies it)",
    }
    ended = _run(client, stage, "curl -s -m 5 https://bad.test/ || echo no")
    assert (ended.stdout, ended.sandbox_denial) == (b"no\n", None)


_SOCKETS = """
import ctypes, errno, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    if getattr(libc, name)(*args) == -1:
        raise OSError(ctypes.get_errno(), "")
def attempt(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
def served():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
print(json.dumps({
    "unix": attempt(lambda: socket.socket(socket.AF_UNIX)),
    "datagrams": attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)),
    "pair": attempt(lambda: socket.socketpair()),
    "vsock": attempt(lambda: socket.socket(40, socket.SOCK_STREAM)),
    "packet": attempt(lambda: socket.socket(17, socket.SOCK_RAW)),
    "crypto": attempt(lambda: socket.socket(38, socket.SOCK_SEQPACKET)),
    "netlink": attempt(lambda: socket.socket(16, socket.SOCK_RAW)),
    "raw": attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
    "public": attempt(lambda: socket.create_connection(("192.0.2.1", 80), 5)),
    "dns": attempt(lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53))),
    "own loopback": attempt(served),
    "low port": attempt(lambda: socket.socket().bind(("127.0.0.1", 80))),
    "namespace": attempt(lambda: call("setns", os.open("/proc/self/ns/net", 0), 0)),
    "new network": attempt(lambda: call("unshare", 0x40000000)),
    "users": attempt(lambda: call("unshare", 0x10000000)),
    "capabilities": [line.split()[1] for line in open("/proc/self/status") if "CapEff" in line],
}))
"""


@pytest.mark.parametrize("permissions", [None, *_UNLIMITED])
def test_other_ways_are_closed(
    client: Client, stage: Stage, permissions: dict[str, Any] | None
) -> None:
    ended = client.run(
        [interpreter(), "-I", "-S", "-c", _SOCKETS],
        env={"PATH": PATH},
        sandbox=_sandbox(stage, permissions),
        enforceManagedNetwork=True,
        networkProxy=_PROXY,
    )
    assert (ended.exit_code, ended.stderr) == (0, b"")
    assert json.loads(ended.stdout) == {
        "unix": "EPERM",
        "datagrams": "EPERM",
        "pair": "ok",
        "vsock": "EPERM",
        "packet": "EPERM",
        "crypto": "EPERM",
        "netlink": "ok",
        "raw": "EPERM",
        "public": "ENETUNREACH",
        "dns": "ENETUNREACH",
        "own loopback": "ok",
        "low port": "EACCES",
        "namespace": "EPERM",
        "new network": "EPERM",
        "users": "EPERM",
        "capabilities": ["0000000000000000"],
    }


def test_the_proxy_of_another_process_is_out_of_reach(
    client: Client, stage: Stage, origin: WebOrigin
) -> None:
    others = start_proxies(client, network_proxy(domains={"*": "allow", "127.0.0.1": "allow"}))
    script = f"""
        curl -s -m 5 -x http://127.0.0.1:{others.http} {origin.url}/ || echo http $?
        curl -s -m 5 -x socks5h://127.0.0.1:{others.socks} {origin.url}/ || echo socks $?
    """
    confined = network_proxy(domains={})
    ended = _run(client, stage, script, networkProxy=confined)
    assert ended.stdout.decode().split() == ["http", "7", "socks", "7"]
    assert others.decisions() == []
    client.call("process/terminate", {"processId": others.process_id})


def test_without_enforcement_the_policy_decides(
    client: Client, stage: Stage, origin: WebOrigin
) -> None:
    script = f"curl -s -m 5 {origin.url}/; curl -s -m 5 --noproxy '*' {origin.url}/ || echo $?"
    ended = _run(client, stage, script, enforceManagedNetwork=False)
    assert ended.stdout == b"originorigin"
    offline = workspace_write(stage.scratch.base)
    ended = _run(client, stage, script, enforceManagedNetwork=False, sandbox=offline)
    assert ended.stdout in (b"7\n", b"2\n7\n", b"7\n7\n")


@pytest.mark.parametrize("permissions", [None, *_UNLIMITED])
def test_nothing_runs_without_a_proxy(
    client: Client, stage: Stage, permissions: dict[str, Any] | None
) -> None:
    start = {
        "processId": "p",
        "argv": ["/bin/true"],
        "cwd": "file:///",
        "tty": False,
        "sandbox": _sandbox(stage, permissions),
        "enforceManagedNetwork": True,
    }
    proxy = {"HTTP_PROXY": "http://127.0.0.1:9"}
    attempts: list[dict[str, Any]] = [
        {"env": {}},
        {"env": {"HTTP_PROXY": "http://192.0.2.1:9"}},
        {"env": proxy, "managedNetwork": {"loopbackPorts": [10]}},
        {"env": proxy, "managedNetwork": {}},
        {"env": {f"{name}_PROXY": f"http://127.0.0.1:{port}" for port, name in _MANY}},
    ]
    for more in attempts:
        code, text = client.failure("process/start", start | more)
        assert (code, text[:63]) == (
            -32600,
            "managed proxy mode requires proxy environment variables: enforc",
        )


_MANY = list(
    enumerate(
        ("HTTP", "HTTPS", "WS", "WSS", "ALL", "FTP", "DOCKER_HTTP", "BUNDLE_HTTP", "YARN_HTTP"), 1
    )
)


def test_ports_of_the_clients_own_proxies(client: Client, stage: Stage, origin: WebOrigin) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        script = f"""
            curl -s -m 5 http://any.test/; echo
            curl -s -m 5 --noproxy '*' http://127.0.0.1:{port}/ || echo other $?
        """
        ended = _run(
            client,
            stage,
            script,
            env={"PATH": PATH, "http_proxy": origin.url, "HTTP_PROXY": origin.url},
            networkProxy=None,
            managedNetwork={"loopbackPorts": [origin.port, port]},
        )
    assert ended.stdout.decode().split() == ["origin", "other", "7"]
    assert origin.requests[-1].startswith("GET http://any.test/ HTTP/1.1\n")


def test_terminals_and_many_commands(client: Client, stage: Stage, origin: WebOrigin) -> None:
    """Prebuilt sandboxes and terminals have the same network."""
    for tty in (False, True, False):
        ended = _run(client, stage, f"curl -s -m 5 {origin.url}/", tty=tty)
        assert (ended.stdout or ended.output["pty"]) == b"origin"


def test_a_program_that_does_not_exist(client: Client, stage: Stage) -> None:
    ended = client.run(
        ["/no/such/program"],
        sandbox=_sandbox(stage, None),
        enforceManagedNetwork=True,
        networkProxy=_PROXY,
    )
    assert ended.exit_code == 101
