"""The Agents API played on loopback: a double of the API, our registry, a real Codex as harness.

A signed webhook makes the service start a confined executor; it registers with our registry, and
Codex works in its workspace through the relay.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.adapters.cloud_agents import APPLICATION_KEY, Api, Service, start_api, start_service
from tests.conformance.codex import Codex, appears, command, patch, report, start_codex
from tests.conformance.model import Model, Step
from tests.support.client import descendants, server_environment, survivors
from tests.support.registry import Node, free_port, start_node
from tests.support.server_internals import eventually

CALM = ("--idle-seconds", "3600", "--check-seconds", "3600")
# Everything that the kernel shows of other processes.
SHOW_PROCESSES = "for p in /proc/[0-9]*; do tr '\\0' '\\n' <$p/environ; cat $p/cmdline; done 2>&1"


@dataclass
class Scene:
    """All parts; `folder` is the workspace directory of the session, an empty one outside of it."""

    api: Api
    node: Node
    service: Service
    folder: Path

    def connect(self, session_id: str = "sess_1") -> None:
        self.api.open_session(session_id, self.node.url, directory=str(self.folder))
        assert self.service.send(self.api.connection_event(session_id)) == 200
        self.node.wait_online(f"env-{session_id}")

    def codex(
        self, script: Sequence[Step], sandbox: str, session_id: str
    ) -> AbstractContextManager[Codex]:
        prefix = "CODEX_EXEC_SERVER_NOISE_"
        variables = {
            f"{prefix}REGISTRY_URL": self.node.url,
            f"{prefix}ENVIRONMENT_ID": f"env-{session_id}",
            f"{prefix}AUTH_TOKEN": self.node.site.client_token,
        }
        return start_codex(script, self.folder, variables=variables, sandbox=sandbox)

    def play(self, *script: Step, sandbox: str, session_id: str = "sess_1") -> Model:
        with self.codex(script, sandbox, session_id) as client:
            return client.completed()

    def workspace(self, session_id: str = "sess_1") -> Path:
        (place,) = self.service.places(session_id)
        return place / "workspace"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    # Not below /tmp, which is another one in a container.
    cache = Path(server_environment("reference")["CODEX_HOME"]).parent
    folder = Path(tempfile.mkdtemp(prefix="workspace-", dir=cache))
    program, root = os.environ["EXEC_SERVER_BUBBLEWRAP"], tmp_path_factory.mktemp("root")
    try:
        with start_api() as api, start_node(root / "registry") as node:
            key = node.site.executor_token
            with start_service(api, root / "sessions", program, *CALM, key=key) as service:
                yield Scene(api, node, service, folder)
        assert list(folder.iterdir()) == []  # nothing has been done outside of the container
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def connected(scene: Scene) -> Scene:
    scene.connect()
    return scene


def _told(model: Model, call_id: str) -> tuple[int | None, str]:
    told = report(model.outputs[call_id])
    return told.exit_code, told.text


@pytest.mark.parametrize("sandbox", ["danger-full-access", "workspace-write"])
def test_codex_works_in_the_workspace_of_the_session(connected: Scene, sandbox: str) -> None:
    """Also with sandboxes of its own, which are made inside the container."""
    model = connected.play(
        [command("write", f"pwd; echo from Codex >{sandbox}.txt; id -u; exit 3")],
        [patch("patch", f"*** Add File: {sandbox}/added.txt", "+hello")],
        [command("outside", "touch /usr/new /etc/new /new")],
        [command("home", "touch ~/new && echo allowed")],
        sandbox=sandbox,
    )
    assert _told(model, "write") == (3, f"{connected.folder}\n1000\n")
    assert (connected.workspace() / f"{sandbox}.txt").read_text() == "from Codex\n"
    assert (connected.workspace() / sandbox / "added.txt").read_text() == "hello\n"
    _, text = _told(model, "outside")
    assert text.count("Read-only file system") == 3
    # The workspace and /tmp alone, if Codex asks for that.
    assert ("allowed" in _told(model, "home")[1]) == (sandbox == "danger-full-access")


@pytest.mark.parametrize("sandbox", ["danger-full-access", "workspace-write"])
def test_no_key_is_within_reach_of_a_command(connected: Scene, sandbox: str) -> None:
    model = connected.play(
        [command("variables", "env")],
        [command("processes", SHOW_PROCESSES)],
        [command("files", f"grep -rl {connected.node.site.executor_token[:8]} ~ /tmp . ; ls -A ~")],
        sandbox=sandbox,
    )
    site = connected.node.site
    hidden = (site.executor_token, site.client_token, APPLICATION_KEY, connected.api.secret)
    shown = "".join(model.outputs.values())
    assert "exec_server" in _told(model, "processes")[1]
    assert [secret for secret in hidden if secret in shown] == []
    assert _told(model, "files")[1] in ("", "new\n")


def test_sessions_do_not_see_each_other(connected: Scene) -> None:
    (connected.workspace() / "private").write_text("of the first session")
    connected.connect("sess_2")
    look = "ls -A; cat /proc/[0-9]*/cmdline | grep -ao 'env-sess_[0-9]' | sort -u"
    model = connected.play(
        [command("look", look)], sandbox="danger-full-access", session_id="sess_2"
    )
    assert _told(model, "look")[1] == "env-sess_2\n"


def test_the_end_of_a_session_ends_its_commands(connected: Scene) -> None:
    before = descendants(connected.service.process.pid)
    connected.connect("sess_3")
    stay = command("stay", "setsid sleep 600 >/dev/null 2>&1 & touch mark; wait")
    with connected.codex([[stay]], "danger-full-access", "sess_3"):
        appears(connected.workspace("sess_3") / "mark")
        new: dict[int, str] = {}

        def sleeps() -> bool:
            family = descendants(connected.service.process.pid)
            new.update((pid, start) for pid, start in family.items() if pid not in before)
            return "sleep" in map(_program, family)

        eventually("the command sleeps", sleeps)
        connected.api.sessions["sess_3"].status = "failed"
        connected.service.send(connected.api.failed_event("sess_3"))
        connected.service.wait_logged("sess_3: removed")
        assert survivors(new) == []
    assert connected.service.places("sess_3") == []


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""  # it has ended


def test_a_registry_that_is_away_is_tried_again(scene: Scene) -> None:
    port = free_port()
    scene.api.open_session("sess_4", f"http://127.0.0.1:{port}", directory=str(scene.folder))
    scene.service.send(scene.api.connection_event("sess_4"))
    scene.service.wait_logged("sess_4: executor ended, exit code 1", times=2)
    session = scene.api.open_session("sess_4", scene.node.url, directory=str(scene.folder))
    scene.node.wait_online(session.environment.id)
