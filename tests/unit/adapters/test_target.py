"""The machine of an adapter, and adapters without their frameworks."""

from __future__ import annotations

import importlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from exec_server.adapters import target
from exec_server.cli.exec import command
from exec_server.client.connect import ConnectOptions, MachineOptions
from exec_server.errors import StartupError

FRAMEWORKS = {
    "claude_managed_agents": ("anthropic.lib.tools", "claude-managed-agents"),
    "claude_managed_agents_files": ("anthropic.lib.tools", "claude-managed-agents"),
    "deepagents": ("deepagents.backends.protocol", "deepagents"),
    "fsspec": ("fsspec.callbacks", "fsspec"),
    "harbor": ("harbor.environments.base", "harbor"),
    "inspect": ("inspect_ai.util", "inspect"),
    "mcp": ("mcp.server.mcpserver", "mcp"),
    "mcp_http": ("uvicorn", "mcp"),
    "mcp_stdio": ("mcp.server.mcpserver", "mcp"),
    "mini_swe_agent": ("minisweagent.exceptions", "mini-swe-agent"),
    "openai_agents": ("agents.sandbox.manifest", "openai-agents"),
    "openai_agents_tools": ("agents", "openai-agents"),
    "openhands": ("openhands.sdk.git.models", "openhands"),
    "pydantic_ai": ("pydantic_ai.workspaces", "pydantic-ai"),
    "swe_rex": ("swerex.deployment.abstract", "swe-rex"),
}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_missing_framework_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    framework, extra = FRAMEWORKS[name]
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, f"exec_server.adapters.{name}", raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"exec_server.adapters.{name}")
    assert str(caught.value).startswith("this adapter needs ")
    assert f" (extra `{extra}`): pip install '.[{extra}]' in a checkout" in str(caught.value)
    assert str(caught.value).count(f"'exec-server[{extra}] @ URL'") == 1
    assert "\n" not in str(caught.value)
    # On older versions their extras install nothing.
    assert ("on Python 3.12" in str(caught.value)) == (name in ("harbor", "openhands"))


def test_a_target_or_a_registry_is_connected_to() -> None:
    assert target.make_environment("ws://127.0.0.1:1", {})._address == "ws://127.0.0.1:1"
    registry: ConnectOptions = {
        "registry": "https://registry.example",
        "environment_id": "e",
        "token": "t",
    }
    assert "registry.example" in str(target.make_environment(None, registry)._address)
    with pytest.raises(StartupError, match="registry= and environment_id= need"):
        target.make_environment(None, {"registry": "https://registry.example"})


def test_without_both_it_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXEC_SERVER_TARGET", "unix:/run/s")
    assert target.make_environment(":", {})._address == "unix:/run/s"
    assert target.make_environment(None, {})._address is None
    options: ConnectOptions = {
        "token": None,
        "registry": None,
        "allow_insecure_token": False,
        "client_name": "name",
        "reconnect": True,
    }
    assert target.make_environment(None, options)._address is None


@pytest.mark.parametrize(
    "options",
    [
        {"environment_id": "e"},
        {"token": "t"},
        {"executor_key": "k"},
        {"account_id": "a"},
        {"ca_file": os.devnull},
        {"pin": "a" * 64},
        {"allow_insecure_token": True},
        {"wait": 30},
    ],
    ids=str,
)
def test_a_machine_that_is_named_in_part_is_not_this_one(
    options: ConnectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXEC_SERVER_TARGET", "unix:/run/s")
    with pytest.raises(StartupError):
        target.make_environment(None, options)
    with pytest.raises(StartupError):
        target.open_environment(None, options)


# Those of StoredMachine, which needs pydantic.
_MACHINE_FIELDS = ("target", "token_env", *MachineOptions.__annotations__)


def stored(**options: Any) -> Any:
    """A machine in a configuration."""
    return SimpleNamespace(**dict.fromkeys(_MACHINE_FIELDS) | options)


def test_the_token_of_a_stored_machine_is_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = stored(
        registry="https://registry.test",
        environment_id="env-1",
        executor_key="key",
        account_id="account",
        token_env="MACHINE_TOKEN",
        ca_file="ca.pem",
        pin=("a" * 64, "b" * 64),
        allow_insecure_token=True,
        retention="8h",
    )
    monkeypatch.delenv("MACHINE_TOKEN", raising=False)
    with pytest.raises(ValueError, match="token_env: the variable MACHINE_TOKEN is not set"):
        target.stored_options(machine)
    monkeypatch.setenv("MACHINE_TOKEN", "secret")
    assert target.stored_options(machine) == {
        "token": "secret",
        "registry": "https://registry.test",
        "environment_id": "env-1",
        "executor_key": "key",
        "account_id": "account",
        "ca_file": "ca.pem",
        "pin": ("a" * 64, "b" * 64),
        "allow_insecure_token": True,
        "retention": "8h",
        "wait": None,
        "reconnect": True,
    }
    machine.token_env = None
    assert target.stored_options(machine)["token"] is None


def test_a_stored_machine_as_words_of_a_command() -> None:
    direct = stored(
        target="wss://host", token_env="TOKEN", pin=("a" * 64, "b" * 64), allow_insecure_token=True
    )
    words = target.exec_words(direct, "agent")
    found = command.build_parser().parse_words([*words[2:], "sh", "-c", "exec sh"])
    assert (found.target, found.user) == ("wss://host", "agent")
    assert found.argv == ["sh", "-c", "exec sh"]
    assert (found.tty, found.token_env, found.pin) == (True, "TOKEN", ["a" * 64, "b" * 64])
    assert found.allow_insecure_token
    relayed = stored(
        registry="https://registry.test/",
        environment_id="env-1",
        executor_key="c" * 64,
        ca_file="ca.pem",
        pin="a" * 64,
        retention=300.0,
        wait=30,
    )
    assert target.exec_words(relayed, None) == [
        *("exec-server", "exec", "-t", "--executor-key", "c" * 64),
        *("--ca-file", "ca.pem", "--pin", "a" * 64, "--retention", "300", "--wait", "30"),
        *("relay:https://registry.test/env-1", "--"),
    ]


@pytest.mark.parametrize("options", [{}, {"registry": "https://x.test", "account_id": "a"}])
def test_a_machine_that_no_command_reaches(options: dict[str, str]) -> None:
    with pytest.raises(NotImplementedError):
        target.exec_words(stored(**options), None)
