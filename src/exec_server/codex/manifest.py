"""The manifest of a plugin: the members that discovery needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec


class ManifestFault(Exception):
    """A manifest is not valid."""


class _Object(list[tuple[str, Any]]):
    """A JSON object with its members in order; some may be repeated."""

    def get(self, name: str, default: Any = None) -> Any:
        values = [value for key, value in self if key == name]
        if len(values) > 1:
            raise ManifestFault(f"duplicate field `{name}`")
        return values[0] if values else default


@dataclass(frozen=True, slots=True)
class Manifest:
    """The name of a plugin, the name for people, and the servers in the manifest as JSON."""

    name: str
    display_name: str
    servers: str | None


class _Servers(msgspec.Struct):
    mcp_servers: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="mcpServers")


def parse_manifest(contents: str, directory: str) -> Manifest:
    """The manifest in a text; its directory names a plugin without a name.

    Raises ManifestFault.
    """
    try:
        members = json.loads(contents, object_pairs_hook=_Object, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ManifestFault(str(error)) from None
    if not isinstance(members, _Object):
        raise ManifestFault("not an object")
    name = members.get("name", "")
    if not isinstance(name, str) or not isinstance(members.get("apps"), str | None):
        raise ManifestFault("a member has the wrong type")
    name = name if name.strip() else directory
    return Manifest(name, _display_name(members) or name, _servers(contents, members))


def _refuse(constant: str) -> None:
    raise ManifestFault(f"`{constant}` is not JSON")


def _display_name(members: _Object) -> str:
    interface = members.get("interface")
    if interface is None:
        return ""
    if not isinstance(interface, _Object):
        raise ManifestFault("a member has the wrong type")
    shown = interface.get("displayName")
    if not isinstance(shown, str | None):
        raise ManifestFault("a member has the wrong type")
    return (shown or "").strip()


def _servers(contents: str, members: _Object) -> str | None:
    """The servers that are written in the manifest, with the numbers as they are written."""
    if not isinstance(members.get("mcpServers"), _Object):
        return None
    try:
        raw = msgspec.json.decode(contents.encode(), type=_Servers).mcp_servers
    except (msgspec.DecodeError, RecursionError) as error:
        raise ManifestFault(str(error)) from None
    return msgspec.json.format(bytes(raw), indent=-1).decode()
