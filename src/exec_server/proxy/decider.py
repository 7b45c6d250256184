"""Decider: decides about each request of one process, asks the client, and reports.

A name is looked up once, after the rules and the client have allowed it, and exactly the checked
addresses are dialled: changing addresses between two look-ups gains nothing. An upstream proxy gets
the name and looks it up itself, so no address that it could find may be forbidden.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, Protocol

import msgspec

from exec_server.errors import printable
from exec_server.protocol.network import (
    Answer,
    DecisionParams,
    Destination,
    PolicyParams,
    PolicyResult,
)
from exec_server.protocol.urls import host_port, parse_address
from exec_server.proxy import hosts
from exec_server.proxy.policy import LOCAL_BLOCKED, Decision, NetworkAccess, NetworkPolicy

log = logging.getLogger(__name__)

# The time of a look-up, as in the reference; then the name counts as unknown.
LOOKUP_SECONDS = 2.0
# The addresses of a name that are compared with all patterns, and dialled one after the other.
# Names have a few; further ones are not dialled.
MAX_ADDRESSES: Final = 16
# A reason of the client is shown to the process and in reports.
REASON_BYTES: Final = 1024

# Refused hosts that are remembered for the denial of the command: a line can name a few.
MAX_REFUSED: Final = 4

_SENTENCES: Final = {
    "not_allowed": "no rule allows it",
    "denied": "a rule denies it",
    "method_not_allowed": "its limited mode does not allow the method",
    "mitm_required": "its limited mode allows no tunnels",
}
_FORBIDDEN: Final = (
    "A rule forbids an address of this name, and the upstream proxy could connect to it."
)
_UNCOMPARED: Final = (
    "Some rules are about addresses, but this machine finds none for this name, or too many to "
    "compare, and the upstream proxy would look it up itself."
)

# The addresses of a name, or OSError.
Resolve = Callable[[str], Awaitable[Sequence[str]]]
# Whether a request goes through an upstream proxy.
Forwards = Callable[[NetworkAccess], bool]


class Controller(Protocol):
    """The client of a process, as far as its proxies need it."""

    def report(self, decision: DecisionParams) -> None:
        """Tell a decision, if that is possible now."""

    async def ask(self, question: PolicyParams) -> object:
        """The `result` of the client's answer; None for an error, or without a connection."""


