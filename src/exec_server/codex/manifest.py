"""The manifest of a plugin: the members that discovery needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec


class ManifestFault(Exception):
    """A manifest is not valid."""


class JsonObject(list[tuple[str, Any]]):
    """A JSON object with its members in order; some may be repeated."""

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a member; raises ManifestFault if it is repeated or is no valid text."""
        values = [value for key, value in self if key == name]
        if len(values) > 1:
            raise ManifestFault(f"duplicate field `{name}`")
        value = values[0] if values else default
        if isinstance(value, str):
            _refuse_surrogates(value)
        return value


@dataclass(frozen=True, slots=True)
class Manifest:
    """The name of a plugin, the name for people, and the servers in the manifest as JSON."""

    name: str
    display_name: str
    servers: str | None
    # Whether it names files of servers and of apps.
    has_servers_file: bool = False
    has_apps_file: bool = False


class _Servers(msgspec.Struct):
    mcp_servers: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="mcpServers")


def parse_members(contents: str) -> JsonObject:
    """The members of the JSON object in a text; raises ManifestFault."""
    try:
        members = json.loads(contents, object_pairs_hook=JsonObject, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ManifestFault(str(error)) from None
    if not isinstance(members, JsonObject):
        raise ManifestFault("not an object")
    for key, _ in members:
        _refuse_surrogates(key)
    return members


def parse_manifest(contents: str, directory: str) -> Manifest:
    """The manifest in a text; its directory names a plugin without a name.

    Raises ManifestFault.
    """
    members = parse_members(contents)
    name = _name(members, directory)
    apps = members.get("apps")
    if not isinstance(apps, str | None):
        raise ManifestFault("a member has the wrong type")
    return Manifest(
        name,
        _display_name(members) or name,
        _servers(contents, members),
        isinstance(declared_servers(members), str),
        apps is not None,
    )


def plugin_name(contents: str, directory: str) -> str:
    """The name of a plugin, whatever the other members are; raises ManifestFault."""
    return _name(parse_members(contents), directory)


def _name(members: JsonObject, directory: str) -> str:
    name = members.get("name", "")
    if not isinstance(name, str):
        raise ManifestFault("a member has the wrong type")
    return name if name.strip() else directory


def declared_servers(members: JsonObject) -> Any:
    """The member `mcpServers`: a file name, a JsonObject, or something else; raises ManifestFault.

    The servers of an object become a file, so all their texts have to be valid.
    """
    servers = members.get("mcpServers")
    if isinstance(servers, JsonObject):
        _refuse_surrogates(json.dumps(servers, ensure_ascii=False))
    return servers


def _refuse_surrogates(text: str) -> None:
    """Refuse half of a pair such as `\\ud800`, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ManifestFault("lone surrogate") from None


def _refuse(constant: str) -> None:
    raise ManifestFault(f"`{constant}` is not JSON")


def _display_name(members: JsonObject) -> str:
    interface = members.get("interface")
    if interface is None:
        return ""
    if not isinstance(interface, JsonObject):
        raise ManifestFault("a member has the wrong type")
    shown = interface.get("displayName")
    if not isinstance(shown, str | None):
        raise ManifestFault("a member has the wrong type")
    return (shown or "").strip()


def _servers(contents: str, members: JsonObject) -> str | None:
    """The servers that are written in the manifest, with the numbers as they are written."""
    if not isinstance(declared_servers(members), JsonObject):
        return None
    try:
        raw = msgspec.json.decode(contents.encode(), type=_Servers).mcp_servers
    except (msgspec.DecodeError, RecursionError) as error:
        raise ManifestFault(str(error)) from None
    return msgspec.json.format(bytes(raw), indent=-1).decode()
