"""What changes while a model is trained, and how it is kept so that a run can go on."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ecinn.checkpoints import read_tensors, write_tensors
from ecinn.errors import InputError
from ecinn.experiments import Experiment
from ecinn.model.classifier import GenerativeClassifier


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
    optimiser: torch.optim.AdamW
    epoch: int = 0
    seconds: float = 0.0
    curve: list[EpochRecord] = field(default_factory=list)

    @classmethod
    def start(cls, experiment: Experiment, device: torch.device) -> "TrainingState":
        """The untrained state, which the experiment alone determines."""
        classifier = GenerativeClassifier(experiment.architecture).to(device)
        average = (
            GenerativeClassifier(experiment.architecture)
            .to(device)
            .requires_grad_(requires_grad=False)
        )
        return cls(classifier, average.eval(), _optimiser(classifier, experiment, device))

    def save(self, path: Path, experiment: Experiment) -> None:
        """Write everything to one safetensors file."""
        tensors = {f"classifier.{k}": v for k, v in self.classifier.state_dict().items()}
        tensors |= {f"average.{k}": v for k, v in self.average.state_dict().items()}
        for name, parameter in self.classifier.named_parameters():
            for key, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"optimiser.{key}.{name}"] = value
        curve = [asdict(record) for record in self.curve]
        about = {"epoch": self.epoch, "seconds": self.seconds, "curve": curve}
        write_tensors(path, tensors, about | {"experiment": asdict(experiment)})

    def restore(self, path: Path, experiment: Experiment) -> None:
        """Take up what `save` wrote; the experiment must be the same but for its epochs."""
        tensors, about = read_tensors(path)
        if about["experiment"] | {"epochs": 0} != _as_json(experiment) | {"epochs": 0}:
            raise InputError(
                f"{path} belongs to other settings than {experiment.name!r} has now: "
                "train into a new folder"
            )

        def part(prefix: str) -> dict[str, Tensor]:
            return {
                name.removeprefix(prefix): value
                for name, value in tensors.items()
                if name.startswith(prefix)
            }

        self.classifier.load_state_dict(part("classifier."))
        self.average.load_state_dict(part("average."))
        for name, parameter in self.classifier.named_parameters():
            self.optimiser.state[parameter] = {
                key: tensors[f"optimiser.{key}.{name}"].to(parameter.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
        self.epoch, self.seconds = about["epoch"], about["seconds"]
        self.curve = [EpochRecord(**record) for record in about["curve"]]


def _optimiser(
    classifier: GenerativeClassifier, experiment: Experiment, device: torch.device
) -> torch.optim.AdamW:
    """Weight decay for weight matrices and kernels alone, not for means, scales and shifts."""
    decayed = [p for n, p in classifier.named_parameters() if p.ndim > 1 and n != "mu"]
    free = [p for n, p in classifier.named_parameters() if p.ndim == 1 or n == "mu"]
    groups = [
        {"params": decayed, "weight_decay": experiment.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    for group in groups:
        group["lr"] = torch.tensor(experiment.learning_rate, device=device)
    return torch.optim.AdamW(groups, fused=True, capturable=device.type == "cuda")


def _as_json(experiment: Experiment) -> dict[str, object]:
    """The settings as JSON gives them back: lists for tuples."""
    loaded: dict[str, object] = json.loads(json.dumps(asdict(experiment)))
    return loaded