class Decider:
    """Decides for one process."""

    def __init__(
        self,
        process_id: str,
        policy: NetworkPolicy,
        controller: Controller,
        resolve: Resolve,
        forwards: Forwards,
    ) -> None:
        self.policy = policy
        self._process_id = process_id
        self._controller = controller
        self._resolve = resolve
        self._forwards = forwards
        self._refused: dict[str, str] = {}  # the last hosts with ports, and why

    @property
    def refusal(self) -> str | None:
        """The last refused hosts and why, for people; None if nothing was refused."""
        if not self._refused:
            return None
        places = [f"{place} ({reason})" for place, reason in self._refused.items()]
        return f"the network proxy refuses {', '.join(places)}"

    async def decide(self, request: NetworkAccess) -> Decision:
        """Decide about a request and report the decision."""
        refusal = self.policy.mode_refusal(request.protocol, request.method, request.port)
        refused = None if refusal is None else _guard(refusal)
        is_socks = request.protocol.startswith("socks5")
        if refused is not None and is_socks and refusal == "method_not_allowed":
            # Whatever the host is, as in the reference; tunnels for TLS are refused after the host.
            self.report(request, refused)
            return refused
        decision = await self._decide_domain(request)
        self.report(request, decision)
        if not decision.is_allowed:
            return decision
        if refused is None:
            decision = self._compared(request, decision)
            refused = None if decision.is_allowed else decision
        if refused is not None:
            self.report(request, refused)
            return refused
        return decision

    def _compared(self, request: NetworkAccess, allowed: Decision) -> Decision:
        """Leave out the addresses that rules forbid; a refusal if none is left.

        An upstream proxy could take any address, so there one that is forbidden or unknown is
        enough. The host itself is allowed, so the refusal is a second decision, as in the
        reference, which gives `policy_denied` as the reason for both rules.
        """
        host, found = request.host, allowed.addresses
        reasons = {each: self.policy.address_refusal(host, each) for each in found[:MAX_ADDRESSES]}
        left = tuple(address for address, reason in reasons.items() if reason is None)
        message = ""
        if self._forwards(request):
            is_complete = 0 < len(found) <= MAX_ADDRESSES
            if len(left) < len(reasons):
                message = _FORBIDDEN
            elif not is_complete and self.policy.has_address_rules(host):
                message = _UNCOMPARED
        if not message and (left or not reasons):
            return replace(allowed, addresses=left)
        reason = "denied" if "denied" in reasons.values() else "policy_denied"
        return Decision("deny", "baseline_policy", reason, scope="non_domain", message=message)

    async def _decide_domain(self, request: NetworkAccess) -> Decision:
        verdict = self.policy.verdict(request.host)
        if verdict == "allow":
            return await self._checked(request.host, Decision("allow", "baseline_policy", "allow"))
        if verdict == "not_allowed_local":
            switch = "allowLocalBinding or a rule for exactly it permits it"
            return _local_refusal(f"{request.host} is a local address: {switch}")
        if verdict != "not_allowed" or self.policy.answer_seconds is None:
            return Decision("deny", "baseline_policy", verdict)
        if not hosts.is_usable(request.host):
            return Decision("deny", "baseline_policy", verdict)
        answer = await self._ask(request, self.policy.answer_seconds)
        if answer is None:
            return Decision("deny", "decider", "not_allowed")
        if answer.type != "allow":
            return Decision(answer.type, "decider", answer.reason or "policy_denied")
        allowed = Decision("allow", "decider", "not_allowed", is_override=True)
        return await self._checked(request.host, allowed)

    async def _checked(self, host: str, allowed: Decision) -> Decision:
        addresses = await self._look_up(host)
        # A name without addresses may be a name of a network that is only known elsewhere.
        if not addresses and not self.policy.may_be_local(host):
            return _local_refusal(f"{host} has no address that this server finds")
        if not self.policy.may_dial(host, addresses):
            local = next(address for address in addresses if not hosts.is_public(address))
            text = f"{host} leads to the local address {local}: allowLocalBinding permits it"
            return _local_refusal(text)
        return replace(allowed, addresses=addresses)

    async def _look_up(self, host: str) -> Sequence[str]:
        if parse_address(host) is not None:
            return (host,)
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                # One more tells that there are others, which an upstream proxy could take.
                return (await self._resolve(host))[: MAX_ADDRESSES + 1]
        except (OSError, UnicodeError):  # TimeoutError is an OSError
            return ()

    async def _ask(self, request: NetworkAccess, seconds: float) -> Answer | None:
        """The client's answer; None if there is no valid one in time."""
        destination = Destination(request.protocol, request.host, request.port)
        question = PolicyParams(self._process_id, destination)
        try:
            async with asyncio.timeout(seconds):
                return decode_answer(await self._controller.ask(question))
        except TimeoutError:
            return None

    def report(self, request: NetworkAccess, decision: Decision) -> None:
        """Report a decision to the client, and a refusal to the log."""
        if not decision.is_allowed:
            place = host_port(request.host, request.port)
            self._refused.pop(place, None)
            self._refused[place] = _explanation(decision)
            if len(self._refused) > MAX_REFUSED:
                del self._refused[next(iter(self._refused))]
            log.info(
                "process %s: %s to %s is refused: %s%s",
                printable(self._process_id),
                request.protocol,
                printable(place),
                printable(decision.reason),
                f" ({decision.message})" if decision.message else "",
            )
        self._controller.report(
            DecisionParams(
                process_id=self._process_id,
                timestamp=_now(),
                scope=decision.scope,
                decision=decision.outcome,
                source=decision.source,
                reason=decision.reason,
                protocol=request.protocol,
                host=request.host,
                port=request.port,
                method=request.method,
                client=request.client,
                policy_override=decision.is_override,
            )
        )


def decode_answer(result: object) -> Answer | None:
    """The decision in the result of an answer; None unless it is valid."""
    try:
        answer = msgspec.convert(result, PolicyResult).decision
    except msgspec.ValidationError:
        return None
    if answer.type == "allow":
        return answer
    reason = answer.reason
    if reason is None or len(reason.encode(errors="replace")) > REASON_BYTES:
        return None
    return answer if all(map(_is_plain, reason)) else None


def _is_plain(character: str) -> bool:
    return character >= " " and not "\x7f" <= character <= "\x9f"


def _local_refusal(text: str) -> Decision:
    message = f"{LOCAL_BLOCKED} {text}."
    return Decision("deny", "baseline_policy", "not_allowed_local", message=message)


def _explanation(decision: Decision) -> str:
    own = decision.message.removeprefix(LOCAL_BLOCKED).strip().removesuffix(".")
    return printable(own or _SENTENCES.get(decision.reason, decision.reason))


def _guard(reason: str) -> Decision:
    return Decision("deny", "mode_guard", reason, scope="non_domain")


def _now() -> str:
    text = datetime.now(UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
