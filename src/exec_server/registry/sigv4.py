"""Requests signed for AWS (Signature Version 4) by botocore, which finds the credentials."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from typing import Any

from exec_server.errors import RegistryError, StartupError, missing_package
from exec_server.host.event_loop import GuardedTasks
from exec_server.registry.destination import Credential, Destinations

DEFAULT_SERVICE = "execute-api"

_UNSIGNED = (
    "environment registry authentication error: failed to resolve environment registry "
    "authentication: request auth build error: failed to load AWS credentials"
)


class SigV4(Credential):
    """Signs each request, with credentials that botocore refreshes when needed.

    The constructor may query the metadata service, so it must not run in an event loop. The secrets
    may be removed from the environment afterwards.
    """

    destinations = Destinations.ENCRYPTED

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        region: str | None = None,
        service: str | None = None,
        profile: str | None = None,
    ) -> None:
        self._botocore = _modules()
        kinds = self._botocore["exceptions"]
        self._errors = (kinds.BotoCoreError, kinds.ClientError, OSError)
        self._service = service or DEFAULT_SERVICE
        session = self._botocore["session"].Session(profile=profile)
        try:
            # botocore itself reads the second variable only.
            found = region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
            self._region = found or session.get_config_variable("region")
        except self._errors as error:
            raise StartupError(f"{_UNSIGNED}: {error}") from None
        if not self._region:
            raise StartupError("AWS SDK config did not resolve a region")
        self._session_credentials = self._find(session)

    def _find(self, session: Any) -> Any:
        try:
            found = session.get_credentials()
        except self._errors as error:
            raise StartupError(f"{_UNSIGNED}: {error}") from None
        if found is None:
            raise StartupError(f"{_UNSIGNED}: none found")
        return found

    async def ready(self, tasks: GuardedTasks) -> None:
        """Fetch the credentials for the first time; raises StartupError."""
        try:
            await asyncio.to_thread(self._credentials)
        except RegistryError as error:
            raise StartupError(str(error)) from None

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        """Return headers that sign a request with a JSON body, or an upgrade without one."""
        # In a thread: signing is slow, and credentials may have to be fetched first.
        return await asyncio.to_thread(self._signed, method, url, body)

    def _signed(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        credentials = self._credentials()
        # The host is signed without its default port, and the signer knows only http and https.
        if url.startswith(("ws:", "wss:")):
            url = "http" + url.removeprefix("ws")
        sent = {"content-type": "application/json"} if method == "POST" else {}
        request = self._botocore["awsrequest"].AWSRequest(method, url, headers=sent, data=body)
        self._botocore["auth"].SigV4Auth(credentials, self._service, self._region).add_auth(request)
        return [
            (name.lower(), value)
            for name, value in request.headers.items()
            if name.lower() not in sent
        ]

    def _credentials(self) -> Any:
        try:
            return self._session_credentials.get_frozen_credentials()
        except self._errors as error:
            raise RegistryError(f"{_UNSIGNED}: {error}") from None


def _modules() -> dict[str, Any]:
    """The modules of botocore, imported only here: it is large, and an extra of its own."""
    names = ("session", "auth", "awsrequest", "exceptions")
    try:
        return {name: importlib.import_module(f"botocore.{name}") for name in names}
    except ModuleNotFoundError:
        raise StartupError(missing_package("--aws-sigv4", "botocore", "aws")) from None
