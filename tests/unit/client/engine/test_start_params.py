"""The params of a start: defaults, shells in place of capabilities, refused arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from exec_server.client.engine.start_params import (
    INHERIT_ALL,
    StartParamsBuilder,
    argv_list,
    sandbox_object,
)
from exec_server.client.paths import PathResolver
from exec_server.errors import InvalidParams
from exec_server.protocol.paths import PathUri
from exec_server.protocol.presets import preset
from exec_server.protocol.process import ProcessId, StartParams, TtySize
from exec_server.protocol.session import Capabilities, EnvironmentInfo

INFO = msgspec.convert(
    {
        "shell": {"name": "sh", "path": "/bin/sh"},
        "cwd": "file:///home",
        "executorVersion": "",
        "providerId": "",
        "userHomeDir": None,
        "platformOs": "",
        "prependPathDirs": [],
        "temporaryDirectories": [],
        "tempDir": "/tmp",
        "capabilities": {},
    },
    EnvironmentInfo,
)
PATHS = PathResolver(INFO)
ALL = Capabilities(process_close_stdin=True, process_resize=True)


def build(capabilities: Capabilities = ALL, **options: Any) -> StartParams:
    defaults: dict[str, Any] = {
        "cwd": None,
        "env": None,
        "clean_env": False,
        "tty": False,
        "sandbox": None,
    }
    return StartParamsBuilder(PATHS, capabilities).build(["a", "b"], **(defaults | options))


PLAIN = StartParams(
    process_id=ProcessId(""),
    argv=["a", "b"],
    cwd=PathUri.from_wire("/home"),
    env_policy=INHERIT_ALL,
    env={},
    tty=False,
    pipe_stdin=False,
)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"cwd": "sub"}, {"cwd": PathUri.from_wire("/home/sub")}),
        ({"env": {"A": Path("/b")}, "clean_env": True}, {"env": {"A": "/b"}, "env_policy": None}),
        ({"stdin": True}, {"pipe_stdin": True}),
        ({"input_size": 0}, {"pipe_stdin": True}),
        ({"tty": True, "stdin": True}, {"tty": True, "env": {"TERM": "xterm-256color"}}),
        ({"tty": True, "env": {"TERM": "dumb"}}, {"tty": True, "env": {"TERM": "dumb"}}),
        (
            {"tty": True, "size": (3, 4), "env": {"TERM": "x"}},
            {"tty": True, "tty_size": TtySize(3, 4), "env": {"TERM": "x"}},
        ),
    ],
)
def test_options_become_members(options: dict[str, Any], changes: dict[str, Any]) -> None:
    assert build(**options) == msgspec.structs.replace(PLAIN, **changes)


def test_a_shell_replaces_a_missing_capability() -> None:
    piped = build(Capabilities(), input_size=7)
    assert piped.argv[:2] == ["/bin/sh", "-c"]
    assert piped.argv[3:] == ["sh", "7", "a", "b"]
    assert piped.pipe_stdin
    sized = build(Capabilities(), tty=True, size=(3, 4))
    assert sized.argv[3:] == ["sh", "3", "4", "a", "b"]
    assert sized.tty_size is None


@pytest.mark.parametrize("size", [(0, 1), (1, 65_536), (1,), "80x24", (1.0, 2)])
def test_a_wrong_size_is_refused(size: Any) -> None:
    with pytest.raises(InvalidParams, match="rows and columns, each from 1 to 65535, not"):
        build(tty=True, size=size)


def test_a_sandbox_is_a_name_or_an_object() -> None:
    workspace = str(PathUri.from_wire("/home/sub"))
    named: Any = preset("workspace-write", cwd=workspace, roots=[workspace])
    assert sandbox_object("workspace-write", PATHS, "sub") == named
    assert build(sandbox="workspace-write", cwd="sub").sandbox == named
    anything: Any = {"any": 1}
    assert sandbox_object(anything, PATHS) is anything
    assert sandbox_object(None, PATHS) is None
    with pytest.raises(InvalidParams, match="unknown sandbox 'open': use one of read-only, "):
        sandbox_object("open", PATHS)  # type: ignore[arg-type]


def test_words_are_texts_or_paths() -> None:
    assert argv_list(word for word in ("a", Path("/b"))) == ["a", "/b"]
    with pytest.raises(InvalidParams, match="argv must not be empty"):
        argv_list([])
    for text in ("ls -l", b"ls", Path("ls")):
        with pytest.raises(TypeError, match="argv is a list of words"):
            argv_list(text)  # type: ignore[arg-type]
    assert argv_list(["a", b"b"]) == ["a", "b"]
    with pytest.raises(TypeError, match=r"argv\[1\] must be str, bytes or a path, not int"):
        argv_list(["a", 1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"env\['A'\] must be str, bytes or a path, not int"):
        build(env={"A": 1})
