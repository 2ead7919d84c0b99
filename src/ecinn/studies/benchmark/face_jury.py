"""What another network, which took no part, says of counterfactual faces."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from ecinn.metrics.statistics import wilson_interval
from ecinn.model import Model
from ecinn.pixels import to_pixels
from ecinn.studies.benchmark.tables import Table, percent

LEVELS = (None, 0.99)
"""Confidences that are asked for; None is plain α₁."""


@dataclass(frozen=True)
class Convinced:
    """How many counterfactuals convince another network."""

    confidence: float | None
    """That was asked for; None: plain α₁."""
    judged: int
    """Faces that the other network reads as p too, before anything is changed."""
    convinced: int
    """Of these, how many it reads as q from the stored counterfactual."""
    change: float
    """Mean |x̂ − x| of these, in pixels of [0, 1]."""


@torch.inference_mode()
def ask(
    network: nn.Module,
    model: Model,
    images: UInt8[Tensor, "images channels height width"],
    *,
    levels: Sequence[float | None] = LEVELS,
    batch_size: int = 50,
    observe: Callable[[int], None] = lambda done: None,
) -> tuple[Convinced, ...]:
    """Explain faces of a model of two classes at every level, and show the stored pictures.

    Args:
        network: logits of the model's classes from pixels in [0, 1].
    """
    judged, convinced, change = 0, [0] * len(levels), [0.0] * len(levels)
    for done in range(0, len(images), batch_size):
        batch = images[done : done + batch_size]
        before = network(model.pixels(batch)).argmax(1).cpu()
        agreed = before == model.predict(batch).argmax(1).cpu()
        judged += int(agreed.sum())
        for number, confidence in enumerate(levels):
            if not agreed.any():
                break
            e = model.explain(batch[agreed], confidence=confidence)
            stored = to_pixels(e.stored_convincing[:, 0].cpu())
            after = network(stored.to(model.device)).argmax(1).cpu()
            convinced[number] += int((after == e.q[:, 0].cpu()).sum())
            moved = (stored - to_pixels(batch[agreed])).abs().flatten(1).mean(1)
            change[number] += float(moved.sum())
        observe(done + len(batch))
    return tuple(
        Convinced(confidence, judged, yes, moved / max(judged, 1))
        for confidence, yes, moved in zip(levels, convinced, change, strict=True)
    )


def jury_table(
    results: Mapping[str, Sequence[Convinced]], errors: Mapping[str, float | None]
) -> Table:
    """A row per model and level; a share's interval is Wilson's of 95 %."""
    rows = []
    for name, levels in results.items():
        for level in levels:
            low, high = wilson_interval(level.convinced, level.judged)
            error = errors[name]
            rows.append(
                (
                    name,
                    "α₁" if level.confidence is None else percent(level.confidence, 0),
                    str(level.judged),
                    f"{percent(level.convinced / max(level.judged, 1))} "
                    f"({percent(low, 1)} – {percent(high, 1)})",
                    f"{level.change:.4f}",
                    percent(None if error is None else 1 - error),
                )
            )
    return Table(
        title="Who else is convinced",
        head=(
            "model",
            "asked confidence %",
            "faces",
            "Inception-V3 reads q %",
            "mean change",
            "it reads real faces as labelled %",
        ),
        rows=tuple(rows),
        notes=(
            "Inception-V3 of the same label saw the same training faces and nothing of our "
            "models. Of the test faces that it reads as our model does, how many stored "
            "counterfactuals it reads as q. In brackets Wilson's interval of 95 %. A change that "
            "fooled only our own network would leave it where it was.",
        ),
    )
