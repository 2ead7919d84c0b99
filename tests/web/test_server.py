"""`ecinn serve` as a process: started, stopped, started again."""

import base64
import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from PIL import Image

from helpers.command_line import fails
from helpers.server import PATIENCE, ask, metric, wait_until

pytestmark = pytest.mark.slow
PROGRAM = [sys.executable, "-m", "ecinn", "serve", "--model", "mnist"]
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


class Served:
    """A process of `ecinn serve`."""

    def __init__(self, *options: str, **variables: str) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ECINN_TOKEN": ""} | variables
        self.process = subprocess.Popen(
            [*PROGRAM, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = ADDRESS.search(line)
        assert match, line + self.stop(signal.SIGKILL)[1]
        self.address = match[0]
        wait_until(self.answers)

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.address}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self, kind: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Return exit code and log."""
        self.process.send_signal(kind)
        _, log = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, log


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served("--port", "0", ECINN_TOKEN="SECRET-token")
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def test_a_stop_finishes_requests_and_the_log_has_no_content_of_them(served: Served) -> None:
    headers = {"Authorization": "Bearer SECRET-token", "X-More": "SECRET-header"}
    url = served.address
    numbered = httpx.get(f"{url}/SECRET-path?SECRET-query", headers=headers)
    httpx.post(f"{url}/api/v1/predict", json={"SECRET-body": 1}, headers=headers)
    httpx.post(f"{url}/api/v1/predict", json=ask(), headers={"Authorization": "SECRET-wrong"})
    answers: list[httpx.Response] = []

    def slow() -> None:
        body = ask(targets="all", path=20)
        answers.append(
            httpx.post(f"{url}/api/v1/explain", json=body, headers=headers, timeout=PATIENCE)
        )

    client = threading.Thread(target=slow)
    client.start()
    # The request for the metrics is in flight too.
    wait_until(lambda: metric(url, "ecinn_in_flight ", **headers) == 2)
    assert not answers
    code, log = served.stop()
    client.join(PATIENCE)
    assert code == 0
    assert answers[0].status_code == 200
    assert len(answers[0].json()["images"][0]["targets"]) == 9
    assert "SECRET" not in log
    assert "Traceback" not in log
    lines = [line for line in log.splitlines() if " bytes " in line]
    assert len(lines) >= 5
    pattern = r"INFO (GET|POST) (/\S*|other) \d{3} \d+\.\d{3} s \d+ bytes [0-9a-f]{16}$"
    assert all(re.search(pattern, line) for line in lines)
    number = numbered.headers["x-request-id"]
    assert re.search(rf"GET other 404 \d\.\d+ s 0 bytes {number}$", log, re.MULTILINE)
    assert any("POST /api/v1/explain 200" in line for line in lines)


def bomb(mode: str, size: tuple[int, int] = (4800, 4900)) -> dict[str, str]:
    """Return a small file of as many pixels as a request may have."""
    file = io.BytesIO()
    Image.new(mode, size).save(file, "PNG")
    assert file.tell() < 100_000
    return {"png": base64.b64encode(file.getvalue()).decode()}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_a_fresh_service_after_attacks() -> None:
    """Pictures that are small as files, very narrow ones, and long explanations, all at once."""
    served = Served("--port", "0")
    status = Path(f"/proc/{served.process.pid}/status")

    def memory(kind: str = "VmRSS") -> int:
        return int(re.search(rf"{kind}:\s+(\d+) kB", status.read_text())[1])

    fresh = memory()
    modes = ("P", "I;16", "LA", "1") * 2
    bombs = [("predict", {"images": [bomb(mode)]}, 200) for mode in modes]
    narrow = [("predict", {"images": [bomb("L", (24_000_000, 1))]}, 413)]
    long = [("explain", {"targets": "all", "path": 11}, 200)] * 2

    def attack(part: tuple[str, dict, int]) -> None:
        path, more, status = part
        url = f"{served.address}/api/v1/{path}"
        assert httpx.post(url, json=ask() | more, timeout=PATIENCE).status_code == status

    try:
        with ThreadPoolExecutor(16) as clients:
            list(clients.map(attack, bombs + narrow + long))
        assert memory("VmHWM") > 1.25 * fresh
        wait_until(lambda: memory() < 1.2 * fresh)
    finally:
        served.stop(signal.SIGKILL)


def test_killed_and_started_again_on_the_same_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    first = Served("--port", port)
    assert "cannot listen on 127.0.0.1:" in fails("serve", "--model", "mnist", "--port", port)
    first.stop(signal.SIGKILL)
    second = Served("--port", port)
    answer = httpx.post(f"{second.address}/api/v1/predict", json=ask(), timeout=PATIENCE)
    assert answer.json()["images"][0]["predicted"] == "3"
    code, _ = second.stop(signal.SIGINT)
    assert code == 0


def connections(address: str, count: int) -> list[socket.socket]:
    """Open connections at once, all before the first request."""
    host, _, port = address.removeprefix("http://").partition(":")
    return [socket.create_connection((host, int(port)), PATIENCE) for _ in range(count)]


def worker_of(connection: socket.socket) -> str:
    """Ask for the metrics, and return which worker they are of."""
    with connection:
        connection.sendall(
            b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        text = b"".join(iter(lambda: connection.recv(2**16), b"")).decode()
    number = re.search(r'ecinn_worker{worker="(\d)",workers="2"} 1', text)
    assert number is not None
    return number[1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_are_replaced_and_a_second_ctrl_c_ends_quietly() -> None:
    served = Served("--port", "0", "--workers", "2")
    parent = served.process.pid
    listed = Path(f"/proc/{parent}/task/{parent}/children")

    def workers() -> set[int]:
        return set(map(int, listed.read_text().split()))

    before = workers()
    assert len(before) == 2
    wait_until(lambda: len(set(map(worker_of, connections(served.address, 40)))) == 2)
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: len(workers()) == 2 and killed not in workers())
    url = served.address

    def slow() -> None:
        with contextlib.suppress(httpx.TransportError):
            body = ask(targets="all", path=61)
            httpx.post(f"{url}/api/v1/explain", json=body, timeout=PATIENCE)

    client = threading.Thread(target=slow)
    client.start()
    wait_until(lambda: metric(url, "ecinn_in_flight ") == 2)
    served.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    code, log = served.stop(signal.SIGINT)
    client.join(PATIENCE)
    assert code == 130
    assert "Traceback" not in log
    assert "worker 0 was killed" in log or "worker 1 was killed" in log
    assert not any(Path(f"/proc/{worker}").exists() for worker in before)


def test_an_unknown_model_is_refused_in_one_line() -> None:
    assert "no model 'nobody'" in fails("serve", "--model", "nobody", "--port", 0)
