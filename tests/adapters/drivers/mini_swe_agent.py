"""mini-swe-agent: an environment made from a configuration, and its LocalEnvironment."""

from __future__ import annotations

from typing import Any

from minisweagent.environments import get_environment

from exec_server.adapters.mini_swe_agent import ExecServerEnvironment
from tests.adapters.drivers import Place, Reported

LOST = Reported
LACKS = "files"

CLASS = "exec_server.adapters.mini_swe_agent.ExecServerEnvironment"


class EnvironmentDriver:
    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def open(self) -> None:
        self.environment = get_environment(self._config | {"timeout": 600})

    def close(self) -> None:
        if isinstance(self.environment, ExecServerEnvironment):
            self.environment.close()

    def run(self, command: str) -> tuple[int, str]:
        done = self.environment.execute({"command": command})
        if done["exception_info"]:
            raise Reported(done["exception_info"])
        return done["returncode"], done["output"]

    def read(self, path: str) -> bytes:
        raise NotImplementedError("an environment of mini-swe-agent has no files")

    def write(self, path: str, data: bytes) -> None:
        raise NotImplementedError("an environment of mini-swe-agent has no files")


def adapter(place: Place) -> EnvironmentDriver:
    options = place.options(stores_token=False)
    return EnvironmentDriver(options | {"environment_class": CLASS, "cwd": place.folder})


def local(folder: str) -> EnvironmentDriver:
    return EnvironmentDriver({"environment_class": "local", "cwd": folder})
