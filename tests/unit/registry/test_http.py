"""The HTTP client: what it sends, what it keeps, and how it fails."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from tests.support.http_server import Answer, HttpServer, answer, hang_up, serving, silence

from exec_server.net import http_client
from exec_server.registry import http
from exec_server.registry.http import CompleteResponse, HttpClient, HttpFailed, ResponseTooLarge

_JSON = [("content-type", "application/json"), ("accept", "*/*")]


def _run(job: Callable[[HttpServer, HttpClient], Awaitable[None]], *answers: Answer) -> HttpServer:
    async def run() -> HttpServer:
        client = HttpClient()
        try:
            async with serving(*answers) as server:
                await job(server, client)
                return server
        finally:
            await client.close()

    return asyncio.run(run())


def _failure(*answers: Answer) -> HttpFailed:
    failures = []

    async def job(server: HttpServer, client: HttpClient) -> None:
        with pytest.raises(HttpFailed) as failed:
            await client.request("POST", server.url + "/x", _JSON, b"{}")
        failures.append(failed.value)
        failed.value.text = failed.value.text.replace(server.url, "URL")

    _run(job, *answers)
    return failures[0]


def test_request_and_reply() -> None:
    async def job(server: HttpServer, client: HttpClient) -> None:
        reply = await client.request("POST", server.url + "/a%2Fb?c=d", _JSON, b"{}")
        expected = [("content-length", "2"), ("x-thing", "1")]
        assert reply == CompleteResponse(201, "Reason", expected, b"ok")

    server = _run(job, answer(201, b"ok", "X-Thing: 1"))
    request = server.requests[0]
    assert request.line == "POST /a%2Fb?c=d HTTP/1.1"
    assert request.headers == [
        ("host", server.url.removeprefix("http://")),
        *_JSON,
        ("content-length", "2"),
    ]
    assert request.body == b"{}"


def test_connections_are_kept() -> None:
    async def job(server: HttpServer, client: HttpClient) -> None:
        for _ in range(3):
            await client.request("POST", server.url, _JSON, b"{}")
        await client.request("GET", server.url, [])

    server = _run(job, answer(200))
    assert [request.connection for request in server.requests] == [1, 1, 1, 1]
    assert server.requests[-1].header("content-length") is None


def test_connections_that_must_close_are_not_kept() -> None:
    async def job(server: HttpServer, client: HttpClient) -> None:
        for _ in range(2):
            await client.request("GET", server.url, [])

    assert _run(job, answer(200, b"", "connection: close")).connections == 2


def test_answer_without_a_length_ends_with_its_connection() -> None:
    async def until_closed(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        await hang_up(writer)

    async def job(server: HttpServer, client: HttpClient) -> None:
        assert (await client.request("GET", server.url, [])).body == b"all of it"

    _run(job, until_closed)


def test_chunked_answer_and_interim_answers() -> None:
    async def job(server: HttpServer, client: HttpClient) -> None:
        reply = await client.request("GET", server.url, [])
        assert (reply.status, reply.body) == (200, b"abc")

    text = b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    _run(job, text + b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n")


def test_a_kept_connection_that_died_is_replaced_once() -> None:
    async def job(server: HttpServer, client: HttpClient) -> None:
        await client.request("GET", server.url, [])
        assert (await client.request("GET", server.url, [])).body == b"second"

    server = _run(job, answer(200), hang_up, answer(200, b"second"))
    assert [request.connection for request in server.requests] == [1, 1, 2]


def test_a_new_connection_that_dies_is_not_replaced() -> None:
    async def job(server: HttpServer, client: HttpClient) -> None:
        await client.request("GET", server.url, [])
        with pytest.raises(HttpFailed, match="error sending request"):
            await client.request("GET", server.url, [])

    server = _run(job, answer(200), hang_up, hang_up)
    assert [request.connection for request in server.requests] == [1, 1, 2]


def test_a_kept_connection_that_dies_in_its_answer_is_not_replaced() -> None:
    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200")
        await hang_up(writer)

    async def job(server: HttpServer, client: HttpClient) -> None:
        await client.request("GET", server.url, [])
        with pytest.raises(HttpFailed):
            await client.request("GET", server.url, [])

    assert len(_run(job, answer(200), half).requests) == 2


def test_old_connections_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job(server: HttpServer, client: HttpClient) -> None:
        await client.request("GET", server.url, [])
        monkeypatch.setattr(http_client, "IDLE_SECONDS", -1.0)
        await client.request("GET", server.url, [])

    assert _run(job, answer(200)).connections == 2


def test_few_connections_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "IDLE_CONNECTIONS", 2)

    async def job(server: HttpServer, client: HttpClient) -> None:
        async def four() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(client.request("GET", server.url, []))

        await four()
        assert server.connections == 4
        await four()

    assert _run(job, answer(200)).connections == 6


def test_an_answer_that_nobody_asked_for_is_given_to_nobody() -> None:
    async def job(server: HttpServer, client: HttpClient) -> None:
        await client.request("GET", server.url, [])
        assert (await client.request("GET", server.url, [])).body == b"right"

    server = _run(job, answer(200) + answer(200, b"wrong"), answer(200, b"right"))
    assert server.connections == 2


def test_redirects_are_answers() -> None:
    async def job(server: HttpServer, client: HttpClient) -> None:
        assert (await client.request("GET", server.url, [])).status == 302

    assert len(_run(job, answer(302, b"", "location: /elsewhere")).requests) == 1


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.05)
    failure = _failure(silence)
    assert (failure.text, failure.causes) == ("route-aware request timed out", ())


def test_time_is_limited_for_the_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slowly(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n1")
        await silence(writer)

    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.05)
    assert _failure(slowly).text == "route-aware request timed out"


def test_answers_are_limited() -> None:
    failure = _failure(answer(200, bytes(http.BODY_BYTES + 1)))
    assert isinstance(failure, ResponseTooLarge)
    assert failure.text == "response body exceeds 1048576 bytes"


def test_heads_are_limited() -> None:
    assert _failure(b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000).causes[0] == (
        "client error (SendRequest)"
    )


def test_answers_up_to_the_limit() -> None:
    async def job(server: HttpServer, client: HttpClient) -> None:
        reply = await client.request("GET", server.url, [])
        assert len(reply.body) == http.BODY_BYTES

    _run(job, answer(200, bytes(http.BODY_BYTES)))


def test_cut_off_answer() -> None:
    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
        await hang_up(writer)

    failure = _failure(half)
    assert failure.text == "error decoding response body"
    assert failure.causes[0] == "error reading a body from connection"


def test_no_answer() -> None:
    failure = _failure(hang_up)
    assert failure.text == "error sending request for url (URL/x)"
    closed = "connection closed before message completed"
    assert failure.causes == ("client error (SendRequest)", closed)


def test_no_http() -> None:
    failure = _failure(b"SSH-2.0-something\r\n\r\n")
    assert failure.text == "error sending request for url (URL/x)"
    assert failure.causes[0] == "client error (SendRequest)"


def _refused(url: str, *headers: tuple[str, str]) -> HttpFailed:
    async def run() -> HttpFailed:
        client = HttpClient()
        with pytest.raises(HttpFailed) as failed:
            await client.request("POST", url, headers)
        await client.close()
        return failed.value

    return asyncio.run(run())


def test_nobody_listens() -> None:
    with socket.socket() as unused:  # bound, so that nobody else can listen there
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        failure = _refused(url)
    assert failure.text == f"error sending request for url ({url})"
    refused = "Connection refused (os error 111)"
    assert failure.causes == ("client error (Connect)", "tcp connect error", refused)


def test_no_tls_there() -> None:
    async def speak_first(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"no TLS here\r\n")
        writer.close()

    async def run() -> HttpFailed:
        client = HttpClient()
        async with await asyncio.start_server(speak_first, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            with pytest.raises(HttpFailed, match="error sending request") as failed:
                await client.request("GET", f"https://127.0.0.1:{port}", [])
        return failed.value

    failure = asyncio.run(run())
    assert failure.causes[0] == "client error (Connect)"
    assert "SSL" in failure.causes[1]


def test_roots_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEX_CA_CERTIFICATE", "/no/such/file")
    assert _refused("https://127.0.0.1:1/").causes[-1] == "No such file or directory (os error 2)"


@pytest.mark.parametrize("url", ["", "x", "ftp://localhost", "http://", "http://u:p@localhost"])
def test_url_that_is_none(url: str) -> None:
    assert _refused(url).text == f"builder error for url ({url})"


def test_header_that_cannot_be_sent_is_not_shown() -> None:
    failure = _refused("http://127.0.0.1:1/", ("authorization", "Bearer s3cret\r\nx: y"))
    assert "s3cret" not in f"{failure.text} {failure.causes}"
    assert failure.causes == ("a header has an invalid value",)


def _certificate(path: Path) -> ssl.SSLContext:
    """A server's side with a certificate that only `path` vouches for."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    certificate = (
        builder.not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(certificate.public_bytes(Encoding.PEM))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.with_suffix(".key").write_bytes(private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, path.with_suffix(".key"))
    return context


