"""Pictures as they should not be: turned, shifted far, inverted; what no training image is."""

import torch
from jaxtyping import UInt8
from torch import Tensor

SHIFT = 0.3
"""Of the side: a face is no longer in the middle."""

Images = UInt8[Tensor, "batch channels height width"]


def misplace(images: Images, generator: torch.Generator) -> Images:
    """Each upside down, turned by a quarter, shifted far in one direction, or inverted."""
    height, width = images.shape[-2:]
    kinds = [images.flip(2), 255 - images]
    if height == width:
        kinds += [images.rot90(turns, (2, 3)) for turns in (1, 3)]
    for axis, side in ((2, height), (3, width)):
        for sign in (-1, 1):
            kinds.append(_shifted(images, axis, sign * round(SHIFT * side)))
    which = torch.randint(len(kinds), (len(images),), generator=generator)
    chosen = images.clone()
    for number, kind in enumerate(kinds):
        rows = (which == number).to(images.device)
        chosen[rows] = kind[rows]
    return chosen


def _shifted(images: Images, axis: int, by: int) -> Images:
    """Moved along an axis; what comes in is the mirrored edge."""
    side = images.shape[axis]
    place = torch.arange(side, device=images.device) - by
    mirrored = torch.where(place < 0, -1 - place, place)
    mirrored = torch.where(mirrored >= side, 2 * side - 1 - mirrored, mirrored)
    return images.index_select(axis, mirrored)
