"""A real Codex, and our client, whose connection is away for 40 s, directly and through a relay.

Two commands run at the cut: one runs on until after it, the other ends meanwhile. Every line
must come once, and both exit codes, from our server with its default flags and from the reference.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest

from exec_server import Environment, Process, connect
from tests.conformance.codex import Codex, appears, command, report, start_codex, write
from tests.conformance.model import Model, Step, ToolCall
from tests.conformance.proxy import Proxy
from tests.conformance.test_relay_codex import CALLERS, EXECUTOR_KEY, HARNESS_TOKEN, pointing_to
from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.client import reference_version, scaled, start_server
from tests.support.relay import ENVIRONMENT, start_executor

pytestmark = [
    pytest.mark.reference,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(reference_version() < (0, 169), reason="older clients try for 25 s"),
]

GAP_SECONDS = 40.0
# The client gives up after 45 s. Through a registry it waits 5 to 7.5 s between its last attempts,
# by chance, so in some runs none of them comes between 40 s and 45 s, whatever the server does. An
# attempt that leaves two seconds for the handshake has to succeed.
LAST_ATTEMPT_SECONDS = 43.0
# So many clients at the same time, of which one at least has to come in time.
RELAYED_CLIENTS = 4

_LINES = 50
# The first prints its second half after the cut, the other one a line each second.
_ENDS = """
echo ends-1; touch ends; while ! test -e cut; do sleep 0.1; done; sleep 2; echo ends-2; exit 4
"""
_RUNS = f"for i in $(seq 1 {_LINES}); do echo runs-$i; touch runs; sleep 1; done; exit 5"
_EXPECTED = [(4, "ends-1\nends-2\n"), (5, "".join(f"runs-{n}\n" for n in range(1, _LINES + 1)))]


def _poll(outputs: dict[str, str]) -> Sequence[ToolCall]:
    return [
        *write("ends-later", "ends", "", yield_time_ms=90_000)(outputs),
        *write("runs-later", "runs", "", yield_time_ms=90_000)(outputs),
    ]


_SCRIPT: list[Step] = [
    [command("ends", _ENDS.strip(), yield_time_ms=500), command("runs", _RUNS, yield_time_ms=500)],
    _poll,
]


def _told(model: Model, name: str) -> tuple[int | None, str]:
    """The exit code and the whole output of a command, or what the model was told instead."""
    parts = [model.outputs.get(f"{name}{part}", "nothing") for part in ("", "-later")]
    if not all(part.startswith("Chunk ID: ") for part in parts):
        return None, parts[-1]
    reports = [report(part) for part in parts]
    return reports[-1].exit_code, "".join(each.text for each in reports)


def _cut(proxy: Proxy, folder: Path) -> None:
    proxy.cut(refuse_for=GAP_SECONDS)
    (folder / "cut").touch()


def _is_late(client: Codex, proxy: Proxy, marks: Path) -> bool:
    """Cut a client off; returns whether it has not come back in time by its own choice."""
    for name in ("ends", "runs"):
        appears(marks / name, 30)
    cut_at = time.monotonic()
    _cut(proxy, marks)
    client.finish(90)
    attempts = [at - cut_at for at in proxy.accepted_at if at > cut_at]
    assert all(at >= GAP_SECONDS for at in attempts)
    told = [_told(client.model, name) for name in ("ends", "runs")]
    if told != _EXPECTED and not (attempts and attempts[0] < LAST_ATTEMPT_SECONDS):
        assert "recovery timed out after 45s" in told[0][1], told
        return True
    assert told == _EXPECTED
    return False


def _directly(kind: str, folder: Path) -> bool:
    with (
        start_server(kind, cwd=folder, env={"HOME": str(folder)}) as server,
        Proxy(server.url) as proxy,
        start_codex(_SCRIPT, folder, url=proxy.url) as client,
    ):
        return _is_late(client, proxy, folder)


@contextmanager
def _relay(kind: str, folder: Path) -> Iterator[tuple[ThreadedRelayService, Proxy]]:
    """A relay with an executor, and the only way of a client to registry and rendezvous."""
    executor = {"CODEX_API_KEY": EXECUTOR_KEY, "HOME": str(folder)}
    with (
        ThreadedRelayService(authorizations=CALLERS) as service,
        start_executor(service, kind=kind, env=executor),
        Proxy(service.url) as proxy,
    ):
        address, own = (url.partition("//")[2] for url in (service.url, proxy.url))
        service.faults.http.rewrite(
            Endpoint.CONNECT,
            lambda answer: json.loads(json.dumps(answer).replace(address, own)),
            times=None,
        )
        yield service, proxy


def _through_a_relay(kind: str, folder: Path) -> bool:
    """Only the client is cut off; the executor keeps its link."""
    with _relay(kind, folder) as (service, proxy):
        address, own = (url.partition("//")[2] for url in (service.url, proxy.url))
        variables = pointing_to(service)
        variables = {name: value.replace(address, own) for name, value in variables.items()}
        with start_codex(_SCRIPT, folder, variables=variables) as client:
            return _is_late(client, proxy, folder)


def _our_client_directly(kind: str, folder: Path) -> bool:
    with start_server(kind, cwd=folder) as server, Proxy(server.url) as proxy:
        return asyncio.run(_use(connect(proxy.url), proxy, folder))


def _our_client_through_a_relay(kind: str, folder: Path) -> bool:
    with _relay(kind, folder) as (_, proxy):
        url = proxy.url.replace("ws://", "http://")
        env = connect(registry=url, environment_id=ENVIRONMENT, token=HARNESS_TOKEN)
        return asyncio.run(_use(env, proxy, folder))


async def _use(
    environment: AbstractAsyncContextManager[Environment], proxy: Proxy, at: Path
) -> bool:
    """Cut our client off; it has an attempt 3 s before its end, whatever its delays are."""

    async def collect(process: Process) -> tuple[int | None, str]:
        data = b"".join([chunk.data async for chunk in process])
        return await process.wait(), data.decode()

    async with asyncio.timeout(scaled(60)), environment as env:
        shells = [env.start(["/bin/sh", "-c", text], cwd=str(at)) for text in (_ENDS, _RUNS)]
        async with shells[0] as ends, shells[1] as runs, asyncio.TaskGroup() as tasks:
            told = [tasks.create_task(collect(process)) for process in (ends, runs)]
            for name in ("ends", "runs"):
                await asyncio.to_thread(appears, at / name, 30)
            _cut(proxy, at)
    assert [each.result() for each in told] == _EXPECTED
    return False


def test_nothing_is_lost_while_the_connection_is_away(folder: Path) -> None:
    """All at the same time: each takes a minute, most of it waiting."""
    single = (_directly, _our_client_directly, _our_client_through_a_relay)
    with ThreadPoolExecutor(2 * (len(single) + RELAYED_CLIENTS)) as threads:

        def submit(way: Callable[[str, Path], bool], kind: str, number: int = 0) -> Future[bool]:
            own = folder / f"{way.__name__}-{kind}-{number}"
            own.mkdir()
            return threads.submit(way, kind, own)

        kinds = ("ours", "reference")
        ways = [submit(way, kind) for way in single for kind in kinds]
        relayed = [
            [submit(_through_a_relay, kind, number) for number in range(RELAYED_CLIENTS)]
            for kind in kinds
        ]
        assert not any([each.result() for each in ways])  # noqa: C419 - all of them end
        for clients in relayed:
            late = [each.result() for each in clients]
            assert not all(late), "no client has tried in time"
