"""capabilityRoots/discoverV1 on the wire."""

from __future__ import annotations

import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol.codex import DiscoverRootsParams, RootParams
from exec_server.protocol.decoding import decode
from exec_server.protocol.paths import PathUri

_PATH = "file:///x"


def test_roots() -> None:
    root = RootParams("a", PathUri.from_text(_PATH))
    assert decode(
        DiscoverRootsParams, {"roots": [{"id": "a", "path": _PATH}]}
    ) == DiscoverRootsParams([root])
    assert decode(DiscoverRootsParams, {"roots": [["a", _PATH, None]]}) == DiscoverRootsParams(
        [root]
    )
    with pytest.raises(InvalidParams, match="expected a sequence"):
        decode(DiscoverRootsParams, {"roots": 5})


def test_an_obsolete_policy_is_not_ignored() -> None:
    root = {"id": "a", "path": _PATH, "sandboxPolicy": {"type": "read-only"}}
    with pytest.raises(InvalidParams, match="obsolete"):
        decode(DiscoverRootsParams, {"roots": [root]})
