"""Blocks on the workers of a Ray cluster, through Ray Data; a lost worker's blocks are redone."""

import json
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit
from uuid import uuid4

os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # read when Ray is imported
import ray
import ray.data

from ecinn.bulk.run import Done, Job, Worker
from ecinn.data.streams import Block
from ecinn.errors import EcinnError, InputError
from ecinn.files import rebuild

OBJECT_STORE = 150 * 2**20
"""Bytes of a local cluster's shared memory: only names and counts pass through it."""
ATTEMPTS = 3
"""After so many workers have died over a block, the run stops; Ray would try for ever."""
PATIENCE = 5.0
"""Seconds in which a cluster must accept a connection and answer."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of a gRPC client, with a frame of kind 4; a server sends one too."""


class Actor:
    """A worker on a machine of the cluster; its failures travel as text."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._worker: Worker | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Explain the block of a batch of one row."""
        block = rebuild(Block, json.loads(batch["block"][0]))
        answer: object
        attempts = f".part-{block.number:05}.try"
        try:
            out = Path(self._job.out)
            if len([*out.glob(f"{attempts}.*")]) >= ATTEMPTS:
                first = (*block.names, f"picture {block.start}")[0]
                raise EcinnError(
                    f"{ATTEMPTS} workers died over {block.count} pictures from {first} of "
                    f"{block.path} on: give workers more memory, or repeat with --engine local"
                )
            attempt = out / f"{attempts}.{uuid4().hex}"
            attempt.touch()
            self._worker = self._worker or Worker(self._job)
            answer = self._worker.explain(block)
            attempt.unlink()
        except (EcinnError, OSError) as error:
            answer = str(error), getattr(error, "exit_code", EcinnError.exit_code)
        return {"answer": [json.dumps(answer)]}


def explain_blocks(
    job: Job,
    blocks: Sequence[Block],
    address: str | None,
    workers: int | None,
    report: Callable[[int], object],
) -> Iterator[Done]:
    """Yield counts and notes of every block, in the order in which they are done."""
    with redirect_stdout(sys.stderr):  # Ray reports on stdout which workers died
        try:
            _connect(address, workers)
            resources = ray.cluster_resources()
            gpus = int(resources.get("GPU", 0)) if job.device != "cpu" else 0
            if job.device.startswith("cuda") and not gpus:
                raise InputError("the Ray cluster has no GPU: use --device cpu")
            count = workers or gpus or max(1, int(resources.get("CPU", 1)))
            ray.data.DataContext.get_current().enable_progress_bars = False
            items = [{"block": json.dumps(asdict(block))} for block in blocks]
            answers = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
                Actor,
                fn_constructor_args=(job,),
                batch_size=1,
                num_cpus=1,
                num_gpus=min(1.0, gpus / count),  # several workers may share one
                compute=ray.data.ActorPoolStrategy(size=min(count, len(blocks))),
            )
            for row in answers.iter_rows():
                counts, notes = json.loads(row["answer"])
                if isinstance(counts, str):
                    raise (InputError if notes == InputError.exit_code else EcinnError)(counts)
                report(counts["pictures"])
                yield Counter(counts), tuple(notes)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise EcinnError(
                f"Ray failed ({reason}): repeat the command to compute the parts that are missing"
            ) from error
        finally:
            ray.shutdown()


def _connect(address: str | None, workers: int | None) -> None:
    """Connect to a cluster, or start one on this machine."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    if address is None:
        ray.init(
            address="local",
            num_cpus=workers,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE,
            **quiet,
        )
        return
    try:
        if address != "auto":
            _greet(urlsplit(address if "//" in address else f"//{address}"))
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"cannot connect to a Ray cluster at {address} ({error}): start one with "
            "`ray start --head`, or correct the address or the token"
        ) from error


def _greet(place: SplitResult) -> None:
    """Raise an `OSError` if there is no gRPC server, for which Ray would wait for minutes."""
    with socket.create_connection((place.hostname, place.port or 6379), PATIENCE) as server:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        server.sendall(GREETING)
        if server.recv(9)[3:4] != b"\4":
            raise ConnectionError("the server is not a Ray cluster")
