"""The service: endpoints, rendezvous and node behind one listener, until a signal ends it."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

from exec_server.errors import StartupError
from exec_server.host.event_loop import GuardedTasks
from exec_server.hosting import endpoints
from exec_server.hosting.database import Database, DatabaseUnavailable
from exec_server.hosting.endpoints import Endpoints, endpoint_of
from exec_server.hosting.http_connection import HttpConnection, SocketAdmission, TakeOver
from exec_server.hosting.http_messages import (
    Networks,
    ServiceAnswer,
    ServiceRequest,
    plaintext_disabled,
    refusal_answer,
)
from exec_server.hosting.metrics import Metrics
from exec_server.hosting.node import Node, ServiceOptions
from exec_server.hosting.relay_hub import RESTARTING, RelayHub
from exec_server.hosting.rendezvous import Forwarder, Rendezvous
from exec_server.hosting.rules import (
    PATH,
    SECRET_BYTES,
    Refusal,
    Rejection,
    Ticket,
    bearer_token,
    invalid_token,
    is_environment_id,
    secret_hash,
    token_text,
)
from exec_server.hosting.store import NewToken, Store
from exec_server.net.listen import BoundSocket
from exec_server.net.tls_acceptor import ServerCertificate, TlsAcceptor

log = logging.getLogger(__name__)

# Lines of one tenant, and of all requests without a known token, in one period.
PERIOD_SECONDS: Final = 60.0
LINES_A_PERIOD: Final = 60
# Tenants with lines of their own in one period. Further ones share those of the unknown tokens.
TENANTS: Final = 1024
# An id that a peer invents may be as long as a request head.
SHOWN_CHARACTERS: Final = 128

# From a request to its answer, whatever the database does: peers wait 10 s, and a client gives its
# session up without an answer.
ANSWER_SECONDS: Final = 6.0
# How long links may take to hang up at the end.
END_SECONDS: Final = 0.5
FIRST_TENANT: Final = "default"
_UPGRADE: Final = "rendezvous"  # the label of upgrades among the endpoints
_TEXT: Final = "text/plain; charset=utf-8"
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"


class RefusalLog:
    """Bounded log lines for refused requests, with the id of the token, never the token.

    A flood must not fill the disk or hide the lines of others, so each tenant has its own number of
    lines, and requests without a known token have one together. The others are counted in one line.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(
        self, endpoint: str, refusal: Refusal, environment_id: str = "", peer: str = ""
    ) -> None:
        """Log one refusal; empty values are not known."""
        tenant = refusal.tenant
        has_lines = tenant in self._counts or len(self._counts) < TENANTS
        owner = tenant if has_lines else ""
        count = self._counts[owner] = self._counts.get(owner, 0) + 1
        if count <= LINES_A_PERIOD:
            log.warning(
                "%s refused: %d reason=%s token=%s tenant=%s environment=%s peer=%s",
                *(endpoint, refusal.status, refusal.reason, refusal.token_id or "-"),
                *(tenant or "-", _quoted_id(environment_id), peer or "-"),
            )

    def end_period(self) -> None:
        """Log how many refusals had no line, and begin anew."""
        counts, self._counts = self._counts, {}
        for tenant, count in counts.items():
            if count > LINES_A_PERIOD:
                log.warning(
                    "%d more requests were refused within %d s: tenant=%s",
                    *(count - LINES_A_PERIOD, PERIOD_SECONDS, tenant or "-"),
                )


def _quoted_id(environment_id: str) -> str:
    """An id that is none is quoted, so that it cannot pose as another field of the line."""
    if not environment_id:
        return "-"
    if is_environment_id(environment_id):
        return environment_id
    return json.dumps(environment_id[:SHOWN_CHARACTERS])


@dataclass(frozen=True, slots=True)
class FirstStart:
    """The two tokens of a new database, shown once."""

    tenant: str
    executor_token: str
    client_token: str


@dataclass(frozen=True, slots=True)
class Signals:
    """Events that the command sets."""

    drain: asyncio.Event
    stop: asyncio.Event  # at once
    reload: asyncio.Event


@dataclass(frozen=True, slots=True)
class Listening:
    """The facts of a node that has begun to listen."""

    node: str
    first_start: FirstStart | None
    has_tenant: bool = True


