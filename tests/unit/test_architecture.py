"""The layers as data: who may import whom, how long a module may be, what documents must say.

From the ground up. A module may import its own layer and the ones that its layer names; no
import, not even a lazy or a type-checking one, may close a circle.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from exec_server.core.files import OPERATIONS
from exec_server.rpc.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "exec_server"
MAX_LINES = 600
MAX_FUNCTION_LINES = 60  # with its signature and docstring; the guide says 40 of code

_IO = {"asyncio", "os", "socket", "subprocess", "threading", "time", "random", "signal", "select"}


@dataclass(frozen=True)
class Layer:
    """Modules, what of the package they may import beside each other, and what not at all."""

    name: str
    modules: tuple[str, ...]
    below: tuple[str, ...]
    banned: frozenset[str] = frozenset()


LAYERS = [
    Layer("errors", ("errors",), (), frozenset(_IO | {"websockets", "msgspec"})),
    Layer("protocol", ("protocol", "protocol.*"), ("errors",), frozenset(_IO | {"websockets"})),
    Layer("relay", ("relay", "relay.*"), ("errors",), frozenset(_IO | {"websockets"})),
    Layer("output", ("core.output",), ("errors", "protocol"), frozenset(_IO | {"websockets"})),
    Layer(
        "core",
        ("core", "core.*"),
        ("errors", "protocol", "output", "version"),
        frozenset({"websockets"}),
    ),
    # What a policy means is found out without looking at the machine.
    Layer(
        "policy",
        tuple(f"sandbox.{name}" for name in ("plan", "policy", "layout", "filter", "denial")),
        ("errors", "protocol", "sandbox"),
        frozenset(_IO | {"websockets"}),
    ),
    Layer(
        "sandbox",
        ("sandbox", "sandbox.*"),
        ("errors", "protocol", "core", "policy"),
        frozenset({"websockets"}),
    ),
    Layer("stream", ("rpc.stream",), (), frozenset({"websockets", "asyncio", "msgspec"})),
    Layer(
        "rpc",
        ("rpc", "rpc.*"),
        ("errors", "protocol", "output", "core", "sandbox", "stream"),
        frozenset({"websockets", "subprocess", "socket"}),
    ),
    Layer("transports", ("transports", "transports.*"), ("errors", "relay", "stream")),
    Layer("registry", ("registry", "registry.*"), ("errors", "relay", "transports")),
    Layer("remote", ("remote",), ("errors", "relay", "stream", "transports", "registry")),
    Layer(
        "client",
        ("client", "client.*"),
        ("errors", "protocol", "relay", "stream", "transports", "registry"),
    ),
    # The one place that knows both the machine and the connections: it puts them together.
    Layer(
        "server",
        ("server",),
        ("errors", "core", "sandbox", "stream", "rpc", "transports"),
    ),
    Layer("logs", ("logs",), ()),
    Layer("arguments", ("arguments",), ("logs", "version")),
    # The guardian stays small, and that is checked by what it imports.
    Layer("guardian", ("guardian",), ("core",), frozenset({"asyncio", "msgspec"})),
    Layer(
        "remote command",
        ("remote_command",),
        ("errors", "transports", "registry", "remote", "server"),
    ),
    Layer(
        "daemon",
        ("daemon",),
        (
            "errors",
            "protocol",
            "core",
            "transports",
            "registry",
            "server",
            "logs",
            "arguments",
            "remote command",
        ),
    ),
    Layer(
        "sandbox command",
        ("sandbox_command", "sandbox_check"),
        ("errors", "protocol", "core", "policy", "sandbox", "arguments"),
    ),
    # What people type: it knows the client, and of the server only its flags.
    Layer(
        "commands",
        ("commands", "commands.*"),
        ("errors", "protocol", "transports", "client", "arguments"),
    ),
    Layer(
        "cli",
        ("cli", "__main__"),
        ("core", "guardian", "daemon", "sandbox command", "commands"),
    ),
    Layer("embedding", ("embedding",), ("errors",)),
    Layer("sync", ("sync", "sync.*"), ("errors", "protocol", "client", "embedding")),
    # What everybody may import for its version, and users for the names that it imports lazily.
    Layer("version", ("",), ("errors", "client", "embedding")),
]


def _modules() -> dict[str, Path]:
    """Every module by its name below the package, which itself is the empty name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _layer_of(module: str) -> Layer:
    for layer in LAYERS:
        if any(fnmatchcase(module, pattern) for pattern in layer.modules):
            return layer
    raise AssertionError(f"{module} belongs to no layer")


def _imported(path: Path) -> Iterator[str]:
    """Every dotted name a module imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            assert node.module is not None
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def _own_imports(module: str) -> set[str]:
    """The modules of the package that a module imports."""
    found = set()
    for name in _imported(MODULES[module]):
        if name.split(".")[0] == "exec_server":
            inner = name.removeprefix("exec_server").removeprefix(".")
            # `from package.module import thing`: the module is the longest part that is one.
            while inner not in MODULES:
                inner = inner.rpartition(".")[0]
            found.add(inner)
    return found - {module}


def test_there_is_something_to_check() -> None:
    assert {"errors", "protocol.jsonrpc", "core.spawn", "rpc.connection", "cli"} <= set(MODULES)
    below = {"core.descendants", "core.system", "guardian", "daemon", "sandbox_command"}
    below.add("commands.dispatch")
    assert _own_imports("cli") == below
    assert "asyncio" in {name.split(".")[0] for name in _imported(MODULES["rpc.connection"])}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module: str) -> None:
    layer = _layer_of(module)
    allowed = {layer.name, *layer.below}
    offences = {
        f"{module} ({layer.name}) imports {other} ({_layer_of(other).name})"
        for other in _own_imports(module)
        if _layer_of(other).name not in allowed
    }
    assert not offences


@pytest.mark.parametrize("module", MODULES)
def test_layers_keep_away_from_what_is_not_theirs(module: str) -> None:
    banned = _layer_of(module).banned
    # websockets.speedups is one C function without a socket.
    used = {name.split(".")[0] for name in _imported(MODULES[module])}
    assert not used & banned


def test_nothing_imports_in_a_circle() -> None:
    graph = {module: _own_imports(module) for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " imports ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short_and_say_what_they_are(module: str) -> None:
    text = MODULES[module].read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text)), "it has no docstring"


@pytest.mark.parametrize("module", MODULES)
def test_functions_are_short(module: str) -> None:
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
        and module != "arguments"  # a parser is a table written as calls
    ]
    assert not long


@pytest.mark.parametrize("module", [name for name in MODULES if "." in name])
def test_no_module_is_called_anything(module: str) -> None:
    assert module.rpartition(".")[2] not in ("utils", "helpers", "common", "base", "manager")


def test_documented_methods_are_the_methods() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    section = text.partition("\n## Methods\n")[2].partition("\n## ")[0].partition("\n###")[0]
    documented = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert documented, "docs/protocol.md has no table of methods"
    assert sorted(documented) == sorted(METHODS)


def test_every_file_operation_is_a_method() -> None:
    assert {call.name for call in OPERATIONS} <= set(METHODS)


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            if not (document.parent / target).exists():
                broken.append(f"{document.name}: {target}")
    assert not broken
