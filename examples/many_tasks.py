"""Fifty tasks on ten workspaces, of which the half is cancelled."""

import asyncio
import sys

from exec_server import Command, Environment, connect

WORKSPACES = 10
TASKS = 50
# Every other task is slow: what it would do is not wanted any more when the quick ones have ended.
SCRIPT = "echo begun >task-$1; sleep $2; echo done >task-$1; cat ../$0/task-$1"


def task(folder: str, number: int) -> Command:
    """A task in its workspace, with options of its own."""
    name = f"workspace-{number % WORKSPACES}"
    seconds = "0.1" if number < TASKS // 2 else "60"
    words = ["sh", "-c", SCRIPT, name, str(number), seconds]
    return Command(words, cwd=f"{folder}/{name}", env={"TASK": str(number)}, timeout=120)


async def main(target: str | None) -> None:
    async with connect(target) if target else Environment.local() as env:
        folder = (await env.run(["mktemp", "-d"], check=True)).text.strip()
        for number in range(WORKSPACES):
            await env.files.mkdir(f"{folder}/workspace-{number}")
        tasks = [task(folder, number) for number in range(TASKS)]
        done = set()
        # In this order, at most 30 at a time: the slow ones begin while the quick ones run.
        async with env.run_each(tasks, concurrency=30, check=True) as results:
            async for each in results:
                assert each.result.text == "done\n"
                done.add(each.index)
                if len(done) == TASKS // 2:
                    break
        # Leaving the block has killed those that ran, and starts no further one.
        print(f"{len(done)} done, {TASKS - len(done)} cancelled")
        counts = await env.shell("cat */task-* | sort | uniq -c", cwd=folder)
        finished = counts.text.split()
        print("done in the workspaces:", finished[finished.index("done") - 1])
        # The environment goes on, and a failure is one result of several.
        async with env.run_each([["true"], ["false"]], check=True) as results:
            outcomes = {each.index: each.error is None async for each in results}
        print("succeeded:", [outcomes[index] for index in sorted(outcomes)])
        await env.files.remove(folder, recursive=True)


asyncio.run(main(*(sys.argv[1:2] or [None])))
