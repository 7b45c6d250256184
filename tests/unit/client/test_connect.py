"""connect(): which dialer a target gets, and refused arguments."""

from __future__ import annotations

import inspect
import ssl
from typing import Any, get_type_hints

import pytest

from exec_server import sync
from exec_server.adapters.target import take_options
from exec_server.cli.parser import ArgumentParser
from exec_server.cli.targets import ACCESS_FLAGS, AccessOptions, access_options, with_access_flags
from exec_server.client.connect import ConnectOptions, MachineOptions, connect
from exec_server.client.engine.dialers import WebSocketDialer
from exec_server.client.engine.relay import RelayDialer
from exec_server.client.engine.stdio import StdioDialer
from exec_server.errors import StartupError

REGISTRY = "https://registry.example"
# The options that have no flag, with the reason.
WITHOUT_FLAG = {
    "token": "arguments are visible to other users: --token-file and --token-env name its source",
    "registry": "part of a TARGET, relay:REGISTRY/ENVIRONMENT",
    "environment_id": "part of a TARGET, relay:REGISTRY/ENVIRONMENT",
    "account_id": "for the registry of OpenAI; `exec-server login` has no tokens for that",
    "tls": "a Python object: --ca-file and --pin describe one",
    "client_name": "a command is always exec-server",
    "reconnect": "a command ends with its session",
    "on_network_request": "a Python function",
}
# The options that configurations of adapters do not store, with the reason.
NOT_STORED = {
    "token": "a secret: `token_env` names its variable",
    "tls": "a Python object: `ca_file` and `pin` describe one",
    "client_name": "the adapter's, which says nothing about the machine",
    "reconnect": "always: a framework cannot ask for it",
    "on_network_request": "a Python function",
}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"target": "ws://127.0.0.1:1"}, WebSocketDialer),
        ({"target": "unix:/run/s"}, WebSocketDialer),
        ({"target": "wss://h", "pin": "ab" * 32}, WebSocketDialer),
        ({"target": "wss://h", "pin": ["ab" * 32, "cd" * 32]}, WebSocketDialer),
        ({"target": "stdio:ssh host 'a b'"}, StdioDialer),
        ({"registry": REGISTRY, "environment_id": "e", "token": "t"}, RelayDialer),
        ({"target": f"relay:{REGISTRY}/e", "token": "t"}, RelayDialer),
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
        ({"target": "ws://h", "environment_id": "e"}, "environment_id= needs registry="),
        ({"target": "ws://example.net", "token": "t"}, "a token is sent only to wss:// URLs"),
        ({"target": "http://example.net"}, "invalid exec-server URL"),
        ({"target": "127.0.0.1:7911"}, "use ws://HOST:PORT, wss://HOST, unix:/PATH, stdio:"),
        ({"target": "box"}, "names of targets.toml are for commands"),
        ({"target": f"relay:{REGISTRY}/e"}, "registry= needs environment_id= and token="),
        ({"target": "relay:build"}, "relay:https://REGISTRY/ENVIRONMENT; or pass registry="),
        (
            {"target": f"relay:{REGISTRY}/e", "registry": REGISTRY, "token": "t"},
            "and excludes a target",
        ),
        ({"target": "unix:s"}, "the path of a unix socket must begin with /"),
        ({"target": "ws://h", "retention": "8 hours"}, "such as 30m, 8h or 1d, not '8 hours'"),
        ({"target": "ws://h", "retention": -1}, "retention must be seconds from 0 to"),
        ({"target": "ws://h", "retention": float("nan")}, "retention must be seconds from 0 to"),
        ({"target": "ws://h", "retention": [1]}, "retention must be seconds from 0 to"),
        ({"target": "wss://h", "pin": "x"}, "the pin `x` is not sha256:"),
        ({"target": "ws://h", "pin": "ab" * 32}, "a pin is for wss:// URLs"),
        ({"target": "wss://h", "ca_file": "/none"}, "cannot read the CA file /none"),
        (
            {"target": "wss://h", "ca_file": "f", "tls": ssl.create_default_context()},
            "tls= excludes ca_file= and pin=",
        ),
        (
            {
                "registry": "http://127.0.0.1:1",
                "environment_id": "e",
                "token": "t",
                "pin": "ab" * 32,
            },
            "a pin is for https:// registries",
        ),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(StartupError, match=text):
        connect(**arguments)


def test_a_target_is_a_text() -> None:
    with pytest.raises(TypeError, match="target must be str, not int"):
        connect(7733)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="target must be str, not int"):
        sync.connect(7733)  # type: ignore[arg-type]


def test_a_relay_target_names_registry_and_environment() -> None:
    env = connect("relay:https://registry.example/base/build-7", token="t")
    assert env._address == "environment build-7 of https://registry.example/base"


def test_the_options_are_those_of_the_signature() -> None:
    hints = get_type_hints(connect)
    keywords = {
        name: hints[name]
        for name, parameter in inspect.signature(connect).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert get_type_hints(ConnectOptions) == keywords


def test_every_option_has_a_flag_or_a_reason() -> None:
    sources = {"token_file", "token_env"}
    assert set(AccessOptions._fields) == {"token", *ACCESS_FLAGS}
    assert sources <= ACCESS_FLAGS.keys()
    assert (ACCESS_FLAGS.keys() - sources).isdisjoint(WITHOUT_FLAG)
    assert (ACCESS_FLAGS.keys() - sources) | WITHOUT_FLAG.keys() == set(get_type_hints(connect)) - {
        "target",
        "return",
    }


def test_flags_arrive_as_options_of_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "t")
    values = {name: f"value of {name}" for name in ACCESS_FLAGS}
    del values["token_file"], values["ca_file"], values["allow_insecure_token"]
    values["token_env"] = "MY_TOKEN"
    words = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    parser = with_access_flags(ArgumentParser(prog="x"))
    access = access_options(parser.parse_args([*words, "--allow-insecure-token"]))
    assert access.connect_options() == {
        "token": "t",
        "executor_key": "value of executor_key",
        "ca_file": None,
        "pin": ("value of pin",),
        "allow_insecure_token": True,
        "retention": "value of retention",
    }


def test_every_option_is_stored_by_adapters_or_has_a_reason() -> None:
    names = list(MachineOptions.__annotations__)
    assert {*names, *NOT_STORED} == set(ConnectOptions.__annotations__)
    assert set(names).isdisjoint(NOT_STORED)
    values: dict[str, Any] = {name: f"value of {name}" for name in names}
    stored = values | {"other": 1}
    assert take_options(stored) == values | {"token": None, "reconnect": True}
    assert stored == {"other": 1}


def test_the_client_without_async_takes_the_same_options() -> None:
    assert sync.connect.__annotations__["options"] == "Unpack[ConnectOptions]"


def test_an_unknown_option_is_refused() -> None:
    wrong: Any = {"tokne": "t"}
    for function in (connect, sync.connect):
        with pytest.raises(TypeError, match="unexpected keyword argument 'tokne'"):
            function("ws://127.0.0.1:1", **wrong)
