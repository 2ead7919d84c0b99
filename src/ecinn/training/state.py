"""Everything that changes during training, and its file, from which a run resumes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ecinn import equations
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.recipes import Recipe
from ecinn.classifier.tensor_files import read_tensors
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.pixels import Labels, to_pixels

OPTIMISER_BUFFERS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
"""State of every weight in AdamW, Adam and SGD."""


@dataclass(frozen=True)
class EpochRecord:
    """One point of the training curve, measured on the noisy, augmented training images."""

    epoch: int
    loss: float
    bits_per_dim: float
    error: float
    seconds: float


@dataclass
class TrainingState:
    """Everything that changes during training."""

    classifier: GenerativeClassifier
    average: GenerativeClassifier
    """Exponential moving average (EMA) of the classifier's weights."""
    optimiser: torch.optim.Optimizer
    epoch: int = 0
    seconds: float = 0.0
    curve: list[EpochRecord] = field(default_factory=list)
    attribute_head: nn.Linear | None = None
    """Predicts all attributes of an image from its latent; not part of the model."""
    attribute_optimiser: torch.optim.Optimizer | None = None
    teacher: nn.Module | None = None
    """Predicts the log-odds of every attribute of an image; constant and not stored."""
    origin: dict[str, str] = field(default_factory=dict)
    """Inputs of the run besides its recipe: the model it was initialised from, the teacher."""
    images: int | None = None
    """Number of training images, once it is known."""

    @classmethod
    def start(cls, recipe: Recipe, device: torch.device, attributes: int = 0) -> "TrainingState":
        """Return the untrained state of a recipe for a dataset with so many attributes."""
        classifier, average = classifier_pair(recipe, device)
        state = cls(classifier, average, make_optimiser(classifier, recipe, device))
        state.add_attribute_head(attributes, recipe, device)
        return state

    def add_attribute_head(self, attributes: int, recipe: Recipe, device: torch.device) -> None:
        """Add an attribute head with zero weights, if there are attributes."""
        if not attributes:
            return
        self.attribute_head = nn.utils.skip_init(
            nn.Linear, recipe.architecture.dim, attributes, device=device
        )
        nn.init.zeros_(self.attribute_head.weight)
        nn.init.zeros_(self.attribute_head.bias)
        self.attribute_optimiser = make_optimiser(self.attribute_head, recipe, device)

    @torch.no_grad()
    def init_from(self, network: GenerativeClassifier, data: Dataset) -> None:
        """Copy the layers of another model, and fit class means of this data to them."""
        self.average.load_state_dict(network.state_dict() | {"mu": self.average.mu})
        device = self.average.mu.device
        parts = [
            self.average.encode(to_pixels(images.to(device))) for images in data.images.split(500)
        ]
        labels = data.labels.to(device)
        self.average.mu.copy_(first_means(torch.cat(parts), labels, len(self.average.mu)))
        self.classifier.load_state_dict(self.average.state_dict())

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """Every network by the name it is stored under."""
        networks: dict[str, nn.Module] = {"classifier": self.classifier, "average": self.average}
        if self.attribute_head is not None:
            networks["attribute_head"] = self.attribute_head
        return networks

    @property
    def optimisers(self) -> Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """Every optimiser with the network that it updates."""
        optimisers: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {
            "optimiser": (self.classifier, self.optimiser)
        }
        if self.attribute_head is not None and self.attribute_optimiser is not None:
            optimisers["attribute_optimiser"] = (self.attribute_head, self.attribute_optimiser)
        return optimisers

    @property
    def loss_optimisers(self) -> list[torch.optim.Optimizer]:
        """The optimisers of the classifier's loss."""
        if self.attribute_optimiser is None:
            return [self.optimiser]
        return [self.optimiser, self.attribute_optimiser]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that a step changes, by name, not copied."""
        tensors = {
            f"{prefix}.{name}": value
            for prefix, network in self.networks.items()
            for name, value in network.state_dict().items()
        }
        for prefix, (network, optimiser) in self.optimisers.items():
            for name, parameter in network.named_parameters():
                for key, value in optimiser.state.get(parameter, {}).items():
                    tensors[f"{prefix}.{key}.{name}"] = value
        return tensors

    @staticmethod
    def comparable(settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings that a resumed run must share: all but the number of epochs."""
        return settings | {"epochs": 0, "finetuning": None}

    def snapshot(self, recipe: Recipe) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return copies of all tensors, and the description to store with them."""
        about = {
            "kind": "training state",
            "epoch": self.epoch,
            "seconds": self.seconds,
            "curve": [asdict(record) for record in self.curve],
            "origin": self.origin,
            "images": self.images,
            "recipe": asdict(recipe),
        }
        return {name: value.detach().clone() for name, value in self.tensors().items()}, about

    def restore(self, path: Path, recipe: Recipe) -> None:
        """Read a stored snapshot of a run with the same inputs and settings except the epochs."""
        tensors, about = read_tensors(path)
        if self.comparable(about["recipe"]) != self.comparable(as_json(recipe)):
            raise InputError(
                f"{path} was trained with other settings than {recipe.name!r} has now: "
                "train into a new folder"
            )
        if self.images is not None and about["images"] not in (None, self.images):
            raise InputError(
                f"{path} was started with {about['images']:,} training images, not "
                f"{self.images:,}: use the same images, or train into a new folder"
            )
        if about["origin"] != self.origin:
            inputs = ", ".join(f"{name} {value}" for name, value in about["origin"].items())
            raise InputError(
                f"{path} was started with {inputs or 'neither init_from nor a teacher'}: "
                "use the same to resume"
            )
        for prefix, network in self.networks.items():
            start = f"{prefix}."
            network.load_state_dict(
                {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
            )
        for prefix, (network, optimiser) in self.optimisers.items():
            for name, parameter in network.named_parameters():
                buffers = {
                    key: tensors[f"{prefix}.{key}.{name}"].to(parameter.device)
                    for key in OPTIMISER_BUFFERS
                    if f"{prefix}.{key}.{name}" in tensors
                }
                if buffers:
                    optimiser.state[parameter] = buffers
        self.epoch, self.seconds = about["epoch"], about["seconds"]
        self.curve = [EpochRecord(**record) for record in about["curve"]]


def first_means(
    z: Float[Tensor, "batch dim"], labels: Labels, classes: int
) -> Float[Tensor, "classes dim"]:
    """m + s(m_y − m): the classes' mean latents, shrunk until the posterior fits best.

    Latents of a class spread wider than N(m_y, 1) if the layers were trained for another task.
    Without shrinking, training would start with wrong predictions of high confidence.
    """
    member = F.one_hot(labels, classes).to(z.dtype)
    centre = z.mean(0)
    offset = member.T @ z / member.sum(0)[:, None].clamp(min=1) - centre
    candidates = [centre + 0.5**halvings * offset for halvings in range(10)]
    return min(
        candidates,
        key=lambda mu: float(F.nll_loss(equations.log_posterior(z, mu), labels)),
    )


def classifier_pair(
    recipe: Recipe, device: torch.device
) -> tuple[GenerativeClassifier, GenerativeClassifier]:
    """Return a classifier to train, and one for its moving average."""
    classifier = GenerativeClassifier(recipe.architecture).to(device)
    average = GenerativeClassifier(recipe.architecture).to(device)
    return classifier, average.requires_grad_(requires_grad=False).eval()


def make_optimiser(
    network: nn.Module, recipe: Recipe, device: torch.device
) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices and kernels, or SGD as in IB-INN.

    Learning rates are tensors, because a captured CUDA graph can only read tensors.
    """
    means = [p for n, p in network.named_parameters() if n == "mu"]
    others = [p for n, p in network.named_parameters() if n != "mu"]

    def group(parameters: list[nn.Parameter], **options: float) -> dict[str, Any]:
        rate = torch.tensor(recipe.learning_rate, device=device)
        return {"params": parameters, "lr": rate, **options}

    if recipe.sgd is None:
        decayed = [p for p in others if p.ndim > 1]
        vectors = [p for p in others if p.ndim == 1]
        groups = [
            group(decayed, weight_decay=recipe.weight_decay),
            group(vectors + means, weight_decay=0.0),
        ]
        return torch.optim.AdamW(groups, fused=True, capturable=device.type == "cuda")
    groups = [
        group(others, weight_decay=recipe.weight_decay),
        group(means, momentum=0.0, lr_factor=recipe.sgd.means_lr_factor),
    ]
    return torch.optim.SGD(groups, momentum=recipe.sgd.momentum, fused=True)


def as_json(recipe: Recipe) -> dict[str, Any]:
    """Return the settings as JSON represents them: lists for tuples."""
    loaded: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return loaded
