"""Progress reports of long-running work: one protocol for the whole package."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """A task, how much of it is done, and the figures it can tell so far."""

    task: str
    done: int
    total: int
    figures: Mapping[str, float | int] = field(default_factory=dict)
    """Such as epoch, epochs, loss, bits_per_dim, error and images_per_second."""


Observer = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """Observe nothing: the default of every `observe` argument."""


def counter(observe: Observer, task: str, total: int) -> Callable[[int], None]:
    """Report how much of one task is done."""
    return lambda done: observe(Progress(task, done, total))
