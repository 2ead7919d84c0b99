"""Two models refined from the same start, and what lies between them."""

import torch

from ecinn.classifier.checkpoint import Checkpoint
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.training.calibration import finish


def mix(
    first: Checkpoint, second: Checkpoint, share: float, data: Dataset, device: torch.device
) -> Checkpoint:
    """The model whose weights are (1 − share)·first + share·second, its means measured anew.

    Weights that come from one start by further training usually lie in one valley. Then this is
    a dial between, say, the nearer and the more real counterfactuals, without any training.
    Whether they do is not checked here: the measured error of the mixture tells.
    """
    if not 0 <= share <= 1:
        raise InputError(f"the share of the second model lies between 0 and 1, not at {share}")
    if first.recipe.architecture != second.recipe.architecture:
        raise InputError("these two models cannot be mixed: their layers differ")
    if first.recipe.dataset != second.recipe.dataset:
        raise InputError("these two models cannot be mixed: they are of different data")
    other = second.classifier.state_dict()
    weights = {
        name: torch.lerp(value, other[name], share) if value.is_floating_point() else value
        for name, value in first.classifier.state_dict().items()
    }
    record = {"mixed": {"share": share}, "first": first.training, "second": second.training}
    return finish(first.recipe, data, weights, device, record)
