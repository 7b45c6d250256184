"""http/request: what is sent, with which secrets, and by which way: proxies and TLS."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.conformance.http_requests import (
    INTERNAL,
    INVALID_PARAMS,
    OK,
    ask,
    body_of,
    failure_of,
    header_list,
    only_ours,
    params_for,
    streamed,
)
from tests.conformance.origin import WAIT, WATCH, Origin, reply, running
from tests.support.client import (
    DEFAULT_TIMEOUT,
    Client,
    Message,
    Server,
    b64,
    scaled,
    start_server,
    start_stdio,
)

pytestmark = pytest.mark.quick

# ---- requests -------------------------------------------------------------------------


def test_request_as_it_is_sent(client: Client, origin: Origin) -> None:
    headers = header_list(
        ("X-A", "1"), ("Accept", "text/x"), ("X-A", "2"), ("x-u", "ü"), ("X-E", "")
    )
    url = f"HTTP://us:p%40@127.0.0.1:{origin.port}/a/../b c?d#e"
    ask(client, url, method="put", headers=headers, bodyBase64=b64("hello"))
    [request] = origin.taken()
    assert (request.line, request.body) == ("put /b%20c?d HTTP/1.1", b"hello")
    assert sorted(request.headers) == [
        ("accept", "text/x"),
        ("authorization", "Basic dXM6cEA="),
        ("content-length", "5"),
        ("host", f"127.0.0.1:{origin.port}"),
        ("x-a", "1"),
        ("x-a", "2"),
        ("x-e", ""),
        ("x-u", "Ã¼"),
    ]


def test_accept_is_all_that_is_added(client: Client, origin: Origin) -> None:
    ask(client, origin.url)
    [request] = origin.taken()
    assert sorted(request.headers) == [("accept", "*/*"), ("host", f"127.0.0.1:{origin.port}")]


def test_a_post_without_a_body_says_so(client: Client, origin: Origin, kind: str) -> None:
    only_ours(kind, "some servers answer 411 to the reference")
    ask(client, origin.url, method="POST")
    assert origin.taken()[0].values("content-length") == ["0"]


def test_host_and_framing_of_the_clients_choice(client: Client, origin: Origin) -> None:
    chosen = header_list(("Host", "other.example"), ("Transfer-Encoding", "chunked"))
    ask(client, origin.url, method="POST", headers=chosen, bodyBase64=b64("hello"))
    [request] = origin.taken()
    assert (request.values("host"), request.body) == (["other.example"], b"hello")
    assert request.values("content-length") == []


def test_head_has_no_body(client: Client, origin: Origin) -> None:
    url = origin.on("/x", OK + b"content-length: 99\r\n\r\n")
    result = ask(client, url, method="HEAD")
    assert result["headers"] == header_list(("content-length", "99"))
    assert result["bodyBase64"] == ""


_BAD_NAME = "header name is invalid: invalid HTTP header name"
_BAD_VALUE = "header value is invalid for X-y: failed to parse header value"
_WRONG: list[tuple[Message, str]] = [
    ({"method": "bad method", "url": "nope"}, "method is invalid: invalid HTTP method"),
    ({"method": ""}, "method is invalid: invalid HTTP method"),
    ({"url": "nope", "headers": [["a b", ""]]}, "url is invalid: relative URL without a base"),
    ({"url": ""}, "url is invalid: relative URL without a base"),
    ({"url": "FTP://x/"}, "only supports http and https URLs, got ftp"),
    ({"url": "ws://x/"}, "only supports http and https URLs, got ws"),
    ({"headers": [["a b", "x\n", "NOPE"]]}, _BAD_NAME),
    ({"headers": [["", "x"]]}, _BAD_NAME),
    ({"headers": [["ü", "x"]]}, _BAD_NAME),
    ({"headers": [["X-y", "a\nb"]]}, _BAD_VALUE),
    ({"headers": [["X-y", "a\x7fb"]]}, _BAD_VALUE),
]


@pytest.mark.parametrize(("wrong", "text"), _WRONG)
def test_invalid_request(client: Client, wrong: Message, text: str) -> None:
    params = params_for("http://127.0.0.1:9/") | wrong
    assert client.failure("http/request", params) == (INVALID_PARAMS, f"http/request {text}")


_SHAPES: list[tuple[Any, str]] = [
    ({"headers": None}, "invalid type: null, expected a sequence"),
    ({"headers": ["x"]}, 'invalid type: string "x", expected struct HttpHeader'),
    ({"headers": [{"name": "A"}]}, "missing field `value`"),
    ({"bodyBase64": "!!"}, "Invalid symbol 33, offset 0."),
    ({"timeoutMs": -1}, "invalid number"),
    ({"redirectPolicy": "zz"}, "unknown variant `zz`, expected `follow` or `stop`"),
    ({"redirectPolicy": None}, "invalid type: null, expected string or map"),
    ({"streamResponse": None}, "invalid type: null, expected a boolean"),
    ({"requestId": None}, "invalid type: null, expected a string"),
]


@pytest.mark.parametrize(("wrong", "text"), _SHAPES)
def test_member_of_the_wrong_type(client: Client, wrong: Message, text: str) -> None:
    assert failure_of(client, "http://127.0.0.1:9/", **wrong) == (INVALID_PARAMS, text)


def test_members_in_an_array(client: Client, origin: Origin) -> None:
    whole = ["POST", origin.url, [["X-A", "1"]], None, None, "follow", "r"]
    assert client.call("http/request", whole)["status"] == 200
    assert origin.taken()[0].values("x-a") == ["1"]
    for count, missing in ((0, 0), (1, 1), (2, 6), (6, 6)):
        text = f"invalid length {missing}, expected struct HttpRequestParams with 8 elements"
        assert client.failure("http/request", whole[:count]) == (INVALID_PARAMS, text)


def test_not_before_the_handshake(server: Server) -> None:
    with server.connect(initialize=False) as client:
        text = "client must call initialize before using http methods"
        assert failure_of(client, "http://127.0.0.1:9/") == (-32600, text)


def test_url_that_is_too_long(client: Client) -> None:
    url = "http://127.0.0.1:9/" + "a" * 65_530
    text = f"http/request failed: builder error for url ({url})"
    assert failure_of(client, url) == (INTERNAL, text)


# ---- values from the environment ------------------------------------------------------


_VARIABLES = {"DEMO": "token", "EMPTY": "", "LINES": "a\nb"}
_FROM_ENVIRONMENT = [
    ("EMPTY", "requires a non-empty executor environment variable EMPTY"),
    ("NOPE", "requires executor environment variable NOPE"),
    ("", "requires executor environment variable "),
    ("openai_api_key", "cannot use executor environment variable openai_api_key"),
    *[
        (name, f"cannot use executor environment variable {name}")
        for name in (
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "AZURE_CLIENT_SECRET",
            "AZURE_FEDERATED_TOKEN_FILE",
            "CODEX_ACCESS_TOKEN",
            "CODEX_API_KEY",
            "CODEX_CONNECTORS_TOKEN",
            "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
            "CODEX_GUARDIAN_DECISIONS_API_KEY",
            "Codex_Guardian_Decisions_Api_Key",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "OPENAI_API_KEY",
            "OPENAI_FEDERATION_RULE_ID",
            "OPENAI_IDENTITY_TOKEN_FILE",
            "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
        )
    ],
]


def test_values_from_the_environment(kind: str, origin: Origin) -> None:
    def header(variable: str | None) -> Message:
        return {"name": "X-Key", "value": "Bearer ", "valueEnvVar": variable}

    with start_server(kind, env=_VARIABLES) as server, server.connect() as client:
        ask(client, origin.url, headers=[header("DEMO")])
        ask(client, origin.url, headers=[header(None)])
        sent = [request.values("x-key")[0].rstrip() for request in origin.taken()]
        assert sent == ["Bearer token", "Bearer"]
        for variable, text in _FROM_ENVIRONMENT:
            expected = (INVALID_PARAMS, f"http/request header X-Key {text}")
            assert failure_of(client, origin.url, headers=[header(variable)]) == expected
        text = "http/request header value is invalid for X-Key: failed to parse header value"
        failure = failure_of(client, origin.url, headers=[header("LINES")])
        assert failure == (INVALID_PARAMS, text)
        assert origin.taken() == []


def test_values_from_the_environment_stay_with_their_server(kind: str, origin: Origin) -> None:
    only_ours(kind, "the reference sends them to whoever it is redirected to")
    key = {"name": "X-Key", "value": "", "valueEnvVar": "DEMO"}
    with (
        running() as other,
        start_server(kind, env=_VARIABLES) as server,
        server.connect() as client,
    ):
        url = origin.on("/x", reply(307, b"", f"location: {other.url}/y"))
        ask(client, url, headers=[key, *header_list(("X-Own", "1"), ("host", "one.example"))])
        assert origin.taken()[0].values("x-key") == ["token"]
        [request] = other.taken()
        assert (request.values("x-key"), request.values("x-own")) == ([], ["1"])
        assert request.values("host") == [f"127.0.0.1:{other.port}"]


# ---- connections ----------------------------------------------------------------------


def test_slow_request_does_not_hold_up_others(client: Client, origin: Origin, kind: str) -> None:
    only_ours(kind, "in the reference it blocks every later request")
    slow = client.request("http/request", params_for(origin.on("/x", WAIT, reply(200, b"late"))))
    assert ask(client, origin.url)["status"] == 200
    client.failure("process/read", {"processId": "never"})
    origin.go()
    assert client.result(slow)["bodyBase64"] == b64("late")


def test_server_ends_though_a_request_is_under_way(kind: str, origin: Origin) -> None:
    only_ours(kind, "the reference waits for the answer")
    url = origin.on("/x", WATCH)
    with start_stdio(kind) as (server, client):
        client.initialize()
        client.request("http/request", params_for(url))
        origin.wait_for_request()
        server.process.terminate()
        assert server.process.wait(scaled(DEFAULT_TIMEOUT)) == 0


def test_proxy_of_the_environment(kind: str, origin: Origin) -> None:
    proxy = {"HTTP_PROXY": origin.url.replace("//", "//us:pa@")}
    with start_server(kind, env=proxy) as server, server.connect() as client:
        url = "http://some.invalid/y?z"
        origin.on(url, reply(200, b"from the proxy"))
        assert ask(client, url)["bodyBase64"] == b64("from the proxy")
    [request] = origin.taken()
    assert request.values("proxy-authorization") == ["Basic dXM6cGE="]
    assert request.values("host") == ["some.invalid"]


_HOSTS = {
    "straße.de": "xn--strae-oqa.de",
    "Bücher.example": "xn--bcher-kva.example",
    "βόλος.example": "xn--nxasmm1c.example",
    "xn--strae-oqa.de": "xn--strae-oqa.de",
    "☃.example": "xn--n3h.example",
    "ü_b-.example": "xn--_b--goa.example",
    "\uff41\uff42\uff43。example": "abc.example",
    "a\u00adb%2Eexample": "ab.example",
    "8.0x8.2056": "8.8.8.8",
}


def test_host_is_the_one_that_a_browser_asks(kind: str, origin: Origin) -> None:
    """The proxy sees which host a URL means, without any name being looked up."""
    with start_server(kind, env={"HTTP_PROXY": origin.url}) as server, server.connect() as client:
        for spelling, host in _HOSTS.items():
            origin.on(f"http://{host}/", reply(200, b""))
            assert ask(client, f"http://{spelling}/")["status"] == 200
            assert origin.taken()[-1].values("host") == [host]


_NO_HOSTS = [
    *(
        "",
        "a:b",
        "[::1",
        "256.0.0.1",
        "a b",
        "a\u200cb.example",
        "\u0301a.example",
        "xn--a.example",
    ),
    *("אa.example", "℀.example"),
]


@pytest.mark.parametrize("host", _NO_HOSTS)
def test_host_that_no_browser_asks(client: Client, host: str) -> None:
    code, text = failure_of(client, f"http://{host}/")
    assert code == INVALID_PARAMS
    assert text.startswith("http/request url is invalid: ")  # the rest is the parser's


def test_no_proxy_for_this_machine_itself(kind: str, origin: Origin) -> None:
    only_ours(kind, "the reference asks the proxy for its own machine too")
    proxy = {"HTTP_PROXY": "http://127.0.0.1:9"}
    with start_server(kind, env=proxy) as server, server.connect() as client:
        assert ask(client, origin.url)["status"] == 200


def _authority(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A root of trust for this test alone, and a server's side that it vouches for."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in ("ca", "site")]
    now = datetime.now(UTC)

    def issue(index: int, extension: x509.ExtensionType) -> x509.Certificate:
        builder = x509.CertificateBuilder(
            names[0], names[index], keys[index].public_key(), x509.random_serial_number()
        )
        builder = builder.not_valid_before(now - timedelta(days=1))
        builder = builder.not_valid_after(now + timedelta(days=1))
        return builder.add_extension(extension, critical=True).sign(keys[0], hashes.SHA256())

    root = issue(0, x509.BasicConstraints(ca=True, path_length=None))
    site = issue(1, x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]))
    (folder / "ca.pem").write_bytes(root.public_bytes(Encoding.PEM))
    private = keys[1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "site.pem").write_bytes(site.public_bytes(Encoding.PEM) + private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "site.pem")
    return folder / "ca.pem", context


def test_tls(kind: str, folder: Path, server: Server, origin: Origin) -> None:
    roots, context = _authority(folder)
    with running(context) as secure:
        url = secure.on("/x", reply(302, b"", f"location: {origin.url}/y"))
        with server.connect() as client:
            text = f"http/request failed: error sending request for url ({url})"
            assert failure_of(client, url) == (INTERNAL, text)
        for name in ("SSL_CERT_FILE", "CODEX_CA_CERTIFICATE"):
            trust = {name: str(roots)}
            with start_server(kind, env=trust) as trusting, trusting.connect() as client:
                assert ask(client, secure.url)["bodyBase64"] == b64("ok")
                assert body_of(streamed(client, secure.url)[1]) == b"ok"
                assert ask(client, url)["status"] == 200
            assert origin.taken()[-1].values("referer") == []
