"""Process.screen: what full-screen programs draw, on both servers."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable

import pytest
from tests.support.client import scaled
from tests.support.client_targets import ClientTarget

from exec_server import Environment, Process, Screen, sync

pytest.importorskip("pyte")

PATIENCE = scaled(20)
CURSES = """
import curses

def main(window):
    while True:
        rows, columns = window.getmaxyx()
        window.erase()
        window.border()
        window.addstr(1, 2, f"size {rows}x{columns}")
        window.refresh()
        key = window.getch()
        if key == ord("q"):
            break

curses.wrapper(main)
"""
_VIM = shutil.which("vim") or shutil.which("vim.tiny")


async def until(process: Process, is_there: Callable[[Screen], bool]) -> Screen:
    async with asyncio.timeout(PATIENCE):
        while not is_there(screen := await process.screen()):
            await asyncio.sleep(0.02)
    return screen


@pytest.mark.quick
@pytest.mark.parametrize("term", ["xterm-256color", "screen", "linux"])
def test_a_program_with_windows(there: ClientTarget, term: str) -> None:
    async def scene(env: Environment) -> None:
        words = [sys.executable, "-c", CURSES]
        variables = {"TERM": term, "LC_ALL": "C.UTF-8"}
        async with env.start(words, tty=True, size=(6, 30), env=variables) as program:
            screen = await until(program, lambda screen: "size" in screen.text)
            assert screen.lines[1] == "│ size 6x30" + " " * 18 + "│"
            assert screen.lines[0] == "┌" + "─" * 28 + "┐"
            assert screen.size == (6, 30)
            # The output is still there for its reader.
            assert b"size" in await program.read_until("size", PATIENCE)
            if env.capabilities.process_resize:
                await program.resize(5, 40)
                screen = await until(program, lambda screen: "size 5x40" in screen.text)
                assert screen.lines[4] == "└" + "─" * 38 + "┘"
            await program.write(b"q")
            assert await program.wait(PATIENCE) == 0
            is_left = "size" in str(await program.screen())
            assert is_left == (term == "linux")  # others get back the screen of before

    there.play(scene)


@pytest.mark.skipif(_VIM is None, reason="there is no vim")
def test_an_editor(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        assert _VIM is not None
        async with env.start([_VIM, "-n", "-u", "NONE"], tty=True, size=(10, 40)) as editor:
            await until(editor, lambda screen: screen.lines[5] == "~")
            await editor.write(b"ione\rtwo \xc5\xbc\x1b:set ruler\r")
            screen = await until(editor, lambda screen: "2,5" in screen.text)
            assert (screen.lines[:3], screen.cursor) == (("one", "two ż", "~"), (1, 4))

    there.play(scene)


def test_a_dialogue_with_a_screen(there: ClientTarget) -> None:
    async def scene(env: Environment) -> None:
        script = "printf 'name: '; read n; printf '\\033[2J\\033[Hhello %s' $n; cat"
        async with env.start(["sh", "-c", script], tty=True) as program:
            await program.read_until("name: ", PATIENCE)  # what was read is on the screen
            screen = await program.screen()
            assert (str(screen), screen.cursor, screen.size) == ("name:", (0, 6), (24, 80))
            await program.write(b"me\n")
            await until(program, lambda screen: str(screen) == "hello me")
        async with env.start(["cat"], stdin=True) as pipe:
            with pytest.raises(RuntimeError, match="has no screen"):
                await pipe.screen()

    there.play(scene)


def test_without_async(there: ClientTarget) -> None:
    with sync.connect(there.url) as env, env.start(["printf", "a\\nb"], tty=True) as program:
        assert program.wait() == 0
        screen = program.screen()
        assert (str(screen), screen.is_complete) == ("a\nb", True)
