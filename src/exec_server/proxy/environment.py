"""The environment variables that lead a process to its proxies. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from exec_server.protocol.network import ProxySettings

_HTTP: Final = (
    *("HTTP_PROXY", "HTTPS_PROXY", "WS_PROXY", "WSS_PROXY"),
    *("http_proxy", "https_proxy", "ws_proxy", "wss_proxy"),
    *("YARN_HTTP_PROXY", "YARN_HTTPS_PROXY", "PIP_PROXY"),
    *("BUNDLE_HTTP_PROXY", "BUNDLE_HTTPS_PROXY", "DOCKER_HTTP_PROXY", "DOCKER_HTTPS_PROXY"),
    *("npm_config_http_proxy", "npm_config_https_proxy", "npm_config_proxy"),
    *("NPM_CONFIG_HTTP_PROXY", "NPM_CONFIG_HTTPS_PROXY", "NPM_CONFIG_PROXY"),
)
_SOCKS: Final = ("ALL_PROXY", "all_proxy", "FTP_PROXY", "ftp_proxy")
_EXCEPTIONS: Final = (
    *("NO_PROXY", "no_proxy", "npm_config_noproxy", "NPM_CONFIG_NOPROXY", "BUNDLE_NO_PROXY"),
)
_LOCAL: Final = "localhost,127.0.0.1,::1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16"
_PROXY_URL: Final = re.compile(r"[a-z0-9]+://(?:[^/@]*@)?(?:127\.0\.0\.1|localhost):([0-9]{1,5})/?")


def proxy_variables(
    settings: ProxySettings, http_port: int, socks_port: int | None
) -> dict[str, str]:
    """The variables of a process with proxies on these ports of 127.0.0.1."""
    http = f"http://127.0.0.1:{http_port}"
    socks = http if socks_port is None else f"socks5h://127.0.0.1:{socks_port}"
    exceptions = _LOCAL if settings.allow_local_binding else ""
    return {
        **dict.fromkeys(_HTTP, http),
        **dict.fromkeys(_SOCKS, socks),
        **dict.fromkeys(_EXCEPTIONS, exceptions),
        "CODEX_NETWORK_PROXY_ACTIVE": "1",
        "CODEX_NETWORK_ALLOW_LOCAL_BINDING": "1" if settings.allow_local_binding else "0",
        "NODE_USE_ENV_PROXY": "1",
        "ELECTRON_GET_USE_PROXY": "true",
    }


def named_ports(env: Mapping[str, str]) -> set[int]:
    """The ports of this machine that the proxy variables of an environment name."""
    found = (_PROXY_URL.fullmatch(env.get(name, "").lower()) for name in (*_HTTP, *_SOCKS))
    return {int(each[1]) for each in found if each is not None}
