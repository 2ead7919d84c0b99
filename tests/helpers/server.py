"""A real server for tests: uvicorn in a thread, and models that can be paused."""

import contextlib
import copy
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import torch
import uvicorn
from torch import Tensor

from ecinn.model import Model
from ecinn.web.app import create_app
from ecinn.web.catalogue import Catalogue, ServedModel
from ecinn.web.server import configuration, listen
from ecinn.web.settings import Settings

FAST = Settings(threads=1, join_seconds=0.001)
PATIENCE = 60.0
"""Seconds to wait for something that must happen, also on a busy machine."""


@contextlib.contextmanager
def running(
    catalogue: Catalogue, settings: Settings = FAST, host: str = "127.0.0.1", **options: Any
) -> Iterator[str]:
    """Run a server and yield its address."""
    app = create_app(catalogue, settings, **options)
    listening = listen(host, 0)
    server = uvicorn.Server(configuration(app, settings))
    server.config.log_config = None
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    wait_until(lambda: server.started)
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listening.close()
        assert not thread.is_alive()


def wait_until(condition: Any, seconds: float = PATIENCE) -> None:
    """Poll a condition; fail after too long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.005)


class HeldClassifier:
    """A classifier whose decode waits for a gate, and that records its evaluations."""

    def __init__(self, classifier: Any) -> None:
        self._classifier = classifier
        self.gate = threading.Event()
        self.gate.set()
        self.encoded: list[int] = []
        self.decoded: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._classifier, name)

    @property
    def mu(self) -> Tensor:
        return self._classifier.mu

    @property
    def tau(self) -> Tensor:
        return self._classifier.tau

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.encoded.append(len(x))
        return self._classifier.encode_with_log_det(x)

    def decode(self, z: Tensor) -> Tensor:
        self.decoded.append(len(z))
        assert self.gate.wait(PATIENCE)
        return self._classifier.decode(z)


def held(served: ServedModel) -> tuple[dict[str, ServedModel], HeldClassifier]:
    """Return a catalogue of one model that can be paused."""
    model: Model = copy.copy(served.model)
    classifier = HeldClassifier(model.classifier)
    model.classifier = classifier  # type: ignore[assignment]
    return {served.name: dataclasses.replace(served, model=model)}, classifier


def ask(sample: int = 18, **more: Any) -> dict[str, Any]:
    """Return a request about a test image."""
    return {"model": "mnist", "images": [{"sample": sample}], **more}


def connect(address: str, client: str = "") -> socket.socket:
    """Open a connection for raw requests, from an address of this machine."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE, (client, 0))


def everything(connection: socket.socket) -> bytes:
    """Read until the other side closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def metric(address: str, name: str, **headers: str) -> float:
    """Read a metric of the service by its name and labels."""
    lines = httpx.get(f"{address}/metrics", headers=headers).text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)


torch.set_num_threads(1)
