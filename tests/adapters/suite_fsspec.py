"""The suite of fsspec, unmodified, against a server of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)

from exec_server.adapters.fsspec import ExecServerFileSystem


class Fixtures(AbstractFixtures):
    @pytest.fixture(scope="class")
    @classmethod
    def fs(cls, server_url: str) -> Iterator[Any]:
        file_system = ExecServerFileSystem(target=server_url)
        yield file_system
        file_system.close()

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        return str(tmp_path)


class TestCopy(Fixtures, AbstractCopyTests):
    pass


class TestGet(Fixtures, AbstractGetTests):
    pass


class TestPut(Fixtures, AbstractPutTests):
    pass


class TestOpen(Fixtures, AbstractOpenTests):
    pass


class TestPipe(Fixtures, AbstractPipeTests):
    pass
