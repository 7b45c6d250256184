"""A registry of ours with the real Codex: both executors and its own client, one node and two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.codex import appears, command, patch, report, start_codex, write
from tests.conformance.model import Model, Step
from tests.support.balancer import Balancer, start_balancer
from tests.support.older_servers import installed_versions, older_binary
from tests.support.postgres import programs, start_postgres
from tests.support.registry import ENVIRONMENT, Node, start_executor, start_node
from tests.versions.installed import as_reference

pytestmark = pytest.mark.reference

_LINES = "for i in 1 2 3 4 5 6 7 8; do echo line-$i; touch mark-$i; sleep 0.1; done; exit 5"
_ALL_LINES = "".join(f"line-{n}\n" for n in range(1, 9))


@dataclass
class Stage:
    """An executor at the first node, clients at the last one, all behind a balancer."""

    balancer: Balancer
    nodes: list[Node]

    def variables(self) -> dict[str, str]:
        return _variables(self.balancer.url, self.nodes[0])


def _variables(url: str, node: Node) -> dict[str, str]:
    prefix = "CODEX_EXEC_SERVER_NOISE_"
    return {
        f"{prefix}REGISTRY_URL": url,
        f"{prefix}ENVIRONMENT_ID": ENVIRONMENT,
        f"{prefix}AUTH_TOKEN": node.site.client_token,
    }


@pytest.fixture(scope="module", params=["one node", "two nodes"])
def stage(
    request: pytest.FixtureRequest, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    with contextlib.ExitStack() as stack:
        balancer = stack.enter_context(start_balancer())
        flags = ("--public-url", balancer.url)
        if request.param == "one node":
            where = tmp_path_factory.mktemp("data")
            nodes = [stack.enter_context(start_node(where, *flags))]
        else:
            if programs() is None:
                pytest.skip("needs the package postgresql")
            place = stack.enter_context(start_postgres()).where
            first = stack.enter_context(start_node(place, *flags))
            nodes = [first, stack.enter_context(start_node(place, *flags, site=first.site))]
        balancer.nodes = [nodes[0].port]
        home = tmp_path_factory.mktemp("home").resolve()
        environment = {"HOME": str(home)}
        stack.enter_context(start_executor(nodes[0], kind=kind, url=balancer.url, env=environment))
        balancer.nodes = [nodes[-1].port]
        yield Stage(balancer, nodes)


def _ended(model: Model, call_id: str) -> tuple[int | None, str]:
    told = report(model.outputs[call_id])
    return told.exit_code, told.text


def test_commands_files_and_a_terminal(stage: Stage, folder: Path) -> None:
    typing = "test -t 0 && stty size; read a; echo hi $a; exit 4"
    script: list[Step] = [
        [command("both", "echo out; sleep 0.1; echo err >&2; exit 3")],
        [patch("patch", "*** Add File: new/add.txt", "+hello")],
        [command("start", typing, tty=True, yield_time_ms=500)],
        write("typed", "start", "Ann\n"),
    ]
    with start_codex(script, folder, variables=stage.variables()) as client:
        model = client.completed()
    assert _ended(model, "both") == (3, "out\nerr\n")
    assert (folder / "new" / "add.txt").read_text() == "hello\n"
    assert report(model.outputs["start"]).text == "24 80\r\n"
    assert _ended(model, "typed") == (4, "Ann\r\nhi Ann\r\n")
    assert stage.nodes[-1].metric("passed_on") in (0, 1)
    if len(stage.nodes) == 2:
        upgrades = 'upgrades_total{role="harness",outcome="%s"}'
        assert stage.nodes[1].metric(upgrades % "passed_on") >= 1
        assert stage.nodes[0].metric(upgrades % "accepted") >= 1


def test_a_command_goes_on_after_all_sockets_were_cut(stage: Stage, folder: Path) -> None:
    script = [[command("c", _LINES)], [command("next", "echo after")]]
    with start_codex(script, folder, variables=stage.variables()) as client:
        appears(folder / "mark-3")
        stage.balancer.nodes = [node.port for node in stage.nodes]
        stage.balancer.cut()
        model = client.completed()
    assert _ended(model, "c") == (5, _ALL_LINES)
    assert _ended(model, "next") == (0, "after\n")


def test_the_oldest_client_that_knows_a_registry(tmp_path: Path, folder: Path) -> None:
    """Versions before 0.142 run commands on their own machine instead, so the node is asked."""
    versions = [version for version in installed_versions() if version >= "0.142.0"]
    if not versions:
        pytest.skip("no older version of the reference is installed")
    program = older_binary(versions[0])
    assert program is not None
    with (
        start_node(tmp_path) as node,
        start_executor(node),
        as_reference(program),
        start_codex(
            [[command("c", "echo out; exit 3")]], folder, variables=_variables(node.url, node)
        ) as client,
    ):
        model = client.completed()
        assert node.metric('upgrades_total{role="harness",outcome="accepted"}') == 1
    assert _ended(model, "c") == (3, "out\n")
