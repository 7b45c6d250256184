"""Every type that a public signature names can be imported from `exec_server`, or from `sync`."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import FunctionType, ModuleType

import pytest

import exec_server
from exec_server import sync

pytestmark = pytest.mark.quick

PACKAGE = "exec_server"
# Methods whose arguments or results a user sees without calling them by name.
SEEN = {"__aenter__", "__aiter__", "__anext__", "__enter__", "__iter__", "__call__"}
# A method of the protocol, whose structs are imported from `exec_server.protocol`.
OPAQUE = {"Call"}
Origin = tuple[str, str]


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


@cache
def _origins(module: str) -> dict[str, Origin]:
    """Where the names of a module are defined, also of imports for type checkers alone."""
    found: dict[str, Origin] = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            for alias in node.names:
                found[alias.asname or alias.name] = (str(node.module), alias.name)
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = (module, node.name)
        elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
            name = ast.unparse(node.targets[0])  # of an alias; a TypeVar is called
            found[name] = (module, name)
    return found


def _named(node: ast.AST | None, module: str) -> Iterator[Origin]:
    """The names of this package in an annotation."""
    for each in ast.walk(node) if node is not None else ():
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            continue  # of a Literal
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            parent, name = _origins(module).get(each.value.id, ("", ""))
            if parent and isinstance(getattr(sys.modules[parent], name, None), ModuleType):
                yield f"{parent}.{name}", each.attr
        elif isinstance(each, ast.Name) and each.id in _origins(module):
            origin = _origins(module)[each.id]
            if not isinstance(getattr(sys.modules.get(origin[0]), origin[1], None), ModuleType):
                yield origin


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, module: str) -> Iterator[Origin]:
    arguments = node.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    for argument in (*every, arguments.vararg, arguments.kwarg):
        yield from _named(argument and argument.annotation, module)
    yield from _named(node.returns, module)


def _of_class(kind: type) -> Iterator[tuple[str, Origin]]:
    """The names in the public methods and attributes of a class, and of its bases here."""
    for base in kind.__mro__:
        module = base.__module__
        if not module.startswith(PACKAGE):
            continue
        node = next(
            each
            for each in _tree(module).body
            if isinstance(each, ast.ClassDef) and each.name == base.__name__
        )
        for member in node.body:
            names: Iterator[Origin] = iter(())
            label = ""
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                label = member.name
                names = _of_function(member, module)
            elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                label = member.target.id
                names = _named(member.annotation, module)
            elif isinstance(member, ast.Assign) and isinstance(member.value, ast.Call):
                function = member.value.func
                if isinstance(function, ast.Subscript):  # Attribute[T]()
                    label = ast.unparse(member.targets[0])
                    names = _named(function.slice, module)
            # Subscribers get notifications of the session by methods that begin with `on_`.
            if label in SEEN or not label.startswith(("_", "on_")):
                yield from ((f"{base.__name__}.{label}", name) for name in names)


def missing(package: ModuleType) -> dict[str, set[str]]:
    """The names that are not exported, each with the signatures that have it."""
    exported = {name: getattr(package, name) for name in package.__all__}
    known = {id(getattr(exec_server, name)) for name in exec_server.__all__}
    known |= {id(value) for value in exported.values()}
    lacking: dict[str, set[str]] = {}
    for name, value in exported.items():
        if name in OPAQUE:
            continue
        if isinstance(value, type):
            named = _of_class(value)
        elif isinstance(value, FunctionType):
            module = value.__module__
            node = next(
                each
                for each in _tree(module).body
                if isinstance(each, ast.FunctionDef) and each.name == name
            )
            named = ((name, origin) for origin in _of_function(node, module))
        else:  # an alias of types
            continue
        for label, (module, type_name) in named:
            __import__(module)
            found = getattr(sys.modules[module], type_name)
            if id(found) not in known:
                lacking.setdefault(f"{module}.{type_name}", set()).add(label)
    return lacking


@pytest.mark.parametrize("package", [exec_server, sync], ids=["async", "sync"])
def test_all_types_of_signatures_are_exported(package: ModuleType) -> None:
    assert missing(package) == {}
