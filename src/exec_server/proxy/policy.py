"""NetworkPolicy: what the rules of a process say about a request, before any look-up. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from exec_server.errors import InvalidParams
from exec_server.protocol.network import (
    NetworkProxy,
    Outcome,
    Protocol,
    ProxySettings,
    Scope,
    Source,
)
from exec_server.protocol.urls import HOST_CHARACTERS, domain_to_ascii, parse_address
from exec_server.proxy import hosts
from exec_server.proxy.hosts import is_usable, normalize

# Patterns of one process, and the characters of one: clients have a few dozen short ones. More
# are refused, because each request of the process is compared with all of them.
MAX_PATTERNS: Final = 4096
PATTERN_CHARACTERS: Final = 1024
# The longest label of DNS. Encoding takes quadratic time, so longer ones are refused before it.
LABEL_CHARACTERS: Final = 63

# After its first dot an address has digits and dots alone; before it IPv6 has colons and letters.
_is_end_of_address: Final = re.compile(r"[0-9*?.]+").fullmatch
_is_address_pattern: Final = re.compile(r"[0-9a-f:*?]+(?:\.[0-9*?.]*)?").fullmatch

_PREFIX: Final = "invalid network proxy config: "
_ANY: Final = "*"


# The reference's limit for the id of a process about which the client is asked.
ASKED_ID_BYTES: Final = 256
# Added to the time that the client has for an answer: the message travels, too.
ANSWER_GRACE_SECONDS: Final = 5.0
# A client that wants longer than a day is asked for a day.
MAX_ANSWER_SECONDS: Final = 86_400.0
# All that a request may do in limited mode, on its own or in an inspected tunnel.
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_TLS_PORT: Final = 443

# The reference's sentence for `not_allowed_local`. Which address and which switch it is, follows.
LOCAL_BLOCKED: Final = "Sandbox policy blocks local/private network addresses."

Verdict = Literal["allow", "denied", "not_allowed_local", "not_allowed"]
Reason = Literal["method_not_allowed", "mitm_required"]
AddressReason = Literal["denied", "policy_denied"]


class DomainPatterns:
    """A set of patterns: `a.b` itself, `*.a.b` all below, `**.a.b` both, `*` and `?` inside."""

    def __init__(self, patterns: Iterable[str], *, denied: bool = False) -> None:
        """Raises InvalidParams; `denied` patterns must not match everything."""
        patterns = list(patterns)
        if len(patterns) > MAX_PATTERNS or max(map(len, patterns), default=0) > PATTERN_CHARACTERS:
            raise InvalidParams(
                f"{_PREFIX}at most {MAX_PATTERNS} domain patterns of {PATTERN_CHARACTERS} "
                "characters are supported"
            )
        self._exact: set[str] = set()
        self._expressions: list[re.Pattern[str]] = []
        self.may_match_address = False
        for pattern in patterns:
            self._add(pattern, denied=denied)

    def _add(self, pattern: str, *, denied: bool) -> None:
        below, itself, rest = _parse(pattern)
        if denied and rest == _ANY and (itself or not below):
            raise InvalidParams(
                f"{_PREFIX}invalid value for network.denied_domains: {pattern} (allowed exact "
                "hosts or scoped wildcards like *.example.com or **.example.com)"
            )
        self.may_match_address |= _may_match_address(rest, below=below, itself=itself)
        if not below and not _has_wildcard(rest):
            self._exact.add(rest)
            return
        expression = _expression(rest)
        if below:
            expression = rf"(?:.+\.)?{expression}" if itself else rf".+\.{expression}"
        self._expressions.append(re.compile(expression, re.DOTALL))

    def names(self, host: str) -> bool:
        """Whether a pattern without wildcards is this host."""
        return host in self._exact

    def match(self, host: str) -> bool:
        """Whether a pattern matches this host, which is in its normal form."""
        return host in self._exact or any(each.fullmatch(host) for each in self._expressions)


def _parse(pattern: str) -> tuple[bool, bool, str]:
    """Whether hosts below match, whether the rest itself matches, and the rest in normal form."""
    text = pattern.strip()
    if not text:
        raise InvalidParams(f"{_PREFIX}domain pattern is empty")
    if re.search(r"[\s/\\{}]", text):
        raise InvalidParams(f"{_PREFIX}unsupported domain pattern syntax: {pattern}")
    if "[" in text or "]" in text:
        inner = re.fullmatch(r"\[([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*|\*)\](?::[0-9]*)?", text)
        if inner is None:
            raise InvalidParams(
                f"{_PREFIX}brackets are only supported for IPv6 literals or [*]: {pattern}"
            )
        return False, True, normalize(inner[1]) if inner[1] != _ANY else _ANY
    below, itself = False, True
    if text.startswith("**."):
        below, text = True, text[3:]
    elif text.startswith("*."):
        below, itself, text = True, False, text[2:]
    if "**" in text:
        raise InvalidParams(f"{_PREFIX}unsupported repeated wildcard: {pattern}")
    rest = normalize(text)
    if not rest.isascii():
        rest = _ascii(rest, pattern)
    if not rest:
        raise InvalidParams(f"{_PREFIX}domain pattern is empty")
    return below, itself, rest


def _ascii(text: str, pattern: str) -> str:
    """The rest of a pattern with international labels in the form in which requests name them."""
    # A longer one matches no host, and encoding thousands of them would take a minute.
    labels = text.split(".") if len(text) <= HOST_CHARACTERS else [text]
    encoded = [label if label.isascii() else _encoded(label) for label in labels]
    if None in encoded:
        raise InvalidParams(
            f"{_PREFIX}domain pattern has no ASCII form: {pattern} (a label with other letters "
            "must be a valid international name without wildcards; write it as xn--…)"
        )
    return normalize(".".join(label or "" for label in encoded))


def _encoded(label: str) -> str | None:
    if len(label) > LABEL_CHARACTERS or _has_wildcard(label):
        return None
    try:
        encoded = domain_to_ascii(label)
    except ValueError:
        return None
    return encoded if is_usable(encoded) else None


def _has_wildcard(text: str) -> bool:
    return "*" in text or "?" in text


def _may_match_address(rest: str, *, below: bool, itself: bool) -> bool:
    """Whether the text of an address could match; false for the names of ordinary hosts."""
    if below and _is_end_of_address(rest) is not None:
        return True
    if not itself:
        return False
    return parse_address(rest) is not None or (
        _has_wildcard(rest) and _is_address_pattern(rest) is not None
    )


def _expression(text: str) -> str:
    """A pattern as an expression whose time is at most that of comparing each two characters."""
    first, *others = (
        "".join("." if character == "?" else re.escape(character) for character in part)
        for part in text.split("*")
    )
    if not others:
        return first
    # Atomic groups, since the first match is as good as any: else many stars take exponential time.
    between = "".join(f"(?>.*?{part})" for part in others[:-1])
    return f"{first}{between}.*{others[-1]}"


@dataclass(frozen=True, slots=True)
class NetworkAccess:
    """A request or connection of the process, as the proxy has understood it."""

    protocol: Protocol
    host: str  # in its normal form
    port: int
    client: str  # the address of the process's socket
    method: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome for one request; `addresses` are the only ones to dial if it is `allow`."""

    outcome: Outcome
    source: Source
    reason: str
    addresses: Sequence[str] = ()
    scope: Scope = "domain"
    is_override: bool = False  # the client has allowed what the rules do not
    message: str = ""  # for people, instead of that of the reason

    @property
    def is_allowed(self) -> bool:
        return self.outcome == "allow"


