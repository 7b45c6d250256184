"""connect(): which dialer a target gets, and refused arguments."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.client.connect import connect
from exec_server.client.engine.dialers import WebSocketDialer
from exec_server.client.engine.relay import RelayDialer
from exec_server.client.engine.stdio import StdioDialer
from exec_server.errors import StartupError

REGISTRY = "https://registry.example"


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"target": "ws://127.0.0.1:1"}, WebSocketDialer),
        ({"target": "stdio:ssh host 'a b'"}, StdioDialer),
        ({"registry": REGISTRY, "environment_id": "e", "token": "t"}, RelayDialer),
    ],
)
def test_a_target_has_a_dialer(arguments: dict[str, Any], kind: type) -> None:
    assert type(connect(**arguments).session._dialer) is kind


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "no target: pass a URL, stdio:COMMAND or registry="),
        ({"target": "stdio:'a"}, "cannot parse the command after stdio: No closing quotation"),
        ({"registry": REGISTRY}, "registry= needs environment_id= and token="),
        ({"registry": REGISTRY, "environment_id": "e"}, "needs environment_id= and token="),
        (
            {"registry": REGISTRY, "environment_id": "e", "token": "t", "target": "ws://h"},
            "and excludes a target",
        ),
        ({"target": "ws://example.net", "token": "t"}, "a token is sent only to wss:// URLs"),
        ({"target": "http://example.net"}, "invalid exec-server URL"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(StartupError, match=text):
        connect(**arguments)
