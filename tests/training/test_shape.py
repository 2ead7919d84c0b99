"""The shape score: it separates what a line cannot, and keeps to its rate of false alarms."""

import numpy as np
import pytest
import torch

from ecinn.classifier.out_of_distribution import SHAPE_BITS, SHAPE_RATE
from ecinn.classifier.quantisation import pack, unpack
from ecinn.training.shape import fit_shape


def test_a_shell_is_told_from_what_is_inside(generator: torch.Generator) -> None:
    """Both have the same mean: a linear score would be at chance."""
    inside = 0.5 * torch.randn(6000, 6, generator=generator)
    outside = torch.randn(6000, 6, generator=generator)
    outside = 5 * outside / outside.norm(dim=1, keepdim=True)
    fitted, held_out = inside.split(3000)
    shape = fit_shape(fitted, outside[:3000], held_out, generator)
    scores = shape.score(held_out).double().numpy()
    assert shape.limit == pytest.approx(np.quantile(scores, 1 - SHAPE_RATE), abs=1e-6)
    assert (shape.score(outside[3000:]) > shape.limit).float().mean() > 0.9
    # The score by other means, with weights that storing does not change.
    weight, bias, out = (value.double().numpy() for value in shape[:3])
    expected = np.maximum(held_out.double().numpy() @ weight.T + bias, 0) @ out
    assert np.allclose(scores, expected, atol=1e-4)
    stored = unpack(pack(dict(list(shape._asdict().items())[:3]), SHAPE_BITS, rounded=""))
    assert all(torch.equal(stored[name], getattr(shape, name)) for name in stored)


def test_the_same_seed_gives_the_same_score(generator: torch.Generator) -> None:
    z = torch.randn(60, 5, generator=generator)
    shapes = [fit_shape(z, z + 1, z, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(shapes[0].weight, shapes[1].weight)
    assert shapes[0].limit == shapes[1].limit
