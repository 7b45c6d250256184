"""Credential providers of clients: which requests get the secret, by both servers.

The command is `bash -c`, the only one that the reference masks.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.client import Client, Server
from tests.support.network import PATH, WebOrigin, network_proxy, web_origin

_SECRET = "tok_abcdefghij"
_BEARER = '-H "Authorization: Bearer $MY_TOKEN"'
_HEADER = {"auth": ["header"], "header": "X-Key", "prefix": "Key "}


@pytest.fixture(scope="module")
def origin() -> Iterator[WebOrigin]:
    with web_origin() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with server.connect() as connected:
        yield connected


def _run(client: Client, script: str, url: str, **members: Any) -> str:
    provider = {"env": ["MY_TOKEN"], "patterns": ["tok_[a-z0-9]{10}"], "url_prefixes": [url]}
    proxy = network_proxy(
        domains={"127.0.0.1": "allow", "localhost": "allow"},
        credentialMasking=True,
        credentialProviders={"mine": provider | members},
    )
    env = {"PATH": PATH, "MY_TOKEN": _SECRET, "OTHER": f"a {_SECRET} b"}
    ended = client.run(["/bin/bash", "-c", script], env=env, networkProxy=proxy)
    assert ended.stderr == b""
    return ended.stdout.decode()


def _words(origin: WebOrigin, count: int) -> list[str]:
    """What the last requests had in the place of the dummy: `secret`, `dummy`, or nothing."""
    shown = []
    for request in origin.requests[-count:]:
        text = re.sub(r"Basic (\S+)", lambda found: base64.b64decode(found[1]).decode(), request)
        text = text.replace(_SECRET, "secret")
        shown.append("secret" if "secret" in text else "dummy" if "tok_" in text else "")
    return shown


@pytest.mark.parametrize(
    ("members", "arguments"),
    [
        (
            {},
            {
                f"{_BEARER} URL/api/x": "secret",
                f"{_BEARER} 'URL/api/?a=b'": "secret",
                '-H "authorization: bearer $MY_TOKEN" URL/api/x': "secret",
                f"{_BEARER} URL/api": "dummy",
                f"{_BEARER} URL/apix": "dummy",
                f"{_BEARER} URL/other": "dummy",
                f"{_BEARER} --path-as-is URL/api/../x": "dummy",
                f"{_BEARER} --path-as-is URL/api/%2e%2e/x": "dummy",
                f"{_BEARER} --path-as-is URL//api/x": "dummy",
                '-H "Authorization: token $MY_TOKEN" URL/api/x': "dummy",
                '-H "Authorization: Bearer x$MY_TOKEN" URL/api/x': "dummy",
                '-H "X-Key: $MY_TOKEN" URL/api/x': "dummy",
                "-u me:$MY_TOKEN URL/api/x": "dummy",
                '"URL/api/x?t=$MY_TOKEN"': "dummy",
                f"{_BEARER} http://localhost:PORT/api/x": "dummy",
            },
        ),
        (
            {"auth": []},
            {
                f"{_BEARER} URL/api/x": "secret",
                '-H "Authorization: token $MY_TOKEN" URL/api/x': "dummy",
            },
        ),
        (
            {"auth": ["basic", "token"]},
            {
                "-u me:$MY_TOKEN URL/api/x": "secret",
                "-u $MY_TOKEN: URL/api/x": "secret",
                '-H "Authorization: token $MY_TOKEN" URL/api/x': "secret",
                f"{_BEARER} URL/api/x": "dummy",
            },
        ),
        (
            _HEADER,
            {
                '-H "X-Key: Key $MY_TOKEN" URL/api/x': "secret",
                '-H "X-Key: $MY_TOKEN" URL/api/x': "dummy",
                '-H "X-Other: Key $MY_TOKEN" URL/api/x': "dummy",
                f"{_BEARER} URL/api/x": "dummy",
            },
        ),
    ],
    ids=["bearer", "default", "basic-and-token", "header"],
)
def test_requests(
    client: Client, origin: WebOrigin, members: dict[str, Any], arguments: dict[str, str]
) -> None:
    lines = [
        f"curl -sS -m 9 --noproxy '' -x $HTTP_PROXY {each}".replace("URL", origin.url)
        for each in arguments
    ]
    script = "\n".join(lines).replace("PORT", str(origin.port))
    assert _run(client, script, f"{origin.url}/api/", **members) == "origin" * len(lines)
    assert dict(zip(arguments, _words(origin, len(lines)), strict=True)) == arguments


@pytest.mark.parametrize("auth", [{}, {"auth": []}])
def test_a_header_without_a_way_of_authentication(
    kind: str, client: Client, origin: WebOrigin, auth: dict[str, Any]
) -> None:
    """By choice ours takes the header for the way: the reference ignores the provider."""
    curl = f"curl -sS -m 9 --noproxy '' -x $HTTP_PROXY -o /dev/null {origin.url}/api/x"
    script = f'{curl} -H "X-Key: Key $MY_TOKEN"; {curl} {_BEARER}; echo $MY_TOKEN'
    members = {"header": "X-Key", "prefix": "Key ", **auth}
    shown = _run(client, script, f"{origin.url}/api/", **members).strip()
    if kind == "reference":
        assert shown == _SECRET
        assert _words(origin, 2) == ["secret", "secret"]
    else:
        assert shown != _SECRET
        assert _words(origin, 2) == ["secret", "dummy"]


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("tok_[a-z0-9]{10}", "tok_[a-z0-9]{10}"),
        ("(?i)TOK_[a-z]{10}", "(?i)tok_[a-z]{10}"),
        ("[a-z]{3}_[a-z]+", "[a-z]{3}_[a-z]+"),
    ],
)
def test_dummies_fit_the_pattern(client: Client, pattern: str, fits: str) -> None:
    shown = _run(client, "echo $MY_TOKEN", "https://a.test/", patterns=[pattern]).strip()
    assert shown != _SECRET
    assert re.fullmatch(fits, shown)


def test_copies_in_other_variables_are_masked(client: Client) -> None:
    shown = _run(client, "echo $MY_TOKEN; echo $OTHER", "https://a.test/").split("\n")
    assert shown[1] == f"a {shown[0]} b"


_RANDOM = "Ab3dEf6hIj9l" * 8


def test_tokens_of_github_and_openai_are_found_in_any_variable(client: Client) -> None:
    token, key = f"ghp_{_RANDOM[:36]}", f"sk-proj-{_RANDOM[:43]}"
    env = {
        "PATH": PATH,
        "GH_TOKEN": "a-token-of-another-kind",
        "A": f"https://x:{token}@github.com/a.git",
        "B": key,
        "C": "x a-token-of-another-kind",
        "SHORT": token[:-1],
        "LOW": "sk-proj-" + "a" * 40,
        "OTHER": f"sk-ant-{_RANDOM[:80]}",
    }
    names = "A B C GH_TOKEN SHORT LOW OTHER CODEX_NETWORK_PROXY_BROKERED_CREDENTIALS"
    script = f"for each in {names}; do echo ${{!each}}; done"
    proxy = network_proxy(credentialMasking=True)
    ended = client.run(["/bin/bash", "-c", script], env=env, networkProxy=proxy)
    *values, brokered = ended.stdout.decode().splitlines()
    dummy = values[0][len("https://x:") : -len("@github.com/a.git")]
    assert re.fullmatch("ghp_masked[A-Za-z0-9]{30}", dummy)
    assert re.fullmatch("sk-proj-masked[A-Za-z0-9]{37}", values[1])
    assert values[2] == f"x {values[3]}"
    assert "masked" in values[3]
    assert values[4:] == [env["SHORT"], env["LOW"], env["OTHER"]]
    assert json.loads(brokered) == sorted(
        [
            *(["@alias:A", dummy], ["@alias:B", values[1]]),
            *(["@alias:C", values[3]], ["@alias:GH_TOKEN", values[3]]),
            *(["GH_TOKEN", dummy], ["GH_TOKEN", values[3]], ["OPENAI_API_KEY", values[1]]),
        ]
    )


def test_limited_mode_refuses_methods_inside_of_tunnels(client: Client, origin: WebOrigin) -> None:
    proxy = network_proxy(
        domains={"127.0.0.1": "allow"},
        allowLocalBinding=True,
        mode="limited",
        credentialMasking=True,
    )
    url = origin.url.replace("http:", "https:")
    # The origin has no TLS, so a method that passes gets 502.
    curl = f"curl -sS -m 9 --noproxy '' -x $HTTP_PROXY -w ' %{{http_code}} ' {url}/x"
    ended = client.run(
        ["/bin/bash", "-c", f"{curl}; {curl} -X POST"], env={"PATH": PATH}, networkProxy=proxy
    )
    assert ended.stdout.decode() == (
        "mitm upstream error 502 Method not allowed in limited mode. 403 "
    )
