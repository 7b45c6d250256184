"""The state of a shell: scripts, and the output of a capture."""

from __future__ import annotations

import pytest

from exec_server.process import shell_state
from exec_server.process.shell_state import ShellState, StateReader, capture_argv, restoring_argv


def _output(*sections: str, mark: str = "m") -> bytes:
    return "".join(f"\0{mark}\0{section}" for section in (*sections, "")).encode()


def _state(shell: str, *sections: str) -> ShellState:
    reader = StateReader(shell, "m")
    reader.feed(_output(*sections))
    return reader.state()


@pytest.mark.parametrize("shell", sorted(shell_state.SHELLS))
def test_a_capture_is_a_login_shell(shell: str) -> None:
    path, flag, script = capture_argv(shell, "/bin/shell", "the-mark")
    assert (path, flag) == ("/bin/shell", "-lc")
    assert script.count("the-mark") == 6
    assert "MARK" not in script


@pytest.mark.parametrize(
    ("shell", "flag", "first"),
    [("bash", "-pc", "set +o privileged"), ("zsh", "-fc", ":"), ("sh", "-c", ":")],
)
def test_a_restored_shell_has_the_text_in_its_third_line(shell: str, flag: str, first: str) -> None:
    argv = restoring_argv(shell, ["/bin/shell", "-lc", "echo $1\necho", "name", "arg"])
    assert argv[:2] == ["/bin/shell", flag]
    assert argv[3:] == ["name", "arg"]
    lines = argv[2].split("\n")
    assert lines[0] == first
    assert lines[1].startswith("if ! . /dev/fd/9 >/dev/null; then printf 'failed to restore")
    assert lines[2:] == ["echo $1", "echo"]


def test_the_sections_become_a_script_and_variables() -> None:
    state = _state(
        "bash",
        "shopt -s login_shell\nshopt -s nullglob\n",
        "f () \n{ \n    :\n}\n",
        "alias a='b'\n",
        "set -o noclobber\nset +o privileged\nset +o monitor\n",
        "A=1\0MULTI=a\nb=c\0PWD=/x\0SHLVL=2\0_=env\0CODEX_THREAD_ID=t\0broken\0",
    )
    assert state.variables == {"A": "1", "MULTI": "a\nb=c"}
    text = (
        "shopt -s nullglob\n\nf () \n{ \n    :\n}\n\nalias a='b'\n\nexec 9<&-\nset -o noclobber\n"
    )
    assert state.script.decode() == text
    assert state.size == len(text) + len("A1") + len("MULTIa\nb=c")


def test_a_shell_without_options_ends_its_script_with_success() -> None:
    assert _state("zsh", "", "", "", "", "").script == b"exec 9<&-\n:\n"


def test_aliases_of_dash_have_no_command() -> None:
    assert (
        b"alias a='b c'\nalias d='e'\n" in _state("sh", "", "", "a='b c'\nd='e'\n", "", "").script
    )


def test_bytes_that_are_no_text_survive() -> None:
    reader = StateReader("bash", "m")
    reader.feed(_output("", "f", "", "", "").replace(b"f", b"\xff"))
    assert b"\xff" in reader.state().script


def test_long_variables_are_restored_by_the_script() -> None:
    value = "x'" * shell_state.VARIABLE_BYTES
    many = {f"V{n}": "y" * 60_000 for n in range(6)}
    listed = "".join(f"{name}={text}\0" for name, text in many.items())
    state = _state("bash", "", "", "", "", f"LONG={value}\0BASH_FUNC_f%%={value}\0{listed}A=1\0")
    assert len(state.variables) == 5  # A, and as many others as fit
    assert b'[ -n "${LONG+x}" ] || export LONG=' in state.script
    assert state.script.count(b"export V") == 2
    assert b"BASH_FUNC" not in state.script


def test_pieces_of_any_size() -> None:
    output = b"printed by a profile\0" + _output("", "", "", "", "A=1\0") + b"and by a child"
    whole = StateReader("bash", "m")
    whole.feed(output)
    single = StateReader("bash", "m")
    for byte in output:
        single.feed(bytes([byte]))
    assert whole.state() == single.state()
    assert whole.state().variables == {"A": "1"}


def test_output_without_all_marks_is_incomplete() -> None:
    reader = StateReader("bash", "m")
    reader.feed(_output("", "", "", ""))
    assert not reader.is_complete


def test_a_large_state_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_state, "STATE_BYTES", 100)
    reader = StateReader("bash", "m")
    reader.feed(b"x" * 101)
    assert reader.is_too_large
    reader.feed(_output("", "", "", "", ""))
    assert not reader.is_complete
