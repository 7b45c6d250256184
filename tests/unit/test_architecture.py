"""Imports follow the layers, modules and functions are short, documents match the code.

The layers are data in `tests/support/layers.py`. No import, not even a lazy or a type-checking
one, may close a cycle.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
from scripts import limits
from tests.support.layers import LAYERS, layer_of

from exec_server.filesystem.operations import OPERATIONS
from exec_server.host.environment import describe
from exec_server.host.http import FORBIDDEN_NAMES
from exec_server.host.interpreter import SECRET_NAMES, STRIPPED_NAMES
from exec_server.server.methods import load_all

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "exec_server"
TESTS = ROOT / "tests"
UNIT_TESTS = TESTS / "unit"
# About the package as a whole: its structure, and its types as a user's type checker sees them.
UNIT_TESTS_OF_NO_MODULE = {
    "test_adapter_suites.py",
    "test_exports.py",
    "test_architecture.py",
    "test_prose.py",
    "test_reference_difference.py",
    "client/test_types.py",
    "test_kernel_machine.py",
    "test_versions.py",
}
MAX_LINES = 900
# A shorter module with a single user in its own folder belongs into that user.
SMALL_LINES = 120
SMALL_MODULES = {
    "adapters.snapshot_archive": "pure: its tests run without the framework",
    "adapters.mcp_resources": "subscriptions of the SDK, which no other part needs",
    "client.engine.attempts": "pure but for its timers, with tests of its own",
    "client.tree_walk": "a walk over any number of answers; `files` has one request each",
    "client.engine.server_requests": "one end of a session, with tests of its own",
    "hosting.envelope": "pure, with tests of its own",
    "registry.sigv4": "imports botocore, on demand",
}
# Sync twins of the client, siblings of platforms, wire structs that their module qualifies.
REPEATED_CLASS_NAMES = 30
MAX_FUNCTION_LINES = 60  # with its signature and docstring; the guide says 40 of code


def _modules() -> dict[str, Path]:
    """Every module by its name below the package, which itself is the empty name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


@cache
def _nodes(path: Path) -> list[ast.AST]:
    """The syntax tree of a module as a list, its root first; most tests here walk it."""
    return list(ast.walk(ast.parse(path.read_text())))


def _imported(path: Path) -> Iterator[str]:
    """Every dotted name a module imports, wherever in the file."""
    for node in _nodes(path):
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
    some = {"errors", "protocol.jsonrpc", "process.spawn", "server.connection", "cli.main"}
    assert some <= set(MODULES)
    # Imports inside functions are seen too.
    assert {"cli.table", "cli.serve.watchdog", "host.libc"} <= _own_imports("cli.main")
    assert "asyncio" in {name.split(".")[0] for name in _imported(MODULES["server.connection"])}


def test_imports_point_downwards() -> None:
    assert not {
        f"{module} ({layer_of(module).name}) imports {other} ({layer_of(other).name})"
        for module in MODULES
        for other in _own_imports(module)
        if layer_of(other).name not in {layer_of(module).name, *layer_of(module).below}
    }


def test_layers_keep_away_from_what_is_not_theirs() -> None:
    # websockets.speedups is one C function without a socket.
    assert not {
        f"{module} imports {name}"
        for module, path in MODULES.items()
        for name in _imported(path)
        if name.split(".")[0] in layer_of(module).banned
    }


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


def test_modules_are_short_and_say_what_they_are() -> None:
    for path in MODULES.values():
        assert len(path.read_text().splitlines()) <= MAX_LINES, path
        root = _nodes(path)[0]
        assert isinstance(root, ast.Module)
        assert ast.get_docstring(root), f"{path} has no docstring"


def test_small_modules_have_more_than_one_user_in_their_folder() -> None:
    users: dict[str, set[str]] = {module: set() for module in MODULES}
    for module in MODULES:
        for other in _own_imports(module):
            users[other].add(module)
    small = {
        module
        for module, path in MODULES.items()
        if len(path.read_text().splitlines()) < SMALL_LINES
        and len(users[module]) == 1
        and users[module].pop().rpartition(".")[0] == module.rpartition(".")[0]
    }
    assert small == set(SMALL_MODULES)


def test_a_public_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    repeated = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert len(repeated) <= REPEATED_CLASS_NAMES, repeated


def test_the_document_names_modules_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = re.findall(r"(?<![\w/.])((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)\b", text)
    assert len(paths) > 20
    roots = (PACKAGE, ROOT)
    assert [path for path in paths if not any((root / path).is_file() for root in roots)] == []


def test_test_modules_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}
    assert UNIT_TESTS / "test_architecture.py" in lengths
    assert {str(path) for path, length in lengths.items() if length > MAX_LINES} == set()


