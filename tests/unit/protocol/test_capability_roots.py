"""capabilityRoots/discoverV1 on the wire."""

from __future__ import annotations

import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol.capability_roots import DiscoverParams, RootParams
from exec_server.protocol.decoding import decode
from exec_server.protocol.paths import PathUri

_PATH = "file:///x"


def test_roots() -> None:
    root = RootParams("a", PathUri.from_text(_PATH))
    assert decode(DiscoverParams, {"roots": [{"id": "a", "path": _PATH}]}) == DiscoverParams([root])
    assert decode(DiscoverParams, {"roots": [["a", _PATH, None]]}) == DiscoverParams([root])
    with pytest.raises(InvalidParams, match="expected a sequence"):
        decode(DiscoverParams, {"roots": 5})


def test_an_obsolete_policy_is_not_ignored() -> None:
    root = {"id": "a", "path": _PATH, "sandboxPolicy": {"type": "read-only"}}
    with pytest.raises(InvalidParams, match="obsolete"):
        decode(DiscoverParams, {"roots": [root]})
