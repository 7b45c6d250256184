"""connect(): which dialer a target gets, and refused arguments."""

from __future__ import annotations

import inspect
import ssl
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from exec_server import sync
from exec_server.adapters.target import take_options
from exec_server.cli.parser import ArgumentParser
from exec_server.cli.targets import ACCESS_FLAGS, access_options, with_access_flags
from exec_server.client import logins
from exec_server.client.connect import ConnectOptions, MachineOptions, connect, starts_program
from exec_server.client.engine.dialers import PatientDialer, WebSocketDialer
from exec_server.client.engine.relay import RelayDialer
from exec_server.client.engine.stdio import StdioDialer
from exec_server.client.environment import Environment
from exec_server.client.logins import Login
from exec_server.client.targets import AccessOptions
from exec_server.errors import StartupError
from exec_server.net.client_tls import PinnedContext

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


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's targets.toml; it is not there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("EXEC_SERVER_TARGET", raising=False)
    (tmp_path / "exec-server").mkdir()
    return tmp_path / "exec-server" / "targets.toml"


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
        ({"target": "ws://127.0.0.1:1", "wait": 30}, PatientDialer),
        ({"target": "stdio:ssh host", "wait": 30}, StdioDialer),
    ],
)
def test_a_target_has_a_dialer(arguments: dict[str, Any], kind: type) -> None:
    assert type(connect(**arguments).session._dialer) is kind


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "no target: name one, such as ws://127"),
        ({"target": "stdio:'a"}, "cannot parse the command after stdio: No closing quotation"),
        ({"registry": REGISTRY}, "registry= and environment_id= need each other"),
        ({"registry": REGISTRY, "environment_id": "e"}, "run `exec-server login"),
        (
            {"registry": REGISTRY, "environment_id": "e", "token": "t", "target": "ws://h"},
            "and exclude a target",
        ),
        ({"target": "ws://h", "environment_id": "e"}, "and exclude a target"),
        ({"target": "ws://example.net", "token": "t"}, "a token is sent only to wss:// URLs"),
        ({"target": "http://example.net"}, r"did you mean ws://example\.net\?"),
        ({"target": "127.0.0.1:7911"}, r"did you mean ws://127\.0\.0\.1:7911\?"),
        ({"target": "box"}, "unknown target `box`; .*targets.toml defines no targets"),
        ({"target": f"relay:{REGISTRY}/e"}, "the registry requires a token: run `exec-server log"),
        ({"target": "relay:build"}, "write relay:https://REGISTRY/ENVIRONMENT"),
        (
            {"target": f"relay:{REGISTRY}/e", "registry": REGISTRY, "token": "t"},
            "and exclude a target",
        ),
        ({"target": "ws://h", "wait": -1}, "wait must be at least 0 seconds, not -1"),
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
    values |= {"token_env": "MY_TOKEN", "wait": "30"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    parser = with_access_flags(ArgumentParser(prog="x"))
    access = access_options(parser.parse_args([*words, "--allow-insecure-token"]))
    assert access.read_token() == "t"
    assert access == AccessOptions(
        token_env="MY_TOKEN",
        executor_key="value of executor_key",
        pin=("value of pin",),
        allow_insecure_token=True,
        retention="value of retention",
        wait=30,
    )


def test_a_name_is_that_of_the_commands(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(
        '[box]\nurl = "ws://127.0.0.1:1/base"\ntoken_env = "T"\n'
        '[far]\nregistry = "https://registry.example"\nenvironment_id = "e"\ntoken = "far"\n'
    )
    file.chmod(0o600)
    monkeypatch.setenv("T", "from the table")
    env = connect("box")
    assert env._address == "ws://127.0.0.1:1/base"
    assert _headers(env) == [("Authorization", "Bearer from the table")]
    assert _headers(connect("box", token="given")) == [("Authorization", "Bearer given")]
    assert connect("far")._address == "environment e of https://registry.example"
    monkeypatch.setenv("EXEC_SERVER_TARGET", "box")
    assert connect()._address == connect(":")._address == env._address


def _headers(env: Environment) -> list[tuple[str, str]]:
    dialer = env.session._dialer
    assert isinstance(dialer, WebSocketDialer)
    return dialer._headers


def test_a_name_may_stand_for_a_program(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread needs to know, because some event loops cannot start one there."""
    file.write_text('[lab]\nstdio = "ssh lab"\n[far]\nurl = "ws://127.0.0.1:1"\n')
    assert isinstance(connect("lab").session._dialer, StdioDialer)
    assert starts_program("lab", {})
    assert not starts_program("far", {})
    assert not starts_program(None, {"registry": REGISTRY, "environment_id": "e"})
    monkeypatch.setenv("EXEC_SERVER_TARGET", "lab")
    assert starts_program(None, {"wait": 3})


def test_a_context_replaces_the_certificates_of_a_table(file: Path) -> None:
    file.write_text('[box]\nurl = "wss://h"\nca_file = "/none"\n')
    with pytest.raises(StartupError, match="cannot read the CA file /none"):
        connect("box")
    connect("box", tls=ssl.create_default_context())


def test_a_relay_takes_the_token_of_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    logins.save_login(Login(REGISTRY, {"executor": "e"}), "file")
    with pytest.raises(StartupError, match="requires a token"):
        connect(f"relay:{REGISTRY}/e")
    logins.save_login(Login(REGISTRY, {"client": "stored"}, pins=("ab" * 32,)), "file")
    taken: list[Any] = []
    monkeypatch.setattr(RelayDialer, "__init__", lambda *_, **options: taken.append(options))
    connect(f"relay:{REGISTRY}/e")
    connect(registry=REGISTRY, environment_id="e", token="given", pin="cd" * 32)
    connect(registry=REGISTRY, environment_id="e", pin="cd" * 32)
    assert [options["token"] for options in taken] == ["stored", "given", "stored"]
    assert all(isinstance(options["tls"], PinnedContext) for options in taken)


@pytest.mark.parametrize("wait", ["30", b"1"])
def test_a_wait_is_a_number(wait: Any) -> None:
    with pytest.raises(TypeError, match="wait must be a number of seconds"):
        connect("ws://127.0.0.1:1", wait=wait)


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
