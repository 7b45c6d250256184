"""Commands with their output, input, exit codes and time limits."""

import asyncio
import sys

from exec_server import CommandFailed, Environment, Timeout, connect


async def main(target: str | None) -> None:
    async with connect(target) if target else Environment.local() as env:
        result = await env.run(["uname", "-s"])
        print(result.text.strip(), "exit code", result.exit_code)

        counted = await env.run(["wc", "-c"], input=b"twelve bytes")
        print(counted.text.strip(), "bytes of input")

        greeting = await env.shell("echo hello $NAME", env={"NAME": "world"}, cwd="/")
        print(greeting.text.strip())

        results = await env.run_many([["expr", str(n), "*", str(n)] for n in range(1, 6)])
        print("squares", [int(result.text) for result in results])

        try:
            await env.shell("echo oh no >&2; exit 3", check=True)
        except CommandFailed as error:
            print("failed with", error.result.exit_code, error.result.error_text.strip())

        try:
            await env.shell("echo begun; sleep 60", timeout=0.5)
        except Timeout as error:
            print("too slow, but it had printed", error.result.text.strip())


asyncio.run(main(*(sys.argv[1:2] or [None])))
