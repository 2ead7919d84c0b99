"""Weights as a file holds them: how far they are rounded, and what is not."""

import pytest
import torch
from torch import Tensor

from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.quantisation import STORED_BITS, pack, stored_precision, unpack
from ecinn.errors import InputError
from helpers.builders import randomise


@pytest.fixture
def weights(small_architecture) -> dict[str, Tensor]:
    classifier = GenerativeClassifier(small_architecture)
    randomise(classifier)
    return dict(classifier.state_dict())


@pytest.mark.parametrize("bits", STORED_BITS)
def test_only_subnets_are_rounded(weights: dict[str, Tensor], bits: int) -> None:
    stored = stored_precision(weights, bits)
    assert stored.keys() == weights.keys()
    for name, value in weights.items():
        assert stored[name].dtype == value.dtype, name
        if ".subnet." not in name or bits == 32:
            assert torch.equal(stored[name], value), name


def test_8_bits_round_every_row_to_a_step_of_its_own(weights: dict[str, Tensor]) -> None:
    stored = stored_precision(weights, 8)
    rounded = 0
    for name, value in weights.items():
        if ".subnet." in name and value.ndim > 1:
            for row, kept in zip(value, stored[name], strict=True):
                step = float(row.abs().max()) / 127
                # Half a step, and the eight digits of the scale: 1/256 of the largest weight.
                assert float((row - kept).abs().max()) <= (0.5 + 127 / 256) * step
                assert len(kept.unique()) <= 255
                rounded += 1
    assert rounded > 20


def test_8_bits_take_a_quarter_of_the_room(weights: dict[str, Tensor]) -> None:
    def size(tensors: dict[str, Tensor]) -> int:
        return sum(value.numel() * value.element_size() for value in tensors.values())

    kernels = {n: v for n, v in weights.items() if ".subnet." in n and v.ndim > 1}
    scales = sum(2 * len(value) for value in kernels.values())
    assert size(pack(kernels, 8)) == size(kernels) / 4 + scales
    assert size(pack(kernels, 16)) == size(kernels) / 2


@pytest.mark.parametrize("bits", STORED_BITS)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4])
def test_saving_again_changes_nothing(weights: dict[str, Tensor], bits: int, size: float) -> None:
    if bits == 16 and size == 1e-30:
        pytest.skip("half precision has no such numbers")
    scaled = {n: size * v if v.is_floating_point() else v for n, v in weights.items()}
    once = stored_precision(scaled, bits)
    twice = stored_precision(once, bits)
    for name, value in once.items():
        assert torch.equal(value, twice[name]), name
        assert bool(value.isfinite().all()), name


def test_a_row_of_zeros_stays_zero() -> None:
    kernel = torch.tensor([[0.0, 0.0], [0.5, -1.0]])
    stored = unpack(pack({"a.subnet.0.weight": kernel}, 8))["a.subnet.0.weight"]
    assert torch.equal(stored[0], kernel[0])
    assert torch.allclose(stored[1], kernel[1], atol=1 / 127)


def test_other_bits_are_refused(weights: dict[str, Tensor]) -> None:
    with pytest.raises(InputError, match="32, 16 or 8 bits, not 4"):
        pack(weights, 4)
