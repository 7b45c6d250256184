"""ExecServerEnvironment: a machine as an environment of mini-swe-agent.

In a configuration: `environment_class: exec_server.adapters.mini_swe_agent.ExecServerEnvironment`.
"""

from __future__ import annotations

from typing import Any, Final

from exec_server.adapters.target import framework_missing, open_environment, stored_options
from exec_server.client.commands import with_system_programs
from exec_server.client.exceptions import Timeout
from exec_server.client.results import Result
from exec_server.errors import ExecServerError

try:
    from minisweagent.exceptions import Submitted
    from minisweagent.utils.serialize import recursive_merge
    from pydantic import ConfigDict, Field

    from exec_server.adapters.stored_machine import StoredMachine
except ImportError as error:
    raise framework_missing("mini-swe-agent", "mini-swe-agent", error) from error

# The members of `platform.uname`, and the options of the command that prints them.
_UNAME: Final = {"system": "-s", "node": "-n", "release": "-r", "version": "-v", "machine": "-m"}
_UNAMES: Final = f"uname {'; uname '.join(_UNAME.values())}"
# The first line of output of an agent that has finished.
_FINISHED: Final = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class ExecServerEnvironmentConfig(StoredMachine):
    """The machine of a run, which trajectories contain, and the defaults of its commands."""

    model_config = ConfigDict(extra="forbid")

    cwd: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    timeout: int = 30


class ExecServerEnvironment:
    """A machine, connected when this is made; `close` kills its processes."""

    def __init__(self, *, config_class: Any = ExecServerEnvironmentConfig, **options: Any) -> None:
        self.config = config_class(**options)
        self._environment = open_environment(self.config.target, stored_options(self.config))
        self._machine: dict[str, str] | None = None  # read at first use

    def close(self) -> None:
        """Kill all processes and end the connection."""
        self._environment.close()

    def execute(
        self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None
    ) -> dict[str, Any]:
        """Run the command of an action; raises Submitted if it is the last one.

        A failure or a timeout is a result with the return code -1 and the output until then.
        """
        try:
            done = self._run(action.get("command", ""), cwd, timeout or self.config.timeout)
            output = {"output": done.text, "returncode": done.exit_code, "exception_info": ""}
        except (Timeout, ExecServerError, OSError) as error:
            text = error.result.text if isinstance(error, Timeout) else ""
            output = {
                "output": text,
                "returncode": -1,
                "exception_info": f"An error occurred while executing the command: {error}",
                "extra": {"exception_type": type(error).__name__, "exception": str(error)},
            }
        _check_finished(output)
        return output

    def _run(self, command: str, cwd: str, timeout: float) -> Result:
        return self._environment.shell(
            command,
            cwd=cwd or self.config.cwd or None,
            env=self.config.env,
            timeout=timeout,
            user=self.config.user,
            sandbox=self.config.sandbox,
            merge_stderr=True,
        )

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        """Variables of prompts: the configuration, and the kind of the machine."""
        if self._machine is None:
            self._machine = self._read_machine()
        merged: dict[str, Any] = recursive_merge(self.config.model_dump(), self._machine, more)
        return merged

    def _read_machine(self) -> dict[str, str]:
        """The machine as `platform.uname` has it, and its shell; unknown texts are empty."""
        info = self._environment.info
        machine = dict.fromkeys(_UNAME, "") | {"system": info.platform_os.capitalize()}
        try:
            done = self._environment.run(with_system_programs(["/bin/sh", "-c", _UNAMES]), cwd="/")
            lines = done.text.splitlines()
        except (ExecServerError, OSError):
            lines = []
        if len(lines) == len(_UNAME):
            machine = dict(zip(_UNAME, lines, strict=True))
        return machine | {"shell": info.shell.name}

    def serialize(self) -> dict[str, Any]:
        kind = f"{type(self).__module__}.{type(self).__name__}"
        config = self.config.model_dump(mode="json")
        return {"info": {"config": {"environment": config, "environment_type": kind}}}


def _check_finished(output: dict[str, Any]) -> None:
    lines = output["output"].lstrip().splitlines(keepends=True)
    if output["returncode"] == 0 and lines and lines[0].strip() == _FINISHED:
        rest = "".join(lines[1:])
        extra = {"exit_status": "Submitted", "submission": rest}
        raise Submitted({"role": "exit", "content": rest, "extra": extra})
