"""The extension without IPython."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_a_missing_ipython_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython.core.magic", None)
    monkeypatch.delitem(sys.modules, "exec_server.jupyter", raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module("exec_server.jupyter")
    assert str(caught.value).startswith(
        "this adapter needs IPython (extra `jupyter`): pip install "
    )
    assert "'.[jupyter]'" in str(caught.value)
    assert "\n" not in str(caught.value)
