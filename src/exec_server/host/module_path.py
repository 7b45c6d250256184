"""Where modules are imported from: never from a directory because the server was started in it.

An agent's directory is its workspace, and a confined command may write there. Whatever the server
imports runs without confinement, so a module of the workspace would be a way out of the sandbox.

A server imports from three kinds of directories: those of the interpreter (the standard library and
site-packages), the one that holds this package, and others, which PYTHONPATH or a .pth file names,
only as far as a package that the server needs is nowhere else. All of them are there at its start.
"""

from __future__ import annotations

import os
import sys
from stat import S_IWOTH

TYPE_CHECKING = False  # not that of typing, whose import takes long
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Final

# The modules of our dependencies, and those that they import themselves. A directory that holds one
# of them counts if the others do not hold it.
NEEDED: Final = (
    *("_cffi_backend", "ada_url", "aiohappyeyeballs", "cryptography", "h11", "jwt", "msgspec"),
    *("pybase64", "regex", "tomli", "tomli_w", "uvloop", "websockets", "yaml"),
)

# The owner of files whose user the namespace of the server does not know, such as root.
_UNMAPPED_USER: Final = 65_534
_PACKAGE: Final = __name__.partition(".")[0]
# The package is found where this process has found it, whatever else has its name. `importlib`, the
# only module that its __init__ imports, is loaded before.
_HELPER: Final = (
    "import sys, importlib; sys.path[:] = sys.argv[1:]; import exec_server; del sys.path[0]; "
)


def drop_script_directory() -> None:
    """Remove the entry that the interpreter has put first for a script: the directory of programs.

    `__main__` removes that of `python -m`. With `-P` and `-I` there is none.
    """
    if not sys.flags.safe_path and sys.path:
        script = os.path.dirname(os.path.realpath(sys.argv[0]))
        if sys.path[0] == script and script not in _interpreter_directories():
            del sys.path[0]


def freeze() -> None:
    """Import only from trusted directories from now on, and no bytecode from elsewhere."""
    sys.path[:] = trusted()
    sys.pycache_prefix = None  # PYTHONPYCACHEPREFIX may be below /tmp


def trusted() -> list[str]:
    """The entries of `sys.path` that a server and its helper processes import from."""
    own = {*_interpreter_directories(), package_home()}
    present = [entry for entry in dict.fromkeys(sys.path) if _is_present(entry)]
    others = [entry for entry in present if entry not in own and not _is_open_to_others(entry)]
    needed = _with_needed_modules(others, [entry for entry in present if entry in own])
    return [entry for entry in present if entry in own or entry in needed]


def package_home() -> str:
    """The directory that holds this package."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def helper_words(code: str) -> list[str]:
    """The words of another interpreter that runs this code, which may import this package.

    It is isolated and without `site`: it imports from where this process does, and from no
    directory that is not trusted.
    """
    words = [sys.executable, "-I", "-S", "-c", _HELPER + code, package_home()]
    return [*words, *trusted()]


def server_words(variables: Mapping[str, str]) -> list[str]:
    """The words that start this program again, in any directory, with these variables.

    A PYTHONPATH is for the programs of the user, unless this package was found through it: it may
    name the workspace, whose `sitecustomize` would run at once. Commands inherit it all the same.
    """
    value = variables.get("PYTHONPATH", "")
    is_ours = package_home() in map(os.path.abspath, value.split(os.pathsep))
    ignored = ["-E"] if value and not is_ours else []
    return [sys.executable, "-P", *ignored, "-m", _PACKAGE]


# ---- kinds of directories -------------------------------------------------------------


def _is_present(entry: str) -> bool:
    """Whether an entry names a directory or an archive, from any working directory."""
    return os.path.isabs(entry) and os.path.exists(entry)


def _interpreter_directories() -> set[str]:
    """The standard library, and where installers put packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    libraries = (
        os.path.dirname(os.path.abspath(os.__file__)),
        os.path.join(sys.base_exec_prefix, sys.platlibdir, version),
    )
    found = {*libraries, *(os.path.join(library, "lib-dynload") for library in libraries)}
    site = sys.modules.get("site")  # None with -S
    if site is not None:
        found.update(site.getsitepackages())
        if site.ENABLE_USER_SITE:
            found.add(site.USER_SITE)
    return found


def _is_open_to_others(entry: str) -> bool:
    """Whether other users can write there."""
    found = os.stat(entry)
    return bool(found.st_mode & S_IWOTH) or found.st_uid not in (0, os.geteuid(), _UNMAPPED_USER)


def _with_needed_modules(others: Sequence[str], own: Sequence[str]) -> set[str]:
    """Those of the other directories with a module that we need and that no own one has."""
    if not others:
        return set()
    missing = [name for name in NEEDED if not _holds(own, name)]
    return {entry for entry in others if any(_holds([entry], name) for name in missing)}


def _holds(entries: Sequence[str], name: str) -> bool:
    from importlib.machinery import PathFinder

    found = PathFinder.find_spec(name, entries)
    return found is not None and found.origin is not None  # a mere directory has no origin
