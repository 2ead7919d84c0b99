"""What changes while a model is trained, and how it is kept so that a run can go on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn import equations
from ecinn.classifier.checkpoint import Checkpoint, read_tensors, write_tensors
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.recipes import FineTuning, Recipe
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.pixels import to_pixels
from ecinn.training.critic import Critic

REMEMBERED = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
"""What AdamW and Adam keep of every weight, and what gradient sgd keeps."""


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
    """All that changes while training: to save it is to be able to go on."""

    classifier: GenerativeClassifier
    average: GenerativeClassifier
    optimiser: torch.optim.Optimizer
    epoch: int = 0
    seconds: float = 0.0
    curve: list[EpochRecord] = field(default_factory=list)
    readout: nn.Linear | None = None
    """Reads all attributes of an image from its latent; no part of the model."""
    readout_optimiser: torch.optim.Optimizer | None = None
    teacher: nn.Module | None = None
    """Gives the log-odds of every attribute of an image; it does not change, nor is it kept."""
    origin: dict[str, str] = field(default_factory=dict)
    """What the run was given beside its settings: whose layers it began with, which teacher."""
    images: int | None = None
    """How many training images there are, once it is known."""

    @classmethod
    def start(cls, recipe: Recipe, device: torch.device, attributes: int = 0) -> "TrainingState":
        """The untrained state, which the recipe and the number of attributes determine."""
        classifier, average = _pair(recipe, device)
        state = cls(classifier, average, _optimiser(classifier, recipe, device))
        state.read_out(attributes, recipe, device)
        return state

    def read_out(self, attributes: int, recipe: Recipe, device: torch.device) -> None:
        """Begin to read so many attributes, from nothing."""
        if not attributes:
            return
        self.readout = nn.utils.skip_init(
            nn.Linear, recipe.architecture.dim, attributes, device=device
        )
        nn.init.zeros_(self.readout.weight)
        nn.init.zeros_(self.readout.bias)
        self.readout_optimiser = _optimiser(self.readout, recipe, device)

    @torch.no_grad()
    def begin_at(self, network: GenerativeClassifier, data: Dataset) -> None:
        """Take another model's layers, and means that suit them to the classes of this data."""
        self.average.load_state_dict(network.state_dict() | {"mu": self.average.mu})
        device = self.average.mu.device
        z = torch.cat(
            [
                self.average.encode(to_pixels(images.to(device)))
                for images in data.images.split(500)
            ]
        )
        self.average.mu.copy_(first_means(z, data.labels.to(device), len(self.average.mu)))
        self.classifier.load_state_dict(self.average.state_dict())

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """Every network by the name it is stored under."""
        networks: dict[str, nn.Module] = {"classifier": self.classifier, "average": self.average}
        return networks if self.readout is None else networks | {"readout": self.readout}

    @property
    def optimisers(self) -> Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """Every optimiser and the network it changes."""
        optimisers: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {
            "optimiser": (self.classifier, self.optimiser)
        }
        if self.readout is not None and self.readout_optimiser is not None:
            optimisers["readout_optimiser"] = (self.readout, self.readout_optimiser)
        return optimisers

    @property
    def descending(self) -> list[torch.optim.Optimizer]:
        """The optimisers that go down the loss together."""
        if self.readout_optimiser is None:
            return [self.optimiser]
        return [self.optimiser, self.readout_optimiser]

    def tensors(self) -> dict[str, Tensor]:
        """All that a step changes, by name, not copied."""
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
    def identity(settings: dict[str, Any]) -> dict[str, Any]:
        """The settings that must be the same in a run that goes on: all but how long it is."""
        return settings | {"epochs": 0, "finetuning": None}

    def save(self, path: Path, recipe: Recipe) -> None:
        """Write everything to one safetensors file."""
        curve = [asdict(record) for record in self.curve]
        about = {"epoch": self.epoch, "seconds": self.seconds, "curve": curve}
        about |= {"origin": self.origin, "images": self.images}
        write_tensors(path, self.tensors(), about | {"recipe": asdict(recipe)})

    def restore(self, path: Path, recipe: Recipe) -> None:
        """Take up what `save` wrote; the settings must be the same but for the epochs."""
        tensors, about = read_tensors(path)
        if self.identity(about["recipe"]) != self.identity(as_json(recipe)):
            raise InputError(
                f"{path} belongs to other settings than {recipe.name!r} has now: "
                "train into a new folder"
            )
        begun_with = about.get("images")
        if None not in (begun_with, self.images) and begun_with != self.images:
            raise InputError(
                f"{path} was begun with {begun_with:,} training images, now there are "
                f"{self.images:,}: give the same, or train into a new folder"
            )
        if about.get("origin", {}) != self.origin:
            given = ", ".join(f"{k} {v}" for k, v in about.get("origin", {}).items())
            raise InputError(
                f"{path} was begun with {given or 'neither a start nor a teacher'}: "
                "give the same to go on"
            )
        for prefix, network in self.networks.items():
            start = f"{prefix}."
            network.load_state_dict(
                {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
            )
        for prefix, (network, optimiser) in self.optimisers.items():
            for name, parameter in network.named_parameters():
                remembered = {
                    key: tensors[f"{prefix}.{key}.{name}"].to(parameter.device)
                    for key in REMEMBERED
                    if f"{prefix}.{key}.{name}" in tensors
                }
                if remembered:
                    optimiser.state[parameter] = remembered
        self.epoch, self.seconds = about["epoch"], about["seconds"]
        self.curve = [EpochRecord(**record) for record in about["curve"]]


def first_means(
    z: Float[Tensor, "batch dim"], labels: Int[Tensor, " batch"], classes: int
) -> Float[Tensor, "classes dim"]:
    """m + s(m_y − m): the mean latents of the classes, drawn together until the posterior fits.

    Latents of a class spread wider than N(m_y, 1) where the layers learned something else, and
    from means as far apart as m_y training would begin with wrong answers of great certainty.
    """
    member = F.one_hot(labels, classes).to(z.dtype)
    centre = z.mean(0)
    offset = member.T @ z / member.sum(0)[:, None].clamp(min=1) - centre
    candidates = [centre + 0.5**halvings * offset for halvings in range(10)]
    return min(
        candidates,
        key=lambda mu: float(F.nll_loss(equations.log_posterior(z, mu), labels)),
    )


class RunningMeans(nn.Module):
    """μ̄ while it moves: the mean latent of every class over the last batches."""

    def __init__(self, mu_bar: Tensor) -> None:
        super().__init__()
        self.register_buffer("mu_bar", mu_bar.clone())
        self.mu_bar: Tensor


@dataclass
class FineTuningState(TrainingState):
    """The second stage: a critic learns beside the classifier, and μ̄ follows."""

    critic: Critic = field(kw_only=True)
    critic_optimiser: torch.optim.Adam = field(kw_only=True)
    means: RunningMeans = field(kw_only=True)

    @classmethod
    def refine(
        cls, pretrained: Checkpoint, stage: Recipe, device: torch.device, attributes: int = 0
    ) -> "FineTuningState":
        """Where the first stage ended, with a new critic."""
        assert stage.finetuning is not None
        classifier, average = _pair(stage, device)
        for network in (classifier, average):
            network.load_state_dict(pretrained.classifier.state_dict())
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(stage.seed)
            critic = Critic(classifier.image_shape, stage.architecture.classes).to(device)
        state = cls(
            classifier,
            average,
            _optimiser(classifier, stage, device),
            critic=critic,
            critic_optimiser=_critic_optimiser(critic, stage.finetuning, device),
            means=RunningMeans(pretrained.mu_bar).to(device),
        )
        state.read_out(attributes, stage, device)
        return state

    @staticmethod
    def identity(settings: dict[str, Any]) -> dict[str, Any]:
        """The settings that must be the same in a run that goes on: all but how long it is."""
        return settings | {"epochs": 0, "finetuning": settings["finetuning"] | {"epochs": 0}}

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """Every network by the name it is stored under."""
        return {**super().networks, "critic": self.critic, "means": self.means}

    @property
    def optimisers(self) -> Mapping[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """Every optimiser and the network it changes."""
        return {**super().optimisers, "critic_optimiser": (self.critic, self.critic_optimiser)}


def _pair(
    recipe: Recipe, device: torch.device
) -> tuple[GenerativeClassifier, GenerativeClassifier]:
    """A classifier to train, and its moving average."""
    classifier = GenerativeClassifier(recipe.architecture).to(device)
    average = GenerativeClassifier(recipe.architecture).to(device)
    return classifier, average.requires_grad_(requires_grad=False).eval()


def _optimiser(network: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    """Weight decay for matrices and kernels alone; in gradient sgd for all but the means."""
    means = [p for n, p in network.named_parameters() if n == "mu"]
    others = [p for n, p in network.named_parameters() if n != "mu"]
    sgd = recipe.sgd
    if sgd is None:
        decayed = [p for p in others if p.ndim > 1]
        free = [p for p in others if p.ndim == 1]
        groups = [
            _group(decayed, recipe, device, weight_decay=recipe.weight_decay),
            _group(free + means, recipe, device, weight_decay=0.0),
        ]
        return torch.optim.AdamW(groups, fused=True, capturable=device.type == "cuda")
    groups = [  # as IB-INN has it
        _group(others, recipe, device, weight_decay=recipe.weight_decay),
        _group(means, recipe, device, momentum=0.0, multiple=sgd.means_rate),
    ]
    return torch.optim.SGD(groups, momentum=sgd.momentum, fused=True)


def _group(
    parameters: list[nn.Parameter], recipe: Recipe, device: torch.device, **how: float
) -> dict[str, Any]:
    """Weights with a learning rate of their own, in a tensor that a captured graph can read."""
    rate = torch.tensor(recipe.learning_rate, device=device)
    return {"params": parameters, "lr": rate, **how}


def _critic_optimiser(
    critic: Critic, finetuning: FineTuning, device: torch.device
) -> torch.optim.Adam:
    """Little momentum, as is usual where two networks learn against each other."""
    return torch.optim.Adam(
        critic.parameters(),
        torch.tensor(finetuning.critic_learning_rate, device=device),
        betas=(0.5, 0.99),
        fused=True,
        capturable=device.type == "cuda",
    )


def as_json(recipe: Recipe) -> dict[str, Any]:
    """The settings as JSON gives them back: lists for tuples."""
    loaded: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return loaded
