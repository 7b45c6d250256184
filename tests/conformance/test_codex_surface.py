"""A real Codex with the features that ask a server for more than processes and files.

As in test_codex_client, the same is expected of our server and of the reference.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.codex import (
    appears,
    command,
    patch,
    report,
    start_app_server,
    start_codex,
    write,
)
from tests.conformance.mcp_server import serve_mcp
from tests.conformance.model import Model, Step, ToolCall, serve
from tests.conformance.proxy import Proxy
from tests.support.client import Message, server_environment, start_server
from tests.support.pictures import PICTURE

pytestmark = pytest.mark.reference


@dataclass
class Machine:
    """A machine with a server: its Codex home, the home of its user, a folder to work in."""

    kind: str
    home: Path
    user: Path
    folder: Path

    def play(
        self, *script: Step, features: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> Model:
        """Runs a whole script of the model; returns what it was told."""
        variables = {"CODEX_HOME": str(self.home), "HOME": str(self.user)} | (env or {})
        with (
            start_server(self.kind, env=variables, cwd=self.folder) as server,
            start_codex(script, self.folder, url=server.url, features=features) as client,
        ):
            return client.completed()


@pytest.fixture
def machine(kind: str, folder: Path) -> Iterator[Machine]:
    # Below a temporary directory Codex does without some of its helpers.
    cache = Path(server_environment("reference")["CODEX_HOME"]).parent
    root = Path(tempfile.mkdtemp(prefix="machine-", dir=cache))
    try:
        for name in ("home", "user"):
            (root / name).mkdir()
        yield Machine(kind, root / "home", root / "user", folder)
    finally:
        shutil.rmtree(root)


def test_mcp_servers_of_the_machine_become_tools(machine: Machine) -> None:
    with serve_mcp() as url:
        settings = f'[mcp_servers.echo]\nurl = "{url}"\nbearer_token_env_var = "ECHO_BEARER"\n'
        (machine.home / "config.toml").write_text(settings)
        call = ToolCall("m", "echo", {"text": "hello"}, "mcp__echo")
        model = machine.play([call], env={"ECHO_BEARER": "abc"})
    assert "hello Bearer abc" in model.outputs["m"]


def test_skills_of_the_machine_are_known_to_the_model(machine: Machine) -> None:
    for path, mark in {
        machine.home / "skills/first/SKILL.md": "mark-home",
        machine.user / ".agents/skills/second/SKILL.md": "mark-user",
    }.items():
        path.parent.mkdir(parents=True)
        path.write_text(f"---\ndescription: {mark}\n---\n")
    model = machine.play([command("c", "echo hi")], features=("executor_capability_discovery_v2",))
    for mark in ("mark-home", "mark-user"):
        assert mark in model.instructions, mark


def test_selected_roots_of_the_machine_are_known_to_the_model(machine: Machine) -> None:
    """An editor selects them for a thread; with the feature the client sends discoverV1."""
    for name, text in {
        "plugin/.codex-plugin/plugin.json": '{"name": "demo"}',
        "plugin/skills/first/SKILL.md": "---\nname: first\ndescription: mark-plugin\n---\n",
        "plain/second/SKILL.md": "---\nname: second\ndescription: mark-plain\n---\nmark-body\n",
    }.items():
        (machine.user / name).parent.mkdir(parents=True)
        (machine.user / name).write_text(text)
    selected = [
        {
            "id": f"{name}@1",
            "location": {
                "type": "environment",
                "environmentId": "remote",
                "path": str(machine.user / name),
            },
        }
        for name in ("plugin", "plain")
    ]
    with (
        start_server(machine.kind, cwd=machine.folder) as server,
        Proxy(server.url, record=True) as proxy,
        serve([[command("c", "echo hi")]]) as model,
        start_app_server(
            {"CODEX_EXEC_SERVER_URL": proxy.url},
            url=model.url,
            sandbox="danger-full-access",
            features=["executor_capability_discovery", "plugins"],
        ) as client,
    ):
        params = {"cwd": str(machine.folder), "selectedCapabilityRoots": selected}
        thread = client.call("thread/start", params)["thread"]["id"]
        said = {"type": "text", "text": "go on with $second"}
        client.call("turn/start", {"threadId": thread, "input": [said]})
        client.wait_for(lambda notice: notice["method"] == "turn/completed")
        methods = proxy.methods()
    assert report(model.outputs["c"]).text == "hi\n"
    assert "capabilityRoots/discoverV1" in methods
    assert "fs/walk" not in methods  # the way without the feature
    for mark in ("demo:first: mark-plugin", "second: mark-plain", "mark-body"):
        assert mark in model.instructions, mark


def test_files_are_copied_between_environments(machine: Machine) -> None:
    """A tool of the model streams them from one server to the other, under its sandbox."""
    content = bytes(range(256)) * 10_000
    (machine.folder / "source").write_bytes(content)

    def copy(call_id: str, target: Path) -> ToolCall:
        places = {
            "source_environment_id": "one",
            "source_path": str(machine.folder / "source"),
            "target_environment_id": "two",
            "target_path": str(target),
        }
        return ToolCall(call_id, "multi_env_copy_file", places)

    allowed, refused = machine.folder / "target", machine.user / "target"
    with (
        start_server(machine.kind, cwd=machine.folder) as one,
        start_server(machine.kind, cwd=machine.folder) as two,
        Proxy(two.url, record=True) as proxy,
    ):
        lines = ['default = "one"', "include_local = false"]
        for name, url in (("one", one.url), ("two", proxy.url)):
            lines += ["[[environments]]", f'id = "{name}"', f'url = "{url}"']
        with start_codex(
            [[copy("in", allowed)], [copy("out", refused)]],
            machine.folder,
            environments="\n".join(lines),
            variables={},
            sandbox="workspace-write",
            features=["multi_env_copy_file"],
        ) as client:
            model = client.completed()
        methods = proxy.methods()
    assert str(len(content)) in model.outputs["in"]
    assert allowed.read_bytes() == content
    assert {"fs/open", "fs/writeBlock", "fs/close"} <= set(methods)
    assert model.outputs["out"].startswith("copy failed")
    assert not refused.exists()


def test_start_up_files_run_once_for_all_commands(machine: Machine) -> None:
    profile = "echo x >> ~/runs; export FROM=profile; hello() { echo hello; }\n"
    (machine.user / ".bash_profile").write_text(profile)
    commands = [[command(name, "echo $FROM; hello; cat ~/runs")] for name in ("first", "second")]
    model = machine.play(*commands, features=("shell_snapshot_v2",))
    for name in ("first", "second"):
        assert report(model.outputs[name]).text == "profile\nhello\nx\n"


# The commands of the next test, and whether each may write outside of the workspace.
_WRITES = {"before": False, "one": True, "between": False, "escalated": True, "after": True}


def test_permissions_that_a_user_grants(machine: Machine) -> None:
    """The model asks for more than its sandbox allows: for a command, then for all that follow."""
    outside = machine.user / "outside"
    outside.mkdir()
    writable = {"file_system": {"write": [str(outside)]}}
    options: dict[str, dict[str, Any]] = {
        "one": {
            "sandbox_permissions": "with_additional_permissions",
            "additional_permissions": writable,
            "justification": "why",
        },
        "escalated": {"sandbox_permissions": "require_escalated", "justification": "why"},
    }
    script: list[Step] = [
        [command(name, f"touch {outside}/{name}", **options.get(name, {}))] for name in _WRITES
    ]
    ask = ToolCall("ask", "request_permissions", {"reason": "why", "permissions": writable})
    script[-1:-1] = [[ask]]
    script += [[patch("patch", f"*** Add File: {outside}/patched", "+x")]]
    with (
        start_server(machine.kind, cwd=machine.folder) as server,
        serve(script) as model,
        start_app_server(
            {"CODEX_EXEC_SERVER_URL": server.url},
            url=model.url,
            sandbox="workspace-write",
            features=["exec_permission_approvals", "request_permissions_tool"],
        ) as client,
    ):
        place = {"cwd": str(machine.folder), "approvalPolicy": "on-request"}
        thread = client.call("thread/start", place)["thread"]["id"]
        said = {"type": "text", "text": "go on"}
        client.call("turn/start", {"threadId": thread, "input": [said]})
        while (message := client.receive()).get("method") != "turn/completed":
            if "id" in message and "method" in message:
                client.send({"id": message["id"], "result": _granted(message)})
    assert {name: not _ended(model, name)[0] for name in _WRITES} == _WRITES
    written = {name for name, may_write in _WRITES.items() if may_write}
    assert {path.name for path in outside.iterdir()} == {*written, "patched"}


def _granted(question: Message) -> dict[str, Any]:
    """The answer of a user who allows everything."""
    if question["method"] == "item/permissions/requestApproval":
        return {"permissions": question["params"]["permissions"], "scope": "session"}
    return {"decision": "accept"}


# All that change what an executor is asked for, or the tools that ask it; the newer ones change
# nothing that a server sees, and have to stay so.
_EXECUTOR_FEATURES = (
    *("agent_message_board_mcp", "apply_patch_streaming_events", "apps_early_resource_discovery"),
    *("code_mode", "command_sessions_world_state", "credential_masking", "deferred_executor"),
    *("executor_capability_discovery", "executor_capability_discovery_v2"),
    *("incremental_exec_tools", "interrupt_on_cancel", "login_shell_package_path"),
    *("mcp_connection_sharing", "mcp_lazy_stdio_startup", "mcp_tool_list_changed"),
    *("multi_env_copy_file", "network_proxy", "shell_snapshot_v2", "subagent_thread_environments"),
)
_SCRIPT = """\
const done = await Promise.all(["a", "b"].map((name) =>
    tools.exec_command({cmd: `echo ${name}; hello`, yield_time_ms: 10000})));
