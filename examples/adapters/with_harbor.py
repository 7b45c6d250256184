"""Harbor: a machine as the environment of a trial. pip install '.[harbor]'

A job has the same in its `environment:`, with `import_path` and `kwargs`.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from harbor.environments.factory import EnvironmentFactory
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.config import EnvironmentConfig as TrialEnvironmentConfig
from harbor.models.trial.paths import TrialPaths

target = sys.argv[1] if len(sys.argv) > 1 else None  # None is a server of this machine


async def main(folder: Path) -> None:
    workspace = folder / "workspace"
    (folder / "definition").mkdir()
    (folder / "program.py").write_text("print(6 * 7)\n")
    environment = EnvironmentFactory.create_environment_from_config(
        config=TrialEnvironmentConfig(
            import_path="exec_server.adapters.harbor:ExecServerEnvironment",
            kwargs={"target": target, "workdir": str(workspace)},
        ),
        environment_dir=folder / "definition",
        environment_name="example",
        session_id="example__1",
        trial_paths=TrialPaths(trial_dir=folder / "trial"),
        task_env_config=EnvironmentConfig(),
    )
    await environment.start(force_build=False)
    await environment.upload_file(folder / "program.py", str(workspace / "program.py"))
    done = await environment.exec("python3 program.py")
    print(done.return_code, done.stdout.strip())
    await environment.stop(delete=True)


with tempfile.TemporaryDirectory() as name:
    asyncio.run(main(Path(name)))
