"""What a registry answers about a token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.support.http_server import Answer, HttpServer, answer, hang_up, serving

from exec_server.errors import RegistryError
from exec_server.registry.api import Permissions, probe


def _ask(*answers: Answer) -> tuple[Permissions, HttpServer]:
    async def scene() -> tuple[Permissions, HttpServer]:
        async with serving(*answers) as server:
            return await probe(server.url, "my box", "secret", None), server

    return asyncio.run(scene())


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((400, 400), Permissions(("executor", "client"), True)),
        ((400, 403), Permissions(("executor",), True)),
        ((403, 400), Permissions(("client",), True)),
        ((403, 403), Permissions(("executor", "client"), False)),
    ],
)
def test_the_roles_follow_from_the_scopes(statuses: Sequence[int], expected: Permissions) -> None:
    permissions, server = _ask(*(answer(status, {}) for status in statuses))
    assert permissions == expected
    assert [request.line.split()[1] for request in server.requests] == [
        "/cloud/environment/my%20box/validate",
        "/cloud/environment/my%20box/connect",
    ]
    assert {request.header("authorization") for request in server.requests} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (answer(401, {}), "does not accept this token"),
        (answer(404, {}), r"does not answer like a registry \(HTTP status 404\)"),
        (answer(200, {}), "does not answer like a registry"),
        (answer(503, {}), "is not available at the moment"),
        (hang_up, "cannot reach http://127.0.0.1"),
    ],
)
def test_refusals_name_the_reason_and_not_the_token(given: Answer, text: str) -> None:
    with pytest.raises(RegistryError, match=text) as caught:
        _ask(given)
    assert "secret" not in str(caught.value)
