"""Judges of faces: two small networks of different families that predict all attributes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ecinn.classifier.tensor_files import find_file, load_tensors, rebuild, write_tensors
from ecinn.data.celeba import ATTRIBUTES
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.flow.device import resolve_device
from ecinn.flow.precision import exact_convolutions
from ecinn.pixels import Images, StoredImages, to_pixels
from ecinn.progress import Observer, ignore
from ecinn.studies.judges import SHIPPED
from ecinn.training.networks import assemble, stored_weights, training_record
from ecinn.training.teacher import (
    AttributeNetwork,
    AttributeTraining,
    Logits,
    count_attributes,
    logit_of_mean,
    train_attributes,
)

KIND = "face judges"
LABELS = ("Smiling", "High_Cheekbones", "Wearing_Lipstick", "Heavy_Makeup")
"""The labels of the paper, which the judges must know best."""
_BATCH = 250
"""Images per forward pass, which bounds memory."""


@dataclass(frozen=True)
class FaceJudgeSettings(AttributeTraining):
    """Sizes for 3 MiB together, with weights as float16, and the training of both networks."""

    residual_width: int = 8
    residual_multiples: tuple[int, ...] = (3, 6, 10, 14)
    """Channels of each stage, in multiples of the width."""
    separable_widths: tuple[int, ...] = (32, 80, 160, 256)
    separable_depths: tuple[int, ...] = (2, 4, 8)
    """Layers of each stage after the first, which is a single convolution."""
    epochs: int = 80
    label_weight: float = 0.5
    """Share of the loss that belongs to the labels of the paper; all attributes share the rest."""
    seed: int = 100
    """Of no model, teacher or jury."""


class SeparableNetwork(nn.Module):
    """Depthwise 5×5 and pointwise convolutions in turn, without shortcuts: pixels to logits.

    Args:
        widths: channels of each stage; all stages but the first halve the image.
        depths: layers of each stage after the first.
    """

    def __init__(self, attributes: int, widths: Sequence[int], depths: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(widths[0]), nn.SiLU()]
        for (channels, filters), depth in zip(pairwise(widths), depths, strict=True):
            layers += _separable(channels, filters, 2)
            layers += [layer for _ in range(depth - 1) for layer in _separable(filters, filters)]
        self.layers = nn.Sequential(*layers)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(widths[-1], attributes)

    def features(self, x: Images) -> Float[Tensor, "batch features"]:
        """Return the penultimate layer."""
        if x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        return torch.mean(self.layers(4 * (x - 0.5)), (2, 3))

    def forward(self, x: Images) -> Logits:
        """Return the logit of every attribute."""
        logits: Tensor = self.head(self.dropout(self.features(x)))
        return logits


def _separable(channels: int, filters: int, stride: int = 1) -> list[nn.Module]:
    """Filter each channel, then mix the channels; each with batch norm and SiLU."""
    return [
        nn.Conv2d(channels, channels, 5, stride, padding=2, groups=channels, bias=False),
        nn.BatchNorm2d(channels),
        nn.SiLU(),
        nn.Conv2d(channels, filters, 1, bias=False),
        nn.BatchNorm2d(filters),
        nn.SiLU(),
    ]


class FaceJudges(nn.Module):
    """Two networks that took no part in making any model, and their training record.

    Each sees a face and its mirror image. All methods take 8-bit faces on any device.
    """

    record: Mapping[str, Any]
    """Training record, and as "errors" of "validation" and "test" those of each attribute."""

    def __init__(self, attributes: int, settings: FaceJudgeSettings) -> None:
        super().__init__()
        self.attributes, self.settings, self.record = attributes, settings, {}
        self.networks = nn.ModuleDict(
            {family: build() for family, build in _builders(attributes, settings).items()}
        )

    def scores(self, images: StoredImages) -> dict[str, Logits]:
        """Return the logit of the mean probability of every attribute, by family."""
        return self._ask(images, "forward", logit_of_mean)

    def probabilities(
        self, images: StoredImages, attribute: str
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return the probability that each face has this attribute, by family."""
        if attribute not in ATTRIBUTES:
            raise InputError(f"CelebA has no attribute {attribute!r}: give one like Smiling")
        column = ATTRIBUTES.index(attribute)
        return {family: s[:, column].sigmoid() for family, s in self.scores(images).items()}

    def features(self, images: StoredImages) -> dict[str, Float[Tensor, "batch features"]]:
        """Return the penultimate layer, averaged over face and mirror image, by family."""
        return self._ask(images, "features", lambda both: both.mean(0))

    @torch.no_grad()
    def _ask(
        self, images: StoredImages, method: str, merge: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """Call a method of each network in parts, and merge the answers for both images."""
        answers: dict[str, Tensor] = {}
        for family, network in self.networks.items():
            device = next(network.parameters()).device
            ask = getattr(network, method)
            with exact_convolutions():
                parts = [
                    merge(torch.stack([ask(x), ask(x.flip(-1))]))
                    for x in (to_pixels(part.to(device)) for part in images.split(_BATCH))
                ]
            answers[family] = torch.cat(parts).to(images.device)
        return answers

    def save(self, path: Path) -> None:
        """Write one safetensors file, completely or not at all."""
        about = {
            "kind": KIND,
            "attributes": self.attributes,
            "settings": asdict(self.settings),
            "record": self.record,
        }
        write_tensors(path, stored_weights(self), about)


def _builders(
    attributes: int, settings: FaceJudgeSettings
) -> dict[str, Callable[[], AttributeNetwork | SeparableNetwork]]:
    s = settings
    return {
        "residual": lambda: AttributeNetwork(attributes, s.residual_width, s.residual_multiples),
        "separable": lambda: SeparableNetwork(attributes, s.separable_widths, s.separable_depths),
    }


def load_face_judges(
    name_or_path: str | Path = "celeba", device: str | torch.device = "cpu"
) -> FaceJudges:
    """Read shipped judges by their name, or any judges of faces by their path."""
    target = resolve_device(device)

    def build(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> FaceJudges:
        settings: FaceJudgeSettings = rebuild(FaceJudgeSettings, about["settings"])
        judges = assemble(lambda: FaceJudges(about["attributes"], settings), tensors, target)
        judges.record = about["record"]
        return judges

    return load_tensors(find_file(name_or_path, SHIPPED, KIND), KIND, build)


def train_face_judges(
    data: Dataset,
    held_out: Mapping[str, Dataset],
    settings: FaceJudgeSettings = FaceJudgeSettings(),  # noqa: B008
    *,
    device: str | torch.device = "auto",
    observe: Observer = ignore,
) -> FaceJudges:
    """Train both judges, each from its own seed, and measure their stored weights.

    Args:
        held_out: images by split, "validation" and "test"; they take no part in the training.
    """
    device = resolve_device(device)
    attributes = count_attributes(data, "a judge of faces")
    if attributes != len(ATTRIBUTES):
        raise InputError(
            f"judges of faces need the {len(ATTRIBUTES)} attributes of CelebA, not {attributes}"
        )
    share = settings.label_weight
    weights = torch.full((attributes,), (1 - share) / attributes)
    weights[[ATTRIBUTES.index(label) for label in LABELS]] += share / len(LABELS)
    trainings = [
        train_attributes(
            build,
            data,
            settings,
            seed=settings.seed * 1_000_003 + number,
            device=device,
            task=family,
            observe=observe,
            weights=weights,
        )
        for number, (family, build) in enumerate(_builders(attributes, settings).items())
    ]
    stored = {
        f"networks.{training.task}.{name}": value
        for training in trainings
        for name, value in stored_weights(training.network).items()
    }
    judges = assemble(lambda: FaceJudges(attributes, settings), stored, device)
    judges.record = {
        **training_record(trainings, len(data), device),
        "images": {split: len(images) for split, images in held_out.items()},
        "errors": {split: _errors(judges, images) for split, images in held_out.items()},
    }
    return judges


def _errors(judges: FaceJudges, data: Dataset) -> dict[str, dict[str, float]]:
    """Return the error rate of every attribute, by family."""
    assert data.attributes is not None
    known = data.attributes > 0
    rates = {f: ((s > 0) != known).double().mean(0) for f, s in judges.scores(data.images).items()}
    return {f: dict(zip(ATTRIBUTES, each.tolist(), strict=True)) for f, each in rates.items()}
