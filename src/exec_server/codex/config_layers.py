"""environmentConfig/read: the layers of Codex's configuration that apply to a directory.

All files are read anew for each request, in this order: of the system, of the user, of each
directory of the project, managed. Blocking.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from exec_server.codex import project, toml_file
from exec_server.codex.home import codex_home, hostname
from exec_server.codex.managed_settings import implied_requirements
from exec_server.codex.project import Checkout, Trust
from exec_server.codex.selection import Table, merged, select, without
from exec_server.codex.toml_file import DocumentTooLarge, TomlFault, UnreadableFile
from exec_server.errors import InternalError
from exec_server.host.environment import user_home
from exec_server.protocol.codex import (
    ConfigLayer,
    LayerStack,
    ReadConfigParams,
    ReadConfigResult,
)
from exec_server.protocol.paths import path_to_uri

SYSTEM_DIRECTORY: Final = "/etc/codex"
# All files of one request: a project may have thousands of directories with one, and each is parsed
# under the interpreter's lock. More is an error.
FILES_BYTES: Final = 2 * 1_048_576
# The text of all layers of an answer. A longer one is an error.
ANSWER_CHARACTERS: Final = 16 * 1_048_576

# Keys that decide whom Codex talks to and what it runs, which a project has no say in.
_NOT_OF_PROJECTS: Final = (
    ("openai_base_url",),
    ("chatgpt_base_url",),
    ("apps_mcp_product_sku",),
    ("responses_api_metadata",),
    ("model_provider",),
    ("model_providers",),
    ("notify",),
    ("profile",),
    ("profiles",),
    ("experimental_realtime_webrtc_call_base_url",),
    ("experimental_realtime_ws_base_url",),
    ("otel",),
    ("features", "respect_system_proxy"),
    ("tui", "keymap", "chat", "previous_permission_mode"),
    ("tui", "keymap", "chat", "next_permission_mode"),
)
_HOOKS: Final = (("hooks",),)


@dataclass(frozen=True, slots=True)
class _Layer:
    kind: str  # the first word of its source; empty: the source is the bare path
    path: str
    document: Table

    def selected(self, paths: Sequence[Sequence[str]]) -> ConfigLayer | None:
        """The layer with the values at these paths alone, None without any."""
        part = select(self.document, paths)
        if not part:
            return None
        source = f"{self.kind} ({self.path})" if self.kind else self.path
        try:
            text = toml_file.dump(part)
        except DocumentTooLarge:
            raise InternalError(f"the tables of {self.path} are nested too often") from None
        return ConfigLayer(source, path_to_uri(os.path.dirname(self.path)), text)


class _Files:
    """Reads the files of one request."""

    def __init__(self) -> None:
        self._left = FILES_BYTES

    def text(self, path: str, what: str = "config file") -> str | None:
        """The text of a file, None if there is none; raises InternalError."""
        try:
            text = toml_file.read_text(path)
        except UnreadableFile as error:
            raise InternalError(f"Failed to read {what} {path}: {error}") from None
        self._left -= 0 if text is None else len(text)
        if self._left < 0:
            fault = f"all files together exceed {FILES_BYTES} bytes"
            raise InternalError(f"Failed to read {what} {path}: {fault}")
        return text


def read(
    params: ReadConfigParams, variables: Mapping[str, str], system_directory: str = SYSTEM_DIRECTORY
) -> ReadConfigResult:
    """The layers for a directory, reduced to the requested keys. Raises InternalError."""
    try:
        home = codex_home(variables)
    except InternalError as error:
        raise error.explained(f"failed to find Codex home: {error.message}") from None
    try:
        config, requirements = _read_layers(params, home, system_directory)
    except InternalError as error:
        text = f"failed to load executor-local config: {error.message}"
        raise error.explained(text) from None
    user = user_home(variables)
    return ReadConfigResult(
        None if user is None else path_to_uri(user),
        path_to_uri(home),
        hostname(),
        config,
        requirements,
    )


def _read_layers(params: ReadConfigParams, home: str, system: str) -> tuple[LayerStack, LayerStack]:
    files = _Files()
    first = _general(files, "system", os.path.join(system, "config.toml"))
    user = _general(files, "user", os.path.join(home, "config.toml"))
    managed_path = os.path.join(system, "managed_config.toml")
    managed = _general(files, "legacy managed_config.toml", managed_path)
    general = merged(layer.document for layer in (first, user, managed) if layer is not None)
    layers = [first, user, *_projects(files, params.cwd.native(), home, general), managed]
    required = [_requirements(files, os.path.join(system, "requirements.toml"))]
    if managed is not None:
        required.append(_Layer("", managed.path, implied_requirements(managed.document)))
    return _stack(layers, params.config_paths), _stack(required, params.requirements_paths)


def _stack(layers: Sequence[_Layer | None], paths: Sequence[Sequence[str]]) -> LayerStack:
    """The layers that have one of the keys; the first is the one before those of a service."""
    present: list[ConfigLayer] = []
    has_first, size = False, 0
    for index, layer in enumerate(layers):
        reduced = None if layer is None else layer.selected(paths)
        if reduced is not None:
            size += len(reduced.toml)
            if size > ANSWER_CHARACTERS:
                raise InternalError(f"the layers exceed {ANSWER_CHARACTERS} characters")
            present.append(reduced)
            has_first = has_first or index == 0
    return LayerStack(present, int(has_first))


def _general(files: _Files, kind: str, path: str) -> _Layer | None:
    """A layer that is not of a project."""
    text = files.text(path)
    if text is None:
        return None
    try:
        return _Layer(kind, path, toml_file.parse(text))
    except TomlFault as fault:
        raise InternalError(f"{path}: {fault}") from None


def _requirements(files: _Files, path: str) -> _Layer | None:
    text = files.text(path, "requirements file")
    if text is None:
        return None
    try:
        return _Layer("", path, toml_file.parse(text))
    except TomlFault as fault:
        raise InternalError(f"failed to parse requirements layer {path}: {fault}") from None


def _projects(files: _Files, cwd: str, home: str, general: Table) -> Iterator[_Layer]:
    """The layers of the trusted directories from the root of the project to the cwd."""
    root = project.project_root(cwd, project.root_markers(general))
    trust = Trust(general.get("projects", {}))
    checkout = project.find_checkout(cwd)
    for directory in project.chain(root, cwd):
        folder = os.path.join(directory, ".codex")
        if not os.path.isdir(folder) or os.path.realpath(folder) == os.path.realpath(home):
            continue
        if trust.is_trusted(directory, root, checkout):
            yield from _of_directory(files, directory, checkout)


def _of_directory(files: _Files, directory: str, checkout: Checkout | None) -> Iterator[_Layer]:
    """The layer of a directory; in a linked worktree the hooks are those of the main checkout."""
    layer = _of_project(files, directory)
    if checkout is None or not checkout.is_linked:
        if layer is not None:
            yield layer
        return
    if layer is not None:
        yield _Layer(layer.kind, layer.path, without(layer.document, _HOOKS))
    relative = os.path.relpath(directory, checkout.root)
    main = _of_project(files, os.path.normpath(os.path.join(checkout.main, relative)))
    if main is not None:
        yield _Layer(main.kind, main.path, select(main.document, _HOOKS))


def _of_project(files: _Files, directory: str) -> _Layer | None:
    path = os.path.join(directory, ".codex", "config.toml")
    text = files.text(path, "project config file")
    if text is None:
        return None
    try:
        document = toml_file.parse(text)
    except TomlFault as fault:
        raise InternalError(f"Error parsing project config file {path}: {fault}") from None
    return _Layer("project", path, without(document, _NOT_OF_PROJECTS))
