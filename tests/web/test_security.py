"""Clients that are slow, disconnected, hostile or without a token."""

import itertools
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import numpy as np
import pytest

from ecinn.web.catalogue import Catalogue, ServedModel
from ecinn.web.security import CONTENT_POLICY
from ecinn.web.settings import Settings
from helpers.server import (
    FAST,
    PATIENCE,
    ask,
    connect,
    everything,
    held,
    metric,
    running,
    wait_until,
)

pytestmark = pytest.mark.slow

IMPATIENT = Settings(
    threads=1,
    join_seconds=0.001,
    head_seconds=1.0,
    body_seconds=1.5,
    body_bytes=20_000,
    bodies_bytes=30_000,
    hosts=("given.example",),
)


@pytest.fixture(scope="module")
def address(catalogue: Catalogue) -> Iterator[str]:
    with running(catalogue, IMPATIENT, token="correct horse") as address:
        yield address


TOKEN = {"Authorization": "Bearer correct horse"}


def head(length: int | None, path: str = "/api/v1/predict") -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer correct horse\r\n"
        f"Content-Type: application/json\r\n{size}\r\n\r\n"
    ).encode()


def test_every_answer_has_the_headers(address: str) -> None:
    paths = ("/", "/health", "/docs", "/openapi.json", "/nothing", "/api/v1/models", "/metrics")
    for path in paths:
        for headers in (TOKEN, {}):
            answer = httpx.get(address + path, headers=headers)
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cross-origin-opener-policy"] == "same-origin"
            assert answer.headers["x-frame-options"] == "DENY"
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "server" not in answer.headers
            assert "access-control-allow-origin" not in answer.headers
    assert httpx.get(address).headers["content-security-policy"] == CONTENT_POLICY
    cross = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(f"{address}/api/v1/predict", headers=TOKEN | cross)
    assert preflight.status_code == 405
    assert "access-control-allow-origin" not in preflight.headers


def test_the_token_guards_the_api_and_nothing_else(address: str) -> None:
    for path in ("/", "/health", "/openapi.json", "/docs"):
        assert httpx.get(address + path).status_code != 401
    wrong = [
        "",
        "Bearer",
        "Bearer wrong",
        "Basic correct horse",
        "Bearer correct horsé",
        "x" * 900,
    ]
    for path in ("/api/v1/models", "/metrics", "/api/nothing"):
        assert httpx.get(address + path, headers=TOKEN).status_code in (200, 404)
        for authorization in wrong:
            given = {"Authorization": authorization.encode()}
            answer = httpx.get(address + path, headers=given)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert list(answer.json()) == ["error"]
    assert httpx.post(f"{address}/api/v1/predict", content=b"x" * 10_000).status_code == 401


def test_other_host_names_are_refused(address: str) -> None:
    evil = httpx.get(f"{address}/health", headers={"Host": "evil.example"})
    assert evil.status_code == 400
    port = address.rpartition(":")[2]
    for name in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "Given.example:80"):
        assert httpx.get(f"{address}/health", headers={"Host": name}).status_code == 200
    assert metric(address, 'ecinn_refused_total{reason="host"}', **TOKEN) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_the_address_that_a_client_connected_to_is_a_host_name(catalogue: Catalogue) -> None:
    with running(catalogue, FAST, host="0.0.0.0") as address:
        other = address.replace("127.0.0.1", "127.0.0.9")
        assert httpx.get(f"{other}/health").status_code == 200
        wrong = {"Host": other.removeprefix("http://")}
        assert httpx.get(f"{address}/health", headers=wrong).status_code == 400


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("given.example", "http://given.example", 200),
        ("given.example", "https://given.example", 200),
        ("given.example:443", "https://given.example", 200),
        ("given.example:8000", "http://given.example:8000", 200),
        ("given.example:8000", "http://given.example:3000", 403),
        ("given.example:8000", "http://given.example", 403),
        ("given.example", "http://evil.example", 403),
        ("given.example", "http://given.example.evil.example", 403),
        ("given.example", "null", 403),
        ("given.example", "", 403),
    ],
)
def test_posts_are_taken_from_the_own_origin_only(
    address: str, host: str, origin: str, status: int
) -> None:
    headers = TOKEN | {"Host": host, "Origin": origin}
    answer = httpx.post(f"{address}/api/v1/predict", json=ask(), headers=headers)
    assert answer.status_code == status
    assert httpx.get(f"{address}/health", headers=headers).status_code == 200


@pytest.mark.parametrize("length", [10**9, None])
def test_large_bodies_are_refused_before_they_are_complete(
    address: str, length: int | None
) -> None:
    with connect(address) as connection:
        connection.sendall(head(length))
        if length is None:
            part = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
            connection.sendall(part * 2)
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'{"error":' in answer


