"""A step of an agent through each adapter, beside the framework's own backend for this machine.

A step is to run a command, read a file, write it with an edit, and run the command again; a file
system only reads and writes, and mini-swe-agent does all of it by commands. Both take turns. Each
framework is measured in the environment that `make adapters` has installed for it:
`python -m bench.agent_steps DRIVER URL` prints the times of one as JSON.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from scripts.adapter_suites import ROWS, Environments
from tests.adapters.drivers import NAMES, Driver, Place, load

ROOT = Path(__file__).resolve().parents[1]
STEPS = 30
# Of a framework whose environment is broken: imports take seconds, all steps another few.
SECONDS = 120
COMMAND = "wc -c app.py"
CONTENT = b"def add(a, b):\n    return a - b\n" * 50


def _calls(made: Driver, lacks: str, path: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The calls of one step, as methods with their arguments."""
    edited = CONTENT.replace(b"a - b", b"a + b", 1)
    if lacks == "files":
        for command in (COMMAND, "cat app.py", "sed -i '2s/a - b/a + b/' app.py", COMMAND):
            yield made.run, (command,)
        return
    if lacks != "commands":
        yield made.run, (COMMAND,)
    yield made.read, (path,)
    yield made.write, (path, edited)
    if lacks != "commands":
        yield made.run, (COMMAND,)


async def _step(made: Driver, lacks: str, path: str) -> float:
    """The seconds of one step; blocking frameworks block, as in their agents."""
    Path(path).write_bytes(CONTENT)
    began = time.perf_counter()
    for method, arguments in _calls(made, lacks, path):
        if iscoroutinefunction(method):
            await method(*arguments)
        else:
            method(*arguments)
    return time.perf_counter() - began


async def _enter(made: Driver) -> None:
    opening = made.open()
    if opening is not None:
        await opening


async def _leave(made: Driver) -> None:
    closing = made.close()
    if closing is not None:
        await closing


async def measure(name: str, url: str) -> dict[str, list[float]]:
    """The times of steps: ours, and those of the framework's own backend if it has one."""
    module = load(name)
    with tempfile.TemporaryDirectory(prefix="exec-server-bench-") as folder:
        pairs = {"ours": module.adapter(Place(folder, target=url)), "own": module.local(folder)}
        backends = {side: made for side, made in pairs.items() if made is not None}
        taken: dict[str, list[float]] = {side: [] for side in backends}
        for made in backends.values():
            await _enter(made)
            await _step(made, module.LACKS, f"{folder}/app.py")
        for _ in range(STEPS):
            for side, made in backends.items():
                taken[side].append(await _step(made, module.LACKS, f"{folder}/app.py"))
        for made in backends.values():
            await _leave(made)
    return taken


def print_rows(url: str) -> None:
    """Measure every framework that is installed, in its own environment."""
    environments = Environments(sys.executable)
    print(f"\n{'a step of an agent, p50':<24}{'ours':>10}{'its own':>10}       {'ratio':>7}")
    for name in (*NAMES, "mcp"):
        (row, *_) = [row for row in ROWS if name in row.flags or row.name == name]
        python = environments.folder / row.name / "bin/python"
        if not (python.parents[1] / "installed").exists():
            print(f"{name:<24} is skipped: `make adapters` installs it")
            continue
        print(_row(name, python, url), flush=True)


def _row(name: str, python: Path, url: str) -> str:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    variables = {"PYTHONPATH": paths, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ended = subprocess.run(
        [str(python), "-m", "bench.agent_steps", name, url],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if ended.returncode:
        return f"{name:<24} failed: {ended.stderr.strip().rpartition(chr(10))[2]}"
    taken = json.loads(ended.stdout.strip().rpartition("\n")[2])
    middle = {side: statistics.median(samples) * 1e3 for side, samples in taken.items()}
    text = f"{name:<24}{middle['ours']:>10.4g}"
    if "own" not in middle:
        return f"{text}{'-':>10} ms"
    return f"{text}{middle['own']:>10.4g} ms   {middle['own'] / middle['ours']:>7.2f}x"


def main() -> int:
    """Measure one framework, or all that are installed on a server of this program."""
    _, name, url = sys.argv
    taken = asyncio.run(measure(name, url))
    print(json.dumps(taken), flush=True)
    os._exit(0)  # some frameworks end their threads slowly


if __name__ == "__main__":
    sys.exit(main())
