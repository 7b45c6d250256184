"""Harbor: an environment made from the configuration of a job; its own need containers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from harbor.environments.factory import EnvironmentFactory
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.config import EnvironmentConfig as TrialEnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from exec_server.adapters.harbor import MachineUnavailableError
from tests.adapters.drivers import Place

LOST = MachineUnavailableError
LACKS = ""


class EnvironmentDriver:
    def __init__(self, place: Place) -> None:
        options = place.options(stores_token=False)
        if name := options.pop("environment_id", None):
            options["environment_id_at_registry"] = name
        self._user = options.pop("user", None)
        self._options = options | {"workdir": place.folder}

    async def open(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="exec-server-harbor-")
        scratch = Path(self._scratch.name)
        (scratch / "definition").mkdir()
        self.environment: Any = EnvironmentFactory.create_environment_from_config(
            config=TrialEnvironmentConfig(
                import_path="exec_server.adapters.harbor:ExecServerEnvironment",
                kwargs=self._options,
            ),
            environment_dir=scratch / "definition",
            environment_name="task",
            session_id="task__1__env",
            trial_paths=TrialPaths(trial_dir=scratch / "trial"),
            task_env_config=EnvironmentConfig(),
        )
        await self.environment.start(force_build=False)

    async def close(self) -> None:
        await self.environment.stop(delete=True)
        self._scratch.cleanup()

    async def run(self, command: str) -> tuple[int, str]:
        done = await self.environment.exec(command, user=self._user)
        return done.return_code, f"{done.stdout}{done.stderr}"

    async def read(self, path: str) -> bytes:
        copy = Path(self._scratch.name) / "copy"
        await self.environment.download_file(path, copy)
        return copy.read_bytes()

    async def write(self, path: str, data: bytes) -> None:
        source = Path(self._scratch.name) / "source"
        source.write_bytes(data)
        await self.environment.upload_file(source, path)


def adapter(place: Place) -> EnvironmentDriver:
    return EnvironmentDriver(place)


def local(folder: str) -> None:
    return None
