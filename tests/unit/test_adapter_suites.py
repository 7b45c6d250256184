"""`make adapters` tries the lower bound of every extra, and runs an example of every adapter."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from scripts import adapter_suites
from tests.adapters import drivers

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# The extras of frameworks; the others are parts of the server and of the command.
FRAMEWORKS = sorted({name.replace("_", "-") for name in drivers.NAMES} | {"mcp"})


def tried_versions(project: str) -> list[list[str]]:
    pinned = re.compile(rf"\b{re.escape(project)}==([\d.]+)")
    rows = [pinned.search(row.requirements) for row in adapter_suites.ROWS]
    return [found[1].split(".") for found in rows if found is not None]


@pytest.mark.parametrize("extra", FRAMEWORKS)
def test_a_lower_bound_is_a_version_that_is_tried(extra: str) -> None:
    (requirement,) = EXTRAS[extra]
    found = re.match(r"([\w-]+)>=([\d.]+)", requirement)
    assert found is not None
    bound = found[2].split(".")
    # 2.4 is tried as 2.4.0.
    exact = [bound, [*bound, "0"]]
    assert any(version in exact for version in tried_versions(found[1]))


@pytest.mark.parametrize("name", drivers.NAMES)
def test_every_adapter_has_an_example_and_rows(name: str) -> None:
    assert (ROOT / f"examples/adapters/with_{name}.py").exists()
    assert f"`adapters/with_{name}.py`" in (ROOT / "examples/README.md").read_text()
    assert (ROOT / f"src/exec_server/adapters/{name}.py").exists()
    rows = [row for row in adapter_suites.ROWS if name in row.flags]
    assert any(row.needs_reference for row in rows)
    assert any(not row.needs_reference for row in rows)
