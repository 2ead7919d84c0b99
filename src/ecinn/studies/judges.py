"""Independent judges of any method's counterfactuals: two oracles, features, autoencoders."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from ecinn.classifier.checkpoint import read_tensors, write_tensors
from ecinn.data.augmentation import Augmentation, augment
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.files import ASSETS

SHIPPED = ASSETS / "judges"
KIND = "judges"
"""Tells a file of judges from a model's."""
_SUFFIX = ".safetensors"
_BATCH = 500
"""Images judged at a time, which bounds memory."""

Images = UInt8[Tensor, "batch channels height width"]
Scaled = Float[Tensor, "batch channels height width"]


def scaled(images: Images) -> Scaled:
    """k/255 − ½: what every judge reads, and the scale of IM1, IM2 and EN."""
    return images.float() / 255 - 0.5


@dataclass(frozen=True)
class JudgeSettings:
    """Sizes, chosen so that MNIST takes minutes on one CPU core, and how long to train."""

    convolution_width: int = 16
    """Channels of the first convolution; features are four times as many."""
    dense_width: int = 512
    autoencoder_width: int = 16
    """As the autoencoders that the authors of ECINN published."""
    convolution_epochs: int = 5
    dense_epochs: int = 25
    autoencoder_epochs: int = 5
    batch_size: int = 128
    learning_rate: float = 0.004
    autoencoder_batch_size: int = 32
    autoencoder_learning_rate: float = 0.01
    shift: float = 2.0
    """Pixels; with the three below, so that oracles are honest on slightly moved images."""
    rotate: float = 8.0
    scale: float = 0.08
    shear: float = 0.08

    @property
    def augmentation(self) -> Augmentation:
        """What every second classifier image goes through."""
        return Augmentation(
            shift=self.shift, rotate=self.rotate, scale=self.scale, shear=self.shear, share=0.5
        )


class ConvolutionalNetwork(nn.Module):
    """Four 3×3 convolutions with batch norm and ReLU, halved twice, averaged over all places."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels, width),
            nn.MaxPool2d(2),
            *_convolution(width, 2 * width),
            nn.MaxPool2d(2),
            *_convolution(2 * width, 4 * width),
            *_convolution(4 * width, 4 * width),
        )
        self.head = nn.Linear(4 * width, classes)

    def features(self, x: Scaled) -> Float[Tensor, "batch features"]:
        """The penultimate layer."""
        return torch.mean(self.body(x), (2, 3))

    def forward(self, x: Scaled) -> Float[Tensor, "batch classes"]:
        """Logits."""
        logits: Tensor = self.head(self.features(x))
        return logits


class FullyConnectedNetwork(nn.Sequential):
    """Two hidden layers with batch norm and ReLU on all pixels at once: knows of no neighbours."""

    def __init__(self, dim: int, classes: int, width: int) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(dim, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width // 2),
            nn.BatchNorm1d(width // 2),
            nn.ReLU(),
            nn.Linear(width // 2, classes),
        )


class Autoencoder(nn.Sequential):
    """The authors' shape: ReLU, ReLU, max-pool 2, linear | ReLU, nearest ×2, ReLU, linear."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, channels, 3, padding=1),
        )


def _convolution(channels: int, width: int) -> Iterator[nn.Module]:
    yield nn.Conv2d(channels, width, 3, padding=1, bias=False)
    yield nn.BatchNorm2d(width)
    yield nn.ReLU()


