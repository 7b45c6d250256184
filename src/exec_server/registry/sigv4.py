"""Requests signed for Amazon's services (Signature Version 4), with botocore for the keys.

Profiles, roles and machine credentials are found as every other tool of theirs finds them.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from typing import Any

from exec_server.errors import RegistryError, StartupError
from exec_server.registry.destination import Reach

DEFAULT_SERVICE = "execute-api"

_UNSIGNED = (
    "environment registry authentication error: failed to resolve environment registry "
    "authentication: request auth build error: failed to load AWS credentials"
)


class SigV4:
    """Signs each request anew with credentials that are refreshed when they have to be.

    Making it finds them, which may ask the machine's metadata: not to be done inside a loop.
    The environment may forget its secrets afterwards.
    """

    hides_answers = False
    reach = Reach.ENCRYPTED

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
        self._failures = (kinds.BotoCoreError, kinds.ClientError, OSError)
        self._service = service or DEFAULT_SERVICE
        session = self._botocore["session"].Session(profile=profile)
        try:
            # botocore itself looks at the second variable only.
            found = region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
            self._region = found or session.get_config_variable("region")
        except self._failures as error:
            raise StartupError(f"{_UNSIGNED}: {error}") from None
        if not self._region:
            raise StartupError("AWS SDK config did not resolve a region")
        self._found = self._find(session)

    def _find(self, session: Any) -> Any:
        try:
            found = session.get_credentials()
        except self._failures as error:
            raise StartupError(f"{_UNSIGNED}: {error}") from None
        if found is None:
            raise StartupError(f"{_UNSIGNED}: there are none")
        return found

    async def ready(self) -> None:
        """Fetch what has only been found so far; raises StartupError."""
        try:
            await asyncio.to_thread(self._credentials)
        except RegistryError as error:
            raise StartupError(str(error)) from None

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        """Headers that sign this request with its JSON body, or this upgrade without one."""
        # In a thread: credentials may have to be fetched first, and signing is slow beside it.
        return await asyncio.to_thread(self._signed, method, url, body)

    def _signed(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        credentials = self._credentials()
        # The name of the host is signed without its port if that is the scheme's own, and for
        # that the signer has to know the scheme.
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
            return self._found.get_frozen_credentials()
        except self._failures as error:
            raise RegistryError(f"{_UNSIGNED}: {error}") from None


def _modules() -> dict[str, Any]:
    """What is needed of botocore, loaded only here: it is large and an extra of its own."""
    names = ("session", "auth", "awsrequest", "exceptions")
    try:
        return {name: importlib.import_module(f"botocore.{name}") for name in names}
    except ModuleNotFoundError:
        raise StartupError(
            "--aws-sigv4 needs botocore; install it with `pip install 'exec-server[aws]'`"
        ) from None
