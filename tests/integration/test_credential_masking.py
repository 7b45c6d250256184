"""Credential masking: no way of starting a command shows it a secret, and requests work.

The names of the providers lead to an origin on loopback, through a proxy of the server's own.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.certificates import make_pair
from tests.support.client import Client, ProcessRun, Server, start_server
from tests.support.network import PATH, network_proxy
from tests.support.sandbox import interpreter, read_only

_TOKEN = "ghp_" + "b" * 36
_CUSTOM = "demo-" + "c" * 20  # a secret of a provider that the client names
_PROVIDER = {
    "env": ["DEMO_TOKEN"],
    "patterns": ["demo-[a-z]{6,}"],
    "url_prefixes": ["https://custom.test/v1/"],
}
_SETTINGS: dict[str, Any] = {
    "domains": {"*": "allow"},
    "allowLocalBinding": True,
    "allowUpstreamProxy": True,
    "credentialMasking": True,
}
_PROXY = network_proxy(**_SETTINGS, credentialProviders={"demo": _PROVIDER})


@dataclass
class Providers:
    """A TLS origin for some names, and the proxy that leads all names to it."""

    proxy: int
    heads: list[str] = field(default_factory=list)  # of the requests that arrived
    asked: list[str] = field(default_factory=list)  # targets of CONNECT, and plain requests


def _serve_origin(listener: socket.socket, context: ssl.SSLContext, heads: list[str]) -> None:
    with contextlib.suppress(OSError):
        while True:
            accepted, _ = listener.accept()
            with contextlib.suppress(OSError), context.wrap_socket(accepted, True) as secure:
                head = b""
                while b"\r\n\r\n" not in head and (data := secure.recv(65536)):
                    head += data
                if head:
                    heads.append(head.decode())
                    secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


def _serve_proxy(listener: socket.socket, origin: int, asked: list[str]) -> None:
    with contextlib.suppress(OSError):
        while True:
            accepted, _ = listener.accept()
            threading.Thread(target=_tunnel, args=(accepted, origin, asked), daemon=True).start()


def _tunnel(accepted: socket.socket, origin: int, asked: list[str]) -> None:
    with contextlib.suppress(OSError), accepted:
        head = b""
        while b"\r\n\r\n" not in head:
            head += accepted.recv(1)
        asked.append(head.decode())
        if not head.startswith(b"CONNECT"):
            accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nplain")
            return
        accepted.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with socket.create_connection(("127.0.0.1", origin)) as outer:
            back = threading.Thread(target=_copy, args=(outer, accepted))
            back.start()
            _copy(accepted, outer)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("masking")


@pytest.fixture(scope="module")
def providers(folder: Path) -> Iterator[Providers]:
    authority = make_pair(folder, "authority")
    pair = make_pair(
        folder, "origin", "api.github.com", "other.test", "custom.test", issuer=authority
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with (
        socket.create_server(("127.0.0.1", 0)) as origin,
        socket.create_server(("127.0.0.1", 0)) as proxy,
    ):
        running = Providers(proxy.getsockname()[1])
        threads = [
            threading.Thread(target=_serve_origin, args=(origin, context, running.heads)),
            threading.Thread(
                target=_serve_proxy, args=(proxy, origin.getsockname()[1], running.asked)
            ),
        ]
        for thread in threads:
            thread.start()
        yield running
        for listener in (origin, proxy):
            listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def server(providers: Providers, folder: Path) -> Iterator[Server]:
    url = f"http://127.0.0.1:{providers.proxy}"
    variables = {
        "HTTP_PROXY": url,
        "HTTPS_PROXY": url,
        "SSL_CERT_FILE": str(folder / "authority.pem"),
        "GH_TOKEN": _TOKEN,  # of the server itself, inherited by policy
    }
    with start_server("ours", env=variables) as running:
        yield running


def _run(client: Client, argv: list[str], **params: Any) -> ProcessRun:
    env = {
        "PATH": PATH,
        "GITHUB_TOKEN": _TOKEN,
        "COPY": f"x {_TOKEN} y {_CUSTOM}",
        "HOME": "/nonexistent",
        "DEMO_TOKEN": _CUSTOM,
    }
    defaults: dict[str, Any] = {"env": env, "networkProxy": _PROXY}
    return client.run(argv, **defaults | params)


_INHERIT_ALL = {
    "inherit": "all",
    "ignoreDefaultExcludes": True,
    "exclude": [],
    "set": {},
    "includeOnly": [],
}
_SNAPSHOT = {"scopeId": "scope", "shell": {"name": "bash", "path": "/bin/bash"}}
_WAYS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "a program": (["/usr/bin/env"], {}),
    "sh -c": (["/bin/sh", "-c", "set; env"], {}),
    "bash -c": (["/bin/bash", "-c", "env; set"], {}),
    "a login shell": (["/bin/bash", "-lc", "env; set"], {}),
    "a login shell on a terminal": (["/bin/bash", "-lic", "env; set"], {"tty": True}),
    "a snapshot": (["/bin/bash", "-lc", "env; set"], {"shellSnapshot": _SNAPSHOT}),
    "the same snapshot": (["/bin/bash", "-lc", "env; set"], {"shellSnapshot": _SNAPSHOT}),
    "inherited": (["/usr/bin/env"], {"envPolicy": _INHERIT_ALL}),
}


@pytest.mark.parametrize("way", _WAYS)
def test_no_way_of_starting_a_command_shows_the_secret(client: Client, way: str) -> None:
    argv, more = _WAYS[way]
    ended = _run(client, argv, **more)
    output = b"".join(ended.output.values())
    assert _TOKEN.encode() not in output
    assert _CUSTOM.encode() not in output
    lines = dict(line.split("=", 1) for line in output.decode().splitlines() if "=" in line)
    assert lines["GITHUB_TOKEN"].startswith("ghp_masked")
    assert lines["DEMO_TOKEN"].startswith("demo-")
    assert f"{lines['GITHUB_TOKEN']} y {lines['DEMO_TOKEN']}" in lines["COPY"]
    if way == "inherited":
        assert lines["GH_TOKEN"] == lines["GITHUB_TOKEN"]
    for name in ("SSL_CERT_FILE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS"):
        assert Path(lines[name]).name.startswith("exec-server-ca-")


@pytest.mark.parametrize("snapshot", [None, _SNAPSHOT | {"scopeId": "profile"}])
def test_start_up_files_see_dummies_only(
    client: Client, tmp_path: Path, snapshot: dict[str, Any] | None
) -> None:
    """What they make of the variables is a part of the state that a snapshot keeps."""
    assert client.environment_info["capabilities"]["shellSnapshotV2"]
    (tmp_path / ".bash_profile").write_text(
        "export COPIED=$GITHUB_TOKEN\n"
        'alias kept="echo $GITHUB_TOKEN"\n'
        'eval "kept() { echo $GITHUB_TOKEN; }"\n'
        'echo "$GITHUB_TOKEN" > ~/written\n'
    )
    env = {"PATH": PATH, "HOME": str(tmp_path), "GITHUB_TOKEN": _TOKEN}
    for _ in range(2):
        ended = _run(
            client,
            ["/bin/bash", "-lc", "env; alias; declare -f; set; kept"],
            env=env,
            shellSnapshot=snapshot,
        )
        output = ended.stdout.decode()
        assert _TOKEN not in output
        assert "COPIED=ghp_masked" in output
        assert "kept" in output
    assert _TOKEN not in (tmp_path / "written").read_text()


_URLLIB = """
import os, urllib.request
request = urllib.request.Request("https://api.github.com/user")
request.add_header("Authorization", "token " + os.environ["GITHUB_TOKEN"])
print(urllib.request.urlopen(request, timeout=9).read().decode(), end="")
"""
_CURL = 'curl -sS -m 9 -H "Authorization: Bearer $GITHUB_TOKEN" https://api.github.com/user'


@pytest.mark.parametrize(
    ("argv", "authorization"),
    [
        ([interpreter(), "-c", _URLLIB], f"token {_TOKEN}"),
        (["/bin/sh", "-c", _CURL], f"Bearer {_TOKEN}"),
        (["/bin/bash", "-lc", _CURL], f"Bearer {_TOKEN}"),
        (["/bin/sh", "-c", f"{_CURL} -x $ALL_PROXY"], f"Bearer {_TOKEN}"),
        (
            ["/bin/sh", "-c", "curl -sS -m 9 -u me:$GITHUB_TOKEN https://api.github.com/user"],
            "Basic " + base64.b64encode(f"me:{_TOKEN}".encode()).decode(),
        ),
    ],
)
def test_the_provider_gets_the_secret(
    client: Client, providers: Providers, argv: list[str], authorization: str
) -> None:
    ended = _run(client, argv)
    assert (ended.stdout, ended.stderr) == (b"ok", b"")
    assert providers.heads[-1].startswith("GET /user HTTP/1.1\r\nHost: api.github.com\r\n")
    assert f"Authorization: {authorization}\r\n" in providers.heads[-1]


def test_masking_in_a_sandbox_whose_only_network_is_the_proxy(
    client: Client, providers: Providers
) -> None:
    ended = _run(
        client, ["/bin/sh", "-c", f"{_CURL}; env"], sandbox=read_only(), enforceManagedNetwork=True
    )
    assert ended.stdout.startswith(b"ok")
    assert _TOKEN.encode() not in ended.stdout
    assert f"Authorization: Bearer {_TOKEN}\r\n" in providers.heads[-1]


def test_other_hosts_get_the_dummy_and_their_own_connection(
    client: Client, providers: Providers, folder: Path
) -> None:
    script = 'curl -sS -m 9 -H "Authorization: Bearer $GITHUB_TOKEN" https://other.test/x'
    # Their own certificate is presented: the bundle contains its issuer.
    ended = _run(client, ["/bin/sh", "-c", f"{script} -w ' %{{ssl_verify_result}}'"])
    assert ended.stdout == b"ok 0"
    assert "Authorization: Bearer ghp_masked" in providers.heads[-1]
    assert _TOKEN not in providers.heads[-1]


def test_plain_http_gets_the_dummy(client: Client, providers: Providers) -> None:
    script = 'curl -sS -m 9 -H "Authorization: Bearer $GITHUB_TOKEN" http://api.github.com/x'
    assert _run(client, ["/bin/sh", "-c", script]).stdout == b"plain"
    assert "ghp_masked" in providers.asked[-1]
    assert _TOKEN not in providers.asked[-1]


def test_secrets_do_not_leave_by_another_host_header(client: Client, providers: Providers) -> None:
    before = len(providers.heads)
    ended = _run(client, ["/bin/sh", "-c", f"{_CURL} -H 'Host: other.test' -w ' %{{http_code}}'"])
    assert ended.stdout.endswith(b" 400")
    assert len(providers.heads) == before


def test_an_origin_that_cannot_prove_its_name(client: Client, providers: Providers) -> None:
    script = _CURL.replace("api.github.com/user", "github.com/x -w ' %{http_code}'")
    assert _run(client, ["/bin/sh", "-c", script]).stdout == b"mitm upstream error 502"
    assert not [head for head in providers.heads if "Host: github.com\r\n" in head]


def test_limited_mode_inspects_every_tunnel(client: Client, providers: Providers) -> None:
    limited = {"proxy": _PROXY["proxy"] | {"mode": "limited"}}
    for host in ("api.github.com", "other.test"):
        before = len(providers.heads)
        for proxy in ("$HTTPS_PROXY", "$ALL_PROXY"):
            curl = f"curl -sS -m 9 -x {proxy} https://{host}/x"
            script = f"{curl} && {curl} -d x -w ' %{{http_code}}'"
            ended = _run(client, ["/bin/sh", "-c", script], networkProxy=limited)
            assert ended.stdout == b"okMethod not allowed in limited mode. 403"
        assert len(providers.heads) == before + 2


def test_nothing_is_masked_unless_it_is_asked_for(client: Client) -> None:
    plain = network_proxy(domains={"*": "allow"})
    ended = _run(client, ["/usr/bin/env"], networkProxy=plain)
    assert f"GITHUB_TOKEN={_TOKEN}".encode() in ended.stdout
    assert b"SSL_CERT_FILE" not in ended.stdout


_ASK_CUSTOM = 'curl -sS -m 9 -H "Authorization: Bearer $DEMO_TOKEN" https://custom.test'


@pytest.mark.parametrize(
    "argv", [["/bin/sh", "-c"], ["/bin/bash", "-c"], ["/bin/bash", "-lc"]], ids=" ".join
)
def test_the_provider_of_a_client_gets_its_secret(
    client: Client, providers: Providers, argv: list[str]
) -> None:
    ended = _run(client, [*argv, f"{_ASK_CUSTOM}/v1/x; {_ASK_CUSTOM}/v2/x; {_ASK_CUSTOM}/v1x"])
    assert (ended.stdout, ended.stderr) == (b"okokok", b"")
    assert f"Authorization: Bearer {_CUSTOM}\r\n" in providers.heads[-3]
    for head in providers.heads[-2:]:
        assert "Authorization: Bearer demo-" in head
        assert _CUSTOM not in head


def test_a_provider_without_a_destination_masks_all_the_same(client: Client) -> None:
    provider = _PROVIDER | {"url_prefixes": [], "url_prefix_from_env": "NOT_SET"}
    proxy = network_proxy(**_SETTINGS, credentialProviders={"demo": provider})
    assert _CUSTOM.encode() not in _run(client, ["/usr/bin/env"], networkProxy=proxy).stdout


@pytest.mark.parametrize(
    ("member", "text"),
    [
        ({"patterns": []}, "credential provider `demo` has no credential patterns"),
        (
            {"patterns": ["(c+)+$y"], "env": ["SLOW"]},
            "the patterns of credential providers take more than 0.5 s",
        ),
        (
            {"patterns": ["[0-9]{8}"], "env": ["MANY"]},
            "the patterns of credential providers match more than 256 texts",
        ),
    ],
)
def test_a_provider_that_cannot_mask_is_refused(
    client: Client, member: dict[str, Any], text: str
) -> None:
    """The reference ignores it and starts the command with the secrets."""
    env = {"SLOW": "c" * 60_000, "MANY": " ".join(f"{n:08}" for n in range(257))}
    params = {"processId": "c", "argv": ["x"], "cwd": "/", "env": env, "tty": False}
    proxy = network_proxy(**_SETTINGS, credentialProviders={"demo": _PROVIDER | member})
    assert client.failure("process/start", params | {"networkProxy": proxy}) == (
        -32602,
        f"invalid network proxy config: {text}",
    )


def test_the_file_of_certificates_ends_with_the_server(folder: Path) -> None:
    with start_server("ours") as running, running.connect() as client:
        ended = _run(client, ["/bin/sh", "-c", "echo $SSL_CERT_FILE"])
        bundle = Path(ended.stdout.decode().strip())
        assert bundle.is_file()
    assert not bundle.exists()
