"""The C routine of the websockets package that masks and unmasks frames.

It is loaded without its package, whose import would take a tenth of our start-up.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec

Mask = Callable[[bytes | bytearray | memoryview, bytes | bytearray], bytes]


def _load() -> Mask:
    package = find_spec("websockets")  # found, not imported
    assert package is not None
    spec = PathFinder.find_spec("websockets.speedups", package.submodule_search_locations)
    if spec is None or spec.loader is None:
        from websockets.utils import apply_mask  # no C routine for this machine

        return apply_mask
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    routine: Mask = module.apply_mask
    return routine


apply_mask = _load()
