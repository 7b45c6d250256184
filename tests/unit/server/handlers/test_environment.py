"""environmentConfig/read: the params that are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol.codex import ReadConfigParams
from exec_server.protocol.paths import PathUri
from exec_server.server.handlers import environment


def _read(uri: str, config: list[list[str]], requirements: list[list[str]]) -> Any:
    context: Any = SimpleNamespace(
        server=SimpleNamespace(variables={}), in_thread=lambda *arguments: arguments[1]
    )
    params = ReadConfigParams(PathUri.from_wire(uri), config, requirements)
    result: Any = environment.read(context, params)
    assert result is params
    return params


@pytest.mark.parametrize(
    ("uri", "config", "requirements", "text"),
    [
        ("file:///x", [], [], "at least one config or requirements path is required"),
        ("file:///x", [["a"], []], [], "TOML paths must contain at least one key segment"),
        ("file:///x", [], [[]], "TOML paths must contain at least one key segment"),
        ("file:///C:/x", [["a"]], [], "'file:///C:/x' is invalid on 'linux'"),
    ],
)
def test_refused(
    uri: str, config: list[list[str]], requirements: list[list[str]], text: str
) -> None:
    with pytest.raises(InvalidParams) as caught:
        _read(uri, config, requirements)
    assert caught.value.message == text


def test_one_path_of_either_kind_is_enough() -> None:
    _read("file:///x", [["a"]], [])
    _read("file:///x", [], [["a"]])
