"""initialize, and the description of the environment in its result."""

from __future__ import annotations

from typing import ClassVar, NewType

from exec_server.protocol.decoding import U32, Call, EmptyResult, Params, Result

SessionId = NewType("SessionId", str)


class Shell(Result, frozen=True):
    """The login shell of the server's user."""

    name: str
    path: str


class Capabilities(Result, frozen=True):
    """Features of the server; clients treat an absent flag as false."""

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
    # Extensions: see docs/protocol.md.
    process_binary: bool = False
    process_close_stdin: bool = False
    process_resize: bool = False
    process_signals: bool = False
    process_list: bool = False
    process_merge_stderr: bool = False
    process_read_loss: bool = False
    process_flow_control: bool = False
    process_detach: bool = False
    process_pid: bool = False
    process_terminate_exited: bool = False
    fs_append: bool = False
    fs_apply_patch: bool = False
    fs_binary: bool = False
    fs_chmod: bool = False
    fs_create: bool = False
    fs_disk_usage: bool = False
    fs_edit: bool = False
    fs_glob: bool = False
    fs_grep: bool = False
    fs_grep_counts: bool = False
    fs_list: bool = False
    fs_list_owners: bool = False
    fs_rename: bool = False
    fs_resolve: bool = False
    fs_set_times: bool = False
    fs_symlink: bool = False
    fs_watch: bool = False
    port_forward: bool = False
    other_users: bool = False
    session_close: bool = False
    session_retention: bool = False


class EnvironmentInfo(Result, frozen=True):
    """What a server says about itself and its machine."""

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
    omissible: ClassVar[tuple[str, ...]] = ("resume_session_id",)
    named_only: ClassVar[tuple[str, ...]] = ("session_retention_seconds", "binary_output")
    client_name: str
    resume_session_id: str | None = None
    # Extensions: `sessionRetention`, and `processBinary` (send output as binary messages).
    session_retention_seconds: U32 | None = None
    binary_output: bool = False


class InitializeResult(Result, frozen=True, omit_defaults=True):
    session_id: SessionId
    environment_info: EnvironmentInfo
    session_retention_seconds: int | None = None  # granted, if it was asked for


INITIALIZE = Call("initialize", InitializeParams, InitializeResult)
INFO: Call[None, EnvironmentInfo] = Call("environment/info", None, EnvironmentInfo)
CLOSE: Call[None, EmptyResult] = Call("session/close", None, EmptyResult)
STATUS: Call[None, EnvironmentStatus] = Call("environment/status", None, EnvironmentStatus)