async def serve(
    bound: BoundSocket,
    database: Database,
    options: ServiceOptions,
    signals: Signals,
    *,
    listening: Callable[[Listening], None],
    metrics_bound: BoundSocket | None = None,
    certificate: ServerCertificate | None = None,
) -> None:
    """Serve until a drain has ended or `stop` is set; raises StartupError."""
    metrics = Metrics()
    store = Store(database, metrics)
    try:
        await store.open()
        first_start = await make_first_tenant(store) if options.makes_first_tokens else None
        has_tenant = await store.has_tenant()
        async with asyncio.TaskGroup() as tasks:
            guarded = GuardedTasks(tasks)  # for connections, which must not end each other
            service = Service(store, metrics, options, guarded.create_task)
            await service.node.start()
            await service.open(bound, metrics_bound, certificate, guarded)
            listening(Listening(service.node.id, first_start, has_tenant))
            background = [
                tasks.create_task(service.node.run()),
                tasks.create_task(service.node.tick()),
                tasks.create_task(service.report_refusals()),
                tasks.create_task(_reload(certificate, signals.reload)),
            ]
            await service.run(signals)
            for task in background:
                task.cancel()
    except* StartupError as errors:
        raise errors.exceptions[0] from None
    except* DatabaseUnavailable as errors:
        raise StartupError(f"cannot use the database: {errors.exceptions[0]}") from None
    finally:
        await store.close()


async def make_first_tenant(store: Store) -> FirstStart | None:
    """Make the first tenant with its two tokens; None if there is a tenant."""
    tenant = secrets.token_hex(8)
    tokens = {"executor": "executor:*", "client": "connect:*"}
    texts = {name: token_text(secrets.token_bytes(SECRET_BYTES)) for name in tokens}
    made = [
        NewToken(new_token_id(), secret_hash(texts[name]), name, tenant, (scope,))
        for name, scope in tokens.items()
    ]
    if not await store.add_first_tenant(tenant, FIRST_TENANT, made):
        return None
    return FirstStart(FIRST_TENANT, texts["executor"], texts["client"])


def new_token_id() -> str:
    return f"tok-{secrets.token_hex(6)}"


async def _reload(certificate: ServerCertificate | None, reload: asyncio.Event) -> None:
    while True:
        await reload.wait()
        reload.clear()
        if certificate is None:
            continue
        try:
            await asyncio.to_thread(certificate.reload)
            log.info("the certificate was read again")
        except StartupError as error:
            log.error("the former certificate stays in use: %s", error)