def check(launch: NetworkProxy, process_id: str) -> None:
    """Raise InvalidParams for a launch that the reference refuses."""
    if not launch.proxy.enabled:
        text = "executor-local network proxy launch requires an enabled proxy"
        raise InvalidParams(f"{_PREFIX}{text}")
    if launch.policy_decision_timeout_ms is not None:
        if launch.policy_decision_timeout_ms == 0:
            raise InvalidParams("network policy decision callback timeout must be nonzero")
        if not 0 < len(process_id.encode()) <= ASKED_ID_BYTES:
            raise InvalidParams(
                f"callback-enabled process ID must be non-empty and at most {ASKED_ID_BYTES} bytes"
            )
    allowed = [path for path, rule in (launch.proxy.unix_sockets or {}).items() if rule == "allow"]
    for index, path in enumerate(allowed):
        if not path.startswith("/") or "\0" in path:
            shown = path.replace("\0", "\\0")
            raise InvalidParams(
                f"{_PREFIX}invalid network.allow_unix_sockets[{index}]: expected a NUL-free "
                f'absolute path for Linux, got "{shown}"'
            )


class NetworkPolicy:
    """The rules of one process."""

    def __init__(self, launch: NetworkProxy) -> None:
        """Raises InvalidParams for a pattern that cannot be understood."""
        settings = launch.proxy
        self._denied = DomainPatterns(_with_rule(settings, "deny"), denied=True)
        self._allowed = DomainPatterns(_with_rule(settings, "allow"))
        self._reviewed = DomainPatterns(settings.review_domains)
        self.allows_local = settings.allow_local_binding
        self.is_limited = settings.mode == "limited"
        # The tunnels of a limited process with masked credentials are inspected, not refused.
        self._inspects_tunnels = bool(settings.credential_masking)
        timeout = launch.policy_decision_timeout_ms
        self.answer_seconds: float | None = None  # None: the client is not asked
        if timeout is not None:
            seconds = min(timeout / 1000, MAX_ANSWER_SECONDS)
            self.answer_seconds = seconds + ANSWER_GRACE_SECONDS

    def verdict(self, host: str) -> Verdict:
        """The rules' verdict; the client may override `not_allowed`.

        An `allow` holds only if the host's addresses pass `may_dial`.
        """
        if not hosts.is_usable(host):
            return "not_allowed"
        forms = _forms(host)
        if any(map(self._denied.match, forms)):
            return "denied"
        if not self.may_be_local(host) and is_local(host):
            return "not_allowed_local"
        if not self._allowed.match(host) or any(map(self._reviewed.match, forms)):
            return "not_allowed"
        return "allow"

    def may_be_local(self, host: str) -> bool:
        """Whether a host may be local; no wildcard or name suffices: owners choose addresses."""
        return self.allows_local or (self._allowed.names(host) and is_local(host))

    def may_dial(self, host: str, addresses: Iterable[str]) -> bool:
        """Whether all addresses that were found for an allowed host may be connected to."""
        return self.may_be_local(host) or all(map(hosts.is_public, addresses))

    def address_refusal(self, host: str, address: str) -> AddressReason | None:
        """Why an address that was found for an allowed host must not be dialled.

        127.0.0.1 has other spellings (`127.1`, `2130706433`), and 0.0.0.0 or a name may lead there.
        The review of a host covers its addresses.
        """
        forms = hosts.address_forms(address)
        if any(map(self._denied.match, forms)):
            return "denied"
        is_reviewed = any(map(self._reviewed.match, _forms(host)))
        if not is_reviewed and any(map(self._reviewed.match, forms)):
            return "policy_denied"
        return None

    def has_address_rules(self, host: str) -> bool:
        """Whether `address_refusal` could refuse an address of this host."""
        if self._denied.may_match_address:
            return True
        is_reviewed = any(map(self._reviewed.match, _forms(host)))
        return self._reviewed.may_match_address and not is_reviewed

    def mode_refusal(self, protocol: Protocol, method: str | None, port: int) -> Reason | None:
        """Why the limited mode refuses a request, whatever its host is."""
        if not self.is_limited:
            return None
        if protocol == "http":
            return None if method in SAFE_METHODS else "method_not_allowed"
        if protocol == "https_connect" or (protocol == "socks5_tcp" and port == _TLS_PORT):
            return None if self._inspects_tunnels else "mitm_required"
        return "method_not_allowed"


def _with_rule(settings: ProxySettings, rule: str) -> list[str]:
    return [pattern for pattern, each in (settings.domains or {}).items() if each == rule]


def _forms(host: str) -> Sequence[str]:
    """The texts of a host that rules are compared with: an address may contain another one."""
    return (host,) if parse_address(host) is None else hosts.address_forms(host)


def is_local(host: str) -> bool:
    """Whether a host is one of this machine or its networks by its own name."""
    address = parse_address(host)
    return host == "localhost" if address is None else not hosts.is_public(str(address))
