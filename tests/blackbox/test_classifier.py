"""A black box: what it answers, what it counts, and how it fails."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from ecinn.blackbox.classifier import ATTEMPTS, BlackBox
from ecinn.blackbox.preprocessing import Preprocessing
from ecinn.errors import EcinnError, InputError

NAMES = ("ant", "bee", "cat")
WEIGHTS = torch.randn((16, 3), generator=torch.Generator().manual_seed(0))


class Frame:
    """Is read by columns, as pandas' DataFrame, but is an array to NumPy."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, column: str) -> None:
        raise KeyError(column)

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return self.values


def images(n: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, 1, 4, 4), generator=generator).byte()


def logits(x: Tensor) -> Tensor:
    return 5 * x.flatten(1) @ WEIGHTS


def expected(stored: Tensor) -> Tensor:
    return logits(stored.float() / 255).softmax(1)


@pytest.mark.parametrize(
    ("call", "output"),
    [
        (logits, "logits"),
        (lambda x: logits(x).log_softmax(1), "logits"),
        (lambda x: logits(x).softmax(1), "probabilities"),
        (lambda x: logits(x).softmax(1).double().numpy(), "probabilities"),
        (lambda x: np.asarray(logits(x)).tolist(), "logits"),
        (lambda x: Frame(np.asarray(logits(x))), "logits"),
    ],
)
def test_logits_and_probabilities_are_recognised(call, output: str) -> None:
    box = BlackBox(call, NAMES)
    stored = images(5)
    torch.testing.assert_close(box.predict(stored), expected(stored))
    assert box.output == output
    assert box.queries == 5


def test_outputs_in_another_order_are_sorted() -> None:
    box = BlackBox(logits, NAMES, classes=("cat", "ant", "bee"))
    torch.testing.assert_close(box.predict(images(4)), expected(images(4))[:, [1, 2, 0]])
    with pytest.raises(InputError, match="missing: cat"):
        BlackBox(logits, NAMES, classes=("dog", "ant", "bee"))


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("link", [torch.sigmoid, lambda value: value])
def test_a_single_output_is_the_second_of_two_classes(shape: tuple[int, ...], link) -> None:
    stored = images(6)
    box = BlackBox(lambda x: link(logits(x)[:, 0]).reshape(shape), ("no", "yes"))
    second = torch.sigmoid(logits(stored.float() / 255)[:, 0])
    torch.testing.assert_close(box.predict(stored), torch.stack([1 - second, second], 1))


def test_a_fixed_batch_is_padded_and_only_real_pictures_are_counted() -> None:
    seen = []

    def call(x: Tensor) -> Tensor:
        seen.append(len(x))
        return logits(x)

    box = BlackBox(call, NAMES, batch=4)
    torch.testing.assert_close(box.predict(images(9)), expected(images(9)))
    assert seen == [4, 4, 4]
    assert box.queries == 9


def test_the_budget_is_never_exceeded() -> None:
    asked = []
    box = BlackBox(lambda x: asked.append(len(x)) or logits(x), NAMES, budget=7)
    box.predict(images(5))
    assert box.left == 2
    with pytest.raises(EcinnError, match="7 queries"):
        box.predict(images(3))
    assert asked == [5]
    box.predict(images(2))
    assert box.left == 0


def test_exceptions_and_hangs_are_tried_again_and_then_reported() -> None:
    number = itertools.count()

    def flaky(x: Tensor) -> Tensor:
        match next(number):
            case 0:
                raise RuntimeError("out of luck\nand more")
            case 1:
                time.sleep(1)
        return logits(x)

    box = BlackBox(flaky, NAMES, timeout=0.3)
    torch.testing.assert_close(box.predict(images(2)), expected(images(2)))
    assert box.queries == 3 * 2  # every try costs

    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("out of luck\nand more")

    box = BlackBox(broken, NAMES)
    with pytest.raises(EcinnError, match=r"RuntimeError: out of luck \(3 times, on 2×1×4×4") as e:
        box.predict(images(2))
    assert "\n" not in str(e.value)
    assert box.queries == ATTEMPTS * 2
    with pytest.raises(EcinnError, match=r"within 0\.05 seconds"):
        BlackBox(lambda x: time.sleep(0.5), NAMES, timeout=0.05).predict(images(1))


def test_a_classifier_that_exits_is_not_waited_for() -> None:
    def leave(_: Tensor) -> None:
        raise SystemExit(3)

    box = BlackBox(leave, NAMES, timeout=20.0)
    start = time.monotonic()
    with pytest.raises(SystemExit):
        box.predict(images(1))
    assert time.monotonic() - start < 10


def test_threads_get_their_own_answers() -> None:
    """The first answer takes longest."""

    def slow(x: Tensor) -> Tensor:
        time.sleep(0.02 * len(x))
        return logits(x)

    box = BlackBox(slow, NAMES)
    asked = [images(n, seed=n) for n in (5, 4, 3, 2, 1)]
    with ThreadPoolExecutor(5) as threads:
        for stored, answer in zip(asked, threads.map(box.predict, asked), strict=True):
            torch.testing.assert_close(answer, expected(stored))
    assert box.queries == 15


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: logits(x)[:, :2], r"\(3, 2\), not \(3, 3\)"),
        (lambda x: logits(x)[:2], r"\(2, 3\)"),
        (lambda x: logits(x) * torch.tensor([[1.0], [float("nan")], [1.0]]), "NaN .* 1 of 3"),
        (lambda x: torch.full((3, 3), 0.5), "do not sum to 1"),
        (lambda x: "a cat", "array of numbers"),
    ],
)
def test_answers_that_make_no_sense_are_refused(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BlackBox(call, NAMES).predict(images(3))


def test_probabilities_that_turn_into_something_else_are_refused() -> None:
    answers = iter([torch.tensor([[0.2, 0.3, 0.5]]), torch.tensor([[0.2, 0.3, 0.9]])])
    box = BlackBox(lambda x: next(answers), NAMES)
    box.predict(images(1))
    with pytest.raises(InputError, match="no longer"):
        box.predict(images(1))


def test_the_classifier_gets_preprocessed_pictures() -> None:
    got = []
    settings = Preprocessing(size=(8, 8), channels="RGB", layout="NHWC", mean=(0.5,))
    box = BlackBox(
        lambda x: got.append(x) or x.mean((1, 2)), NAMES, preprocessing=settings, output="logits"
    )
    box.predict(images(2))
    assert got[0].shape == (2, 8, 8, 3)
    torch.testing.assert_close(got[0], settings(images(2)))


def test_a_black_box_that_is_no_longer_used_leaves_no_thread() -> None:
    box = BlackBox(logits, NAMES)
    box.predict(images(1))
    thread = box._worker._thread
    assert thread.is_alive()
    del box
    thread.join(5)
    assert not thread.is_alive()
