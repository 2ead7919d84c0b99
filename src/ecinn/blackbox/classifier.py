"""A classifier as a black box: pictures in, probabilities out, every picture counted."""

import math
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ecinn.blackbox.preprocessing import Preprocessing
from ecinn.errors import EcinnError, InputError, first_line
from ecinn.pixels import StoredImages

Output = Literal["logits", "probabilities"]
ATTEMPTS = 3
"""Attempts per batch before an exception or timeout is reported."""
TIMEOUT = 60.0
"""Seconds that a batch may take by default."""
BATCH = 256
"""Pictures per query batch."""
ABANDONED = "ecinn-abandoned"
"""Name of threads in which a classifier hangs."""
SUM_TOLERANCE = 1e-2
"""Largest distance from 1 of the sum of a row of probabilities; half precision rounds them."""


class BlackBox:
    """Wrap a callable from a batch of pictures to probabilities or logits.

    Answers are probabilities in the order of `class_names`. Exceptions and hangs are tried again;
    wrong shapes, NaN and a spent budget are reported at once. All pictures sent are counted.
    Several threads may ask; they wait for each other.
    """

    def __init__(
        self,
        call: Callable[[Tensor], Any],
        class_names: Sequence[str],
        *,
        name: str = "classifier",
        preprocessing: Preprocessing | None = None,
        classes: Sequence[str] = (),
        output: Output | None = None,
        batch: int | None = None,
        budget: int | None = None,
        timeout: float | None = TIMEOUT,
    ) -> None:
        """Describe how to ask.

        Args:
            classes: names of the outputs, where their order differs from `class_names`.
            output: what the answers are; None recognises it in the first answer.
            batch: the only number of pictures that it takes at once.
            budget: the largest number of queries.
            timeout: seconds that a batch may take; None waits for ever.
        """
        self.call, self.name, self.class_names = call, name, tuple(class_names)
        self.preprocessing = preprocessing or Preprocessing()
        self.classes = tuple(classes) or self.class_names
        if output is not None and output not in get_args(Output):
            raise InputError(f"output is logits or probabilities, not {output!r}")
        self.output, self.batch, self.budget, self.timeout = output, batch, budget, timeout
        self.queries = 0
        self._order = self._find_order()
        self._worker, self._lock = _Worker(), threading.Lock()

    @property
    def left(self) -> float | int:
        """The queries that are left of the budget."""
        return math.inf if self.budget is None else self.budget - self.queries

    def predict(self, images: StoredImages) -> Float[Tensor, "batch classes"]:
        """Return the classifier's probabilities, on the CPU."""
        if not len(images):
            return torch.zeros((0, len(self.class_names)))
        parts = [self._predict(part) for part in images.split(self.batch or BATCH)]
        return torch.cat(parts)

    def _predict(self, images: StoredImages) -> Float[Tensor, "batch classes"]:
        x = self.preprocessing(images.cpu())
        if self.batch is not None and len(x) < self.batch:
            x = torch.cat([x, x[-1:].expand(self.batch - len(x), *x.shape[1:])])
        with self._lock:
            return self._read(self._ask(x, len(images)), len(x))[: len(images)]

    def _ask(self, x: Tensor, pictures: int) -> Any:  # noqa: ANN401
        failure = ""
        for _ in range(ATTEMPTS):
            if pictures > self.left:
                raise EcinnError(
                    f"the budget of {self.budget:,} queries is spent ({self.queries:,} used): "
                    "allow more with --queries, or use fewer pictures"
                )
            self.queries += pictures
            try:
                return self._worker.run(self.call, x, self.timeout)
            except queue.Empty:
                failure = f"gave no answer within {self.timeout:g} seconds"
                self._worker.abandon()
                self._worker = _Worker()
            except Exception as error:
                failure = f"failed with {type(error).__name__}: {first_line(error)}"
        values = (
            f"{'×'.join(map(str, x.shape))} values of {float(x.min()):.3g} to {float(x.max()):.3g}"
        )
        raise EcinnError(
            f"{self.name} {failure} ({ATTEMPTS} times, on {values}): check its input size, "
            "channels and layout, or allow more time"
        )

    def _read(self, answer: Any, n: int) -> Float[Tensor, "batch classes"]:  # noqa: ANN401
        """Check an answer and return its probabilities in the order of the class names."""
        try:
            given = answer if isinstance(answer, Tensor) else torch.as_tensor(np.array(answer))
            rows = given.detach().to("cpu", torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{self.name} must answer with an array of numbers, not {type(answer).__name__}"
            ) from error
        classes = len(self.class_names)
        if rows.shape == (n,) and not given.is_floating_point():
            raise InputError(
                f"{self.name} answers with class numbers: let it answer with the probabilities or "
                "logits of all classes"
            )
        if classes == 2 and rows.shape in ((n,), (n, 1)):
            rows = self._two_columns(rows.reshape(n))
        if rows.shape != (n, classes):
            raise InputError(
                f"{self.name} answers {n} pictures with shape {tuple(rows.shape)}, not "
                f"({n}, {classes}): it needs one output for each of the {classes} classes"
            )
        wrong = int((~rows.isfinite().all(1)).sum())
        if wrong:
            raise InputError(
                f"{self.name} answers NaN or infinity for {wrong} of {n} pictures: "
                "check its preprocessing (scale, mean, std)"
            )
        if self.output is None:
            self.output = self._recognise(rows)
        if self.output == "logits":
            rows = rows.softmax(1)
        elif not _are_probabilities(rows):
            raise InputError(
                f"{self.name} no longer answers with probabilities: some rows do not sum to 1 "
                "(use --output logits if they are logits)"
            )
        return (rows / rows.sum(1, keepdim=True))[:, self._order]

    def _recognise(self, rows: Float[Tensor, "batch classes"]) -> Output:
        if _are_probabilities(rows):
            return "probabilities"
        if bool(((rows >= 0) & (rows <= 1)).all()):
            raise InputError(
                f"{self.name} answers with values between 0 and 1 whose rows do not sum to 1: say "
                "--output logits, or let it end with a softmax"
            )
        total = _common_sum(rows)
        if total is not None:
            raise InputError(
                f"{self.name} answers with positive values whose rows all sum to {total:.4g}: "
                "divide them by that if they are probabilities, or say --output logits"
            )
        return "logits"

    def _two_columns(self, value: Float[Tensor, " batch"]) -> Float[Tensor, "batch 2"]:
        """Return both classes, from the probability or the logit of the second."""
        inside = bool(((value >= 0) & (value <= 1)).all())
        if self.output is None:
            self.output = "probabilities" if inside else "logits"
        if self.output == "logits":
            return torch.stack([torch.zeros_like(value), value], 1)
        return torch.stack([1 - value, value], 1)

    def _find_order(self) -> list[int]:
        if sorted(self.classes) != sorted(self.class_names):
            missing = sorted(set(self.class_names) - set(self.classes))
            raise InputError(
                f"the classifier's classes ({_listed(self.classes)}) are not those of the data "
                f"({_listed(self.class_names)})"
                + (f"; missing: {_listed(missing)}" if missing else "")
                + ": give --classes with the name of every output, in order"
            )
        return [self.classes.index(name) for name in self.class_names]


