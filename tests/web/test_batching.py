"""The queue alone: which requests are batched, refused and dropped."""

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from ecinn.web.batching import Batcher, FullError
from ecinn.web.clients import CLIENT
from ecinn.web.settings import Settings


class Squares:
    """Squares numbers; −1 fails alone, 13 fails the whole batch."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.wanted: list[bool] = []

    def __call__(self, asked: Sequence[int], wanted: Callable[[], bool]) -> list[Any]:
        self.passes.append(list(asked))
        assert self.gate.wait(10)
        self.wanted.append(wanted())
        if 13 in asked:
            raise RuntimeError("thirteen")
        return [ValueError("minus") if number == -1 else number**2 for number in asked]


def with_batcher(
    squares: Squares,
    use: Callable[["Batcher[int, int]"], Awaitable[None]],
    workers: int = 1,
    **limits: Any,
) -> None:
    async def run() -> None:
        settings = Settings(**{"queued": 8, "pass_values": 100, "join_seconds": 0.02} | limits)
        batcher: Batcher[int, int] = Batcher(
            squares, settings, workers, key=lambda n: n % 2, cost=lambda n: 10
        )
        async with batcher.running():
            try:
                await asyncio.wait_for(use(batcher), 10)
            finally:
                squares.gate.set()

    asyncio.run(run())


def test_concurrent_requests_of_a_key_share_a_pass_and_keep_their_answers() -> None:
    squares = Squares()

    async def use(batcher: "Batcher[int, int]") -> None:
        answers = await asyncio.gather(*(batcher.submit(n) for n in (2, 3, 4, 5, 6)))
        assert answers == [4, 9, 16, 25, 36]

    with_batcher(squares, use)
    assert squares.passes == [[2, 4, 6], [3, 5]]


def test_a_pass_is_bounded_but_a_large_request_is_computed_alone() -> None:
    squares = Squares()

    async def use(batcher: "Batcher[int, int]") -> None:
        await asyncio.gather(*(batcher.submit(n) for n in (2, 4, 6)))

    with_batcher(squares, use, pass_values=25)
    assert squares.passes == [[2, 4], [6]]
    squares.passes.clear()
    with_batcher(squares, use, pass_values=1)
    assert squares.passes == [[2], [4], [6]]


def test_one_bad_request_fails_alone_and_a_broken_pass_fails_those_in_it() -> None:
    squares = Squares()

    async def use(batcher: "Batcher[int, int]") -> None:
        tasks = [batcher.submit(n) for n in (-1, 3, 2)]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[0], ValueError)
        assert answers[1:] == [9, 4]
        with pytest.raises(RuntimeError, match="thirteen"):
            await batcher.submit(13)
        assert await batcher.submit(5) == 25

    with_batcher(squares, use)


def test_a_full_queue_refuses_with_a_time_and_cancelled_requests_make_room() -> None:
    squares = Squares()
    squares.gate.clear()

    async def use(batcher: "Batcher[int, int]") -> None:
        first = asyncio.create_task(batcher.submit(2))
        while not squares.passes:
            await asyncio.sleep(0.005)
        waiting = [asyncio.create_task(batcher.submit(n)) for n in (4, 6)]
        await asyncio.sleep(0)
        assert batcher.waiting == 2
        with pytest.raises(FullError) as refused:
            await batcher.submit(8)
        assert refused.value.retry_after >= 1
        waiting[0].cancel()
        await asyncio.sleep(0)
        last = asyncio.create_task(batcher.submit(8))
        await asyncio.sleep(0)
        squares.gate.set()
        assert await asyncio.gather(first, waiting[1], last) == [4, 36, 64]

    with_batcher(squares, use, queued=2)
    assert squares.passes == [[2], [6, 8]]


def test_requests_that_nobody_waits_for_are_not_computed() -> None:
    squares = Squares()
    squares.gate.clear()

    async def use(batcher: "Batcher[int, int]") -> None:
        running = asyncio.create_task(batcher.submit(2))
        while not squares.passes:
            await asyncio.sleep(0.005)
        queued = asyncio.create_task(batcher.submit(3))
        await asyncio.sleep(0)
        running.cancel()
        queued.cancel()
        await asyncio.sleep(0.05)
        squares.gate.set()
        while not squares.wanted:
            await asyncio.sleep(0.005)
        assert await batcher.submit(5) == 25

    with_batcher(squares, use)
    assert squares.passes == [[2], [5]]
    assert squares.wanted == [False, True]


def test_a_pass_goes_on_while_one_of_its_requests_is_waited_for() -> None:
    squares = Squares()
    squares.gate.clear()

    async def use(batcher: "Batcher[int, int]") -> None:
        stays, leaves = (asyncio.create_task(batcher.submit(n)) for n in (2, 4))
        while not squares.passes:
            await asyncio.sleep(0.005)
        leaves.cancel()
        await asyncio.sleep(0.02)
        squares.gate.set()
        assert await stays == 4

    with_batcher(squares, use)
    assert squares.passes == [[2, 4]]
    assert squares.wanted == [True]


def test_several_workers_compute_at_the_same_time() -> None:
    squares = Squares()
    squares.gate.clear()

    async def use(batcher: "Batcher[int, int]") -> None:
        tasks = [submit_as("a", batcher, 2), submit_as("b", batcher, 3)]
        while len(squares.passes) < 2:
            await asyncio.sleep(0.005)
        squares.gate.set()
        assert await asyncio.gather(*tasks) == [4, 9]

    with_batcher(squares, use, workers=2)


def submit_as(client: str, batcher: "Batcher[int, int]", number: int) -> "asyncio.Task[int]":
    context = contextvars.copy_context()
    context.run(CLIENT.set, client)
    return asyncio.create_task(batcher.submit(number), context=context)


def test_clients_take_turns() -> None:
    squares = Squares()

    async def use(batcher: "Batcher[int, int]") -> None:
        tasks = [submit_as("greedy", batcher, n) for n in (2, 4, 6, 8)]
        tasks += [submit_as("other", batcher, n) for n in (10, 12)]
        await asyncio.gather(*tasks)

    with_batcher(squares, use, pass_values=1)
    assert squares.passes == [[2], [10], [4], [12], [6], [8]]


def test_one_client_never_occupies_all_workers() -> None:
    squares = Squares()
    squares.gate.clear()

    async def use(batcher: "Batcher[int, int]") -> None:
        tasks = [submit_as("greedy", batcher, n) for n in (2, 3, 4, 5)]
        await asyncio.sleep(0.2)
        assert squares.passes == [[2], [3]]
        tasks.append(submit_as("other", batcher, 6))
        while len(squares.passes) < 3:
            await asyncio.sleep(0.005)
        assert squares.passes[2] == [6]
        squares.gate.set()
        assert await asyncio.gather(*tasks) == [4, 9, 16, 25, 36]

    with_batcher(squares, use, workers=3, pass_values=1)


def test_without_a_key_every_request_is_computed_alone() -> None:
    squares = Squares()

    async def use(batcher: "Batcher[int, int]") -> None:
        batcher._key = None
        assert await asyncio.gather(*(batcher.submit(n) for n in (2, 4))) == [4, 16]

    with_batcher(squares, use)
    assert squares.passes == [[2], [4]]
