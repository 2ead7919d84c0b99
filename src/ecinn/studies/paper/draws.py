"""Test images drawn at random: nobody chooses what a figure shows."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.model import Model
from ecinn.studies.paper.artefact import Context

_AT_ONCE = 64


def generator(context: Context, figure: int) -> torch.Generator:
    """The draws of one figure: the same ones whether or not others are made too."""
    return torch.Generator().manual_seed(1000 * context.seed + figure)


def draw(
    model: Model,
    data: Dataset,
    among: Bool[Tensor, " batch"],
    n: int,
    generator: torch.Generator,
) -> Int[Tensor, " n"]:
    """The places of the first n of these images, shuffled, that the model reads as labelled."""
    candidates = among.nonzero()[:, 0]
    shuffled = candidates[torch.randperm(len(candidates), generator=generator)]
    found: list[Tensor] = []
    for places in shuffled.split(max(n, min(_AT_ONCE, 2 * n))):
        read_as = model.predict(data.images[places]).argmax(1).cpu()
        found.append(places[read_as == data.labels[places]])
        if sum(map(len, found)) >= n:
            return torch.cat(found)[:n]
    raise InputError(
        f"the model reads only {sum(map(len, found))} of {len(candidates)} such test images as "
        f"they are labelled, and {n} are to be shown: take more images or another model"
    )
