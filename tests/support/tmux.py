"""A real terminal for tests: tmux, with a plain shell in it."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.client import DEFAULT_TIMEOUT, scaled

PROMPT = "ready> "


def is_installed() -> bool:
    return shutil.which("tmux") is not None


class Terminal:
    """One window: its keyboard and its screen."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def tmux(self, *words: str, data: bytes | None = None) -> str:
        ended = subprocess.run(
            ["tmux", "-S", str(self._socket), "-f", "/dev/null", *words],
            input=data,
            capture_output=True,
            timeout=scaled(DEFAULT_TIMEOUT),
            check=True,
        )
        return ended.stdout.decode()

    def screen(self) -> str:
        """The screen, and the lines that have scrolled out of it."""
        lines = self.tmux("capture-pane", "-p", "-J", "-S", "-1000").splitlines()
        return "\n".join(line.rstrip() for line in lines)

    def wait_for(self, text: str | Callable[[str], bool]) -> str:
        """The screen as soon as a text is on it, or a predicate is true."""
        found = (lambda screen: text in screen) if isinstance(text, str) else text
        deadline = time.monotonic() + scaled(DEFAULT_TIMEOUT)
        while not found(screen := self.screen()):
            assert time.monotonic() < deadline, f"waited for {text!r} on this screen:\n{screen}"
            time.sleep(0.02)
        return screen

    def keys(self, *names: str) -> None:
        """Press keys by tmux's names for them."""
        self.tmux("send-keys", *names)

    def type(self, text: str) -> None:
        """Type characters as they are."""
        self.tmux("send-keys", "-l", text)

    def line(self, text: str) -> None:
        self.type(text)
        self.keys("Enter")

    def paste(self, data: bytes) -> None:
        """Paste bytes as they are."""
        self.tmux("load-buffer", "-", data=data)
        self.tmux("paste-buffer", "-r")

    def resize(self, columns: int, rows: int) -> None:
        self.tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def command(self, text: str) -> str:
        """Run a command in the shell and return its output."""
        self.tmux("clear-history")
        self.line(f"clear; {text}; echo end-of-$((40+2))")
        screen = self.wait_for("end-of-42")
        lines = screen.partition("end-of-42")[0].strip("\n").splitlines()
        return "\n".join(line for line in lines if not line.startswith(PROMPT)).strip()

    def modes(self) -> str:
        """The modes of the terminal as stty writes them down."""
        return self.command("stty -g")


@contextlib.contextmanager
def terminal(columns: int = 80, rows: int = 24) -> Iterator[Terminal]:
    """A window of this size; everything in it is ended at last."""
    with tempfile.TemporaryDirectory(prefix="tmux-") as directory:
        window = Terminal(Path(directory) / "socket")
        # dash: it leaves the modes of the terminal as it finds them, and edits nothing.
        # exec: a shell of another kind would stay between tmux and this one.
        shell = "exec env -i TERM=tmux-256color PATH=/usr/bin:/bin HOME=/tmp LANG=C.UTF-8"
        window.tmux(
            *("new-session", "-d", "-x", str(columns), "-y", str(rows)),
            f"{shell} PS1={shlex.quote(PROMPT)} dash -i",
        )
        try:
            window.tmux("set-option", "-g", "status", "off")
            window.resize(columns, rows)
            window.wait_for(PROMPT.strip())
            yield window
        finally:
            window.tmux("kill-server")