class Service:
    """One node: answers requests and admits sockets. A front.RequestHandler."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        options: ServiceOptions,
        start_task: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._options = options
        self._metrics = metrics
        self._start_task = start_task
        self._connections: set[HttpConnection] = set()
        self._servers: list[asyncio.Server | TlsAcceptor] = []
        self._prefix = urlsplit(options.public_url).path.rstrip("/")
        self._has_own_metrics = False
        self._refusal_log = RefusalLog()
        self.trusted = options.trusted
        self.hub = RelayHub(metrics, options.stall_seconds)
        self.node = Node(options, store, self.hub, start_task)
        self.rendezvous = Rendezvous(store, self.hub, self.node)
        self._endpoints = Endpoints(
            store, metrics, self.node, refused=self.refused, clock=time.monotonic
        )

    async def open(
        self,
        bound: BoundSocket,
        metrics_bound: BoundSocket | None,
        certificate: ServerCertificate | None,
        tasks: GuardedTasks,
    ) -> None:
        loop = asyncio.get_running_loop()
        if certificate is not None:
            acceptor = TlsAcceptor(bound.socket, certificate, self._make_connection, tasks)
            acceptor.open()
            self._servers.append(acceptor)
        else:
            self._servers.append(await loop.create_server(self._make_connection, sock=bound.socket))
        if metrics_bound is not None:
            self._has_own_metrics = True
            handler = _MetricsHandler(self)
            self._servers.append(
                await loop.create_server(
                    lambda: HttpConnection(handler, self._start_task, self._connections),
                    sock=metrics_bound.socket,
                )
            )

    def _make_connection(self) -> HttpConnection:
        return HttpConnection(self, self._start_task, self._connections)

    async def run(self, signals: Signals) -> None:
        """Until a drain has ended, or at once after `stop`."""
        async with asyncio.TaskGroup() as tasks:
            drain = tasks.create_task(signals.drain.wait())
            stop = tasks.create_task(signals.stop.wait())
            await asyncio.wait([drain, stop], return_when=asyncio.FIRST_COMPLETED)
            if not stop.done():
                log.info("draining")
                forwarders = self.rendezvous.forwarders
                moving = tasks.create_task(self.node.drain(self._options.drain_seconds, forwarders))
                await asyncio.wait([moving, stop], return_when=asyncio.FIRST_COMPLETED)
                moving.cancel()
            drain.cancel()
            stop.cancel()
        await self._close()

    async def _close(self) -> None:
        self.node.is_draining = self.node.is_closed = True
        for server in self._servers:
            server.close()
        for executor in list(self.hub.executors.values()):
            executor.close(RESTARTING, "the node is restarting")
        for client in list(self.hub.clients):
            client.link.close(RESTARTING, "the node is restarting")
        for forwarder in list(self.rendezvous.forwarders):
            forwarder.close()
        await self.node.leave()
        await asyncio.sleep(END_SECONDS if self._connections or self.rendezvous.forwarders else 0)

    def admission(self) -> SocketAdmission:
        upgraded = len(self.hub.executors) + len(self.hub.clients)
        passed_on = 2 * len(self.rendezvous.forwarders) + self.rendezvous.connecting
        return self._options.capacity.admission(len(self._connections) + upgraded + passed_on)

    def overloaded(self, path: str) -> ServiceAnswer:
        path = path.removeprefix(self._prefix)
        if path.startswith(PATH):
            rejection = Rejection(503, "route_unavailable", "too_many_connections")
            self._metrics.upgrades.add("unknown", rejection.code)
            return self.refused(_UPGRADE, rejection)
        name, environment_id = endpoint_of(path) or ("other", "")
        refusal = endpoints.unavailable(name, "too many connections", reason="too_many_connections")
        self._metrics.requests.add(name, str(refusal.status))
        return self.refused(name, refusal, environment_id)

    def refuse(self, refusal: Refusal, peer: str) -> ServiceAnswer:
        self._metrics.requests.add("unreadable", str(refusal.status))
        return self.refused("unreadable", refusal, peer=peer)

    def refused(
        self, endpoint: str, refusal: Refusal, environment_id: str = "", peer: str = ""
    ) -> ServiceAnswer:
        """Count and log a refusal; returns its answer."""
        self._metrics.refusals.add(endpoint, refusal.reason)
        self._refusal_log.add(endpoint, refusal, environment_id, peer)
        return refusal_answer(refusal)

    async def answer(self, request: ServiceRequest) -> ServiceAnswer | TakeOver:
        path = request.path.removeprefix(self._prefix)
        if path.startswith(PATH):
            return await self._upgrade(replace(request, path=path))
        started = time.monotonic()
        name, environment_id = endpoint_of(path) or (_label(path), "")
        try:
            if name in endpoints.OPERATIONS:
                answer = await self._answer_endpoint(name, environment_id, request)
            else:
                answer = self._answer_other(path, request)
        except Refusal as refusal:
            answer = self.refused(name, refusal, environment_id, request.peer)
        self._metrics.requests.add(name, str(answer.status))
        self._metrics.request_seconds.observe(name, time.monotonic() - started)
        return answer

    async def _answer_endpoint(
        self, name: str, environment_id: str, request: ServiceRequest
    ) -> ServiceAnswer:
        if request.method != "POST":
            raise Refusal(405, "method_not_allowed", "use POST", allow="POST")
        if self.node.is_draining:
            raise endpoints.unavailable(name, reason="draining")
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._endpoints.answer(name, environment_id, request)
        except Refusal:
            raise
        except Exception as error:
            raise endpoints.unavailable(name, reason=_failure(name, error)) from None

    def _answer_other(self, path: str, request: ServiceRequest) -> ServiceAnswer:
        if request.method in ("GET", "HEAD"):
            if path == "/livez":
                return ServiceAnswer(200, b"ok\n", _TEXT)
            if path == "/readyz":
                return self._readiness()
            if path == "/metrics" and not self._has_own_metrics:
                return self.metrics_answer(request, is_open=self._options.metrics_are_open)
        if endpoints.is_plaintext_form(path):
            raise plaintext_disabled()
        raise Refusal(404, "not_found", "there is nothing here")

    async def report_refusals(self) -> None:
        """Log the number of refusals without a line again and again until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            self._refusal_log.end_period()

    def _readiness(self) -> ServiceAnswer:
        if self.node.is_draining:
            return refusal_answer(Refusal(503, "draining", "the node is restarting"))
        if not self.node.has_database:
            return refusal_answer(Refusal(503, "unavailable", "the database is away"))
        return ServiceAnswer(200, b"ok\n", _TEXT)

    def metrics_answer(self, request: ServiceRequest, *, is_open: bool) -> ServiceAnswer:
        """The metrics for the token's holder, or on an open listener for all; raises Refusal."""
        if expected := self._options.metrics_token_hash:
            token = bearer_token(request.headers.get("authorization"))
            if not hmac.compare_digest(secret_hash(token), expected):
                raise invalid_token("unknown_token")
        elif not is_open:
            raise Refusal(403, "forbidden", "/metrics needs a token or an address of its own")
        gauges = {
            "executors": len(self.hub.executors),
            "clients": len(self.hub.clients),
            "streams": self.hub.streams(),
            "passed_on": len(self.rendezvous.forwarders),
            "queued_bytes": self.node.queued_bytes,
        }
        return ServiceAnswer(200, self._metrics.text(gauges).encode(), _PROMETHEUS)

    async def _upgrade(self, request: ServiceRequest) -> ServiceAnswer | TakeOver:
        ticket: Ticket | None = None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                ticket = await self.rendezvous.ticket(request)
                granted = await self.rendezvous.admit(ticket, request)
            # Of a connection that is passed on the holder counts whether it is accepted.
            is_passed_on = isinstance(granted, Forwarder)
            self._metrics.upgrades.add(ticket.role, "passed_on" if is_passed_on else "accepted")
            return granted
        except Rejection as raised:
            rejection = raised
        except Exception as error:
            rejection = Rejection(503, "route_unavailable", _failure("an upgrade", error))
        self._metrics.upgrades.add("unknown" if ticket is None else ticket.role, rejection.code)
        if ticket is None:  # its signature is not known to be ours
            return self.refused(_UPGRADE, rejection, peer=request.peer)
        rejection.token_id, rejection.tenant = ticket.token_id, rejection.tenant or ticket.tenant
        return self.refused(_UPGRADE, rejection, ticket.environment_id, request.peer)


