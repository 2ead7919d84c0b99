"""Check the classes that images are explained against."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from ecinn.errors import InputError
from ecinn.explanation.result import Skipped

Targets = (
    int | Sequence[int] | Literal["all"] | Int[Tensor, " targets"] | Int[Tensor, "batch targets"]
)


def resolve_targets(
    target: Targets, p: Int[Tensor, " batch"], classes: int, names: Sequence[str] | None = None
) -> Int[Tensor, "batch targets"]:
    """Resolve the targets of every image, refusing those that are its predicted class.

    Args:
        target: one class, several, one row per image, or "all" classes but p.
    """
    q = given_targets(target, p, classes)
    same = (q == p[:, None]).any(1)
    if bool(same.any()):
        index = int(same.nonzero()[0])
        which = f"image {index}" if len(p) > 1 else "the image"
        raise InputError(f"{which} is {already_predicted(int(p[index]), names)}")
    return q


def given_targets(
    target: Any,  # noqa: ANN401 (checked here)
    p: Int[Tensor, " batch"],
    classes: int,
) -> Int[Tensor, "batch targets"]:
    """Return the targets of every image as given, checked for shape and range only."""
    if isinstance(target, str):
        if target != "all":
            raise InputError(f"target is a class, several classes or 'all', not {target!r}")
        every = torch.arange(classes, device=p.device).expand(len(p), classes)
        return every[every != p[:, None]].reshape(len(p), classes - 1)
    try:
        q = torch.as_tensor(target, device=p.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"targets must be class numbers, not {target!r}") from error
    if q.numel() and (q.is_floating_point() or q.dtype == torch.bool):
        raise InputError(f"targets must be whole numbers, not {q.dtype}")
    if q.ndim < 2:
        q = q.reshape(-1).expand(len(p), -1)
    if q.ndim != 2 or len(q) != len(p) or not q.shape[1]:
        raise InputError(
            f"targets of {len(p)} images are whole numbers of shape (images, targets), "
            f"not {tuple(q.shape)}"
        )
    if bool(((q < 0) | (q >= classes)).any()):
        wrong = int(q[(q < 0) | (q >= classes)][0])
        raise InputError(
            f"target {wrong} is out of range: this model's classes are 0 to {classes - 1}"
        )
    return q.long()


def already_predicted(p: int, names: Sequence[str] | None) -> str:
    """Return the reason for skipping an image, and what to do instead."""
    return (
        f"already predicted as {names[p] if names else p}: "
        "choose another target, or 'all' for every other class"
    )


class AlreadyPredictedError(InputError):
    """Raised if every image is already predicted as a target."""

    def __init__(self, message: str, skipped: tuple[Skipped, ...] = ()) -> None:
        super().__init__(message)
        self.skipped = skipped


def nothing_left(skipped: Sequence[Skipped]) -> AlreadyPredictedError:
    """Return the error to raise if every image was skipped."""
    message = (
        f"the image is {skipped[0].reason}"
        if len(skipped) == 1
        else "every image is already predicted as a target: choose another target, or 'all' for "
        "every other class"
    )
    return AlreadyPredictedError(message, tuple(skipped))


def skip_predicted(
    q: Int[Tensor, "batch targets"], p: Int[Tensor, " batch"], names: Sequence[str]
) -> tuple[Int[Tensor, " explained"], tuple[Skipped, ...]]:
    """Return the rows that can be explained, and those that already are their target."""
    same = (q == p[:, None]).any(1)
    reasons = {int(row): already_predicted(int(p[row]), names) for row in same.nonzero()}
    skipped = tuple(Skipped(row, None, reason) for row, reason in reasons.items())
    if bool(same.all()):
        raise nothing_left(skipped)
    return (~same).nonzero().squeeze(1), skipped


def number(value: Any) -> Any:  # noqa: ANN401
    """Turn a tensor or array without dimensions into a number."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
