"""Jobs in parallel that survive a restart of the server; without a URL it restarts its own server.

A job is lost with the server that runs it, and is started again on the next one. So it must be
possible to run it twice, as these are: they compute a number.
"""

import asyncio
import sys

from exec_server import Environment, SessionLost, connect, serve

JOBS = range(1, 9)
# Commands that run at the same time.
AT_ONCE = 4


class Runner:
    """Runs jobs, a few at a time, and repeats those whose server was lost."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._slots = asyncio.Semaphore(AT_ONCE)
        self.results: dict[int, int] = {}
        self.has_result = asyncio.Event()

    async def run(self, number: int) -> None:
        async with self._slots:
            while number not in self.results:
                try:
                    result = await self._env.shell(
                        f"sleep 0.1; echo $(({number} * {number}))", check=True
                    )
                except SessionLost:
                    continue  # reconnect=True: the next call opens a new session
                self.results[number] = int(result.text)
                self.has_result.set()


async def run_all(url: str, restart: asyncio.Event | None = None) -> None:
    async with connect(url, reconnect=True) as env:
        runner = Runner(env)
        async with asyncio.TaskGroup() as tasks:
            for number in JOBS:
                tasks.create_task(runner.run(number))
            if restart is not None:
                await runner.has_result.wait()  # some jobs are done, others under way
                restart.set()
        print(f"{len(runner.results)} of {len(JOBS)} jobs done")
        print(sorted(runner.results.values()))


async def main(target: str | None) -> None:
    if target is not None:
        await run_all(target)
        return
    restart = asyncio.Event()
    server = await serve()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_all(server.url, restart))
        await restart.wait()
        await server.aclose()  # with all its processes
        server = await serve(server.url)
    await server.aclose()


asyncio.run(main(*(sys.argv[1:2] or [None])))
