"""`exec-server exec -t` in a real terminal, and that the terminal is sane afterwards."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import tmux
from tests.support.client import (
    DEFAULT_TIMEOUT,
    KINDS,
    SOURCE,
    Server,
    descendants,
    scaled,
    start_server,
    survivors,
)

pytestmark = pytest.mark.skipif(not tmux.is_installed(), reason="there is no tmux")

_CLIENT = f"PYTHONPATH={shlex.quote(str(SOURCE))} {shlex.quote(sys.executable)} -m exec_server"
_VIM = shutil.which("vim") or shutil.which("vim.tiny")


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with start_server(request.param) as running:
        yield running


@pytest.fixture
def ours() -> Iterator[Server]:
    with start_server("ours") as running:
        yield running


@pytest.fixture
def window() -> Iterator[tmux.Terminal]:
    with tmux.terminal(100, 30) as terminal:
        yield terminal


def _start(window: tmux.Terminal, target: str, command: str, *flags: str) -> str:
    """Type a client with a terminal; returns the modes that the terminal had before."""
    modes = window.modes()
    words = " ".join([*flags, shlex.quote(target), "--", command])
    window.line(f"clear; {_CLIENT} exec -t {words}; echo code-$?")
    return modes


def _client(window: tmux.Terminal) -> int:
    """The pid of the client: what the shell has started."""
    shell = int(window.tmux("display-message", "-p", "#{pane_pid}"))
    children = Path(f"/proc/{shell}/task/{shell}/children")
    deadline = time.monotonic() + scaled(DEFAULT_TIMEOUT)
    while not (pids := children.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(pids[0])


# ---- a program on it ------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.skipif(_VIM is None, reason="there is no vim")
def test_vim_edits_and_saves(server: Server, window: tmux.Terminal, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("first line\n")
    modes = _start(window, server.url, f"{_VIM} -n -u NONE {path}")
    window.wait_for("first line")
    window.wait_for("~\n~\n")  # what vim shows below the end of a file
    window.type("osecond żółć 日本")
    window.keys("Escape")
    window.line(":wq")
    window.wait_for("code-0")
    assert path.read_text() == "first line\nsecond żółć 日本\n"
    assert window.modes() == modes


@pytest.mark.skipif(_VIM is None, reason="there is no vim")
def test_vim_follows_the_size_of_the_window(ours: Server, window: tmux.Terminal) -> None:
    _start(window, ours.url, f"{_VIM} -n -u NONE")
    window.wait_for(lambda screen: screen.count("\n~") >= 25)
    window.resize(60, 12)
    window.wait_for(lambda screen: 5 <= screen.rpartition("clear;")[2].count("\n~") <= 11)
    window.line(":echo 'size' &lines . 'x' . &columns")
    window.wait_for("12x60")
    window.line(":q!")
    window.wait_for("code-0")


def test_a_command_begins_with_the_size_of_the_window(
    server: Server, window: tmux.Terminal
) -> None:
    _start(window, server.url, "sh -c 'stty size; tty; echo $TERM'")
    screen = window.wait_for("code-0")
    assert "30 100" in screen
    assert "/dev/pts/" in screen
    assert "tmux-256color" in screen


def test_a_command_hears_of_a_new_size(ours: Server, window: tmux.Terminal) -> None:
    script = "trap 'stty size' WINCH; echo begun-$((40+2)); while :; do sleep 1000 & wait; done"
    _start(window, ours.url, f"sh -c {shlex.quote(script)}")
    window.wait_for("begun-42")
    window.resize(90, 20)
    window.wait_for("20 90")
    window.keys("C-c")
    window.wait_for("code-130")


def test_without_a_command_there_is_a_shell(ours: Server, window: tmux.Terminal) -> None:
    window.line(f"clear; {_CLIENT} exec {ours.url}; echo code-$?")
    window.wait_for(lambda s: "clear;" not in s and s.rstrip().endswith(("#", "$")))
    window.line("shopt -q login_shell && echo login-$((1+1)); exit 7")
    screen = window.wait_for("code-7")
    assert "login-2" in screen


# ---- keys -----------------------------------------------------------------------------


def test_keys_for_signals_are_the_commands(server: Server, window: tmux.Terminal) -> None:
    shell = "bash --norc --noprofile -i"
    modes = _start(window, server.url, f"env PS1='remote> ' {shell}")
    window.wait_for("remote>")
    # The shell edits its lines in modes of its own: wait until a command has its own.
    window.line("echo sleep-$((1+1)); sleep 1000")
    window.wait_for("sleep-2")
    window.keys("C-c")
    window.wait_for(lambda screen: screen.count("remote>") >= 2)
    window.line("echo cat-$((1+1)); cat")
    window.wait_for("cat-2")
    window.line("typed")
    window.wait_for(lambda screen: screen.count("typed") == 2)
    window.keys("C-z")
    window.wait_for("Stopped")
    window.line("echo fg-$((1+1)); fg")
    window.wait_for("fg-2")
    window.line("typed again")
    window.wait_for(lambda screen: screen.count("typed again") == 2)
    window.keys("C-d")  # of cat
    window.wait_for(lambda screen: screen.rstrip().endswith("remote>"))
    window.keys("C-d")  # of the shell
    window.wait_for("code-0")
    assert window.modes() == modes


def test_text_is_passed_as_its_bytes(server: Server, window: tmux.Terminal) -> None:
    script = 'echo begun-$((40+2)); read -r line; printf %s "$line" | od -An -tx1'
    _start(window, server.url, f"sh -c {shlex.quote(script)}")
    window.wait_for("begun-42")
    window.line("ż日😀")
    assert "c5 bc e6 97 a5 f0 9f 98 80" in window.wait_for("code-0")


def test_a_large_paste_arrives_whole(server: Server, window: tmux.Terminal) -> None:
    lines = (f"{number:06d} ~. żółć {'x' * 80}\n~.\n" for number in range(1100))
    data = "".join(lines).encode()[:102_400]
    script = f"stty raw -echo; echo begun-$((40+2)); head -c {len(data)} | sha256sum"
    modes = _start(window, server.url, f"sh -c {shlex.quote(script)}")
    window.wait_for("begun-42")
    window.paste(data)
    screen = window.wait_for("code-0")
    assert hashlib.sha256(data).hexdigest() in screen
    assert window.modes() == modes


# ---- escapes --------------------------------------------------------------------------


def test_an_escape_leaves(server: Server, window: tmux.Terminal) -> None:
    modes = _start(window, server.url, "sh -c 'echo begun-$((40+2)); exec cat'")
    window.wait_for("begun-42")
    window.keys("Enter")
    window.type("~?")
    window.wait_for("suspend exec-server")
    window.type("~.")
    assert "exec-server: terminated by ~." in window.wait_for("code-255")
    assert window.modes() == modes


def test_an_escape_suspends_and_the_command_goes_on(ours: Server, window: tmux.Terminal) -> None:
    modes = _start(window, ours.url, "sh -c 'echo begun-$((40+2)); exec cat'")
    window.wait_for("begun-42")
    window.keys("~", "C-z")
    window.wait_for("Stopped")
    assert window.modes() == modes
    window.resize(80, 20)
    window.line("clear; fg")
    window.wait_for("exec cat")
    window.line("still there")
    window.wait_for(lambda screen: screen.count("still there") == 2)
    window.keys("C-d")
    assert window.modes() == modes


# ---- afterwards -----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_the_terminal_is_sane_after_the_client_is_killed(
    ours: Server, window: tmux.Terminal, number: signal.Signals
) -> None:
    modes = _start(window, ours.url, "sh -c 'echo begun-$((40+2)); exec cat'")
    window.wait_for("begun-42")
    client = _client(window)
    family = {client: "", **descendants(client)}
    os.kill(client, number)
    window.wait_for(f"code-{128 + number}")
    assert window.modes() == modes
    assert survivors({pid: start for pid, start in family.items() if start}) == []


_SCREEN = (
    "alternate_on",
    *("cursor_flag", "keypad_cursor_flag", "keypad_flag"),
    *("mouse_any_flag", "mouse_all_flag", "mouse_button_flag", "mouse_sgr_flag"),
    *("mouse_standard_flag", "mouse_utf8_flag"),
)


def _screen_flags(window: tmux.Terminal) -> dict[str, str]:
    """What programs may have switched on, as tmux has it."""
    form = " ".join(f"{name}=#{{{name}}}" for name in _SCREEN)
    words = window.tmux("display-message", "-p", form).split()
    return dict(word.split("=") for word in words)


def _is_pasting_bracketed(window: tmux.Terminal) -> bool:
    """Whether tmux puts brackets around a paste."""
    window.line("clear; od -An -c")
    window.tmux("set-buffer", "pasted")
    window.tmux("paste-buffer", "-p")
    window.keys("Enter")
    window.keys("C-d")
    screen = window.wait_for("p   a   s   t   e   d")
    return "[   2   0   0   ~" in screen


@pytest.mark.skipif(_VIM is None, reason="there is no vim")
def test_the_screen_is_sane_after_the_client_is_killed_under_vim(
    server: Server, window: tmux.Terminal
) -> None:
    before = _screen_flags(window)
    modes = _start(window, server.url, f"{_VIM} -n -u NONE -c 'set mouse=a ttymouse=sgr'")
    window.wait_for("~\n~\n")
    # As vim itself does it where it knows the terminal better.
    script = r"printf '\033[?2004h\033[?1002h\033[?1006h\033[?1h\033[?25l' > /dev/tty"
    window.line(f":silent !{script}")
    window.wait_for(lambda _: _screen_flags(window)["mouse_button_flag"] == "1")
    window.wait_for(lambda _: _screen_flags(window)["alternate_on"] == "1")
    client = _client(window)
    family = descendants(client)
    assert family  # the keeper
    os.kill(client, signal.SIGKILL)
    # Not for the exit code: a shell that was faster has written it on the other screen.
    window.wait_for(lambda _: not survivors(family))
    window.wait_for(lambda _: _screen_flags(window) == before)
    assert not _is_pasting_bracketed(window)
    assert window.modes() == modes


def test_the_screen_is_sane_after_the_client_is_killed_within_a_query(
    ours: Server, window: tmux.Terminal
) -> None:
    """The terminal would take what restores it for a part of the string that has begun."""
    before = _screen_flags(window)
    script = r"printf '\033[?1h\033[?1049h\033[?25lbegun-\033P+q'; exec cat"
    _start(window, ours.url, f"sh -c {shlex.quote(script)}")
    window.wait_for("begun-")
    os.kill(_client(window), signal.SIGKILL)
    window.wait_for(lambda _: _screen_flags(window) == before)


def test_a_screen_that_the_command_has_left_so_is_left_so(
    ours: Server, window: tmux.Terminal
) -> None:
    """It has ended by itself, as it wanted to; the keeper does not interfere."""
    script = r"printf '\033[?1h\033[?1049h\033[?1049l\033[?25l'"
    _start(window, ours.url, f"sh -c {shlex.quote(script)}")
    window.wait_for("code-0")
    flags = _screen_flags(window)
    assert (flags["keypad_cursor_flag"], flags["cursor_flag"]) == ("1", "0")


def test_the_terminal_is_sane_after_a_program_that_served_is_killed(
    window: tmux.Terminal, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    serve = f"echo $$ > {pid_file}; exec env {_CLIENT} --listen stdio"
    script = r"printf '\033[?1049h\033[?25l'; echo begun-$((40+2)); exec cat"
    modes = _start(window, f"stdio:sh -c {shlex.quote(serve)}", f"sh -c {shlex.quote(script)}")
    window.wait_for("begun-42")
    assert window.tmux("display-message", "-p", "#{alternate_on}").strip() == "1"
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert "connection lost" in window.wait_for("code-255")
    # What the program has switched on is off again.
    flags = window.tmux("display-message", "-p", "#{alternate_on} #{cursor_flag}").split()
    assert flags == ["0", "1"]
    assert window.modes() == modes


def test_a_user_need_not_wait_for_a_server_that_is_gone(window: tmux.Terminal) -> None:
    with start_server("ours") as server:
        modes = _start(window, server.url, "sh -c 'echo begun-$((40+2)); exec cat'")
        window.wait_for("begun-42")
        server.process.kill()
        server.process.wait()
        window.wait_for("to leave, type Enter ~.")
        window.keys("Enter")
        window.type("~.")
        window.wait_for("code-255")
        assert window.modes() == modes


def test_the_terminal_is_sane_after_a_mistake(window: tmux.Terminal) -> None:
    modes = _start(window, "ws://127.0.0.1:1", "cat")
    assert "Check that the server is running" in window.wait_for("code-255")
    assert window.modes() == modes


def test_zsh_completes(window: tmux.Terminal, tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh")
    window.line(f"clear; {_install(tmp_path)} zsh -f")
    window.line("PS1='z> '; autoload -U compinit; compinit -D; bindkey '^I' complete-word")
    window.line("source <(exec-server completion zsh); echo sourced-$((1+1))")
    window.wait_for("sourced-2")
    for typed, completed in (
        ("exec-server inf", "exec-server info "),
        ("exec-server exec bui", "exec-server exec build-7 "),
        ("exec-server cat bui", "exec-server cat build-7:"),
        ("exec-server exec --tim", "exec-server exec --timeout "),
    ):
        window.type(typed)
        window.keys("Tab")
        window.wait_for(f"z> {completed}".rstrip())
        window.keys("C-u")


def test_bash_escapes_the_names_that_it_completes(window: tmux.Terminal, tmp_path: Path) -> None:
    with start_server("ours", cwd=tmp_path) as server:
        words = _install(tmp_path)
        targets = tmp_path / "exec-server" / "targets.toml"
        targets.write_text(f'[build-7]\nurl = "{server.url}"\n')
        (tmp_path / "with space").mkdir()
        (tmp_path / "with space" / "file").write_text("its content\n")
        window.line(f"clear; {words} bash --norc --noprofile")
        window.line("PS1='b> '; source <(exec-server completion bash); echo sourced-$((1+1))")
        window.wait_for("sourced-2")
        window.type("exec-server cat build-7:wi")
        window.keys("Tab")
        window.wait_for("b> exec-server cat build-7:with\\ space/")
        window.keys("Tab")
        window.wait_for("b> exec-server cat build-7:with\\ space/file")
        window.keys("Enter")
        window.wait_for("its content")


def _install(directory: Path) -> str:
    """A program named exec-server and a file with one target; returns the words to find them."""
    (directory / "bin").mkdir()
    program = directory / "bin" / "exec-server"
    program.write_text(f'#!/bin/sh\nexec env {_CLIENT} "$@"\n')
    program.chmod(0o755)
    (directory / "exec-server").mkdir()
    (directory / "exec-server" / "targets.toml").write_text('[build-7]\nurl = "ws://x"\n')
    return f"PATH={directory / 'bin'}:$PATH XDG_CONFIG_HOME={directory}"