text(done.map((each) => `${each.exit_code} ${each.output}`).join(""));
"""


def test_all_features_at_once(machine: Machine) -> None:
    """Commands, a terminal, patches, images, MCP, code, the network and a lost connection."""
    (machine.user / ".bash_profile").write_text("hello() { echo hello from the profile; }\n")
    (machine.folder / "image.png").write_bytes(PICTURE)
    skill = machine.user / ".agents/skills/first/SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("---\ndescription: mark-skill\n---\n")
    lines = "for i in 1 2 3 4 5 6; do echo line-$i; touch mark-$i; sleep 0.2; done; exit 5"
    script: list[Step] = [
        [command("both", "hello; echo err >&2; exit 3")],
        [command("ask", "read a; echo hi $a; exit 4", tty=True, yield_time_ms=1000)],
        write("typed", "ask", "Ann\n"),
        [patch("patch", "*** Add File: new/added.txt", "+first")],
        [ToolCall("image", "view_image", {"path": "image.png"})],
        [ToolCall("mcp", "echo", {"text": "over http"}, "mcp__echo")],
        [ToolCall("code", "exec", _SCRIPT)],
        [command("network", "curl -sS -m 8 http://unlisted.test/")],
        [command("outside", "touch /etc/exec-server-conformance")],
        [command("cut", lines)],
    ]
    variables = {"CODEX_HOME": str(machine.home), "HOME": str(machine.user), "ECHO_BEARER": "abc"}
    with (
        serve_mcp() as url,
        start_server(machine.kind, env=variables, cwd=machine.folder) as server,
        Proxy(server.url, record=True) as proxy,
    ):
        settings = f'[mcp_servers.echo]\nurl = "{url}"\nbearer_token_env_var = "ECHO_BEARER"\n'
        approval = 'default_tools_approval_mode = "approve"\n'
        (machine.home / "config.toml").write_text(settings + approval)
        with start_codex(
            script,
            machine.folder,
            url=proxy.url,
            sandbox="workspace-write",
            features=_EXECUTOR_FEATURES,
            mcp="\n[sandbox_workspace_write]\nnetwork_access = true\n",
        ) as client:
            appears(machine.folder / "mark-3", 60)
            proxy.cut()
            model = client.completed()
        methods = proxy.methods()
    assert {"capabilities/discoverV2", "environmentConfig/read", "http/request"} <= set(methods)
    assert "mark-skill" in model.instructions
    assert _ended(model, "both") == (3, "hello from the profile\nerr\n")
    assert _ended(model, "typed") == (4, "Ann\r\nhi Ann\r\n")
    assert (machine.folder / "new/added.txt").read_text() == "first\n"
    assert "image" in model.images
    assert "over http Bearer abc" in model.outputs["mcp"]
    for name in ("a", "b"):
        assert f"0 {name}\nhello from the profile\n" in model.outputs["code"]
    assert '"reason":"not_allowed"' in report(model.outputs["network"]).text
    assert "Read-only file system" in report(model.outputs["outside"]).text
    assert proxy.accepted >= 2
    assert _ended(model, "cut") == (5, "".join(f"line-{n}\n" for n in range(1, 7)))


def _ended(model: Model, call_id: str) -> tuple[int | None, str]:
    told = report(model.outputs[call_id])
    return told.exit_code, told.text
