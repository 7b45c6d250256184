"""Every fs call with its own function."""

from __future__ import annotations

import subprocess
import sys

import pytest

from exec_server.filesystem.operations import OPERATIONS, OnDemand
from exec_server.protocol.sandbox import Confinable

pytestmark = pytest.mark.quick


def test_every_operation_can_be_confined() -> None:
    for call in OPERATIONS:
        assert call.params is not None
        assert issubclass(call.params, Confinable), call.name


def test_no_function_serves_two_calls() -> None:
    assert len(set(OPERATIONS.values())) == len(OPERATIONS)


def test_operations_on_demand_exist_and_are_not_imported_before() -> None:
    code = (
        "import sys, exec_server.cli.serve.run;"
        "from exec_server.filesystem.operations import load_all;"
        "names = [f'exec_server.filesystem.{name}' for name in ('changes', 'search')];"
        "print(*(name in sys.modules for name in names));"
        "load_all();"
        "print(*(name in sys.modules for name in names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False False", "True True"]


def test_an_operation_on_demand_is_that_of_its_module() -> None:
    on_demand = {call: row for call, row in OPERATIONS.items() if isinstance(row, OnDemand)}
    assert on_demand
    for call, operation in on_demand.items():
        name = call.name.partition("/")[2]
        snake = "".join(f"_{each.lower()}" if each.isupper() else each for each in name)
        assert operation.load().__name__ == snake
