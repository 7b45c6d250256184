"""Every file operation is explained as a read or as a write, and can be confined."""

from __future__ import annotations

from typing import get_args

from exec_server.filesystem.operations import OPERATIONS
from exec_server.protocol import files
from exec_server.protocol.sandbox import Confinable
from exec_server.sandbox.files import _WRITES

# Operations that leave their path as it is, or that name two paths.
_READS = {
    *(files.READ_FILE, files.GET_METADATA, files.CANONICALIZE, files.READ_DIRECTORY, files.WALK),
    *(files.GLOB, files.GREP, files.DISK_USAGE, files.LIST, files.RESOLVE),
}
_TWO_PATHS = {files.COPY, files.RENAME}


def test_each_operation_reads_or_writes_its_path() -> None:
    writes = {call for call in OPERATIONS if call.params in get_args(_WRITES)}
    assert writes == set(OPERATIONS) - _READS - _TWO_PATHS


def test_the_union_has_all_params_that_can_be_confined() -> None:
    confinable = {
        kind
        for kind in vars(files).values()
        if isinstance(kind, type) and issubclass(kind, Confinable) and kind is not Confinable
    }
    assert set(get_args(files.ConfinableParams)) == confinable
