"""mini-swe-agent with a scripted model: a coding task, and a command that never ends."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.models.test_models import DeterministicModel, make_output

from exec_server.adapters.mini_swe_agent import ExecServerEnvironment
from tests.adapters.coding_task import (
    COUNT_LEFT,
    EDIT,
    FIXED,
    NEVER_ENDS,
    READ,
    RUN_TESTS,
    make_repository,
)
from tests.adapters.interrupts import interrupted, nothing_is_left

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat app.py"
CLASS = "exec_server.adapters.mini_swe_agent.ExecServerEnvironment"


@pytest.fixture
def environment(server_url: str, tmp_path: Path) -> Iterator[ExecServerEnvironment]:
    config = {"environment_class": CLASS, "target": server_url, "cwd": make_repository(tmp_path)}
    made = get_environment(config | {"env": {"WORD": "of the configuration"}})
    assert isinstance(made, ExecServerEnvironment)
    yield made
    made.close()


def test_a_coding_task(environment: ExecServerEnvironment, tmp_path: Path) -> None:
    commands = [READ, RUN_TESTS, EDIT, RUN_TESTS, "echo $WORD >&2", SUBMIT]
    outputs = [make_output("", [{"command": command}]) for command in commands]
    agent = DefaultAgent(
        DeterministicModel(outputs=outputs, cost_per_call=0.0),
        environment,
        system_template="You work in {{cwd}} on {{system}}.",
        instance_template="{{task}}",
        cost_limit=100.0,
    )
    result = agent.run("Repair the program.")
    assert result == {"exit_status": "Submitted", "submission": FIXED}
    seen = "".join(str(message["content"]) for message in agent.messages)
    assert f"You work in {tmp_path} on Linux." in seen
    assert "AssertionError: -1" in seen
    assert "all tests pass" in seen
    assert "of the configuration" in seen
    saved = agent.serialize()["info"]["config"]
    assert saved["environment_type"] == CLASS


def test_prompts_describe_the_machine(
    environment: ExecServerEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("system", "node", "release", "version", "machine")
    here = {name: getattr(platform.uname(), name) for name in names}
    monkeypatch.setattr(platform, "uname", None)  # that of the client is not asked
    monkeypatch.setattr(platform, "machine", None)
    shown = environment.get_template_vars(task="a task")
    assert {name: shown[name] for name in here} == here
    assert (shown["task"], shown["cwd"]) == ("a task", environment.config.cwd)


def test_an_interrupted_agent(
    environment: ExecServerEnvironment, server_url: str, tmp_path: Path
) -> None:
    """Ctrl-C ends the run and the command; the environment can be used by the next run."""
    endless = make_output("", [{"command": f"touch begun; {NEVER_ENDS}"}])
    agent = DefaultAgent(
        DeterministicModel(outputs=[endless], cost_per_call=0.0),
        environment,
        system_template="You work.",
        instance_template="{{task}}",
    )
    with interrupted(tmp_path / "begun"):
        agent.run("Repair the program.")
    assert nothing_is_left(server_url)
    assert environment.execute({"command": "echo again"})["output"] == "again\n"


def test_a_command_that_never_ends(environment: ExecServerEnvironment) -> None:
    result = environment.execute({"command": NEVER_ENDS}, timeout=1)
    assert (result["output"], result["returncode"]) == ("begun\n", -1)
    assert result["extra"]["exception_type"] == "Timeout"
    left = environment.execute({"command": COUNT_LEFT})
    assert left["output"] == "0\n"


def test_a_server_that_is_gone_is_a_result(environment: ExecServerEnvironment) -> None:
    environment.close()
    result = environment.execute({"command": "true"})
    assert (result["returncode"], result["extra"]["exception_type"]) == (-1, "SessionLost")


def test_confined(server_url: str, tmp_path: Path) -> None:
    made = ExecServerEnvironment(target=server_url, sandbox="read-only", cwd=str(tmp_path))
    assert made.execute({"command": "touch new"})["returncode"] == 1
    made.close()