def _failure(name: str, error: Exception) -> str:
    """Log why a request fails; returns the reason. A defect must not end the service."""
    if isinstance(error, (DatabaseUnavailable, TimeoutError)):
        log.info("%s cannot be answered: %s", name, str(error) or "it took too long")
        return "database_unavailable"
    log.error("defect while answering %s", name, exc_info=error)
    return "defect"


def _label(path: str) -> str:
    """The metrics label of a path; peers invent paths, so all but these share one."""
    return path[1:] if path in ("/livez", "/readyz", "/metrics") else "other"


class _MetricsHandler:
    """The handler of --metrics-listen."""

    trusted: Networks = ()

    def __init__(self, service: Service) -> None:
        self._service = service

    def admission(self) -> SocketAdmission:
        return self._service.admission()

    def overloaded(self, path: str) -> ServiceAnswer:
        return self._service.overloaded("")

    def refuse(self, refusal: Refusal, peer: str) -> ServiceAnswer:
        return refusal_answer(refusal)

    async def answer(self, request: ServiceRequest) -> ServiceAnswer | TakeOver:
        try:
            if request.path != "/metrics" or request.method not in ("GET", "HEAD"):
                raise Refusal(404, "not_found", "there is nothing here")
            return self._service.metrics_answer(request, is_open=True)
        except Refusal as refusal:
            return self._service.refused(_label(request.path), refusal, peer=request.peer)
