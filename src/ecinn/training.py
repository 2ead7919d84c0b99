"""Training: a loop that can be interrupted, resumed to the same weights, and is fast on a GPU."""

import contextlib
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from ecinn import equations
from ecinn.checkpoints import Checkpoint, save_checkpoint
from ecinn.data.augmentation import augment
from ecinn.data.dataset import Dataset
from ecinn.errors import EcinnError, InputError
from ecinn.experiments import Experiment
from ecinn.files import output_folder
from ecinn.finishing import finish
from ecinn.model.bijections import Chain, Coupling
from ecinn.model.classifier import GenerativeClassifier
from ecinn.pixels import dequantise
from ecinn.training_state import EpochRecord, TrainingState

MODEL_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"
EXPLODED = 1e3
"""A loss above this never comes back."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands; figures are means since the last report."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    bits_per_dim: float
    error: float
    images_per_second: float
    seconds_left: float


def train(
    experiment: Experiment,
    data: Dataset,
    folder: Path,
    *,
    device: torch.device,
    resume: bool = False,
    observe: Callable[[Progress], None] = lambda progress: None,
    save_every: float = 30.0,
) -> Checkpoint:
    """Train, save as it goes, and leave a finished model in the folder.

    Args:
        save_every: seconds between two saved states; a state is saved at the end of an epoch.
    """
    output_folder(folder)
    state_file = folder / STATE_FILE
    if not resume and (state_file.exists() or (folder / MODEL_FILE).exists()):
        raise InputError(f"{folder} holds a run already: resume it, or choose another folder")
    with _own_randomness(device):
        state = TrainingState.start(experiment, device)
        if resume and state_file.exists():
            state.restore(state_file, experiment)
        _run(experiment, data, state, state_file, device, observe, save_every)
    checkpoint = finish(
        experiment,
        data,
        state.average.state_dict(),
        device,
        _record(experiment, data, state, device),
    )
    save_checkpoint(checkpoint, folder / MODEL_FILE)
    return checkpoint


def _run(
    experiment: Experiment,
    data: Dataset,
    state: TrainingState,
    state_file: Path,
    device: torch.device,
    observe: Callable[[Progress], None],
    save_every: float,
) -> None:
    step = _OptimisationStep(experiment, data, state, device)
    batch = step.batch_size
    steps_per_epoch = len(data) // batch
    steps = steps_per_epoch * experiment.epochs
    saved = began = time.monotonic()
    earlier_seconds, first_step = state.seconds, state.epoch * steps_per_epoch
    for epoch in range(state.epoch, experiment.epochs):
        # All randomness of an epoch comes from (seed, epoch): an epoch that is interrupted and
        # begun again is the same epoch.
        order = step.begin_epoch(epoch)
        sums = torch.zeros(3)
        for index in range(steps_per_epoch):
            number = epoch * steps_per_epoch + index
            step(order[index * batch : (index + 1) * batch], number / steps, number)
            last = index == steps_per_epoch - 1
            if last or (index + 1) % 50 == 0:
                figures = step.read_figures()
                sums += figures
                loss, bits, error = (figures / ((index % 50) + 1)).tolist()
                _stop_if_broken(loss, state_file)
                seconds = time.monotonic() - began
                rate = (number + 1 - first_step) / seconds
                observe(
                    Progress(
                        epoch=epoch + 1,
                        epochs=experiment.epochs,
                        step=number + 1,
                        steps=steps,
                        loss=loss,
                        bits_per_dim=bits,
                        error=error,
                        images_per_second=rate * batch,
                        seconds_left=(steps - number - 1) / rate,
                    )
                )
        loss, bits, error = (sums / steps_per_epoch).tolist()
        now = time.monotonic()
        state.epoch, state.seconds = epoch + 1, earlier_seconds + now - began
        state.curve.append(EpochRecord(epoch + 1, loss, bits, error, state.seconds))
        if now - saved >= save_every or epoch + 1 == experiment.epochs:
            state.save(state_file, experiment)
            saved = now


class _OptimisationStep:
    """One step of AdamW on one batch; on a GPU captured once as a CUDA graph and replayed."""

    def __init__(
        self, experiment: Experiment, data: Dataset, state: TrainingState, device: torch.device
    ) -> None:
        self.experiment = experiment
        self.state = state
        self.batch_size = min(experiment.batch_size, len(data))
        self.images = data.images.to(device)
        self.labels = data.labels.to(device)
        self.generator = torch.Generator(device)
        self.device = device
        # What a step reads lives in tensors, because a captured graph has no arguments.
        self.batch = torch.zeros(self.batch_size, dtype=torch.long, device=device)
        self.averaging_weight = torch.zeros((), device=device)
        self.figures = torch.zeros(3, device=device)
        self.averages: list[Tensor] = list(state.average.parameters())
        self.parameters: list[Tensor] = list(state.classifier.parameters())
        state.classifier.train()
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            _prepare_for_gpu(state.classifier)
            self._capture()

    def begin_epoch(self, epoch: int) -> Int[Tensor, " images"]:
        """Seed what is random and shuffle the images."""
        seed = self.experiment.seed * 1_000_003 + epoch
        torch.manual_seed(seed)
        self.generator.manual_seed(seed)
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))
        return order.to(self.device)

    def __call__(self, batch: Int[Tensor, " batch"], done: float, number: int) -> None:
        """Take a step; `done` is the share of the run that lies behind."""
        self.batch.copy_(batch)
        rate = self.experiment.learning_rate * _schedule(done, self.experiment.warm_up)
        for group in self.state.optimiser.param_groups:
            group["lr"].fill_(rate)
        # The average starts short, so that it does not remember the first weights for long.
        decay = min(self.experiment.averaging, (1 + number) / (10 + number))
        self.averaging_weight.fill_(1 - decay)
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def read_figures(self) -> Float[Tensor, " figures"]:
        """Sums of loss, bits/dim and error since the last call."""
        figures = self.figures.to("cpu", copy=True)
        self.figures.zero_()
        return figures

    def _step(self) -> None:
        classifier, experiment = self.state.classifier, self.experiment
        loss, figures = batch_loss(
            classifier,
            self.images[self.batch],
            self.labels[self.batch],
            experiment,
            self.generator,
        )
        self.state.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(classifier.parameters(), experiment.gradient_clip)
        self.state.optimiser.step()
        with torch.no_grad():
            # All tensors in a few launches; one by one they would cost a tenth of the step.
            torch._foreach_mul_(self.averages, 1 - self.averaging_weight)
            scaled = torch._foreach_mul(self.parameters, self.averaging_weight)
            torch._foreach_add_(self.averages, scaled)
            torch._foreach_copy_(list(self.state.average.buffers()), list(classifier.buffers()))
            self.figures += figures

    def _capture(self) -> None:
        """Warm up on a side stream, put the weights back, record one step."""
        before = {k: v.clone() for k, v in self.state.classifier.state_dict().items()}
        average = {k: v.clone() for k, v in self.state.average.state_dict().items()}
        moments = {
            parameter: {key: value.clone() for key, value in entry.items()}
            for parameter, entry in self.state.optimiser.state.items()
        }
        self.averaging_weight.fill_(1.0)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for group in self.state.optimiser.param_groups:
                group["lr"].fill_(0.0)
            for _ in range(3):
                self._step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.generator)
        with torch.cuda.graph(self.graph):
            self._step()
        self.state.classifier.load_state_dict(before)
        self.state.average.load_state_dict(average)
        for parameter, entry in self.state.optimiser.state.items():
            for key, value in entry.items():
                if parameter in moments:
                    value.copy_(moments[parameter][key])
                else:
                    value.zero_()
        self.figures.zero_()


def batch_loss(
    classifier: GenerativeClassifier,
    images: UInt8[Tensor, "batch channels height width"],
    labels: Int[Tensor, " batch"],
    experiment: Experiment,
    generator: torch.Generator,
) -> tuple[Float[Tensor, ""], Float[Tensor, " figures"]]:
    """The information-bottleneck loss of a batch; beside it loss, bits/dim and error to report."""
    images = augment(images, experiment.augmentation, generator)
    x = dequantise(images, generator, experiment.noise)
    z, log_det = classifier.encode_with_log_det(x)
    dim = classifier.architecture.dim
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, classifier.mu))
    log_posterior = equations.log_posterior(z, classifier.mu)
    cross_entropy = equations.smoothed_cross_entropy(
        log_posterior, labels, experiment.label_smoothing
    )
    loss = equations.information_bottleneck_loss(
        -log_p.mean() / dim, cross_entropy, experiment.beta
    )
    with torch.no_grad():
        error = (log_posterior.argmax(1) != labels).float().mean()
        figures = torch.stack([loss, equations.bits_per_dim(log_p, dim).mean(), error])
    return loss, figures


def _record(
    experiment: Experiment, data: Dataset, state: TrainingState, device: torch.device
) -> dict[str, object]:
    """How the model was made, to be kept inside its checkpoint."""
    batch = min(experiment.batch_size, len(data))
    images = state.epoch * (len(data) // batch) * batch
    return {
        "seconds": round(state.seconds, 1),
        "images_per_second": round(images / max(state.seconds, 1e-9)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "curve": [asdict(record) for record in state.curve],
    }


def _schedule(done: float, warm_up: float) -> float:
    """Linear from 0 to 1 over the warm-up, then half a cosine down to 0."""
    if done < warm_up:
        return done / warm_up
    return 0.5 * (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up)))


def _prepare_for_gpu(classifier: GenerativeClassifier) -> None:
    """bf16 inside the subnets, whose precision no inverse depends on; one compile per shape."""
    for module in classifier.modules():
        if isinstance(module, Coupling):
            module.half_precision = True
    for block in classifier.inn.bijections:
        if isinstance(block, Chain):
            block.compile(dynamic=False)


@contextlib.contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Dropout draws from the global generators: give the caller's back as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def _stop_if_broken(loss: float, state_file: Path) -> None:
    if math.isfinite(loss) and loss < EXPLODED:
        return
    kept = f"the last good state is {state_file}" if state_file.exists() else "nothing was saved"
    raise EcinnError(
        f"training broke: the loss became {loss:.3g}; {kept}. "
        "Lower the learning rate or the clamp, or raise the weight decay"
    )
