"""Plays the exchanges in cases/*.json against the server under test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.scene import Scene
from tests.support.client import Server, start_server, start_stdio

pytestmark = pytest.mark.quick

_CASES = Path(__file__).resolve().parent / "cases"


def load() -> dict[str, dict[str, Any]]:
    """All cases by the name of their file and their own."""
    return {
        f"{path.stem}-{case['name']}": case
        for path in sorted(_CASES.glob("*.json"))
        for case in json.loads(path.read_text())
    }


def _steps(case: dict[str, Any], kind: str) -> list[Any]:
    """The steps for this server: a case marked `ours` expects them of ours alone."""
    if "ours" not in case or kind == "ours":
        steps: list[Any] = case["steps"]
        return steps
    if "reference" not in case:
        pytest.skip(f"by choice only ours does this: {case['ours']}")
    alternative: list[Any] = case["reference"]
    return alternative


def play(
    case: dict[str, Any],
    steps: list[Any],
    server: Server,
    folder: Path,
    make_scene: Callable[..., Scene] = Scene,
) -> None:
    """Plays a case on this server, or on one of the same kind that the case describes."""
    kind = server.kind
    settings = case.get("server")
    if case.get("stdio"):
        with start_stdio(kind, cwd=folder) as (own, client):
            make_scene(own, folder, stdio=client).play(case, steps)
    elif settings is None:
        make_scene(server, folder).play(case, steps)
    else:
        env = {k: v.replace("{dir}", str(folder)) for k, v in settings.get("env", {}).items()}
        with start_server(kind, *settings.get("flags", []), env=env, cwd=folder) as own:
            make_scene(own, folder).play(case, steps)


@pytest.mark.parametrize("case", load().values(), ids=load())
def test_case(case: dict[str, Any], kind: str, server: Server, folder: Path) -> None:
    play(case, _steps(case, kind), server, folder)
