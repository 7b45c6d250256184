"""Remote mode of the server: builds an executor from arguments and environment, and runs it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping

from exec_server.errors import StartupError
from exec_server.net.client_stream import forwarder
from exec_server.net.client_tls import (
    client_context,
    roots_for_http,
    roots_for_websockets,
    tls_context,
)
from exec_server.protocol.urls import parse_url
from exec_server.registry.api import Registry
from exec_server.registry.credentials import AuthOptions, Bearer, choose_credential
from exec_server.registry.destination import Credential, check_destination, check_pinned_registry
from exec_server.registry.executor_key import executor_identity
from exec_server.registry.http import HttpClient
from exec_server.server.remote import DirectExecutor, RelayExecutor, Security, upgrade_headers
from exec_server.server.serve import Executor, Options, forward_remote, serve_remote

_NOT_ENCRYPTED = (
    "Warning: --relay-security {} is not encrypted: the operator of the relay can read and change "
    "everything, and run commands here"
)


class RemoteMode:
    """The remote mode of a command line, validated as far as possible without the network.

    Create it before secrets are removed from the environment, and run it afterwards.
    """

    def __init__(self, arguments: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self._id = (arguments.environment_id or arguments.executor_id or "").strip()
        self._is_direct = arguments.remote_transport == "direct"
        if arguments.aws_sigv4 and not self._is_direct:
            raise StartupError("--aws-sigv4 requires --remote-transport direct")
        if self._is_direct and not arguments.aws_sigv4:
            raise StartupError("--remote-transport direct requires --aws-sigv4")
        if arguments.forward:
            _check_forward_url(arguments.connect)
            if self._is_direct:
                raise StartupError("direct exec-server transport does not support forwarding")
        self._connect: str | None = arguments.connect
        self._security = _security(arguments)
        own = client_context(arguments.ca_file, arguments.pin or ())
        check_pinned_registry(own, arguments.remote)
        self._tls = own or tls_context(roots_for_websockets(environ))
        self._headers = upgrade_headers(environ)
        self._http = HttpClient(own or tls_context(roots_for_http(environ)))
        # The issuer of a credential is another server: a pin or --ca-file is not for it.
        self._issuer_http = HttpClient()
        self._on_ready: Callable[[str], None] | None = arguments.on_ready
        self._waits_for_registry: bool = arguments.waits_for_registry
        self._credential = _credential(arguments, environ, self._id, self._issuer_http)
        self._registry = Registry(arguments.remote, self._id, self._credential, self._http)
        has_key = self._security == "noise" and not self._is_direct
        self._identity = (
            executor_identity(arguments.key_file, self._id, environ) if has_key else None
        )
        if self._security != "noise":
            print(_NOT_ENCRYPTED.format(self._security), file=sys.stderr, flush=True)

    async def run(
        self, stop: asyncio.Event, options: Options, variables: Mapping[str, str]
    ) -> None:
        """Serve or forward until `stop` is set; raises RegistryError or StartupError."""
        executor = self._executor()
        try:
            if self._connect is None:
                await serve_remote(
                    executor,
                    stop,
                    watch=self._credential.wait_ended,
                    options=options,
                    variables=variables,
                )
            else:
                destination = self._connect
                await forward_remote(
                    executor,
                    lambda tasks: forwarder(destination, self._tls, tasks),
                    stop,
                    watch=self._credential.wait_ended,
                )
        finally:
            await self._http.close()
            await self._issuer_http.close()

    def _executor(self) -> Executor:
        if self._is_direct:
            return DirectExecutor(self._registry, self._credential, tls=self._tls)
        return RelayExecutor(
            self._registry,
            self._credential,
            security=self._security,
            tls=self._tls,
            headers=self._headers,
            identity=self._identity,
            waits_for_registry=self._waits_for_registry,
            on_ready=self._on_ready,
        )


def _security(arguments: argparse.Namespace) -> Security:
    if arguments.relay_security is not None:
        chosen: Security = arguments.relay_security
        return chosen
    return "text" if arguments.executor_id is not None else "noise"


def _credential(
    arguments: argparse.Namespace, environ: Mapping[str, str], environment_id: str, http: HttpClient
) -> Credential:
    if arguments.registry_token is not None:
        stored = Bearer(arguments.registry_token)
        check_destination(stored, arguments.remote)
        return stored
    credential = choose_credential(
        AuthOptions(
            stdin_flag=arguments.stdin_flag,
            exit_on_stdin_close=arguments.exit_on_stdin_close,
            chatgpt_account_id=arguments.chatgpt_account_id,
            use_agent_identity_auth=arguments.use_agent_identity_auth,
            aws_sigv4=arguments.aws_sigv4,
            aws_region=arguments.aws_region,
            aws_service=arguments.aws_service,
            aws_profile=arguments.aws_profile,
            needs_bearer_token=arguments.executor_id is not None,
        ),
        environ,
        environment_id=environment_id,
        http=http,
    )
    allowed = arguments.registry_auth == "api-key"
    check_destination(credential, arguments.remote, allow_any_https=allowed)
    return credential


def _check_forward_url(url: str) -> None:
    text = "failed to configure exec-server websocket: "
    try:
        parse_url(url, frozenset({"ws", "wss"}))
    except ValueError:
        if "://" in url:
            text += "forward destination must be a ws:// or wss:// URL"
        else:
            text += "relative URL without a base"
        raise StartupError(text) from None
