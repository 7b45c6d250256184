"""ServerFeatures: what recorded servers of every generation show, and the forms of requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.older_servers import answers, recorded

from exec_server.client.engine.server_features import METHODS, PROBES, Answer, ServerFeatures, judge
from exec_server.errors import InternalError, InvalidParams, MethodNotFound, Unsupported
from exec_server.protocol.sandbox import preset
from exec_server.protocol.session import Capabilities

# What each generation lacks; each entry holds for its version and the later ones up to the next.
_FIRST = {
    "has_canonicalize",
    "has_file_sizes",
    "has_interrupt",
    "has_open_files",
    "has_status",
    "has_uri_directories",
    "has_uri_paths",
    "has_walk",
    "confines_commands",
    "refuses_symlinks",
    "repeats_writes_safely",
}
_LAST_NATIVE = _FIRST - {"has_canonicalize", "has_file_sizes", "has_interrupt", "has_uri_paths"}
LACKING = {
    "0.120.0": _FIRST | {"has_stdin_pipes", "has_environment_policies", "confines_files"},
    "0.121.0": _FIRST | {"has_stdin_pipes", "confines_files"},
    "0.124.0": _FIRST | {"confines_files"},
    "0.125.0": _FIRST,
    "0.129.0": _FIRST,
    "0.133.0": _FIRST,
    "0.137.0": _FIRST - {"has_canonicalize"},
    "0.140.0": _LAST_NATIVE,
    "0.141.0": _LAST_NATIVE - {"has_uri_directories"},
    "0.143.0": {"has_status", "refuses_symlinks"},
    "0.145.0": {"refuses_symlinks"},
    "0.148.0": {"refuses_symlinks"},
    "0.149.1": set(),
    "0.153.4": set(),
    "0.160.0": set(),
    "0.166.0": set(),
    "0.169.0": set(),
}


def lacking(features: ServerFeatures) -> set[str]:
    names = set(ServerFeatures.__struct_fields__) - {"capabilities"}
    return {name for name in names if not getattr(features, name)}


@pytest.mark.parametrize("version", recorded())
def test_every_generation_shows_what_it_has(version: str) -> None:
    recording = recorded()[version]
    found = judge(answers(recording), Capabilities(), has_sessions=True)
    assert lacking(found) == LACKING[version]


@pytest.mark.parametrize("version", recorded())
def test_a_server_that_describes_itself_lacks_nothing(version: str) -> None:
    """The probes are not sent to these; they would find nothing else."""
    is_described = "environmentInfo" in recorded()[version]["initialize"]["result"]
    assert is_described == (version >= "0.15")
    assert not is_described or LACKING[version] == set()


def test_every_feature_has_a_probe_or_is_shown_by_the_handshake() -> None:
    probed = {probe.feature for probe in PROBES}
    assert probed == set(ServerFeatures.__struct_fields__) - {"capabilities", "has_sessions"}


@pytest.mark.parametrize("answer", [InternalError("busy"), InvalidParams("argv must not be empty")])
def test_what_is_uncertain_counts_as_unconfined(answer: Answer) -> None:
    found = judge([answer] * len(PROBES), Capabilities(), has_sessions=False)
    assert not found.confines_commands
    assert not found.confines_files
    assert not found.repeats_writes_safely
    assert not found.has_sessions
    assert found.has_walk  # it is not unknown


def test_nothing_is_known_of_a_server_that_knows_nothing() -> None:
    found = judge([MethodNotFound("no")] * len(PROBES), Capabilities(), has_sessions=True)
    assert lacking(found) == {probe.feature for probe in PROBES}
    assert found.missing_methods == METHODS.keys()


EVERYTHING = Capabilities(**dict.fromkeys(Capabilities.__struct_fields__, True))


def test_a_complete_server_needs_no_polyfill() -> None:
    assert not ServerFeatures(capabilities=EVERYTHING).missing_methods
    missing = ServerFeatures(capabilities=EVERYTHING, has_walk=False).missing_methods
    assert missing == {"fs/walk"}
    streams = {"fs/open", "fs/readBlock", "fs/writeBlock", "fs/close"}
    reads = replace(EVERYTHING, file_write_streaming=False, fs_append=False)
    assert ServerFeatures(capabilities=reads).missing_methods == {"fs/append", *streams}


@pytest.mark.parametrize("is_confined", [False, True])
def test_how_files_are_opened(is_confined: bool) -> None:
    all_of_it = ServerFeatures(capabilities=EVERYTHING)
    assert all_of_it.opens_for_reading(is_confined=is_confined)
    assert all_of_it.writes_blocks(is_confined=is_confined)
    unconfined = ServerFeatures(confines_commands=False)
    assert unconfined.opens_for_reading(is_confined=is_confined) is not is_confined
    assert unconfined.writes_blocks(is_confined=is_confined) is not is_confined
    assert unconfined.runs(is_confined=is_confined) is not is_confined
    closed = ServerFeatures(capabilities=EVERYTHING, has_open_files=False)
    assert not closed.opens_for_reading(is_confined=is_confined)


def test_a_sandbox_has_the_paths_of_the_server() -> None:
    named: dict[str, Any] = preset("workspace-write", cwd="file:///w%20x", roots=["file:///w%20x"])
    newer, older = ServerFeatures(), ServerFeatures(has_uri_directories=False)
    assert newer.sends_uris
    assert not older.sends_uris
    assert not ServerFeatures(has_uri_paths=False).sends_uris
    for form in (newer.command_sandbox, newer.file_sandbox):
        assert form(named) is named
        assert form(None) is None
    expected = named | {"cwd": "/w x", "workspaceRoots": ["/w x"]}
    for form in (older.command_sandbox, older.file_sandbox):
        assert form(named) == expected
        assert form(expected) == expected
        assert form(None) is None


def test_a_request_is_not_made_without_its_sandbox() -> None:
    unable = ServerFeatures(confines_commands=False, confines_files=False)
    for form, text in (
        (unable.command_sandbox, "sandbox in process/start: it would run the command without"),
        (unable.file_sandbox, "sandbox with permissions in fs methods: it would use the file"),
    ):
        with pytest.raises(Unsupported, match=text):
            form({"permissions": {}})
        assert form(None) is None


def test_features_do_not_change() -> None:
    with pytest.raises(AttributeError):
        ServerFeatures().has_walk = False  # type: ignore[misc]
    assert msgspec.structs.replace(ServerFeatures(), has_walk=False) != ServerFeatures()