def test_functions_are_short() -> None:
    long = [
        f"{path}: {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in MODULES.values()
        for node in _nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert not long


def test_no_module_is_called_anything() -> None:
    names = {module.rpartition(".")[2] for module in MODULES}
    assert not names & {"utils", "helpers", "common", "base", "manager"}


def test_documented_methods_are_the_methods() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    section = text.partition("\n## Methods\n")[2].partition("\n## ")[0].partition("\n###")[0]
    documented = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert documented, "docs/protocol.md has no table of methods"
    assert sorted(documented) == sorted(load_all())


def test_documented_capabilities_are_those_that_are_reported() -> None:
    """Each flag that is true names a test that exists; flags of extensions have a section."""
    text = (ROOT / "docs" / "protocol.md").read_text()
    section = text.partition("\n### Capabilities\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \| (yes|no) \| (.+) \|$", section, re.MULTILINE)
    reported = msgspec.to_builtins(describe({}).capabilities)
    assert {name: here == "yes" for name, _, here, _ in rows} == {
        name: reported[name] for name, *_ in rows
    }
    newest = json.loads((ROOT / "tests/vectors/handshakes.json").read_text())["0.169.0"]
    recorded = newest["initialize"]["result"]["environmentInfo"]["capabilities"]
    assert {name: reference == "yes" for name, reference, *_ in rows} == recorded
    undocumented = reported.keys() - {name for name, *_ in rows}
    assert [name for name in undocumented if f"`{name}`" not in text] == []
    tests = [shown.strip("`") for _, _, here, shown in rows if here == "yes"]
    assert len(tests) > 10
    assert [path for path in tests if not (ROOT / path).is_file()] == []


def test_documented_credentials_are_those_that_are_kept_back() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    children = text.partition("\nCredentials and settings")[2].partition("\n\n")[0]
    never, inherited = (set(re.findall(r"`([A-Z_]+)`", part)) for part in children.split(".", 1))
    assert never == STRIPPED_NAMES
    assert inherited == SECRET_NAMES - STRIPPED_NAMES
    headers = text.partition("Refused are those that")[2].partition(". A\n")[0]
    excepted, *added = re.findall(r"`([A-Z_]+)`", headers)
    assert (never | inherited) - {excepted} | set(added) == FORBIDDEN_NAMES


def test_every_file_operation_is_a_method() -> None:
    assert {call.name for call in OPERATIONS} <= set(load_all())


def _source_of(test: Path) -> str:
    """The module that a unit test is about: `test_module.py` or `test_module_subject.py`."""
    folder, name = test.relative_to(UNIT_TESTS).parent, test.stem.removeprefix("test_")
    while name:
        module = ".".join((*folder.parts, name))
        if module in MODULES:
            return module
        name = name.rpartition("_")[0]
    return ""


def test_unit_tests_mirror_the_source() -> None:
    strangers = [
        str(test.relative_to(UNIT_TESTS))
        for test in sorted(UNIT_TESTS.rglob("test_*.py"))
        if not _source_of(test)
    ]
    assert set(strangers) == UNIT_TESTS_OF_NO_MODULE


def test_layers_name_no_layer_above_them() -> None:
    numbers = {layer.name: layer.number for layer in LAYERS}
    # Every layer may import the package for its version; users import the client from it.
    upwards = {
        (layer.name, other)
        for layer in LAYERS
        for other in layer.below
        if numbers[other] > layer.number and layer.name != "version"
    }
    assert not upwards


def test_the_document_of_limits_is_up_to_date() -> None:
    assert limits.DOCUMENT.read_text() == limits.document(), "run: make limits"


LIMITS = """
# Requests that wait:
# more are refused.
MAX_WAITING = 4 * 2
MAX_TENTHS: Final = MAX_WAITING * 10

UNEXPLAINED = 3
POLL_SECONDS = 0.25  # twice a blink
_PRIVATE = 5  # left out
# The kernel's number.
O_PATH = 0x200000
# A text is no limit.
NAME = "name"
LONG_BYTES = 3 * 1_048_576  # a file
ODD_BYTES = 1000  # a line
"""


def test_limits_are_read_from_constants_and_their_comments() -> None:
    rows = [(limit.name, limits.shown(limit), limit.reason) for limit in limits.limits(LIMITS)]
    assert rows == [
        ("MAX_WAITING", "8", "Requests that wait: more are refused."),
        ("MAX_TENTHS", "80", "Requests that wait: more are refused."),
        ("POLL_SECONDS", "0.25 s", "twice a blink"),
        ("LONG_BYTES", "3 MiB", "a file"),
        ("ODD_BYTES", "1,000 bytes", "a line"),
    ]


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            if not (document.parent / target).exists():
                broken.append(f"{document.name}: {target}")
    assert not broken


def test_extras_are_installed_in_a_way_that_works() -> None:
    """No package index has exec-server: `exec-server[x]` alone would be a program of others."""
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    wrong, named = [], set()
    folders = ("src", "docs", "examples", "scripts", "bench", "soak")
    files = [path for each in folders for path in (ROOT / each).rglob("*.[pm][yd]")]
    for path in [*ROOT.glob("*.md"), *files]:
        text = path.read_text()
        named |= set(re.findall(r"'\.\[([a-z-]+)\]'", text))
        named |= set(re.findall(r"exec-server\[([a-z-]+)\]", text))
        for found in re.finditer(r"exec-server\[|pip install '?exec-server\b", text):
            if not re.match(r"(pip install ')?exec-server\[[^]\n]+\] @ ", text[found.start() :]):
                wrong.append(f"{path.relative_to(ROOT)}: {text[found.start() :][:60]!r}")
    assert not wrong
    assert named <= extras
    assert len(named) > 10


def test_names_that_tests_patch_exist() -> None:
    """Tests name classes and constants in texts, for servers that they start with changes."""
    missing = []
    for file in TESTS.rglob("*.py"):
        for name in re.findall(r'"((?:[a-z_]+\.)+[A-Z]\w+)"', file.read_text()):
            module, _, member = name.removeprefix("exec_server.").rpartition(".")
            path = PACKAGE / module.replace(".", "/")
            if not (PACKAGE / module.partition(".")[0]).exists():
                continue  # not a name of this package
            source = path.with_suffix(".py") if path.with_suffix(".py").exists() else None
            if source is None or not re.search(rf"\b{member}\b", source.read_text()):
                missing.append(f"{file.relative_to(ROOT)}: {name}")
    assert not missing