def test_roots_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    roots = tmp_path / "roots.pem"
    tls = _certificate(roots)

    async def ask(times: int) -> HttpServer:
        client = HttpClient()
        try:
            async with serving(answer(200, b"safe"), tls=tls) as server:
                for _ in range(times):
                    assert (await client.request("GET", server.url, [])).body == b"safe"
                return server
        finally:
            await client.close()

    with pytest.raises(HttpFailed) as failed:
        asyncio.run(ask(1))
    assert "CERTIFICATE_VERIFY_FAILED" in failed.value.causes[-1]
    monkeypatch.setenv("SSL_CERT_FILE", "/no/such/file")
    monkeypatch.setenv("CODEX_CA_CERTIFICATE", str(roots))
    assert asyncio.run(ask(2)).connections == 1


def test_a_proxy_is_told_the_whole_url(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job(server: HttpServer, client: HttpClient) -> None:
        proxy = server.url.replace("http://", "http://user:word@")
        monkeypatch.setenv("HTTP_PROXY", proxy)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        await client.request("POST", "http://registry.test:81/x?y", [], b"{}")

    request = _run(job, answer(200)).requests[0]
    assert request.line == "POST http://registry.test:81/x?y HTTP/1.1"
    assert request.header("host") == "registry.test:81"
    assert request.header("proxy-authorization") == "Basic dXNlcjp3b3Jk"


def test_cancelled_request_leaves_no_connection() -> None:
    async def job(server: HttpServer, client: HttpClient) -> None:
        asked = asyncio.Event()

        async def note(writer: asyncio.StreamWriter) -> None:
            asked.set()
            await silence(writer)

        server.answers[:] = [note]
        async with asyncio.TaskGroup() as group:
            task = group.create_task(client.request("GET", server.url, []))
            await asked.wait()
            task.cancel()
        server.answers[:] = [answer(200)]
        await client.request("GET", server.url, [])

    assert _run(job, b"").connections == 2


def test_closed_client_keeps_nothing() -> None:
    async def job(server: HttpServer, client: HttpClient) -> None:
        await client.close()
        for _ in range(2):
            await client.request("GET", server.url, [])

    assert _run(job, answer(200)).connections == 2