def test_the_size_of_all_bodies_is_bounded(address: str) -> None:
    with connect(address) as first, connect(address) as second:
        for connection in (first, second):
            connection.sendall(head(19_000) + b"x" * 18_000)
        answers = [everything(first), everything(second)]
    statuses = sorted(answer.split()[1] for answer in answers)
    assert statuses == [b"408", b"429"]
    assert httpx.post(f"{address}/api/v1/predict", json=ask(), headers=TOKEN).status_code == 200


@pytest.mark.parametrize("path", ["/api/v1/predict", "/", "/nothing"])
def test_slow_bodies_time_out(address: str, path: str) -> None:
    started = time.monotonic()
    with connect(address) as connection:
        connection.sendall(head(100, path) + b"{")
        answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert time.monotonic() - started > IMPATIENT.body_seconds / 2


def test_slow_headers_time_out_also_on_a_kept_connection(address: str) -> None:
    with connect(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHo")
        assert everything(connection) == b""
    with connect(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert b"200 OK" not in everything(connection)


def test_garbage_is_refused_and_the_service_survives(address: str) -> None:
    generator = np.random.default_rng(0)
    bodies = [
        b"",
        b"null",
        b"[" * 10_000,
        b'{"model":"mnist","images":[{"sample":' + b"9" * 5000 + b"}]}",
        b'{"model":"mnist","images":[{"sample":NaN}]}',
        b'{"model":"\\ud800","images":[{"sample":1}]}',
        b'\xff\xfe{"model"',
        generator.bytes(5000),
    ]
    kinds = ("application/json", "multipart/form-data; boundary=x", "text/plain", "")
    paths = ("predict", "explain", "film", "sheet", "explain/files")
    with httpx.Client(headers=TOKEN) as client:
        for what, kind, body in itertools.product(paths, kinds, bodies):
            answer = client.post(
                f"{address}/api/v1/{what}", content=body, headers={"Content-Type": kind}
            )
            assert 400 <= answer.status_code < 500
            assert list(answer.json()) == ["error"]
            assert "\n" not in answer.json()["error"]
    for junk in (generator.bytes(3000), b"\r\n\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with connect(address) as connection:
            connection.sendall(junk)
            assert b"Traceback" not in everything(connection)
    assert httpx.get(f"{address}/health").status_code == 200


def test_request_paths_never_reach_the_file_system(address: str) -> None:
    for path in (
        "static/../../model.py",
        "static/..%2f..%2fmodel.py",
        "static//etc/passwd",
    ):
        with connect(address) as connection:
            request = f"GET /{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            connection.sendall(request.encode())
            assert everything(connection).startswith(b"HTTP/1.1 404")


def test_work_ends_when_its_client_disconnects(served: ServedModel) -> None:
    catalogue, classifier = held(served)
    classifier.gate.clear()
    settings = Settings(threads=1, join_seconds=0.0, passes=1, part_values=784, part_images=1)
    body = json.dumps(ask(targets="all")).encode()
    question = head(len(body), "/api/v1/explain") + body
    with running(catalogue, settings) as address:
        with connect(address) as leaving:
            leaving.sendall(question)
            wait_until(lambda: classifier.decoded)
            with connect(address) as queued:
                queued.sendall(question)
                wait_until(lambda: httpx.get(f"{address}/health").json()["queue"] == 1)
        gone = 'ecinn_requests_total{route="/api/v1/explain",status="499"}'
        wait_until(lambda: metric(address, gone) == 2)
        assert httpx.get(f"{address}/health").json()["queue"] == 0
        classifier.gate.set()
        wait_until(lambda: metric(address, 'ecinn_joined_requests_count{queue="explain"}') == 1)
        # Only the part of the first request that was being decoded.
        assert classifier.decoded == [1]
        assert classifier.encoded == [1]
        later = httpx.post(f"{address}/api/v1/explain", json=ask(), timeout=PATIENCE)
        assert later.status_code == 200


def test_an_answer_that_takes_too_long_is_cancelled(served: ServedModel) -> None:
    catalogue, classifier = held(served)
    classifier.gate.clear()
    settings = Settings(threads=1, join_seconds=0.0, answer_seconds=0.5)
    with running(catalogue, settings) as address:
        late = httpx.post(f"{address}/api/v1/explain", json=ask(), timeout=PATIENCE)
        assert late.status_code == 503
        assert "ask for less" in late.json()["error"]
        assert httpx.get(f"{address}/health").json()["queue"] == 0
        classifier.gate.set()


def test_internal_errors_are_one_line_without_details(
    served: ServedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogue, classifier = held(served)

    def broken(*_: object) -> None:
        raise RuntimeError("the secret of the request")

    classifier.encode_with_log_det = broken  # type: ignore[method-assign, assignment]
    with running(catalogue, FAST) as address:
        answer = httpx.post(f"{address}/api/v1/predict", json=ask())
    assert answer.status_code == 500
    assert "secret" not in answer.text
    logged = capsys.readouterr().err
    assert "secret" not in logged
    assert "Traceback" not in logged
    assert "RuntimeError" in logged


def test_too_many_requests_at_once_are_refused(served: ServedModel) -> None:
    catalogue, classifier = held(served)
    classifier.gate.clear()
    settings = Settings(threads=1, join_seconds=0.0, in_flight=1)
    with running(catalogue, settings) as address, ThreadPoolExecutor(1) as clients:
        slow = clients.submit(
            httpx.post, f"{address}/api/v1/explain", json=ask(), timeout=PATIENCE
        )
        wait_until(lambda: classifier.decoded)
        refused = httpx.get(f"{address}/health")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        classifier.gate.set()
        assert slow.result().status_code == 200


PROXIED = Settings(
    threads=1,
    join_seconds=0.0,
    client_explanations=2,
    client_in_flight=3,
    trusted_proxies=("127.0.0.0/8",),
)


@pytest.mark.parametrize("trusted", [True, False])
def test_one_client_has_a_share_of_the_work_in_flight(
    served: ServedModel, *, trusted: bool
) -> None:
    """Clients are told apart by the proxy's header only if the proxy is trusted."""
    catalogue, classifier = held(served)
    classifier.gate.clear()
    settings = PROXIED if trusted else replace(PROXIED, trusted_proxies=())
    with running(catalogue, settings) as address, ThreadPoolExecutor(4) as threads:

        def post(what: str, client: str) -> httpx.Response:
            # What a client puts into the header stands before what the proxy adds.
            headers = {"X-Forwarded-For": f"192.0.2.99, {client}"}
            url = f"{address}/api/v1/{what}"
            return httpx.post(url, json=ask(), headers=headers, timeout=PATIENCE)

        slow = [threads.submit(post, "explain", "192.0.2.1") for _ in range(2)]
        wait_until(lambda: metric(address, "ecinn_in_flight ") == 3)
        refused = post("explain", "192.0.2.1")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "2"
        assert metric(address, 'ecinn_refused_total{reason="client_explanations"}') == 1
        assert post("predict", "192.0.2.1").status_code == 200
        if trusted:
            slow += [threads.submit(post, "explain", "192.0.2.2") for _ in range(2)]
            wait_until(lambda: metric(address, "ecinn_in_flight ") == 5)
        assert post("explain", "192.0.2.2").status_code == 429
        classifier.gate.set()
        assert [job.result().status_code for job in slow] == [200] * len(slow)
        assert post("explain", "192.0.2.1").status_code == 200


def test_one_client_has_a_share_of_all_requests(served: ServedModel) -> None:
    catalogue, classifier = held(served)
    classifier.gate.clear()
    settings = replace(PROXIED, client_in_flight=1, client_bytes=1000)
    other = {"X-Forwarded-For": "192.0.2.2"}
    with running(catalogue, settings) as address, ThreadPoolExecutor(1) as threads:
        url = f"{address}/api/v1/explain"
        slow = threads.submit(httpx.post, url, json=ask(), timeout=PATIENCE)
        wait_until(lambda: classifier.decoded)
        assert httpx.get(f"{address}/health").status_code == 429
        assert httpx.get(f"{address}/health", headers=other).status_code == 200
        classifier.gate.set()
        assert slow.result().status_code == 200
        large = httpx.post(f"{address}/api/v1/predict", json=ask() | {"more": "x" * 1000})
        assert large.status_code == 429
        assert metric(address, 'ecinn_refused_total{reason="bytes"}') == 1


def test_the_page_is_served_and_cached(catalogue: Catalogue, tmp_path) -> None:
    (tmp_path / "index.html").write_text("<h1>page</h1>")
    (tmp_path / "page.js").write_text("1")
    with running(catalogue, FAST, page_folder=tmp_path) as address:
        page = httpx.get(address)
        assert page.text == "<h1>page</h1>"
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["cache-control"] == "no-cache"
        script = httpx.get(f"{address}/static/page.js")
        assert script.headers["content-type"].startswith("text/javascript")
        again = httpx.get(address, headers={"If-None-Match": page.headers["etag"]})
        assert again.status_code == 304
        assert not again.content
    with running(catalogue, FAST, page_folder=tmp_path / "none") as address:
        assert httpx.get(address).status_code == 404
