"""Load test of `ecinn serve` on loopback: statuses, latencies, memory and speed.

Writes docs/results/service.json. The offline rate is that of the library on the same images in
batches, on as many threads as there are cores, measured before and after in the same run: once for
predictions and explanations as tensors, once with the JSON and the pictures of the answers.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import ecinn
from ecinn.files import atomic_write
from ecinn.pixels import to_pixels
from ecinn.web import answers
from ecinn.web.passes import predict_jointly, split_network

RESULT = Path(__file__).parent.parent / "docs" / "results" / "service.json"
BATCH = 32
"""Batch size of the offline rate; a core is fastest with about as many digits."""
PREDICTIONS = 3
"""Predictions per explanation."""


def main() -> None:
    """Measure, print and write; exit 1 if an answer was neither 200 nor 429."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    if not (1 <= given.clients <= 1000 and 1 <= given.seconds <= 600):
        sys.exit("1 to 1000 clients for 1 to 600 seconds")
    offline = [offline_rates(2.0)]
    own = time.process_time()
    with_server = run_load(given.clients, given.seconds, given.workers)
    own = time.process_time() - own
    offline.append(offline_rates(2.0))
    rates = {kind: statistics.mean(rate[kind] for rate in offline) for kind in offline[0]}

    answered, took = with_server["answered"], with_server["seconds"]
    all_answers = sum(answered.values()) or 1

    def library(more: str, cost: Callable[[str], float]) -> float:
        """Return the cost of the same answers to the library."""
        return sum(count * cost(kind + more) for kind, count in answered.items())

    def slower_than(more: str) -> float:
        return round(took / max(library(more, lambda kind: 1 / rates[kind]), 1e-9), 3)

    def cpu(more: str) -> float:
        return round(library(more, lambda kind: rates[f"{kind} cpu"]) / all_answers, 2)

    cpu_seconds = with_server.pop("cpu_seconds")

    result = {
        "command": f"benchmarks/load.py --clients {given.clients} --seconds {given.seconds:g} "
        f"--workers {given.workers}",
        "cores": os.cpu_count(),
        "workers": given.workers,
        "torch": torch.__version__,
        **with_server,
        "offline_per_second": {
            kind: round(rate, 1) for kind, rate in rates.items() if not kind.endswith("cpu")
        },
        "cpu_ms_per_answer": {
            "service": round(1000 * cpu_seconds / all_answers, 2),
            "clients": round(1000 * own / all_answers, 2),
            "library": cpu(""),
            "library_with_pictures": cpu(" json"),
        },
        # The clients run on the same cores.
        "clients_share_of_cores": round(own / with_server["seconds"] / (os.cpu_count() or 1), 3),
        "slower_than_offline": slower_than(""),
        "slower_than_offline_with_pictures": slower_than(" json"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
    print(json.dumps(result, indent=1))
    atomic_write(given.out, (json.dumps(result, indent=1) + "\n").encode())
    if wrong := failures(result):
        sys.exit("failed: " + "; ".join(wrong))


def failures(result: dict[str, Any]) -> list[str]:
    """List what failed."""
    wrong = [
        f"{count} requests ended with {status}"
        for status, count in result["statuses"].items()
        if status not in ("200", "429")
    ]
    if not result["statuses"].get("200"):
        wrong.append("nothing was answered")
    return wrong


def offline_rates(seconds: float) -> dict[str, float]:
    """Images per second of the library, one batch per core at a time, and its CPU time in ms."""
    torch.set_num_threads(1)
    model = ecinn.load("mnist", "cpu")
    images = to_pixels(model.recipe.load("test").images[:BATCH])
    second = model.predict(images).topk(2).indices[:, 1:]
    network = split_network(model, BATCH)

    def predictions() -> bytes:
        (prediction,) = predict_jointly(model, network, [images])
        assert not isinstance(prediction, Exception)
        return answers.to_json({"images": answers.predictions(prediction, model.class_names)})

    calls = {
        "predict": lambda: model.predict(images),
        "explain": lambda: model.explain(images, second),
        "predict json": predictions,
        "explain json": lambda: answers.explanation(model.explain(images, second)),
    }
    rates = {}
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as threads:
        for kind, call in calls.items():
            end = time.perf_counter() + seconds

            def repeat(call: Callable[[], object] = call, end: float = end) -> int:
                done = 0
                while time.perf_counter() < end:
                    call()
                    done += BATCH
                return done

            start, cpu = time.perf_counter(), time.process_time()
            done = sum(threads.map(lambda _, repeat=repeat: repeat(), range(cores)))
            rates[kind] = done / (time.perf_counter() - start)
            rates[f"{kind} cpu"] = 1000 * (time.process_time() - cpu) / done
    return rates


def run_load(clients: int, seconds: float, workers: int) -> dict[str, Any]:
    """Start a server, and clients that ask again as soon as they are answered."""
    command = [sys.executable, "-m", "ecinn", "serve", "--model", "mnist", "--port", "0"]
    command += ["--workers", str(workers)]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    try:
        address = re.search(r"127\.0\.0\.1:(\d+)", server.stdout.readline())
        assert address is not None, "the server did not start"
        port = int(address[1])
        asyncio.run(warm_up(port))
        time.sleep(2)  # until all workers listen
        before, cpu = memory(server.pid), cpu_time(server.pid)
        measured = asyncio.run(drive(port, clients, seconds))
        after, cpu = memory(server.pid), cpu_time(server.pid) - cpu
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    finally:
        server.kill()
        server.wait()
    return measured | {
        "cpu_seconds": cpu,
        "memory_mib_before": round(before),
        "memory_mib_after": round(after),
        "exit_code": code,
    }


def memory(process: int) -> float:
    """Return the memory of a process and its children in MiB; what they share counts once."""
    match = re.search(r"\nPss:\s+(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text())
    assert match is not None
    return int(match[1]) / 1024 + sum(map(memory, children(process)))


def cpu_time(process: int) -> float:
    """Return the CPU seconds of a process and its children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(cpu_time, children(process)))


def children(process: int) -> list[int]:
    """Return the ids of a process's children."""
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(child) for child in text.split()]


async def warm_up(port: int) -> None:
    """Wait until the server answers."""
    for _ in range(200):
        try:
            if (await ask(port, *request("explain", 0), None))[0] == 200:
                return
        except OSError:
            await asyncio.sleep(0.1)


async def drive(port: int, clients: int, seconds: float) -> dict[str, Any]:
    """Let every client ask, wait for the answer, and ask again; refused ones wait first."""
    statuses: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    latencies: dict[str, list[float]] = {"predict": [], "explain": []}
    start = time.perf_counter()
    end = start + seconds

    async def client(number: int) -> None:
        turn = number
        connection = None
        while time.perf_counter() < end:
            kind = "explain" if turn % (PREDICTIONS + 1) == 0 else "predict"
            turn += 1
            begun = time.perf_counter()
            try:
                status, wait, connection = await ask(
                    port, *request(kind, turn), connection, own_address(number)
                )
                statuses[str(status)] += 1
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                status, wait, connection = 0, 0.0, None
                statuses[type(error).__name__] += 1
            if status == 200:
                answered[kind] += 1
                latencies[kind].append(time.perf_counter() - begun)
            elif wait:
                await asyncio.sleep(min(wait, max(0.0, end - time.perf_counter())))
        if connection is not None:
            connection[1].close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    took = time.perf_counter() - start
    return {
        "clients": clients,
        "seconds": round(took, 2),
        "predictions_per_explanation": PREDICTIONS,
        "statuses": dict(sorted(statuses.items())),
        "answered": dict(sorted(answered.items())),
        "answers_per_second": round(sum(answered.values()) / took, 1),
        "latency_ms": {kind: percentiles(times) for kind, times in latencies.items()},
    }


def percentiles(seconds: list[float]) -> dict[str, int]:
    """Return p50, p90 and p99 in milliseconds."""
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{percent}": round(1000 * cuts[percent - 1]) for percent in (50, 90, 99)}


def request(kind: str, turn: int) -> tuple[str, bytes]:
    """Return address and body of a request about a test image."""
    body: dict[str, Any] = {"model": "mnist", "images": [{"sample": turn * 37 % 10_000}]}
    return f"/api/v1/{kind}", json.dumps(body).encode()


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def own_address(number: int) -> tuple[str, int] | None:
    """Return an address for each client: what one client may do at once is bounded."""
    if sys.platform != "linux":  # other systems have one loopback address
        return None
    return f"127.0.{1 + number // 250}.{1 + number % 250}", 0


async def ask(
    port: int,
    path: str,
    body: bytes,
    connection: Connection | None,
    own: tuple[str, int] | None = None,
) -> tuple[int, float, Connection | None]:
    """Send a request; return its status, the seconds to wait, and the connection to reuse.

    Written without a client library, which would take more of the shared cores than the service.
    """
    reader, writer = connection or await asyncio.open_connection("127.0.0.1", port, local_addr=own)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = re.search(r"content-length: (\d+)", head)
    await reader.readexactly(int(length[1]) if length else 0)
    wait = re.search(r"retry-after: (\d+)", head)
    kept: Connection | None = (reader, writer)
    if "connection: close" in head:
        writer.close()
        kept = None
    return int(head.split()[1]), float(wait[1]) if wait else 0.0, kept


if __name__ == "__main__":
    main()
