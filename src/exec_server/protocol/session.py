"""initialize, and the environment a server describes in its answer."""

from __future__ import annotations

from typing import ClassVar, NewType

from exec_server.protocol.method import Call
from exec_server.protocol.wire import Params, Result

SessionId = NewType("SessionId", str)


class Shell(Result, frozen=True):
    name: str
    path: str


class Capabilities(Result, frozen=True):
    """Only what works is true; clients take an absent flag as false."""

    network_proxy_launch: bool = False
    network_proxy_review_domains: bool = False
    credential_masking: bool = False
    credential_masking_custom_providers: bool = False
    capability_discovery_sandbox: bool = False
    fs_watch_missing: bool = False
    capability_discovery_v2: bool = False
    environment_config_read: bool = False
    http_header_env_vars: bool = False
    sandboxed_file_streaming: bool = False
    file_write_streaming: bool = False
    shell_snapshot_v2: bool = False
    windows_mxc: bool = False
    linux_root_write_preserves_devices: bool = False
    linux_approved_root_write_preserves_restrictions: bool = False
    # From here on ours alone: see the extensions in docs/protocol.md.
    process_close_stdin: bool = False
    process_resize: bool = False
    process_signals: bool = False
    process_list: bool = False
    process_read_loss: bool = False


class EnvironmentInfo(Result, frozen=True):
    shell: Shell
    executor_version: str
    provider_id: str
    cwd: str | None
    user_home_dir: str | None
    platform_os: str
    prepend_path_dirs: list[str]
    temporary_directories: list[str]
    temp_dir: str
    capabilities: Capabilities


class EnvironmentStatus(Result, frozen=True):
    status: str


class InitializeParams(Params, frozen=True):
    wire_name: ClassVar[str] = "InitializeParams"
    omissible: ClassVar[tuple[str, ...]] = ("resume_session_id",)
    client_name: str
    resume_session_id: str | None = None


class InitializeResult(Result, frozen=True):
    session_id: SessionId
    environment_info: EnvironmentInfo


INITIALIZE = Call("initialize", InitializeParams, InitializeResult)
INFO: Call[None, EnvironmentInfo] = Call("environment/info", None, EnvironmentInfo)
STATUS: Call[None, EnvironmentStatus] = Call("environment/status", None, EnvironmentStatus)
