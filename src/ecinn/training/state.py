"""Everything that changes during training, and its file, from which a run resumes."""

import copy
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.recipes import Recipe
from ecinn.classifier.tensor_files import below, read_tensors
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.files import rebuild
from ecinn.pixels import to_pixels
from ecinn.training import critic as critics
from ecinn.training.critic import Critic

STATE_FILES = ("state.safetensors", "finetuning.safetensors")
"""The resumable states of the two stages."""
NETWORKS = ("classifier", "average", "maker", "attribute_head", "critic")
OPTIMISERS = {
    "optimiser": "classifier",
    "attribute_optimiser": "attribute_head",
    "critic_optimiser": "critic",
}
"""Every optimiser and the network that it updates."""


@dataclass
class TrainingState:
    """Everything that changes during training."""

    classifier: GenerativeClassifier
    average: GenerativeClassifier
    """Exponential moving average (EMA) of the classifier's weights."""
    optimiser: torch.optim.Optimizer
    epoch: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    """For each epoch: epoch, loss, bits_per_dim, error, seconds, on the noisy training images."""
    maker: GenerativeClassifier | None = None
    """An earlier moving average, which makes counterfactuals to learn from."""
    attribute_head: nn.Linear | None = None
    """Predicts all attributes of an image from its latent; not part of the model."""
    attribute_optimiser: torch.optim.Optimizer | None = None
    critic: Critic | None = None
    """Tells counterfactuals from real images; not part of the model."""
    critic_optimiser: torch.optim.Optimizer | None = None
    teacher: nn.Module | None = None
    """Predicts the logits of all attributes, or of all classes; constant and not stored."""
    origin: dict[str, str] = field(default_factory=dict)
    """Inputs of the run besides its recipe: the model it was initialised from, the teacher."""
    images: int = 0
    """Number of training images; 0 if it is unknown."""
    labels: str = ""
    """Hash of their labels; empty if it is unknown."""
    restarts: list[dict[str, float]] = field(default_factory=list)
    """For each divergence: its epoch and the learning rate from then on, half of that before."""

    @staticmethod
    def start(recipe: Recipe, device: torch.device, attributes: int = 0) -> "TrainingState":
        """Return the untrained state of a recipe for a dataset with so many attributes."""
        classifier = GenerativeClassifier(recipe.architecture).to(device)
        classifier.tau.fill_(recipe.tau)
        # Tied means follow the latents' means instead of the gradient.
        classifier.mu.requires_grad_(not recipe.tied)
        average = copy.deepcopy(classifier).requires_grad_(requires_grad=False).eval()
        state = TrainingState(classifier, average, make_optimiser(classifier, recipe, device))
        if attributes:
            head = nn.utils.skip_init(
                nn.Linear, recipe.architecture.dim, attributes, device=device
            )
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
            state.attribute_head = head
            state.attribute_optimiser = make_optimiser(head, recipe, device)
        return state

    def add_critic(self, recipe: Recipe, device: torch.device) -> None:
        """Add an untrained critic of counterfactuals."""
        a = recipe.architecture
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(recipe.seed)
            critic = Critic(a.channels, a.height, a.width, a.classes)
        self.critic = critic.to(device)
        self.critic_optimiser = torch.optim.Adam(
            [{"params": list(critic.parameters()), "lr_factor": critics.LEARNING_RATE}],
            torch.tensor(recipe.learning_rate, device=device),
            betas=(0.5, 0.99),  # low momentum, as is usual for adversarial training
            fused=True,
            capturable=device.type == "cuda",
        )

    @torch.no_grad()
    def init_from(self, network: GenerativeClassifier, data: Dataset) -> None:
        """Copy the layers of another model; class means start at the means of this data."""
        own = {"mu": self.average.mu, "tau": self.average.tau}
        self.average.load_state_dict(network.state_dict() | own)
        mu = self.average.mu
        total, count = torch.zeros_like(mu), mu.new_zeros(len(mu), 1)
        for images, labels in zip(data.images.split(500), data.labels.split(500), strict=True):
            member = F.one_hot(labels.to(mu.device), len(mu)).to(mu.dtype)
            total += member.T @ self.average.encode(to_pixels(images.to(mu.device)))
            count += member.sum(0)[:, None]
        mu.copy_(total / count.clamp(min=1))
        self.classifier.load_state_dict(self.average.state_dict())

    @property
    def networks(self) -> dict[str, nn.Module]:
        """Every network by the name it is stored under."""
        networks = {name: getattr(self, name, None) for name in NETWORKS}
        return {name: network for name, network in networks.items() if network is not None}

    @property
    def optimisers(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """Every optimiser with the network that it updates."""
        pairs = OPTIMISERS.items()
        return {o: (self.networks[n], getattr(self, o)) for o, n in pairs if n in self.networks}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that a step changes, in the order of their names, not copied."""
        tensors = {
            f"{prefix}.{name}": value
            for prefix, network in self.networks.items()
            for name, value in network.state_dict().items()
        }
        for prefix, (network, optimiser) in self.optimisers.items():
            for name, parameter in network.named_parameters():
                for key, value in optimiser.state.get(parameter, {}).items():
                    tensors[f"{prefix}.{key}.{name}"] = value
        # Files are read in any order, but processes exchange tensors in one.
        return dict(sorted(tensors.items()))

    @staticmethod
    def comparable(settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings that a resumed run must share.

        These are all but the number of epochs and the default confidence, which no step uses.
        """
        finetuning = settings["finetuning"]
        free = {"epochs": 0, "default_confidence": None}
        return settings | free | {"finetuning": finetuning and finetuning | {"epochs": 0}}

    def snapshot(self, recipe: Recipe) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return copies of all tensors, and the description to store with them."""
        about = {
            "kind": "training state",
            "epoch": self.epoch,
            "seconds": self.seconds,
            "curve": list(self.curve),
            "restarts": list(self.restarts),
            "origin": self.origin,
            "images": self.images,
            "labels": self.labels,
            "recipe": asdict(recipe),
        }
        return {name: value.detach().clone() for name, value in self.tensors().items()}, about

    @torch.no_grad()
    def overwrite(self, tensors: dict[str, Tensor]) -> None:
        """Copy earlier values of all tensors into them, where a captured graph reads them."""
        for name, value in self.tensors().items():
            # Optimiser buffers did not exist before the first step; they start at zero.
            value.copy_(tensors[name]) if name in tensors else value.zero_()

    def restore(self, path: Path, recipe: Recipe) -> None:
        """Read a stored snapshot of a run with the same inputs and settings except the epochs."""
        tensors, about = read_tensors(path)
        try:  # settings that did not exist when the state was stored have their defaults
            stored = as_json(rebuild(Recipe, about["recipe"]))
        except (TypeError, ValueError):  # of another version
            stored = about["recipe"]
        if self.comparable(stored) != self.comparable(as_json(recipe)):
            raise InputError(
                f"{path} was trained with other settings than {recipe.name!r} has now: "
                "train into a new folder"
            )
        if self.images and about["images"] != self.images:
            raise InputError(
                f"{path} was started with {about['images']:,} training images, not "
                f"{self.images:,}: use the same images, or train into a new folder"
            )
        known = about.get("labels") and self.labels
        if known and about["labels"] != self.labels:
            raise InputError(
                f"{path} was started with other labels: use the same, or train into a new folder"
            )
        if about["origin"] != self.origin:
            inputs = ", ".join(f"{name} {value}" for name, value in about["origin"].items())
            raise InputError(
                f"{path} was started with {inputs or 'neither init_from nor a teacher'}: "
                "use the same to resume"
            )
        for prefix, network in self.networks.items():
            network.load_state_dict(below(tensors, prefix))
        for prefix, (network, optimiser) in self.optimisers.items():
            parameters = dict(network.named_parameters())
            for name, value in below(tensors, prefix).items():
                buffer, _, weight = name.partition(".")
                parameter = parameters[weight]
                optimiser.state[parameter][buffer] = value.to(parameter.device)
        self.epoch, self.seconds, self.curve = about["epoch"], about["seconds"], about["curve"]
        self.restarts = about.get("restarts", [])


def make_optimiser(
    network: nn.Module, recipe: Recipe, device: torch.device
) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices and kernels, or SGD as in IB-INN.

    Learning rates are tensors, because a captured CUDA graph can only read tensors.
    """
    means = [p for n, p in network.named_parameters() if n == "mu" and p.requires_grad]
    others = [p for n, p in network.named_parameters() if n != "mu"]
    rate = torch.tensor(recipe.learning_rate, device=device)
    if recipe.sgd is None:
        groups: list[dict[str, Any]] = [
            {"params": [p for p in others if p.ndim > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for p in others if p.ndim == 1] + means, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, rate, fused=True, capturable=device.type == "cuda")
    factor = recipe.sgd.means_lr_factor
    groups = [
        {"params": others, "weight_decay": recipe.weight_decay},
        {"params": means, "lr": rate.clone(), "momentum": 0.0, "lr_factor": factor},
    ]
    return torch.optim.SGD(groups, rate, momentum=recipe.sgd.momentum, fused=True)


def as_json(recipe: Recipe) -> dict[str, Any]:
    """Return the settings as JSON represents them: lists for tuples."""
    loaded: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return loaded
