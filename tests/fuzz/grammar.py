"""Requests for every method of the server: valid, nearly valid and interdependent. Pure.

Params are built from the structs of the method table, so a new method is covered at once. Ids,
paths and programs are drawn from small pools, so that requests refer to each other.

A server that is fuzzed runs with the rights of the tester. Therefore every program is harmless, and
a request is sent only if no text in it, read as a path, leads out of the scratch folder to a path
that may exist.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import pkgutil
import types
import typing
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin

import msgspec
from tests.fuzz.mutation import mutate_value

from exec_server import protocol
from exec_server.errors import RpcError
from exec_server.protocol import network, process, session
from exec_server.protocol.decoding import Base64, Call, Params, Uuid
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Sandbox

Json = Any

_PROGRAMS: tuple[list[str], ...] = (
    ["true"],
    ["false"],
    ["cat"],
    ["echo", "hello"],
    ["sleep", "0.05"],
    ["sleep", "100"],
    ["sh", "-c", "echo out; echo err >&2; exit 3"],
    ["sh", "-c", "head -c 300000 /dev/zero"],
    ["sh", "-c", "(setsid sleep 100 &) ; echo left"],
    ["sh", "-c", "read line; echo $line"],
    ["no-such-program"],
    [],
)
_PROCESSES = ("p0", "", "\u00e9", "x" * 4096)
_HANDLES = ("h1", "h2", "h3", "")
_TEXTS = ("", "a", "name", "\u00e9\U0001f600", "A=B", "\0", "*", "x" * 300)
_PATHS = (
    "/a",
    "/b",
    "/dir",
    "/dir/inner",
    "/dir/inner/file",
    "/link",
    "/missing",
    "/missing/x",
    "/.git",
)
_SIGNALS = ("interrupt", "SIGTERM", "SIGKILL", "SIGSTOP", "SIGCONT", "SIGUSR1", "SIGWINCH", "INT")

_SEARCHED = "/usr/bin:/bin"
_INHERIT_ALL = {
    "inherit": "all",
    "ignoreDefaultExcludes": True,
    "exclude": [],
    "set": {},
    "includeOnly": [],
}
_PATCHES = (
    "*** Begin Patch\n*** Add File: new\n+line\n*** End Patch\n",
    "*** Begin Patch\n*** Update File: a\n@@\n-hello\n+bye\n*** End Patch\n",
    "*** Begin Patch\n*** Delete File: b\n*** End Patch\n",
    "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-hello\n+bye\n",
    "",
)
# Members of params whose values at random would hardly ever be valid.
_MEMBERS: dict[str, tuple[Json, ...]] = {
    "handleId": _HANDLES,
    "watchId": (0, 1, 2, 3),
    "waitMs": (0, 1, 20, None),
    "timeoutMs": (1, 100, 1000, None),
    "method": ("GET", "GET", "GET", "POST", "A B"),
    "signal": _SIGNALS,
    "offset": (0, 0, 1, 5_000, 2**40, 2**63),
    "len": (1, 100, 70_000, 2**20, 2**63),
    "maxBytes": (None, 0, 1, 10_000),
    "mode": (0o644, 0o755, 0o755, 0o700, 0o4755, 0, 2**31),
    "maxDepth": (1, 5, 64, 0),
    "maxDirectories": (1, 100, 10_000, 0),
    "maxEntries": (1, 100, 10_000),
    "dataBase64": ("", "YWJj", "aGVsbG8K", "YQ", "=" * 4),
    "env": (*[{"PATH": _SEARCHED}] * 4, {}, {"A": "b"}),
    "envPolicy": (None, _INHERIT_ALL, _INHERIT_ALL),
    "arg0": (None, None, "name"),
    "ttySize": (None, None, None, {"rows": 24, "columns": 80}),
    "networkProxy": (None,),
    "shellSnapshot": (None,),
    "managedNetwork": (None, None, None, {"loopbackPorts": [80]}),
    "enforceManagedNetwork": (False, False, False, True),
    "patch": _PATCHES,
    "pattern": ("*", "**/*", "dir/*", "[", ""),
    "target": ("a", "dir", "missing", "\0"),
    "oldText": ("hello", "hello", "a", "", "missing"),
}
# Names with every kind of bytes that a file may have, which `live` plants.
NAMES = (b"\xff", b"caf\xe9", b"new\nline", b"\xed\xa0\x80", b"\x1b[31m", b"%41", b"*[", b"\\")
# Words that mutations insert.
_WORDS = ("type", "kind", "root", "access", "\u00e9", "%", "x")
_NOWHERE = "/nonexistent"


class Grammar:
    """Draws requests; `folder` is the scratch folder as a URI, `origin` an HTTP server."""

    def __init__(
        self, calls: dict[str, Call[Any, Any]], folder: str, origin: str, *, is_confined: bool
    ) -> None:
        self._calls = calls
        # Others need running processes and open files.
        self._names = [*calls, *["process/start", "fs/open"] * (len(calls) // 6)]
        self._folder = folder
        self._origin = origin
        self._is_confined = is_confined
        self._numbers = itertools.count(1)
        # Processes that other requests refer to.
        self.recent: deque[str] = deque(["p0"], maxlen=8)
        self._members: dict[str, Callable[[Random], Json]] = {
            name: partial(_pick, values) for name, values in _MEMBERS.items()
        }
        self._members |= {
            "processId": self._process_id,
            "argv": lambda random: list(random.choice(_PROGRAMS)),
            "cwd": lambda random: self._within(random, ("", "", "", "/dir", "/missing")),
            "url": self._url,
            "sandbox": self._sandbox,
        }

    def request(self, random: Random) -> tuple[str, Json]:
        """A method and its params; one in three is changed so that it may be invalid."""
        name = random.choice(self._names)
        kind = self._calls[name].params
        is_start = name == process.START.name
        while True:
            params: Json = None if kind is None else self._value(kind, random)
            if is_start and random.random() < 0.8:
                self.recent.append(f"p{next(self._numbers)}")
                params["processId"] = self.recent[-1]
            if random.random() < 0.33:
                for _ in range(random.choice((1, 1, 2))):
                    params = mutate_value(params, random, _WORDS)
            if self.is_harmless(params):
                return name, params

    def is_harmless(self, value: Json) -> bool:
        """Whether no text in a value is a path outside of the scratch folder that may exist."""
        if isinstance(value, dict):
            return all(self.is_harmless(each) for pair in value.items() for each in pair)
        if isinstance(value, list):
            return all(map(self.is_harmless, value))
        if not isinstance(value, str):
            return True
        if ".." in value or "%2e" in value.lower():
            return False
        try:
            native = PathUri.from_wire(value).native()
        except RpcError:
            return True
        inside = self._folder.removeprefix("file://")
        return value == _SEARCHED or f"{native}/".startswith((f"{inside}/", _NOWHERE))

    # ---- values from annotations ------------------------------------------------------

    def _value(self, kind: Any, random: Random) -> Json:
        origin, arguments = get_origin(kind), get_args(kind)
        if isinstance(kind, NewType):
            return self._value(kind.__supertype__, random)
        if origin is Annotated:
            return self._number(arguments, random)
        if origin is Literal:
            return random.choice(arguments)
        if origin in (Union, types.UnionType):
            return self._value(random.choice(arguments), random)
        if origin is list:
            return [self._value(arguments[0], random) for _ in range(random.choice((0, 1, 1, 3)))]
        if origin is dict:
            return {
                random.choice(_TEXTS): self._value(arguments[1], random)
                for _ in range(random.choice((0, 0, 1)))
            }
        if isinstance(kind, type) and issubclass(kind, PathUri):
            return self.path(random)
        if isinstance(kind, type) and issubclass(kind, Params):
            return self._struct(kind, random)
        return self._plain(kind, random)

    def _plain(self, kind: Any, random: Random) -> Json:
        if kind is None or kind is type(None):
            return None
        if kind is bool:
            return random.random() < 0.5
        if kind is Base64:
            return base64.b64encode(random.randbytes(random.choice((0, 1, 3, 5000)))).decode()
        if kind is Uuid:
            return f"00000000-0000-4000-8000-{random.getrandbits(48):012x}"
        if kind in (int, float):
            return random.choice((0, 1, -1, 1.5))
        if kind in (object, Any):
            return random.choice((None, 1, "x", {}, []))
        return random.choice(_TEXTS)

    def _number(self, arguments: tuple[Any, ...], random: Random) -> Json:
        for extra in (meta.extra for meta in arguments[1:] if isinstance(meta, msgspec.Meta)):
            if extra is not None:
                low, high = extra["low"], extra["high"]
                return random.choice((low, low + 1, min(high, 80), high))
        return self._value(arguments[0], random)

    def _struct(self, kind: type[Params], random: Random) -> Json:
        members: dict[str, Json] = {}
        config = kind.__struct_config__
        if config.tag is not None:
            members[str(config.tag_field)] = config.tag
        hints = typing.get_type_hints(kind, include_extras=True)
        for field in msgspec.structs.fields(kind):
            is_optional = not field.required
            if is_optional and random.random() < 0.5:
                continue
            name, hint = field.encode_name, hints[field.name]
            draw = None if get_origin(hint) is Literal else self._members.get(name)
            members[name] = draw(random) if draw else self._value(hint, random)
        return members

    # ---- values that need care --------------------------------------------------------

    def path(self, random: Random) -> str:
        """A path inside of the scratch folder, or one that does not exist."""
        if random.random() < 0.05:
            return random.choice(
                ("file:///nonexistent/x", "relative", "", "file:///nonexistent%00")
            )
        if random.random() < 0.3:
            return self._any_name(random)
        return self._within(random, _PATHS)

    def _any_name(self, random: Random) -> str:
        """A URI whose last name has any bytes; mostly one of those that exist."""
        name = random.choice(NAMES) if random.random() < 0.6 else random.randbytes(3)
        parent = random.choice(("", "", "/dir", "/link", "/missing"))
        return f"{self._folder}{parent}/" + "".join(f"%{byte:02X}" for byte in name)

    def _within(self, random: Random, names: Sequence[str]) -> str:
        path = self._folder + random.choice(names)
        return path.removeprefix("file://") if random.random() < 0.1 else path

    def _process_id(self, random: Random) -> str:
        """Mostly a recent one; a start makes it a new one."""
        return random.choice(self.recent if random.random() < 0.9 else _PROCESSES)

    def _url(self, random: Random) -> str:
        path = random.choice(("/length/1/1000", "/chunked/2/100000", "/cut/3/5000", "/length/1/0"))
        return random.choice((self._origin + path, self._origin + path, "ftp://x/", "http://", ""))

    def _sandbox(self, random: Random) -> Json:
        """A sandbox of any form, always one in a confined run."""
        if not self._is_confined and random.random() < 0.9:
            return None
        if random.random() < 0.3:
            return self._struct(Sandbox, random)
        entries = [{"path": _special("root"), "access": "read"}]
        if random.random() < 0.7:
            entries.append({"path": _special("project_roots"), "access": "write"})
        if random.random() < 0.4:
            path = {"type": "path", "path": self.path(random)}
            entries.append({"path": path, "access": random.choice(("read", "write", "deny"))})
        if random.random() < 0.3:
            pattern = random.choice(("**/*.secret", "dir/*", "[", "/nonexistent/*", "*" * 50))
            entries.append({"path": {"type": "glob_pattern", "pattern": pattern}, "access": "deny"})
        if random.random() < 0.2:
            # Every request is denied, and each answer names the path.
            whole = {"type": "path", "path": self._folder.removeprefix("file://")}
            entries.append({"path": whole, "access": "deny"})
        return {
            "permissions": {
                "type": "managed",
                "file_system": {"type": "restricted", "entries": entries},
                "network": random.choice(("restricted", "enabled")),
            },
            "cwd": self._folder,
            "workspaceRoots": [self._folder],
            "windowsSandboxLevel": "disabled",
        }


def _pick(values: Sequence[Json], random: Random) -> Json:
    return random.choice(values)


def _special(kind: str) -> Json:
    return {"type": "special", "value": {"kind": kind}}


def all_calls() -> dict[str, Call[Any, Any]]:
    """Every call of a client but `initialize`, which belongs to the connection."""
    others = (session.INITIALIZE.name, network.POLICY_REQUEST.name)  # the server sends the latter
    found = {}
    for module in pkgutil.iter_modules(protocol.__path__, f"{protocol.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Call) and value.name not in others:
                found[value.name] = value
    return found
