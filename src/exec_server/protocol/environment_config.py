"""environmentConfig/read: structs and the call."""

from __future__ import annotations

from typing import ClassVar

from exec_server.protocol.decoding import Params, Result
from exec_server.protocol.method import Call
from exec_server.protocol.paths import PathUri


class ReadParams(Params, frozen=True):
    """Each path is a list of keys of a TOML document, the outermost first."""

    wire_name: ClassVar[str] = "EnvironmentConfigReadParams"
    cwd: PathUri
    config_paths: list[list[str]]
    requirements_paths: list[list[str]]


class ConfigLayer(Result, frozen=True):
    """The requested part of one file, as TOML text."""

    source: str
    base_dir: str
    toml: str


class LayerStack(Result, frozen=True):
    """Layers from the lowest precedence to the highest."""

    layers: list[ConfigLayer]
    # The number of layers before the place of those that a client knows from its service.
    cloud_insertion_index: int


class ReadResult(Result, frozen=True):
    user_home_dir: str | None
    codex_home_dir: str
    hostname: str | None
    config: LayerStack
    requirements: LayerStack


READ = Call("environmentConfig/read", ReadParams, ReadResult)
