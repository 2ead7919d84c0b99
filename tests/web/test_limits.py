"""Small requests that could cost much time, memory or connections."""

import base64
import contextlib
import dataclasses
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import httpx
import pytest
from pydantic import ValidationError

from ecinn.data.photographs import Photograph
from ecinn.errors import InputError
from ecinn.web import schemas
from ecinn.web.catalogue import Catalogue, ServedModel
from ecinn.web.security import CHUNK
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

SHORT = Settings(threads=1, join_seconds=0.001, head_seconds=0.4, body_seconds=0.6)


@pytest.fixture(scope="module")
def address(catalogue: Catalogue) -> Iterator[str]:
    with running(catalogue, FAST) as address:
        yield address


def bad_values() -> str:
    return json.dumps(ask() | {"images": [{"pixels": [[-1] * 256] * 256}] * 4})


def extra_keys() -> str:
    return json.dumps(ask() | {f"key{number}": 0 for number in range(300_000)})


def extra_keys_of_an_image() -> str:
    return json.dumps(ask() | {"images": [{f"key{number}": 0 for number in range(300_000)}]})


def wrong_images() -> str:
    return json.dumps(ask() | {"images": [{"pixels": [[[]] * 140] * 256}] * 4})


MANY_ERRORS = [bad_values, extra_keys, extra_keys_of_an_image, wrong_images]


@pytest.mark.parametrize("body", MANY_ERRORS)
def test_a_body_with_many_errors_is_refused_in_one_line(address: str, body) -> None:
    kind = {"Content-Type": "application/json"}
    wrong = httpx.post(f"{address}/api/v1/predict", content=body(), headers=kind, timeout=PATIENCE)
    assert wrong.status_code == 422
    line = wrong.json()["error"]
    assert len(line) < 300
    assert "\n" not in line


@pytest.mark.parametrize("body", MANY_ERRORS)
def test_a_body_with_many_errors_makes_few_error_records(body) -> None:
    """Validation runs on the event loop, so its cost must not grow with a record per value."""
    given = json.loads(body())
    # At most one error per kind of image and image.
    assert errors_of(given) <= len(get_args(schemas.GivenImage)) * len(given["images"])


def errors_of(given: object) -> int:
    try:
        schemas.PredictRequest.model_validate(given)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("part", [b"0,", b"[" * 3])
def test_a_body_of_too_many_values_is_not_parsed(address: str, part: bytes) -> None:
    body = b'{"model":"mnist","images":[' + part * 550_000 + b"0]}"
    kind = {"Content-Type": "application/json"}
    answer = httpx.post(f"{address}/api/v1/predict", content=body, headers=kind)
    assert answer.status_code == 413
    assert "fewer" in answer.json()["error"]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "index.html").write_text("page")
    (tmp_path / "large.bin").write_bytes(bytes(range(256)) * (40 * 2**12))
    return tmp_path


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def never_reading(address: str) -> socket.socket:
    connection = connect(address)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(get("/static/large.bin"))
    return connection


@pytest.mark.parametrize("answer_seconds", [90.0, 0.3])
def test_an_unread_answer_counts_as_in_flight_and_is_aborted(
    catalogue: Catalogue, page: Path, answer_seconds: float
) -> None:
    settings = dataclasses.replace(SHORT, answer_seconds=answer_seconds)
    with running(catalogue, settings, page_folder=page) as address:

        def open_files() -> float:
            return metric(address, "process_open_fds")

        before = min(open_files() for _ in range(5))
        started = time.monotonic()
        with never_reading(address):
            # The request for the metrics is in flight too.
            wait_until(lambda: metric(address, "ecinn_in_flight ") == 2)
            assert open_files() >= before + 2
            wait_until(lambda: metric(address, "ecinn_in_flight ") == 1)
            assert time.monotonic() - started > 0.25
            # Only our end of the connection is left.
            wait_until(lambda: open_files() == before + 1)


def test_large_answers_are_complete(catalogue: Catalogue, page: Path) -> None:
    for size in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 7):
        (page / f"{size}.bin").write_bytes(random.Random(size).randbytes(size))
    with running(catalogue, SHORT, page_folder=page) as address:
        for path in page.glob("*.bin"):
            assert httpx.get(f"{address}/static/{path.name}").content == path.read_bytes()


def test_unread_answers_count_as_held(catalogue: Catalogue, page: Path) -> None:
    settings = Settings(threads=1, join_seconds=0.001, bodies_bytes=30_000_000)
    with running(catalogue, settings, page_folder=page) as address, never_reading(address):
        wait_until(lambda: metric(address, "ecinn_in_flight ") == 2)
        assert httpx.get(f"{address}/health").status_code == 200
        assert httpx.post(f"{address}/api/v1/predict", json=ask()).status_code == 429


@pytest.mark.parametrize(
    ("line", "status"), [("Host: localhost", 401), ("Host: evil.example", 400)]
)
def test_sending_slowly_after_an_early_answer_is_aborted(
    catalogue: Catalogue, line: str, status: int
) -> None:
    settings = Settings(threads=1, head_seconds=0.4, hosts=("localhost",))
    with (
        running(catalogue, settings, token="correct horse") as address,
        connect(address) as connection,
    ):
        head = f"POST /api/v1/predict HTTP/1.1\r\n{line}\r\nContent-Length: 100000\r\n\r\n"
        connection.sendall(head.encode())
        answer = connection.recv(65536)
        assert answer.startswith(f"HTTP/1.1 {status}".encode())
        assert b"connection: close" in answer.lower()
        wait_until(lambda: not takes(connection))


