"""http/request: which redirects are followed, where to, and what goes along."""

from __future__ import annotations

import base64

import pytest

from tests.conformance.http_requests import INTERNAL, ask, failure_of, header_list
from tests.conformance.origin import Origin, reply, running
from tests.support.client import Client, b64

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT"])
def test_redirected_method_and_body(
    client: Client, origin: Origin, status: int, method: str
) -> None:
    url = origin.on("/x", reply(status, b"", "location: /y"))
    types = header_list(("Content-Type", "a/b"), ("X-Own", "1"))
    ask(client, url, method=method, bodyBase64=b64("hello"), headers=types)
    _, request = origin.taken()
    changed = status == 303 or (status in (301, 302) and method == "POST")
    expected = "GET" if changed and method != "HEAD" else method
    assert request.line == f"{expected} /y HTTP/1.1"
    assert request.body == (b"" if changed else b"hello")
    assert request.values("content-type") == ([] if changed else ["a/b"])
    assert request.values("x-own") == ["1"]


@pytest.mark.parametrize("status", [300, 304, 305])
def test_other_statuses_are_no_redirects(client: Client, origin: Origin, status: int) -> None:
    url = origin.on("/x", reply(status, b"", "location: /y"))
    assert ask(client, url)["status"] == status
    assert len(origin.taken()) == 1


_FOR_ONE_SERVER = ("authorization", "cookie", "cookie2", "proxy-authorization", "www-authenticate")


def test_headers_on_the_way_to_the_same_server(client: Client, origin: Origin) -> None:
    headers = header_list(("Referer", "other"), *((name, "1") for name in _FOR_ONE_SERVER))
    url = origin.on("/x?q", reply(302, b"", "location: /y"))
    ask(client, url + "#fragment", headers=headers)
    _, request = origin.taken()
    assert [request.values(name) for name in _FOR_ONE_SERVER] == [["1"]] * 5
    assert request.values("referer") == [url]


def test_headers_on_the_way_to_another_server(client: Client, origin: Origin) -> None:
    headers = header_list(("X-Own", "1"), *((name, "1") for name in _FOR_ONE_SERVER))
    with running() as other:
        url = origin.on("/x", reply(302, b"", f"location: {other.url}/y"))
        ask(client, url, headers=headers)
        [request] = other.taken()
    assert [request.values(name) for name in _FOR_ONE_SERVER] == [[]] * 5
    assert request.values("x-own") == ["1"]
    assert request.values("referer") == [origin.url + "/"]


def test_ten_redirects_are_followed(client: Client, origin: Origin) -> None:
    for number in range(1, 12):
        origin.on(f"/{number}", reply(302, b"", f"location: /{number - 1}"))
    assert ask(client, origin.url + "/10")["status"] == 200
    assert len(origin.taken()) == 11
    text = "http/request failed: too many redirects"
    assert failure_of(client, origin.url + "/11") == (INTERNAL, text)
    assert len(origin.taken()) == 11


def test_redirects_are_not_followed_on_demand(client: Client, origin: Origin) -> None:
    url = origin.on("/x", reply(302, b"see there", "location: /y"))
    result = ask(client, url, redirectPolicy="stop")
    assert (result["status"], base64.b64decode(result["bodyBase64"])) == (302, b"see there")
    assert len(origin.taken()) == 1


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("y", "/a/y"),
        ("../y", "/y"),
        ("?z", "/a/b?z"),
        (" /sp ce ", "/sp%20ce"),
        ("/c\\d", "/c/d"),
        ("http:y", "/a/y"),
    ],
)
def test_relative_locations(client: Client, origin: Origin, location: str, target: str) -> None:
    ask(client, origin.on("/a/b", reply(302, b"", f"location: {location}")))
    assert origin.taken()[1].line == f"GET {target} HTTP/1.1"


@pytest.mark.parametrize(
    "line", ["x: y", "location: http://", "location: http://[", "location: /ü"]
)
def test_location_that_leads_nowhere(client: Client, origin: Origin, line: str) -> None:
    assert ask(client, origin.on("/x", reply(302, b"", line)))["status"] == 302


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://x/", "data:,x"])
def test_location_of_another_scheme(client: Client, origin: Origin, location: str) -> None:
    url = origin.on("/x", reply(302, b"", f"location: {location}"))
    text = f"redirect target uses unsupported URL scheme: {location.partition(':')[0]}"
    assert failure_of(client, url) == (INTERNAL, f"http/request failed: {text}")
