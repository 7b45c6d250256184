"""A dialogue with a program in a terminal: a REPL that answers, asks for more, fails and ends."""

import asyncio
import re
import sys

from exec_server import Environment, PatternNotFound, Process, connect

# What the REPL can print next: it is ready, wants the next line of a block, or asks a question. The
# question begins a line: the terminal echoes the code as well, which has the same word.
READY, MORE, QUESTION = ">>> ", "... ", re.compile(rb"\n(\w+)\? ")
QUIET = {"TERM": "dumb", "PYTHON_BASIC_REPL": "1"}


async def say(repl: Process, line: str) -> str:
    """Send a line, and what the REPL then asks for; the answer without the echo of the line."""
    await repl.write(line.encode() + b"\n")
    while True:
        found = await repl.expect([READY, MORE, QUESTION], timeout=30)
        if found.pattern == READY:
            return found.text.partition("\r\n")[2].strip()
        # The end of a block is an empty line.
        await repl.write(b"\n" if found.pattern == MORE else b"World\n")


async def main(target: str | None) -> None:
    async with connect(target) if target else Environment.local() as env:
        words = ["python3", "-q"]
        async with env.start(words, tty=True, size=(24, 80), env=QUIET) as repl:
            await repl.read_until(READY, timeout=30)
            await say(repl, "x = 6")
            print(await say(repl, "x * 7"))
            print((await say(repl, "for n in range(3): print(n)")).split())
            print((await say(repl, "'Hello, ' + input('name? ')")).splitlines()[-1])
            print((await say(repl, "1 / 0")).splitlines()[-1])
            print(await say(repl, "import os; os.get_terminal_size().columns"))
            try:
                await say(repl, "exit(5)")
            except PatternNotFound:  # the output has ended
                print("exit code", await repl.wait())


asyncio.run(main(*(sys.argv[1:2] or [None])))
