"""The environment variables that lead a process to its proxies."""

from __future__ import annotations

from tests.support.network import launch

from exec_server.proxy.process_proxy import named_ports, proxy_variables


def test_variables_are_those_of_the_reference() -> None:
    env = proxy_variables(launch().proxy, 1, 2)
    by_value: dict[str, set[str]] = {}
    for name, value in env.items():
        by_value.setdefault(value, set()).add(name)
    assert by_value == {
        "http://127.0.0.1:1": {
            *("HTTP_PROXY", "HTTPS_PROXY", "WS_PROXY", "WSS_PROXY"),
            *("http_proxy", "https_proxy", "ws_proxy", "wss_proxy"),
            *("YARN_HTTP_PROXY", "YARN_HTTPS_PROXY", "PIP_PROXY", "BUNDLE_HTTP_PROXY"),
            *("BUNDLE_HTTPS_PROXY", "DOCKER_HTTP_PROXY", "DOCKER_HTTPS_PROXY"),
            *("npm_config_http_proxy", "npm_config_https_proxy", "npm_config_proxy"),
            *("NPM_CONFIG_HTTP_PROXY", "NPM_CONFIG_HTTPS_PROXY", "NPM_CONFIG_PROXY"),
        },
        "socks5h://127.0.0.1:2": {"ALL_PROXY", "all_proxy", "FTP_PROXY", "ftp_proxy"},
        "": {"NO_PROXY", "no_proxy", "npm_config_noproxy", "NPM_CONFIG_NOPROXY", "BUNDLE_NO_PROXY"},
        "1": {"CODEX_NETWORK_PROXY_ACTIVE", "NODE_USE_ENV_PROXY"},
        "0": {"CODEX_NETWORK_ALLOW_LOCAL_BINDING"},
        "true": {"ELECTRON_GET_USE_PROXY"},
    }


def test_local_binding_and_no_socks() -> None:
    env = proxy_variables(launch(allowLocalBinding=True).proxy, 1, None)
    assert env["ALL_PROXY"] == env["FTP_PROXY"] == "http://127.0.0.1:1"
    assert env["CODEX_NETWORK_ALLOW_LOCAL_BINDING"] == "1"
    assert env["NO_PROXY"] == ("localhost,127.0.0.1,::1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16")


def test_ports_that_variables_name() -> None:
    env = {
        "HTTP_PROXY": "http://127.0.0.1:1",
        "https_proxy": "HTTP://user:word@localhost:2/",
        "ALL_PROXY": "socks5h://127.0.0.1:3",
        "FTP_PROXY": "http://127.0.0.2:4",
        "npm_config_proxy": "http://127.0.0.1",
        "OTHER": "http://127.0.0.1:5",
    }
    assert named_ports(env) == {1, 2, 3}
