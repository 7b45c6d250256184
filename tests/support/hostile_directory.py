"""A directory with a module for every name that a server could import, each of which leaves a mark.

It stands for a workspace into which a confined command, or a cloned repository, has put them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import marshal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

from exec_server.host.interpreter import NEEDED
from tests.support.client import RpcFailure, uri
from tests.support.protections import Scene

# What the interpreter itself imports at its start if it finds them.
CUSTOM = ("sitecustomize", "usercustomize")
OPTIONAL = ("asyncpg", "botocore", "keyring", "nacl")
ALL = (*sorted(sys.stdlib_module_names), *NEEDED, *OPTIONAL, *CUSTOM, "exec_server")


@functools.cache
def names_after_start() -> tuple[str, ...]:
    """Without the package, and what the interpreter loads for `-m` before it loads the package."""
    code = "import runpy, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True)
    loaded = {"exec_server", *done.stdout.decode().split()}
    return tuple(name for name in ALL if name not in loaded)


class Trap:
    """The directory; `names` are the modules whose code has run."""

    def __init__(self, folder: Path, mark: Path) -> None:
        self.folder = folder
        self._mark = mark

    @property
    def names(self) -> list[str]:
        return self._mark.read_text().split() if self._mark.exists() else []

    def set(self, names: Iterable[str] = ALL) -> None:
        """Write a module of each name."""
        for name in names:
            if name == "exec_server":
                (self.folder / name).mkdir()
                for file in ("__init__.py", "__main__.py"):
                    (self.folder / name / file).write_text(self.text(name))
            else:
                (self.folder / f"{name}.py").write_text(self.text(name))

    def text(self, name: str) -> str:
        """A module that leaves its mark and cannot be imported."""
        return (
            f"print({name!r}, file=open({str(self._mark)!r}, 'a'))\nraise ImportError('hostile')\n"
        )

    def forge_bytecode(self, name: str, cache: Path) -> None:
        """Write hostile bytecode for an installed package where PYTHONPYCACHEPREFIX names it."""
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        with mock.patch.object(sys, "pycache_prefix", str(cache)):
            path = Path(importlib.util.cache_from_source(spec.origin))
        found = Path(spec.origin).stat()
        path.parent.mkdir(parents=True, exist_ok=True)
        numbers = struct.pack("<LLL", 0, int(found.st_mtime), found.st_size)
        code = marshal.dumps(compile(self.text(name), spec.origin, "exec"))
        path.write_bytes(importlib.util.MAGIC_NUMBER + numbers + code)


def run_outside(name: str, text: str, pattern: str) -> Callable[[Scene], bool]:
    """A command leaves a file in the workspace, which a search for `pattern` runs outside."""

    def attack(scene: Scene) -> bool:
        mark = scene.base / "outside" / "mark"
        code = "os.makedirs(os.path.dirname(extra[0]), exist_ok=True)\n"
        code += "open(extra[0], 'w').write(extra[1]); os.chmod(extra[0], 0o755)"
        assert scene.command("WW", code, str(scene.ws / name), text.replace("MARK", str(mark)))
        with contextlib.suppress(RpcFailure):  # of a search that failed because of the file
            scene.client.call("fs/grep", {"path": uri(scene.ws), "pattern": pattern})
        return mark.exists()

    return attack


# The first search imports this module.
IMPORT = run_outside("regex.py", "open('MARK', 'w').close()", "one")
RUN_PROGRAM = run_outside("bin/rg", "#!/bin/sh\ntouch MARK\n", "one")
