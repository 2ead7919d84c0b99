"""The same flow on a GPU as CUDA graphs: one image does not wait for a thousand launches."""

import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ecinn.flow.bijections import Bijection, LogDet

SIZES = tuple(2**k for k in range(11))
"""Batch sizes that are captured, each when it is first needed."""
PADDED = 64
"""Smaller batches are padded to the next size; larger ones are cut into several."""

Outputs = tuple[Tensor, ...]
Function = Callable[[Tensor], Outputs]


class Captured(Bijection):
    """A bijection for inference, captured once for each direction and batch size.

    What cannot be captured, for example because memory is short, runs as it is.
    """

    def __init__(self, bijection: Bijection) -> None:
        super().__init__()
        self.bijection = bijection
        self._graphs: dict[tuple[str, int, torch.dtype], _Graph | None] = {}
        self._lock = threading.Lock()
        # Graphs take turns and their results are copied, so all of them can share memory.
        self._pool = torch.cuda.graph_pool_handle()

    def forward(self, x: Tensor) -> tuple[Tensor, LogDet]:
        """Return f(x) and log |det J|."""
        z, log_det = self._run("forward", self.bijection.forward, x)
        return z, log_det

    def inverse(self, y: Tensor) -> Tensor:
        """Return f⁻¹(y)."""
        return self._run("inverse", lambda z: (self.bijection.inverse(z),), y)[0]

    def _run(self, name: str, function: Function, x: Tensor) -> Outputs:
        if torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing() or not len(x):
            return function(x)
        # Buffers that are made in inference mode could not be written outside of it.
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            counts = list(cuts(len(x)))
            parts = [self._part(name, function, part) for part in x.split(counts)]
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    def _part(self, name: str, function: Function, x: Tensor) -> Outputs:
        size = next(size for size in SIZES if size >= len(x))
        key = name, size, x.dtype
        if key not in self._graphs:
            try:
                self._graphs[key] = _Graph(function, x, size, self._pool)
            except RuntimeError:
                torch.cuda.empty_cache()
                self._graphs[key] = None
        graph = self._graphs[key]
        return function(x) if graph is None else graph(x)


class _Graph:
    """One captured call with its buffers."""

    def __init__(self, function: Function, x: Tensor, size: int, pool: object) -> None:
        self._input = x.new_zeros((size, *x.shape[1:]))
        self._input[: len(x)] = x
        stream = torch.cuda.Stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries choose their kernels
                function(self._input)
        torch.cuda.current_stream(x.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):  # type: ignore[arg-type]
            self._output = function(self._input)

    def __call__(self, x: Tensor) -> Outputs:
        self._input[: len(x)] = x
        self._graph.replay()
        return tuple(each[: len(x)].clone() for each in self._output)


def cuts(count: int) -> Iterator[int]:
    """Yield the parts of a batch: captured sizes, and a rest of at most `PADDED`."""
    while count > PADDED:
        size = max(size for size in SIZES if size <= count)
        yield size
        count -= size
    if count:
        yield count
