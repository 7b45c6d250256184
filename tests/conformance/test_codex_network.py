"""The newest client with its managed network switched on, against both servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.codex import command, report, start_codex
from tests.support.client import Server, reference_binary, start_server

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(reference_binary() is None, reason="the client is not installed"),
]


# The client starts proxies only where it allows the network at all.
_ONLINE = "\n[sandbox_workspace_write]\nnetwork_access = true\n"


# A provider of the user's own, beside those that the server knows.
_PROVIDER = """
[features.network_proxy]
enabled = true
[features.network_proxy.credentials.mine]
env = ["MY_TOKEN"]
patterns = ["tok_[a-z]{10}"]
url_prefixes = ["https://api.example.test/"]
"""


def test_commands_have_proxies_and_no_other_network(server: Server, folder: Path) -> None:
    script = [
        [command("proxied", "curl -sS -m 8 http://unlisted.test/; echo; echo ${HTTP_PROXY%:*}")],
        [command("direct", "curl -sS -m 8 --noproxy '*' http://127.0.0.1:9/ || echo code $?")],
    ]
    with start_codex(
        script,
        folder,
        url=server.url,
        sandbox="workspace-write",
        features=["network_proxy"],
        mcp=_ONLINE,
    ) as client:
        model = client.completed()
    proxied = report(model.outputs["proxied"])
    assert '"reason":"not_allowed"' in proxied.text, proxied.text
    assert proxied.text.endswith("\nhttp://127.0.0.1\n")
    assert report(model.outputs["direct"]).text.endswith("code 7\n")


def test_commands_see_no_credentials(kind: str, folder: Path) -> None:
    """The client asks for masking; the reference masks no login shells, which it starts."""
    tokens = {"GITHUB_TOKEN": "ghp_" + "b" * 36, "MY_TOKEN": "tok_abcdefghij"}
    script = [[command("env", "env | grep -e ^GITHUB_TOKEN= -e ^MY_TOKEN= | sort")]]
    with (
        start_server(kind, env=tokens, cwd=folder) as server,
        start_codex(
            script,
            folder,
            url=server.url,
            sandbox="workspace-write",
            features=["credential_masking"],
            mcp=_PROVIDER + _ONLINE,
        ) as client,
    ):
        model = client.completed()
    lines = report(model.outputs["env"]).text.splitlines()
    shown = dict(line.split("=") for line in lines if "TOKEN=" in line)
    assert shown.keys() == tokens.keys()
    for name, start in {"GITHUB_TOKEN": "ghp_masked", "MY_TOKEN": "tok_"}.items():
        if kind == "ours":
            assert shown[name].startswith(start)
            assert shown[name] != tokens[name]
        else:
            assert shown[name] == tokens[name]