class JudgeNetworks(nn.Module):
    """All networks of a set of judges."""

    def __init__(self, shape: tuple[int, int, int], classes: int, settings: JudgeSettings) -> None:
        super().__init__()
        channels, height, width = shape
        self.convolutional = ConvolutionalNetwork(channels, classes, settings.convolution_width)
        self.fully_connected = FullyConnectedNetwork(
            channels * height * width, classes, settings.dense_width
        )
        self.feature_network = ConvolutionalNetwork(channels, classes, settings.convolution_width)
        self.autoencoders = nn.ModuleList(
            Autoencoder(channels, settings.autoencoder_width) for _ in range(classes)
        )
        self.autoencoder_of_all = Autoencoder(channels, settings.autoencoder_width)
        # Twice as fast on a CPU where channels are few.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Judges:
    """Networks that no method of counterfactuals has seen, and what is known of them."""

    networks: JudgeNetworks
    shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    settings: JudgeSettings
    record: Mapping[str, Any]
    """Seed; on the test images `accuracy` and `reconstruction_error`; versions, seconds."""

    @property
    def oracles(self) -> Mapping[str, nn.Module]:
        """The two classifiers, by family."""
        return {
            "convolutional": self.networks.convolutional,
            "fully connected": self.networks.fully_connected,
        }

    def to(self, device: torch.device) -> "Judges":
        """Move the networks; answers come back to where the images are."""
        self.networks.to(device)
        return self

    def scores(self, images: Images) -> dict[str, Float[Tensor, "batch classes"]]:
        """Logits of each oracle, by family."""
        return {family: self._judge(oracle, images) for family, oracle in self.oracles.items()}

    def verdicts(self, images: Images) -> dict[str, Int[Tensor, " batch"]]:
        """The class that each oracle says, by family."""
        return {family: scores.argmax(1) for family, scores in self.scores(images).items()}

    def features(self, images: Images) -> Float[Tensor, "batch features"]:
        """What the Fréchet distance compares: the feature network's penultimate layer."""
        return self._judge(self.networks.feature_network.features, images)

    def reconstruct(self, images: Images, labels: Int[Tensor, " batch"] | None = None) -> Scaled:
        """AE_label(x) of every image, or AE_all(x) without labels, on the scale of `scaled`."""
        if labels is None:
            return self._judge(self.networks.autoencoder_of_all, images)
        if bool(((labels < 0) | (labels >= len(self.class_names))).any()):
            raise InputError(f"labels of these judges are 0 to {len(self.class_names) - 1}")
        reconstructed = torch.empty(images.shape, device=images.device)
        for label, network in enumerate(self.networks.autoencoders):
            chosen = labels == label
            if bool(chosen.any()):
                reconstructed[chosen] = self._judge(network, images[chosen])
        return reconstructed

    @torch.no_grad()
    def _judge(self, network: Callable[[Tensor], Tensor], images: Images) -> Tensor:
        if tuple(images.shape[1:]) != self.shape:
            raise InputError(
                f"these judges are for images of shape {self.shape}, not {tuple(images.shape[1:])}"
            )
        device = self.networks.convolutional.head.weight.device
        answers = [network(scaled(batch.to(device))) for batch in images.split(_BATCH)]
        return torch.cat(answers).to(images.device)

    def save(self, path: Path) -> None:
        """One safetensors file, written at once; weights as float16, which they fit already."""
        about = {
            "kind": KIND,
            "shape": self.shape,
            "class_names": self.class_names,
            "settings": dataclasses.asdict(self.settings),
            "record": self.record,
        }
        write_tensors(path, _halved(self.networks.state_dict()), about)


def shipped_judges() -> list[str]:
    """Names that `load_judges` knows without a path."""
    return sorted(path.stem for path in SHIPPED.glob(f"*{_SUFFIX}"))


def load_judges(name_or_path: str | Path) -> Judges:
    """Read shipped judges by their name, or any by their path."""
    shipped = str(name_or_path) in shipped_judges()
    path = SHIPPED / f"{name_or_path}{_SUFFIX}" if shipped else Path(name_or_path)
    if not path.is_file():
        raise InputError(
            f"no judges {str(name_or_path)!r}: give a path to a {_SUFFIX} file of judges, "
            f"or one of: {', '.join(shipped_judges())}"
        )
    tensors, about = read_tensors(path)
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise InputError(f"{path} holds no judges but something else: give a file of judges")
    try:
        channels, height, width = about["shape"]
        return _assemble(
            tensors,
            (int(channels), int(height), int(width)),
            tuple(about["class_names"]),
            JudgeSettings(**about["settings"]),
            about["record"],
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"{path} does not fit this version's judges ({reason}); "
            "use the version of ecinn that wrote it, or train them again"
        ) from error


def _halved(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.half() if v.is_floating_point() else v for k, v in weights.items()}


def _assemble(
    weights: Mapping[str, Tensor],
    shape: tuple[int, int, int],
    class_names: tuple[str, ...],
    settings: JudgeSettings,
    record: Mapping[str, Any],
) -> Judges:
    """Judges with the stored weights, which is also how freshly trained ones are measured."""
    with torch.device("meta"):
        networks = JudgeNetworks(shape, len(class_names), settings)
    networks.to_empty(device="cpu").load_state_dict(dict(weights))
    networks.eval().requires_grad_(requires_grad=False)
    return Judges(networks, shape, class_names, settings, record)


@dataclass(frozen=True)
class JudgeProgress:
    """Where the training stands: the epoch's mean loss, seconds since the first network began."""

    network: str
    epoch: int
    epochs: int
    loss: float
    seconds: float


