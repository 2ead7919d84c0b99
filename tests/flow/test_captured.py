"""CUDA graphs of a flow: how batches are cut, and equality with the plain flow on a GPU."""

import random

import pytest
import torch

from ecinn.flow.captured import PADDED, SIZES, Captured, cuts
from ecinn.flow.network import Architecture, Stage, build_inn
from helpers.builders import randomise


def test_batches_are_cut_into_captured_sizes_and_a_rest() -> None:
    drawn = random.Random(3)
    for count in [0, 1, PADDED, PADDED + 1, *(drawn.randrange(5000) for _ in range(200))]:
        parts = list(cuts(count))
        assert sum(parts) == count
        assert all(part in SIZES for part in parts[:-1])
        assert not parts or parts[-1] in SIZES or parts[-1] <= PADDED
        assert len(parts) <= 1 + count // SIZES[-1] + len(SIZES) - SIZES.index(PADDED)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_results_are_those_of_the_flow() -> None:
    inn = randomise(build_inn(Architecture(1, 28, 28, 10, (Stage(1, 8), Stage(2, 8)), 16))).cuda()
    captured = Captured(inn)
    for count in (1, 3, 70, 3):
        x = torch.rand(count, 1, 28, 28, device="cuda")
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                z, log_det = inn(x)
                same_z, same_log_det = captured(x)
                torch.testing.assert_close(same_z, z, rtol=0, atol=1e-5)
                torch.testing.assert_close(same_log_det, log_det, rtol=0, atol=1e-3)
                torch.testing.assert_close(captured.inverse(z), x, rtol=0, atol=1e-4)
