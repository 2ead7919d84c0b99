"""Batch concurrent requests: a bounded queue, and work in threads off the event loop."""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from ecinn.errors import EcinnError
from ecinn.web.settings import Settings

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
Wanted = Callable[[], bool]
"""Returns True while a client waits for the answer."""
Compute = Callable[[Sequence[Ask], Wanted], Sequence[Answer | Exception]]
"""Returns one answer or exception for every request, in their order."""

MAX_RETRY = 60


class FullError(EcinnError):
    """The queue is full."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"too many requests are waiting: try again in {retry_after} s")
        self.retry_after = retry_after


class AbandonedError(EcinnError):
    """No client waits for the answer any more: the work is given up."""


@dataclass
class _Job(Generic[Ask, Answer]):
    ask: Ask
    key: Hashable
    cost: int
    answer: "asyncio.Future[Answer]"


class Batcher(Generic[Ask, Answer]):
    """Computes waiting requests of the same key together.

    All of its state belongs to the event loop; only `compute` runs in threads. A request that is
    cancelled while it waits is never computed.
    """

    def __init__(
        self,
        compute: Compute[Ask, Answer],
        settings: Settings,
        workers: int = 1,
        *,
        key: Callable[[Ask], Hashable],
        cost: Callable[[Ask], int],
        observe: Callable[[int, float], None] = lambda joined, seconds: None,
    ) -> None:
        """Args: observe: called with the size of every batch and the seconds it took."""
        self._compute, self._settings = compute, settings
        self._key, self._cost, self._observe = key, cost, observe
        self._waiting: deque[_Job[Ask, Answer]] = deque()
        self._arrived = asyncio.Event()
        self._workers = workers
        self._threads = ThreadPoolExecutor(workers, "ecinn-pass")
        self._seconds_per_job = 0.05

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work; on leaving, cancel waiting requests and finish the batches in progress."""
        workers = [asyncio.create_task(self._work()) for _ in range(self._workers)]
        try:
            yield
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            for job in self._waiting:
                job.answer.cancel()
            await asyncio.to_thread(self._threads.shutdown)

    @property
    def waiting(self) -> int:
        """Number of queued requests whose clients still wait."""
        return sum(not job.answer.done() for job in self._waiting)

    async def submit(self, ask: Ask) -> Answer:
        """Compute a request together with others; raise FullError if too many wait."""
        if len(self._waiting) >= self._settings.queued:
            self._forget()
            if (waiting := len(self._waiting)) >= self._settings.queued:
                seconds = math.ceil(waiting * self._seconds_per_job / self._workers)
                raise FullError(min(max(1, seconds), MAX_RETRY))
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Job(ask, self._key(ask), self._cost(ask), answer))
        self._arrived.set()
        return await answer

    def _forget(self) -> None:
        """Drop cancelled requests."""
        self._waiting = deque(job for job in self._waiting if not job.answer.done())

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            await asyncio.sleep(self._settings.join_seconds)
            if jobs := self._take():
                await self._run(jobs)
            elif not self._waiting:
                self._arrived.clear()

    def _take(self) -> list[_Job[Ask, Answer]]:
        """Take the oldest request and, in order, those that may be batched with it."""
        self._forget()
        taken: list[_Job[Ask, Answer]] = []
        left: deque[_Job[Ask, Answer]] = deque()
        cost = 0
        for job in self._waiting:
            fits = cost + job.cost <= self._settings.pass_values
            if not taken or (job.key == taken[0].key and fits):
                cost += job.cost
                taken.append(job)
            else:
                left.append(job)
        self._waiting = left
        return taken

    async def _run(self, jobs: list[_Job[Ask, Answer]]) -> None:
        def wanted() -> bool:
            return not all(job.answer.cancelled() for job in jobs)

        started, loop = time.perf_counter(), asyncio.get_running_loop()
        asks = [job.ask for job in jobs]
        answers: Sequence[Answer | Exception]
        try:
            answers = await loop.run_in_executor(self._threads, self._compute, asks, wanted)
        except Exception as error:
            answers = [error] * len(jobs)
        seconds = time.perf_counter() - started
        self._seconds_per_job += 0.2 * (seconds / len(jobs) - self._seconds_per_job)
        self._observe(len(jobs), seconds)
        for job, answer in zip(jobs, answers, strict=True):
            if job.answer.done():
                continue
            if isinstance(answer, Exception):
                job.answer.set_exception(answer)
            else:
                job.answer.set_result(answer)