def train_judges(
    train: Dataset,
    test: Dataset,
    *,
    seed: int,
    device: torch.device,
    observe: Callable[[JudgeProgress], None] = lambda progress: None,
    settings: JudgeSettings = JudgeSettings(),  # noqa: B008
) -> Judges:
    """Train all judges, each on its own random numbers, and measure them on the test images."""
    _require_judgeable(train, test)
    began = time.monotonic()
    channels, height, width = train.images.shape[1:]
    shape, classes = (channels, height, width), len(train.class_names)
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        networks = JudgeNetworks(shape, classes, settings).to(device).train()
    images, labels = train.images.to(device), train.labels.to(device)
    everything = Dataset(images, labels, train.class_names)
    assignments: list[tuple[str, nn.Module, int, Dataset]] = [
        ("convolutional", networks.convolutional, settings.convolution_epochs, everything),
        ("fully connected", networks.fully_connected, settings.dense_epochs, everything),
        ("features", networks.feature_network, settings.convolution_epochs, everything),
        ("autoencoder", networks.autoencoder_of_all, settings.autoencoder_epochs, everything),
    ]
    for label, name in enumerate(train.class_names):
        own = Dataset(images[labels == label], labels[labels == label], train.class_names)
        network = networks.autoencoders[label]
        assignments.append((f"autoencoder of {name}", network, settings.autoencoder_epochs, own))
    for number, (name, network, epochs, data) in enumerate(assignments):
        losses = _fit(network, data, epochs, settings, 1_000 * seed + number)
        for epoch, loss in enumerate(losses, start=1):
            observe(JudgeProgress(name, epoch, epochs, loss, time.monotonic() - began))
    record = {
        "seed": seed,
        "training_images": len(train),
        "test_images": len(test),
        "torch": torch.__version__,
        "device": device.type,
        "seconds": round(time.monotonic() - began, 1),
    }
    # Measured on the weights as they are stored, so that the figures are those of the file.
    weights = _halved(networks.state_dict())
    judges = _assemble(weights, shape, train.class_names, settings, record).to(device)
    judges = dataclasses.replace(judges, record=record | _measure(judges, test))
    return judges.to(torch.device("cpu"))


def _fit(
    network: nn.Module, data: Dataset, epochs: int, settings: JudgeSettings, seed: int
) -> Iterator[float]:
    """Train with AdamW under one cycle of the learning rate; the mean loss of every epoch."""
    generator = torch.Generator(data.images.device).manual_seed(seed)
    batch_size, rate = settings.batch_size, settings.learning_rate
    if isinstance(network, Autoencoder):
        batch_size, rate = settings.autoencoder_batch_size, settings.autoencoder_learning_rate
    batch_size = min(batch_size, len(data))
    steps = len(data) // batch_size
    optimiser = torch.optim.AdamW(network.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=epochs * steps)
    for _ in range(epochs):
        order = torch.randperm(len(data), generator=generator, device=generator.device)
        total = torch.zeros((), device=generator.device)
        for batch in order.split(batch_size)[:steps]:
            images = data.images[batch]
            if isinstance(network, Autoencoder):
                x = scaled(images)
                loss = F.mse_loss(network(x), x)
            else:
                x = scaled(augment(images, settings.augmentation, generator))
                loss = F.cross_entropy(network(x), data.labels[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.detach()
        yield float(total) / steps


def _measure(judges: Judges, test: Dataset) -> dict[str, dict[str, float]]:
    """Accuracy of all classifiers; mean squared error per pixel of the autoencoders."""
    scores = judges.scores(test.images)
    scores["features"] = judges._judge(judges.networks.feature_network, test.images)
    x = scaled(test.images)
    another = (test.labels + 1) % len(test.class_names)
    reconstructions = {
        "of the image's class": judges.reconstruct(test.images, test.labels),
        "of another class": judges.reconstruct(test.images, another),
        "of all classes": judges.reconstruct(test.images),
    }
    return {
        "accuracy": {
            name: (logits.argmax(1) == test.labels).double().mean().item()
            for name, logits in scores.items()
        },
        "reconstruction_error": {
            name: F.mse_loss(image, x).item() for name, image in reconstructions.items()
        },
    }


def _require_judgeable(train: Dataset, test: Dataset) -> None:
    channels, height, width = train.images.shape[1:]
    if not 1 <= channels <= 3 or height % 4 or width % 4:
        raise InputError(
            f"judges read 1 to 3 channels and sides divisible by 4, not {channels} channels of "
            f"{height}×{width}: resize the images"
        )
    if train.images.shape[1:] != test.images.shape[1:] or train.class_names != test.class_names:
        raise InputError("training and test images differ in shape or classes: give one data set")
    counts = torch.bincount(train.labels, minlength=len(train.class_names))
    if len(counts) < 2 or not len(test) or not bool(counts.all()):
        raise InputError("give at least two classes, training images of each, and test images")