class _Worker:
    """A thread that computes one answer at a time, and can be left behind if one hangs."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[Tensor], Any], x: Tensor, timeout: float | None) -> Any:  # noqa: ANN401
        """Return call(x), or raise its exception, or `queue.Empty` when it takes too long."""
        if self._thread is None:
            queues = (self._tasks, self._results)
            self._thread = threading.Thread(target=_work, args=queues, daemon=True)
            self._thread.start()
        self._tasks.put((call, x))
        result, error = self._results.get(timeout=timeout)
        if error is not None:
            raise error
        return result

    def abandon(self) -> None:
        """Leave the thread behind with the call that hangs; `ecinn.__main__` knows its name."""
        assert self._thread is not None
        self._thread.name = ABANDONED

    def __del__(self) -> None:
        self._tasks.put(None)


def _work(tasks: "queue.SimpleQueue[Any]", results: "queue.SimpleQueue[Any]") -> None:
    """Answer tasks until None comes; keeps neither the classifier nor the pictures alive."""
    while (task := tasks.get()) is not None:
        call, x = task
        try:
            with torch.no_grad():
                results.put((call(x), None))
        except BaseException as error:
            results.put((None, error))
        del task, call, x


def _are_probabilities(rows: Float[Tensor, "batch classes"]) -> bool:
    sums = rows.sum(1)
    return bool((rows >= -1e-6).all() and ((sums - 1).abs() <= SUM_TOLERANCE).all())


def _common_sum(rows: Float[Tensor, "batch classes"]) -> float | None:
    """Return the sum of every row, if all are equal but for rounding and no value is negative."""
    sums = rows.sum(1)
    mean = float(sums.mean())
    equal = (sums - mean).abs().max() <= 2 * SUM_TOLERANCE * mean
    return mean if len(rows) > 1 and mean > 0 and bool((rows >= 0).all()) and equal else None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 6 else (*names[:4], "…", names[-1]))
