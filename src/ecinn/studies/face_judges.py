"""Judges of faces: two small networks of different families that predict all attributes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ecinn.classifier.tensor_files import find_file, load_tensors, write_tensors
from ecinn.data.celeba import ATTRIBUTES
from ecinn.data.dataset import Dataset
from ecinn.files import rebuild
from ecinn.flow.device import resolve_device
from ecinn.flow.precision import exact_convolutions
from ecinn.pixels import Images, StoredImages, to_pixels
from ecinn.progress import Observer, ignore
from ecinn.studies.judges import SHIPPED
from ecinn.training.augmented import TeacherSettings, train_augmented
from ecinn.training.networks import assemble, stored_weights, training_record
from ecinn.training.teacher import logit_of_mean

KIND = "face judges"
RESIDUAL, SEPARABLE = "residual", "separable"
"""The families of the two networks."""
LABELS = ("Smiling", "High_Cheekbones", "Wearing_Lipstick", "Heavy_Makeup")
"""The labels of the paper, which the judges must know best."""
_BATCH = 250
"""Images per forward pass, which bounds memory."""

Logits = Float[Tensor, "batch attributes"]
Features = Float[Tensor, "batch features"]


@dataclass(frozen=True)
class FaceJudgeSettings:
    """Sizes for 2.2 MiB together, and the training of both networks."""

    residual_widths: tuple[int, ...] = (32, 64, 96, 128)
    separable_widths: tuple[int, ...] = (40, 96, 192, 320)
    separable_depths: tuple[int, ...] = (2, 4, 8)
    """Layers of each stage after the first, which is a single convolution."""
    label_weight: float = 0.5
    """Share of the loss that belongs to the labels of the paper; all attributes share the rest."""
    training: TeacherSettings = field(default_factory=lambda: TeacherSettings(epochs=80, seed=100))
    """Schedule, augmentation and seed; a teacher's width does not apply."""
    stored_bits: int = 8
    """Bits per stored weight of convolutions and matrices; vectors are float32."""


DEFAULTS = FaceJudgeSettings()


