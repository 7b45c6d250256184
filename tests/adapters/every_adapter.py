"""What every adapter has to do, whatever its framework: `--adapter NAME` selects the one.

A server is a target, a registry's environment or one of its own; a sandbox confines commands and
files; a lost connection is the framework's own error, in time; a cancelled command is killed.
`--server reference` runs what the reference can do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest

from exec_server import sync
from exec_server.client.engine import session as client_session
from exec_server.errors import ExecServerError
from exec_server.protocol.sandbox import preset
from tests.adapters.coding_task import (
    EDIT,
    FIXED,
    NEVER_ENDS,
    NUMBER,
    READ,
    RUN_TESTS,
    make_repository,
)
from tests.adapters.drivers import TOKEN, Driver, DriverModule, Place, call, load
from tests.adapters.interrupts import interrupted
from tests.adapters.proxy import Proxy
from tests.support.client import Server, descendants, scaled, start_server, survivors
from tests.support.server_internals import eventually

# Instead of the 45 s for which the client tries to reach its server again.
RECOVERY_SECONDS = 1.0
# Until an adapter has to say that its server is lost: recovery, twice for what may be repeated.
LOST_SECONDS = 20.0
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def driver(request: pytest.FixtureRequest) -> DriverModule:
    return load(request.config.getoption("--adapter"))


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with start_server(request.config.getoption("--server")) as started:
        yield started


@contextlib.asynccontextmanager
async def opened(driver: DriverModule, place: Place) -> AsyncIterator[Driver]:
    made = driver.adapter(place)
    await call(made.open)
    try:
        yield made
    finally:
        await call(made.close)


def play(scene: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(scaled(60)):
            await scene

    asyncio.run(limited())


async def repair(driver: DriverModule, place: Place) -> None:
    """The coding task as far as the framework has commands and files."""
    app = f"{place.folder}/app.py"
    async with opened(driver, place) as made:
        if driver.LACKS == "commands":
            broken = await call(made.read, app)
            await call(made.write, app, broken.replace(b"a - b", b"a + b"))
        else:
            assert "return a - b" in (await call(made.run, READ))[1]
            code, output = await call(made.run, RUN_TESTS)
            assert (code, "AssertionError: -1" in output) == (1, True)
            if driver.LACKS == "files":
                assert (await call(made.run, EDIT))[0] == 0
            else:
                await call(made.write, app, FIXED.encode())
            assert (await call(made.run, RUN_TESTS))[1].strip() == "all tests pass"
        if driver.LACKS != "files":
            assert await call(made.read, app) == FIXED.encode()
    assert Path(app).read_text() == FIXED


# ---- three kinds of machines ------------------------------------------------------------


def test_a_target(driver: DriverModule, server: Server, tmp_path: Path) -> None:
    play(repair(driver, Place(make_repository(tmp_path), target=server.url)))


def test_a_server_of_its_own(driver: DriverModule, tmp_path: Path) -> None:
    before = descendants(os.getpid())
    play(repair(driver, Place(make_repository(tmp_path))))
    now = descendants(os.getpid())
    # Looked up later: the servers of the tests may start their launchers at any moment.
    others = set(before).union(*(descendants(pid) for pid in before))
    assert survivors({pid: start for pid, start in now.items() if pid not in others}) == []


def test_an_environment_of_a_registry(
    driver: DriverModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registry(tmp_path / "registry") as (url, token):
        monkeypatch.setenv(TOKEN, token)
        folder = tmp_path / "project"
        folder.mkdir()
        place = Place(make_repository(folder), registry=url, environment_id="machine")
        play(repair(driver, place))


def test_a_machine_that_is_named_in_part(driver: DriverModule, tmp_path: Path) -> None:
    """Without its registry, an environment is an error and not this machine."""

    async def scene() -> None:
        async with opened(driver, Place(str(tmp_path), environment_id="machine")) as made:
            await (call(made.read, "/x") if driver.LACKS == "commands" else call(made.run, "true"))

    with pytest.raises(Exception) as caught:
        play(scene())
    assert "no target for environment_id: name a machine" in _texts(caught.value)


class Misspelled(Place):
    """A place with an option that does not exist."""

    def options(self, *, stores_token: bool = True) -> dict[str, Any]:
        return super().options(stores_token=stores_token) | {"sandox": "read-only"}


def test_an_unknown_option_is_refused(driver: DriverModule, server: Server, tmp_path: Path) -> None:
    """It could be a misspelled target or sandbox, without which commands run anywhere."""

    async def scene() -> None:
        async with opened(driver, Misspelled(str(tmp_path), target=server.url)) as made:
            if driver.LACKS == "commands":
                await call(made.write, f"{tmp_path}/file", b"")
            else:
                await call(made.run, "true")

    with pytest.raises((TypeError, ValueError), match="sandox"):
        play(scene())


class Pinned(Place):
    """A place with the options of `connect` about accounts, keys and certificates."""

    def options(self, *, stores_token: bool = True) -> dict[str, Any]:
        more = {
            "account_id": "account",
            "executor_key": "0" * 64,
            "pin": ["0" * 64],
            "allow_insecure_token": True,
        }
        return super().options(stores_token=stores_token) | more


def test_the_options_of_connect_are_accepted(driver: DriverModule, tmp_path: Path) -> None:
    async def scene() -> None:
        async with opened(driver, Pinned(str(tmp_path), "wss://127.0.0.1:1")) as made:
            await (call(made.read, "/x") if driver.LACKS == "commands" else call(made.run, "true"))

    with pytest.raises(Exception) as caught:
        play(scene())
    assert "cannot connect to wss://127.0.0.1:1" in _texts(caught.value)


# ---- the example ------------------------------------------------------------------------


EXAMPLES = {
    "claude_managed_agents": ["Linux", "wrote 6 bytes to greeting.txt", "hello"],
    "deepagents": ["tool: Linux", "ai: It is Linux."],
    "fsspec": ["hello", "['', '/greeting.txt', '/notes']", "False"],
    "harbor": ["0 42"],
    "inspect": ["success 1.0", "tool: Linux", "assistant: It is Linux."],
    "mini_swe_agent": ["{'exit_status': 'Submitted', 'submission': 'Linux\\n'}"],
    "openai_agents": ["True True", "It is Linux."],
    "openhands": ["uname -s: Linux", "finished"],
    "pydantic_ai": ["It is Linux."],
    "swe_rex": ["0 ['/tmp', 'kept', 'Linux']"],
}


def test_the_example(request: pytest.FixtureRequest) -> None:
    """It starts a server of its own; its last lines are these."""
    name = request.config.getoption("--adapter")
    expected = EXAMPLES[name]
    ended = subprocess.run(
        [sys.executable, f"{REPOSITORY}/examples/adapters/with_{name}.py"],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-len(expected) :] == expected


# ---- confined ---------------------------------------------------------------------------


def test_confined(driver: DriverModule, server: Server, tmp_path: Path) -> None:
    """A read-only sandbox: reading works, and neither commands nor files write."""
    folder = make_repository(tmp_path)
    policy = preset("read-only", cwd=f"file://{folder}", roots=[f"file://{folder}"])

    async def scene(sandbox: str | dict[str, Any]) -> None:
        async with opened(driver, Place(folder, server.url, sandbox=sandbox)) as made:
            if driver.LACKS != "commands":
                assert (await call(made.run, READ))[0] == 0
                assert (await call(made.run, "touch by-command"))[0] != 0
            if driver.LACKS != "files":
                assert b"a - b" in await call(made.read, f"{folder}/app.py")
                with pytest.raises(Exception) as caught:
                    await call(made.write, f"{folder}/by-file", b"text")
                assert re.search(r"(?i)denied|read-only|sandbox", _texts(caught.value))

    play(scene("read-only"))
    play(scene(policy))
    assert sorted(os.listdir(folder)) == ["app.py", "test_app.py"]


# ---- a lost connection ------------------------------------------------------------------


@pytest.fixture
def proxy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(client_session, "RECOVERY_SECONDS", RECOVERY_SECONDS)
    with Proxy(server.url).running() as started:
        yield started


def test_a_connection_lost_in_the_middle(
    driver: DriverModule, proxy: Proxy, tmp_path: Path
) -> None:
    """Of a command and of a file call; when the server is there again, the adapter works again."""
    folder = make_repository(tmp_path)

    async def scene() -> None:
        async with opened(driver, Place(folder, proxy.url)) as made:
            if driver.LACKS != "commands":
                running = call(made.run, f"touch {folder}/begun; sleep 600")
                await _lost(driver, running, proxy.cut, begun=tmp_path / "begun")
                proxy.mend()
                assert (await call(made.run, "echo again"))[1].strip() == "again"
            if driver.LACKS != "files":
                await call(made.read, f"{folder}/app.py")
                proxy.cut_next()
                await _lost(driver, call(made.read, f"{folder}/app.py"), None)
                proxy.mend()
                assert b"a - b" in await call(made.read, f"{folder}/app.py")
                proxy.cut_next()
                await _lost(driver, call(made.write, f"{folder}/new", b"text"), None)
                proxy.mend()

    play(scene())


async def _lost(
    driver: DriverModule,
    work: Coroutine[Any, Any, Any],
    cut: Callable[[], None] | None,
    begun: Path | None = None,
) -> None:
    """Some work has to fail in time with the error of the framework, once it was cut."""
    running = asyncio.get_running_loop().create_task(work)
    if cut is not None and begun is not None:
        await asyncio.to_thread(eventually, "the command begins", begun.exists)
        cut()
    with pytest.raises(driver.LOST):
        async with asyncio.timeout(scaled(LOST_SECONDS)):
            await running


def test_nothing_is_there(driver: DriverModule, tmp_path: Path) -> None:
    """A machine that cannot be reached at all is an error at once, or at first use."""

    async def scene() -> None:
        async with opened(driver, Place(str(tmp_path), "ws://127.0.0.1:1")) as made:
            await (call(made.read, "/x") if driver.LACKS == "commands" else call(made.run, "true"))

    with pytest.raises(Exception) as caught:
        play(scene())
    assert "cannot connect to ws://127.0.0.1:1" in _texts(caught.value)


# ---- cancelled --------------------------------------------------------------------------


def test_a_cancelled_command_is_killed(
    driver: DriverModule, server: Server, tmp_path: Path
) -> None:
    """By cancelling the task, or by Ctrl-C for frameworks without tasks; the adapter goes on."""
    if driver.LACKS == "commands":
        return
    made = driver.adapter(Place(str(tmp_path), server.url))
    command = f"touch {tmp_path}/begun; {NEVER_ENDS}"
    if iscoroutinefunction(made.run):
        play(_cancel_task(made, command, tmp_path / "begun"))
    else:
        _interrupt(made, command, tmp_path / "begun")
    eventually("the command ends", lambda: not _commands_of(server.process.pid, f"sleep {NUMBER}"))
    # A job of a session's bash outlives it on the reference, as a child of init.
    subprocess.run(["pkill", "-KILL", "-f", f"^sleep {NUMBER}$"], check=False)


async def _cancel_task(made: Driver, command: str, begun: Path) -> None:
    await made.open()
    running = asyncio.get_running_loop().create_task(made.run(command))
    await asyncio.to_thread(eventually, "the command begins", begun.exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await made.close()


def _interrupt(made: Driver, command: str, begun: Path) -> None:
    made.open()
    with interrupted(begun):
        made.run(command)
    assert made.run("echo again")[1].strip() == "again"
    made.close()


# ---- closed -----------------------------------------------------------------------------


def test_closing_ends_what_commands_have_left(
    driver: DriverModule, server: Server, tmp_path: Path
) -> None:
    """At once, also what no pipe and no process group leads to."""
    if driver.LACKS == "commands":
        return
    command = f"setsid sleep {NUMBER} </dev/null >{tmp_path}/log 2>&1 & echo begun"

    def left() -> list[str]:
        return _commands_of(server.process.pid, f"sleep {NUMBER}")

    async def scene() -> None:
        async with opened(driver, Place(str(tmp_path), server.url)) as made:
            assert (await call(made.run, command))[1].strip().endswith("begun")
            await asyncio.to_thread(eventually, "it runs", left)

    play(scene())
    assert left() == []


# ---- helpers ----------------------------------------------------------------------------


def _commands_of(pid: int, words: str) -> list[str]:
    """The command lines below a process that contain some words."""
    found = []
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{each}/cmdline").read_text().replace("\0", " ")
            if words in line:
                found.append(line)
    return found


def _texts(error: BaseException | None) -> str:
    """The text of an error and of its causes."""
    return "" if error is None else f"{error}\n{_texts(error.__cause__)}"


def _is_online(url: str, token: str) -> bool:
    try:
        sync.connect(registry=url, environment_id="machine", token=token).close()
    except ExecServerError:
        return False
    return True


@contextlib.contextmanager
def registry(data: Path) -> Iterator[tuple[str, str]]:
    """A registry of ours with one machine, `machine`; its address and a token of a client."""
    flags = ["registry", "--listen", "127.0.0.1:0", "--print-json", "--data", str(data)]
    node = Server("ours", flags)
    try:
        node.read_url()
        facts = json.loads(node.url)
        machine = Server(
            "ours",
            ["--remote", facts["url"], "--environment-id", "machine", "--registry-auth", "api-key"],
            env={"EXEC_SERVER_API_KEY": facts["executor_token"]},
        )
        try:
            eventually("online", lambda: _is_online(facts["url"], facts["client_token"]), 30)
            yield facts["url"], facts["client_token"]
        finally:
            machine.kill()
            machine.release()
    finally:
        node.kill()
        node.release()
