"""Every adapter behind the same few methods, for the tests and benchmarks of all of them.

A driver opens an adapter as its framework does and translates nothing but names: its errors are
those of the framework. Frameworks that report errors in results get `Reported`.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any, Protocol, cast

# The name of the environment variable with the token of a registry.
TOKEN = "EXEC_SERVER_ADAPTER_TOKEN"

NAMES = (
    "claude_managed_agents",
    "deepagents",
    "fsspec",
    "harbor",
    "inspect",
    "mini_swe_agent",
    "openai_agents",
    "openhands",
    "pydantic_ai",
    "swe_rex",
)


class Reported(Exception):
    """An error that the framework has in its result."""


@dataclass(frozen=True)
class Place:
    """A directory of a machine: of a target, of a registry's environment, or of this one."""

    folder: str
    target: str | None = None
    registry: str | None = None
    environment_id: str | None = None
    sandbox: str | dict[str, Any] | None = None
    user: str | None = None

    def options(self, *, stores_token: bool = True) -> dict[str, Any]:
        """The options of a constructor, without those that are not set."""
        names = ("target", "registry", "environment_id", "sandbox", "user")
        given = {name: getattr(self, name) for name in names}
        if self.registry is not None and stores_token:
            given["token"] = os.environ[TOKEN]
        elif self.registry is not None:
            given["token_env"] = TOKEN
        return {name: value for name, value in given.items() if value is not None}


class Driver(Protocol):
    """An adapter in use. Methods are all blocking or all coroutines, as those of the framework."""

    def open(self) -> Any:
        """Make the adapter, and connect if the framework asks for that."""

    def close(self) -> Any:
        """End it as the framework does."""

    def run(self, command: str) -> Any:
        """The exit code and the output of a text for a shell."""

    def read(self, path: str) -> Any:
        """The content of a file, as bytes."""

    def write(self, path: str, data: bytes) -> Any:
        """Write a file."""


class DriverModule(Protocol):
    """A module of this package."""

    # What a lost connection raises.
    LOST: type[Exception] | tuple[type[Exception], ...]
    # What the framework lacks: "commands" or "files".
    LACKS: str

    def adapter(self, place: Place) -> Driver:
        """The adapter of ours."""

    def local(self, folder: str) -> Driver | None:
        """The framework's own backend for this machine, if it has one."""


def load(name: str) -> DriverModule:
    """The driver of a framework, which has to be installed."""
    return cast(DriverModule, importlib.import_module(f"tests.adapters.drivers.{name}"))


async def call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of a driver; a blocking one in a thread."""
    if iscoroutinefunction(method):
        return await method(*arguments)
    return await asyncio.to_thread(method, *arguments)
