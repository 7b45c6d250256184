"""The managed network: `networkProxy` of process/start, and the messages of its proxies."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from exec_server.protocol.decoding import U16, U64, Call, Notice, Params, Result

Rule = Literal["none", "allow", "deny"]
Mode = Literal["limited", "full"]
Protocol = Literal["http", "https_connect", "socks5_tcp", "socks5_udp"]
Authentication = Literal["bearer", "token", "basic", "header"]
Scope = Literal["domain", "non_domain"]
Outcome = Literal["allow", "deny", "ask"]
Source = Literal["baseline_policy", "mode_guard", "proxy_state", "decider"]


class CredentialProvider(
    Params, frozen=True, rename=None, forbid_unknown_fields=True, omit_defaults=True
):
    """A service whose secrets a client wants to be masked."""

    wire_name: ClassVar[str] = "CredentialProviderConfig"
    omissible: ClassVar[tuple[str, ...]] = ("url_prefix_from_env", "header", "prefix")
    env: list[str] = msgspec.field(default_factory=list)
    patterns: list[str] = msgspec.field(default_factory=list)  # of secrets
    url_prefixes: list[str] = msgspec.field(default_factory=list)  # that may get them
    url_prefix_from_env: str | None = None  # a variable that holds a further one
    auth: list[Authentication] = msgspec.field(default_factory=list)  # empty: bearer
    header: str | None = None
    prefix: str | None = None  # of the value of the header


class ProxySettings(Params, frozen=True, kw_only=True, omit_defaults=True):
    """The rules of the proxies of one process; the reference refuses null for a missing map."""

    wire_name: ClassVar[str] = "NetworkProxySettings"
    omissible: ClassVar[tuple[str, ...]] = ("domains", "unix_sockets", "credential_providers")
    enabled: bool
    enable_socks5: bool
    enable_socks5_udp: bool
    allow_upstream_proxy: bool
    dangerously_allow_all_unix_sockets: bool
    mode: Mode
    domains: dict[str, Rule] | None = None
    unix_sockets: dict[str, Literal["allow", "deny"]] | None = None
    allow_local_binding: bool
    review_domains: list[str] = msgspec.field(default_factory=list)
    credential_masking: bool = False
    credential_providers: dict[str, CredentialProvider] | None = None


class AuditMetadata(Params, frozen=True, omit_defaults=True):
    """What the client notes about its own user; it is not used here."""

    wire_name: ClassVar[str] = "NetworkProxyAuditMetadata"
    omissible: ClassVar[tuple[str, ...]] = (
        *("conversation_id", "app_version", "user_account_id", "auth_mode", "originator"),
        *("user_email", "terminal_type", "model", "slug"),
    )
    conversation_id: str | None = None
    app_version: str | None = None
    user_account_id: str | None = None
    auth_mode: str | None = None
    originator: str | None = None
    user_email: str | None = None
    terminal_type: str | None = None
    model: str | None = None
    slug: str | None = None


class NetworkProxy(Params, frozen=True, omit_defaults=True):
    wire_name: ClassVar[str] = "RemoteNetworkProxyLaunchConfig"
    omissible: ClassVar[tuple[str, ...]] = (
        "environment_id",
        "execution_id",
        "policy_decision_timeout_ms",
    )
    proxy: ProxySettings
    audit_metadata: AuditMetadata = AuditMetadata()
    environment_id: str | None = None
    execution_id: str | None = None
    policy_decision_timeout_ms: U64 | None = None  # None: the client is not asked


class ManagedNetwork(Params, frozen=True):
    """Proxies of the client itself that a process in a sandbox may reach."""

    wire_name: ClassVar[str] = "ManagedNetworkSandboxContext"
    loopback_ports: list[U16] = msgspec.field(default_factory=list)
    allow_local_binding: bool = False
    dangerously_allow_all_unix_sockets: bool = False


class DecisionParams(Result, frozen=True, kw_only=True, omit_defaults=True):
    """A decision about one connection or request of a process."""

    process_id: str
    timestamp: str
    scope: Scope
    decision: Outcome
    source: Source
    reason: str
    protocol: Protocol
    host: str
    port: int
    method: str | None = None
    client: str | None = None
    policy_override: bool


class Destination(Result, frozen=True):
    protocol: Protocol
    host: str
    port: int


class PolicyParams(Result, frozen=True):
    process_id: str
    request: Destination


class Answer(Result, frozen=True, omit_defaults=True):
    """What the client decides; a reason is for `deny` and `ask`."""

    type: Outcome
    reason: str | None = None


class PolicyResult(Result, frozen=True):
    decision: Answer


DECISION = Notice("network/policyDecision", DecisionParams)
POLICY_REQUEST = Call("network/policyRequest", PolicyParams, PolicyResult)