def takes(connection: socket.socket) -> bool:
    """Return True if the other side accepts another byte."""
    try:
        connection.sendall(b"x")
    except ConnectionError:
        return False
    return True


def test_one_connection_too_many_is_refused_in_one_line(catalogue: Catalogue) -> None:
    settings = Settings(threads=1, connections=2)
    with running(catalogue, settings) as address, httpx.Client() as a, httpx.Client() as b:
        for client in (a, b):
            assert client.get(f"{address}/health").status_code == 200
        refused = httpx.get(f"{address}/health")
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert refused.headers["x-content-type-options"] == "nosniff"
        assert list(refused.json()) == ["error"]
        assert a.get(f"{address}/health").status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_idle_connections_of_one_client_do_not_lock_out_others(catalogue: Catalogue) -> None:
    settings = Settings(threads=1, connections=12, client_connections=5)
    name = 'ecinn_refused_total{reason="client_connections"}'
    with running(catalogue, settings) as address, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(address, "127.0.0.2")) for _ in range(40)]
        wait_until(lambda: metric(address, name) == 35)
        # The first ones are kept; the others are closed soon, or at once if they are very many.
        assert all(everything(connection) == b"" for connection in idle[5:])
        with connect(address, "127.0.0.2") as connection:
            connection.sendall(get("/health"))
            answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 5" in answer.lower()
        idle[0].sendall(get("/health"))
        assert idle[0].recv(65536).startswith(b"HTTP/1.1 200")
        idle[1].close()
        refused = 'ecinn_requests_total{route="other",status="429"}'
        assert metric(address, refused) == 1

        def served() -> bool:
            with connect(address, "127.0.0.2") as connection:
                connection.sendall(get("/health"))
                return connection.recv(65536).startswith(b"HTTP/1.1 200")

        wait_until(served)


def test_a_trusted_proxy_may_open_more_connections(catalogue: Catalogue) -> None:
    settings = Settings(threads=1, client_connections=1, trusted_proxies=("127.0.0.1",))
    with running(catalogue, settings) as address, connect(address), connect(address):
        assert httpx.get(f"{address}/health").status_code == 200


def test_decodings_that_wait_are_bounded(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def slow(files: list[bytes], *_: object) -> list[Photograph]:
        if not files:
            return []
        assert gate.wait(PATIENCE)
        raise InputError("a bad image")

    monkeypatch.setattr("ecinn.web.service.read_images", slow)
    body = {"model": "mnist", "images": [{"png": base64.b64encode(b"x").decode()}]}
    settings = Settings(threads=1, join_seconds=0.0, decodings=1)
    with running(catalogue, settings) as address, ThreadPoolExecutor(2) as clients:
        url = f"{address}/api/v1/predict"
        first = clients.submit(httpx.post, url, json=body, timeout=PATIENCE)
        wait_until(lambda: metric(address, "ecinn_in_flight ") == 2)
        second = clients.submit(httpx.post, url, json=body, timeout=PATIENCE)
        wait_until(lambda: metric(address, 'ecinn_queue{queue="decode"}') == 1)
        refused = httpx.post(url, json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert httpx.post(url, json=ask()).status_code == 200
        gate.set()
        assert {first.result().status_code, second.result().status_code} == {422}


def test_memory_is_returned_after_work_and_only_then(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[int] = []
    monkeypatch.setattr("ecinn.web.service.TRIM_SECONDS", 0.02)
    monkeypatch.setattr("ecinn.web.service._malloc_trim", lambda: trims.append)
    with running(catalogue, FAST) as address:
        assert httpx.get(f"{address}/health").status_code == 200
        time.sleep(0.2)
        assert not trims
        for count in (1, 2):
            assert httpx.post(f"{address}/api/v1/predict", json=ask()).status_code == 200
            wait_until(lambda count=count: len(trims) == count)
        time.sleep(0.2)
        assert trims == [0, 0]


def test_memory_is_returned_after_work_that_takes_longer_than_a_look(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    trims: list[int] = []
    monkeypatch.setattr("ecinn.web.service.TRIM_SECONDS", 0.02)
    monkeypatch.setattr("ecinn.web.service._malloc_trim", lambda: trims.append)
    catalogue, classifier = held(served)
    classifier.gate.clear()
    with running(catalogue, FAST) as address, ThreadPoolExecutor(1) as clients:
        url = f"{address}/api/v1/explain"
        answer = clients.submit(httpx.post, url, json=ask(), timeout=PATIENCE)
        wait_until(lambda: classifier.decoded)
        time.sleep(0.2)
        assert not trims
        classifier.gate.set()
        assert answer.result().status_code == 200
        wait_until(lambda: len(trims) == 1)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_cannot_post(address: str, site: str) -> None:
    url, headers = f"{address}/api/v1/predict", {"Sec-Fetch-Site": site}
    refused = httpx.post(url, json=ask(), headers=headers)
    assert refused.status_code == 403
    assert list(refused.json()) == ["error"]
    assert httpx.get(f"{address}/", headers=headers).status_code == 200
    for own in ("same-origin", "none"):
        assert httpx.post(url, json=ask(), headers={"Sec-Fetch-Site": own}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/health"])
def test_head_requests(catalogue: Catalogue, page: Path, path: str) -> None:
    with running(catalogue, FAST, page_folder=page) as address:
        answer = httpx.head(address + path)
        assert answer.status_code == 200
        assert not answer.content
        whole = httpx.get(address + path)
        assert answer.headers["content-length"] == whole.headers["content-length"]
