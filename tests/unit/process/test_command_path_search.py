"""Which files a program name stands for, on pipes and on a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from exec_server.errors import InternalError
from exec_server.process.command import Command, candidates


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """bin/tool can be run, bin/plain cannot, bin/dir is a folder."""
    (tmp_path / "bin" / "dir").mkdir(parents=True)
    (tmp_path / "bin" / "tool").touch(0o755)
    (tmp_path / "bin" / "plain").touch(0o644)
    return tmp_path


def _candidates(program: str, cwd: Path, env: dict[str, str], *, tty: bool = False) -> list[str]:
    return candidates(Command([program], str(cwd), env, tty=tty))


def _failure(program: str, cwd: Path, env: dict[str, str], *, tty: bool = True) -> str:
    with pytest.raises(InternalError) as caught:
        _candidates(program, cwd, env, tty=tty)
    return caught.value.message


# ---- pipes ----------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["/bin/x", "./x", "a/b", "../x", "x/"])
def test_name_with_a_slash_is_a_path(folder: Path, program: str) -> None:
    assert _candidates(program, folder, {"PATH": "/p"}) == [program]


def test_other_names_are_searched_in_the_childs_path(folder: Path) -> None:
    assert _candidates("x", folder, {"PATH": "/a:rel::/b"}) == ["/a/x", "rel/x", "x", "/b/x"]
    assert _candidates("x", folder, {"PATH": ""}) == ["x"]
    default = ["/usr/local/bin/x", "/bin/x", "/usr/bin/x"]
    assert _candidates("x", folder, {}) == default


def test_empty_program(folder: Path) -> None:
    assert _failure("", folder, {}, tty=False) == "missing program for pipe spawn"
    assert _failure("", folder, {}) == "missing program for PTY spawn"


# ---- terminals ------------------------------------------------------------------------


def test_absolute_path_on_a_terminal_is_left_to_the_kernel(folder: Path) -> None:
    assert _candidates("/no/such", folder, {}, tty=True) == ["/no/such"]


@pytest.mark.parametrize("program", ["./bin/tool", "../{name}/bin/tool"])
def test_dotted_path_on_a_terminal_is_below_the_directory(folder: Path, program: str) -> None:
    program = program.format(name=folder.name)
    assert _candidates(program, folder, {}, tty=True) == [f"{folder}/{program}"]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("./none", "it does not exist"),
        ("./bin/dir", "it is a directory"),
        ("./bin/plain", "it is not executable"),
    ],
)
def test_dotted_path_on_a_terminal_explains_itself(folder: Path, program: str, reason: str) -> None:
    text = f"Unable to spawn {folder}/{program} because {reason}"
    assert _failure(program, folder, {}) == text


def test_search_on_a_terminal(folder: Path) -> None:
    found = [f"{folder}/bin/tool"]
    assert _candidates("tool", folder, {"PATH": f"/nowhere:{folder}/bin"}, tty=True) == found
    assert _candidates("tool", folder, {"PATH": "bin"}, tty=True) == found
    assert _candidates("bin/tool", folder, {"PATH": str(folder)}, tty=True) == found


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        ("none", []),
        ("plain", ["{folder}/bin/plain exists but is not executable."]),
        ("dir", ["{folder}/bin/dir exists but is a directory."]),
    ],
)
def test_search_on_a_terminal_explains_itself(folder: Path, program: str, lines: list[str]) -> None:
    path = f"/nowhere:{folder}/bin"
    text = "\n".join(
        [
            f"Unable to spawn {program} because:",
            *(line.format(folder=folder) for line in lines),
            f'No viable candidates found in PATH "{path}"',
        ]
    )
    assert _failure(program, folder, {"PATH": path}) == text


def test_search_on_a_terminal_without_a_path(folder: Path) -> None:
    text = "Unable to spawn tool because:\nUnable to resolve the PATH"
    assert _failure("tool", folder, {}) == text
