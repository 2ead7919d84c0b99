"""Batch concurrent requests: a bounded queue, and work in threads off the event loop."""

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from ecinn.errors import EcinnError
from ecinn.web.clients import CLIENT, Turns
from ecinn.web.settings import Settings

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
Wanted = Callable[[], bool]
"""Returns True while a client waits for the answer."""
Compute = Callable[[Sequence[Ask], Wanted], Sequence[Answer | Exception]]
"""Returns one answer or exception for every request, in their order."""

MAX_RETRY = 60


class FullError(EcinnError):
    """The queue is full, or one client has too many requests in it."""

    def __init__(self, retry_after: int, reason: str = "queue", what: str = "requests") -> None:
        super().__init__(f"too many {what} are waiting: try again in {retry_after} s")
        self.retry_after, self.reason = retry_after, reason


class AbandonedError(EcinnError):
    """No client waits for the answer any more: the work is given up."""


@dataclass
class _Job(Generic[Ask, Answer]):
    ask: Ask
    client: str
    key: Hashable
    cost: int
    answer: "asyncio.Future[Answer]"


class Batcher(Generic[Ask, Answer]):
    """Computes waiting requests of the same key together; clients take turns.

    One client alone never occupies all workers, unless there is only one. All of the state belongs
    to the event loop; only `compute` runs in threads. A request that is cancelled while it waits
    is never computed.
    """

    def __init__(
        self,
        compute: Compute[Ask, Answer],
        settings: Settings,
        workers: int = 1,
        *,
        key: Callable[[Ask], Hashable] | None,
        cost: Callable[[Ask], int] = lambda _: 0,
        observe: Callable[[int, float], None] = lambda joined, seconds: None,
        queued: int | None = None,
    ) -> None:
        """Start with an empty queue.

        Args:
            key: None computes every request alone.
            observe: called with the size of every batch and the seconds it took.
            queued: length of the queue, if it is not that of the settings.
        """
        self._compute, self._settings = compute, settings
        self._key, self._cost, self._observe = key, cost, observe
        self._queued = queued or settings.queued
        self._waiting: deque[_Job[Ask, Answer]] = deque()
        self._turns = Turns()
        self._alone: Counter[str] = Counter()  # batches of one client only, in progress
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
        if len(self._waiting) >= self._queued:
            self._forget()
            if (waiting := len(self._waiting)) >= self._queued:
                seconds = math.ceil(waiting * self._seconds_per_job / self._workers)
                raise FullError(min(max(1, seconds), MAX_RETRY))
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        key = object() if self._key is None else self._key(ask)
        self._waiting.append(_Job(ask, CLIENT.get(), key, self._cost(ask), answer))
        self._arrived.set()
        return await answer

    def _forget(self) -> None:
        """Drop cancelled requests."""
        self._waiting = deque(job for job in self._waiting if not job.answer.done())

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            if self._key is not None:
                await asyncio.sleep(self._settings.join_seconds)
            if not await self._work_once():
                self._arrived.clear()

    async def _work_once(self) -> bool:
        """Compute a batch; return False if there is none. Keeps nothing of it in memory."""
        if not (jobs := self._take()):
            return False
        clients = {job.client for job in jobs}
        alone = clients if len(clients) == 1 else ()
        self._alone.update(alone)
        await self._run(jobs)
        self._alone.subtract(alone)
        self._alone += Counter()  # forgets clients without a batch
        self._arrived.set()
        return True

    def _take(self) -> list[_Job[Ask, Answer]]:
        """Take the request whose turn it is and, in turn, those that may be batched with it."""
        self._forget()
        jobs = list(self._waiting)
        order = [jobs[place] for place in self._turns.order([job.client for job in jobs])]
        most = max(1, self._workers - 1)
        first = next((job for job in order if self._alone[job.client] < most), None)
        if first is None:
            return []
        taken, cost = [first], first.cost
        for job in order:
            fits = cost + job.cost <= self._settings.pass_values
            if job is not first and job.key == first.key and fits:
                cost += job.cost
                taken.append(job)
        chosen = set(map(id, taken))
        self._waiting = deque(job for job in jobs if id(job) not in chosen)
        for job in taken:
            self._turns.served(job.client)
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
