"""The directories from which a server and its helper processes import."""

from __future__ import annotations

import ast
import os
import re
import site
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.support.client import SOURCE

import exec_server
from exec_server.host import interpreter

_LIBRARY = str(Path(os.__file__).parent)
_SITE = site.getsitepackages()[0]
_INSTALLED = [_LIBRARY, f"{_LIBRARY}/lib-dynload", _SITE]
# The modules of dependencies whose names differ.
_MODULES = {"ada-url": "ada_url", "PyJWT": "jwt", "PyYAML": "yaml", "tomli-w": "tomli_w"}


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A `sys.path` with the directories of the interpreter."""
    changed = list(_INSTALLED)
    monkeypatch.setattr(sys, "path", changed)
    return changed


def _make(folder: Path, *names: str) -> str:
    folder.mkdir(parents=True)
    for name in names:
        (folder / f"{name}.py").touch()
    return str(folder)


def test_the_interpreters_own_directories_count(path: list[str]) -> None:
    assert interpreter.trusted() == _INSTALLED


def test_the_directory_of_this_package_counts(path: list[str]) -> None:
    path.insert(1, interpreter.package_home())
    assert interpreter.package_home() == str(Path(exec_server.__file__).parent.parent)
    assert interpreter.trusted() == list(dict.fromkeys(path))


@pytest.mark.usefixtures("path")
def test_what_is_relative_missing_or_twice_there_does_not_count(
    path: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _make(tmp_path / "src", "regex")
    path[:0] = ["", ".", "src", str(tmp_path / "missing")]
    path.append(_SITE)
    assert interpreter.trusted() == _INSTALLED


def test_others_do_not_count_whatever_they_hold(path: list[str], tmp_path: Path) -> None:
    path.insert(0, _make(tmp_path / "workspace", *interpreter.NEEDED))
    assert interpreter.trusted() == _INSTALLED


def test_others_count_if_something_needed_is_nowhere_else(path: list[str], tmp_path: Path) -> None:
    path.remove(_SITE)
    first = _make(tmp_path / "first", "regex", "yaml")
    second = _make(tmp_path / "second", "other")
    third = _make(tmp_path / "third", "jwt")
    (tmp_path / "fourth" / "h11").mkdir(parents=True)  # a directory is no module yet
    path[:0] = [first, second]
    path += [third, str(tmp_path / "fourth")]
    assert interpreter.trusted() == [first, *_INSTALLED[:2], third]


def test_a_directory_that_others_can_write_never_counts(
    path: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.remove(_SITE)
    path.append(_make(tmp_path / "open", "regex"))
    assert interpreter.trusted() == path
    (tmp_path / "open").chmod(0o1777)
    assert interpreter.trusted() == _INSTALLED[:2]
    (tmp_path / "open").chmod(0o755)
    owner = (tmp_path / "open").stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert interpreter.trusted() == (path if owner == 0 else _INSTALLED[:2])


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_never_counts(path: list[str], tmp_path: Path) -> None:
    path.remove(_SITE)
    path.append(_make(tmp_path / "theirs", "regex"))
    os.chown(tmp_path / "theirs", 12_345, 12_345)
    assert interpreter.trusted() == _INSTALLED[:2]


def test_without_site_and_with_packages_of_the_user(
    path: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = _make(tmp_path / "mine")
    path.append(mine)
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    monkeypatch.setattr(site, "USER_SITE", mine)
    assert interpreter.trusted() == [*_INSTALLED, mine]
    monkeypatch.delitem(sys.modules, "site")
    assert interpreter.trusted() == _INSTALLED  # the packages are nowhere else


def test_freezing(path: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", "/tmp/cache")
    path[:0] = ["", "/missing"]
    interpreter.freeze()
    assert sys.path is path
    assert path == _INSTALLED
    assert sys.pycache_prefix is None


def test_the_directory_of_a_script_is_dropped(
    path: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "exec-server")])
    for first, is_dropped in ((str(tmp_path), True), ("/elsewhere", False)):
        path[:] = [first, *_INSTALLED]
        interpreter.drop_script_directory()
        assert (first not in path) == is_dropped
    monkeypatch.setattr(sys, "argv", [f"{_SITE}/program"])
    path[:] = [_SITE]
    interpreter.drop_script_directory()
    assert path == [_SITE]
    path.clear()
    interpreter.drop_script_directory()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, ["-P"]),
        ("", ["-P"]),
        (":", ["-P", "-E"]),
        ("/x:.", ["-P", "-E"]),
        (f"/x:{SOURCE}", ["-P"]),
        (f"{SOURCE}/./:/x", ["-P"]),
    ],
)
def test_the_words_of_a_server(
    monkeypatch: pytest.MonkeyPatch, value: str | None, words: list[str]
) -> None:
    monkeypatch.setattr(interpreter, "package_home", lambda: str(SOURCE))
    variables = {} if value is None else {"PYTHONPATH": value}
    expected = [sys.executable, *words, "-m", "exec_server"]
    assert interpreter.server_words(variables) == expected


def test_helper_processes_find_this_package_and_nothing_beside_it(
    path: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `cd src; python -m exec_server`, whose directory is dropped."""
    home = tmp_path / "home"
    (home / "exec_server").mkdir(parents=True)
    (home / "exec_server" / "__init__.py").write_text("where = 'here'\n")
    (home / "importlib.py").write_text("raise ImportError\n")
    monkeypatch.setattr(interpreter, "package_home", lambda: str(home))
    words = interpreter.helper_words("print(exec_server.where, *sys.path, sep=chr(10))")
    done = subprocess.run(words, capture_output=True, check=True, cwd=home, text=True)
    assert done.stdout.splitlines() == ["here", *_INSTALLED]


def test_the_needed_modules_are_the_dependencies() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[>=; ]", text)[0] for text in project["dependencies"]]
    modules = {_MODULES.get(name, name) for name in names}
    assert modules == set(interpreter.NEEDED) - {"_cffi_backend"}  # that of cryptography


def test_the_package_imports_nothing_that_a_directory_could_replace() -> None:
    """The modules that run while the directory of `python -m` is still the first on the path."""
    imported = set()
    for name in ("__init__.py", "__main__.py"):
        for node in ast.parse((SOURCE / "exec_server" / name).read_text()).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
    assert imported == {"importlib", "sys", "os", "exec_server.cli.main"}


def test_no_other_module_starts_an_interpreter() -> None:
    """`module_path` is the only place with the words of one, so that none forgets a flag."""
    start = re.compile(r"sys\.executable|[\"']-m[\"'], *[\"']?\w*exec_server|-m exec_server")
    found = {
        str(path.relative_to(SOURCE / "exec_server"))
        for path in (SOURCE / "exec_server").rglob("*.py")
        if start.search(path.read_text())
    }
    # The others are a title and an error text.
    assert found == {"host/interpreter.py", "__main__.py", "sandbox/runtime/launcher.py"}


def test_another_encoding_is_left_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    interpreter.start_again_in_utf8()
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-P", "-m", "exec_server", "ls"])
    interpreter.start_again_in_utf8()
    assert started == [[sys.executable, "-X", "utf8", "-P", "-m", "exec_server", "ls"]]
    monkeypatch.setattr(sys, "_xoptions", {"utf8": True})
    interpreter.start_again_in_utf8()
    assert len(started) == 1
    assert interpreter.server_words({})[1:3] == ["-X", "utf8"]
    assert interpreter.helper_words("pass")[1:3] == ["-X", "utf8"]