class JudgeNetwork(nn.Module):
    """Pixels in [0, 1] to one logit per attribute: layers, average pooling, dropout, a matrix."""

    def __init__(self, layers: Sequence[nn.Module], channels: int, attributes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(channels, attributes)

    def features(self, x: Images) -> Features:
        """Return the penultimate layer."""
        if x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        return torch.mean(self.layers(4 * (x - 0.5)), (2, 3))

    def forward(self, x: Images) -> Logits:
        """Return the logit of every attribute."""
        logits: Tensor = self.head(self.dropout(self.features(x)))
        return logits


def residual_network(attributes: int, widths: Sequence[int]) -> JudgeNetwork:
    """Two residual blocks per stage; all stages but the first halve the image."""
    layers = _normalised(nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.ReLU())
    for channels, filters in pairwise((widths[0], *widths)):
        stride = 1 if len(layers) == 3 else 2
        layers += [_ResidualBlock(channels, filters, stride), _ResidualBlock(filters, filters, 1)]
    return JudgeNetwork(layers, widths[-1], attributes)


def separable_network(
    attributes: int, widths: Sequence[int], depths: Sequence[int]
) -> JudgeNetwork:
    """Depthwise 5×5 and pointwise convolutions in turn, without shortcuts."""
    layers = _normalised(nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.SiLU())
    for (before, filters), depth in zip(pairwise(widths), depths, strict=True):
        for channels, stride in ((before, 2), *[(filters, 1)] * (depth - 1)):
            depthwise = nn.Conv2d(
                channels, channels, 5, stride, padding=2, groups=channels, bias=False
            )
            layers += _normalised(depthwise, nn.SiLU())
            layers += _normalised(nn.Conv2d(channels, filters, 1, bias=False), nn.SiLU())
    return JudgeNetwork(layers, widths[-1], attributes)


class _ResidualBlock(nn.Module):
    """ReLU(s(x) + F(x)), two convolutions in F, and s a 1×1 convolution where shapes differ."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        first = nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)
        second = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.residual = nn.Sequential(
            *_normalised(first, nn.ReLU()), second, nn.BatchNorm2d(filters)
        )
        self.shortcut = nn.Sequential()
        if (channels, stride) != (filters, 1):
            project = nn.Conv2d(channels, filters, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(filters))
        self.relu = nn.ReLU()  # a module, because DeepLift uses the plain gradient of F.relu

    def forward(self, x: Images) -> Float[Tensor, "batch filters rows columns"]:
        activation: Tensor = self.relu(self.shortcut(x) + self.residual(x))
        return activation


def _normalised(convolution: nn.Conv2d, activation: nn.Module) -> list[nn.Module]:
    return [convolution, nn.BatchNorm2d(convolution.out_channels), activation]


class AttributeClassifier(nn.Module):
    """Use a judge as a binary classifier of one attribute: its logits are 0 and ℓ.

    Unlike Inception-V3, it does not resize its images, so nothing smooths its heatmaps.
    """

    def __init__(self, network: nn.Module, attribute: str) -> None:
        super().__init__()
        self.network, self.column = network, ATTRIBUTES.index(attribute)

    def forward(self, x: Images) -> Float[Tensor, "batch 2"]:
        """Return the logits of images in [0, 1] without and with the attribute."""
        logit = self.network(x)[:, self.column]
        return torch.stack([torch.zeros_like(logit), logit], 1)


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
        column = ATTRIBUTES.index(attribute)
        return {family: s[:, column].sigmoid() for family, s in self.scores(images).items()}

    def features(self, images: StoredImages) -> dict[str, Float[Tensor, "batch features"]]:
        """Return the penultimate layer, averaged over face and mirror image, by family."""
        return self._ask(images, "features", lambda both: both.mean(0))

    def classifier(self, attribute: str) -> AttributeClassifier:
        """Return the residual network, without mirror images, as a classifier of one attribute."""
        return AttributeClassifier(self.networks[RESIDUAL], attribute).eval()

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
        write_tensors(path, stored_weights(self, self.settings.stored_bits), about)


def _builders(
    attributes: int, settings: FaceJudgeSettings
) -> dict[str, Callable[[], JudgeNetwork]]:
    s = settings
    return {
        RESIDUAL: lambda: residual_network(attributes, s.residual_widths),
        SEPARABLE: lambda: separable_network(attributes, s.separable_widths, s.separable_depths),
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
    settings: FaceJudgeSettings = DEFAULTS,
    *,
    device: str | torch.device = "auto",
    observe: Observer = ignore,
) -> FaceJudges:
    """Train both judges, each from its own seed, and measure their stored weights."""
    device = resolve_device(device)
    attributes, weights = len(ATTRIBUTES), attribute_weights(settings.label_weight).to(device)
    assert data.attributes is not None
    trainings = [
        train_augmented(
            build,
            data.images,
            data.attributes,
            settings.training,
            number=number,
            weights=weights,
            task=family,
            device=device,
            observe=observe,
        )
        for number, (family, build) in enumerate(_builders(attributes, settings).items())
    ]
    stored = {
        f"networks.{training.task}.{name}": value
        for training in trainings
        for name, value in stored_weights(training.network, settings.stored_bits).items()
    }
    judges = assemble(lambda: FaceJudges(attributes, settings), stored, device)
    judges.record = {
        **training_record(trainings, len(data), device),
        "images": {split: len(images) for split, images in held_out.items()},
        "errors": {split: _errors(judges, images) for split, images in held_out.items()},
    }
    return judges


def attribute_weights(share: float) -> Float[Tensor, " attributes"]:
    """Return the weight of each attribute: the mean is 1, the paper's labels have this share."""
    count = len(ATTRIBUTES)
    weights = torch.full((count,), 1 - share)
    weights[[ATTRIBUTES.index(label) for label in LABELS]] += share * count / len(LABELS)
    return weights


def _errors(judges: FaceJudges, data: Dataset) -> dict[str, dict[str, float]]:
    """Return the error rate of every attribute, by family."""
    assert data.attributes is not None
    known = data.attributes > 0
    rates = {f: ((s > 0) != known).double().mean(0) for f, s in judges.scores(data.images).items()}
    return {f: dict(zip(ATTRIBUTES, each.tolist(), strict=True)) for f, each in rates.items()}
