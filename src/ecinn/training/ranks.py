"""Train in several processes that torchrun started: each takes its rows of every batch."""

import atexit
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn.classifier.recipes import Recipe
from ecinn.errors import EcinnError, InputError
from ecinn.flow.device import resolve_device

TIMEOUT = timedelta(days=7)
"""Longest wait for another process: the first may train a teacher or evaluate meanwhile. If one
fails, torchrun ends the others at once."""


class LostProcessError(EcinnError):
    """Another process of the run has ended."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run and the place of this one; without torchrun it is alone."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leads(self) -> bool:
        """Return whether this process prints, writes files and evaluates."""
        return self.rank == 0

    def rows(self, start: int, stop: int) -> Int[Tensor, " rows"]:
        """Return the rows of this process among those from start to stop, in order."""
        first, last = (
            start + (stop - start) * rank // self.size for rank in (self.rank, self.rank + 1)
        )
        return torch.arange(first, last, device=self.device)

    def sum_(self, *tensors: Tensor) -> None:
        """Replace tensors of the same type by their sums over all processes."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        with _told_if_lost():
            dist.all_reduce(flat)
        for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of the first process."""
        for tensor in tensors if self.size > 1 else ():
            value = tensor.contiguous()
            with _told_if_lost():
                dist.broadcast(value, 0)
            tensor.copy_(value)

    def wait(self) -> None:
        """Wait until all processes are here."""
        arrived = torch.ones(1, device=self.device)
        self.sum_(arrived)
        arrived.item()  # a GPU adds up later

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Let the first process do something before the others, which then find its files."""
        if not self.leads:
            self.wait()
        yield
        if self.leads:
            self.wait()

    def require_same(self, value: object, message: str) -> None:
        """Raise an `InputError` unless this value is the same in all processes."""
        digest = int(hashlib.sha256(str(value).encode()).hexdigest()[:8], 16)
        total = torch.tensor([digest], dtype=torch.long, device=self.device)
        self.sum_(total)
        if int(total) != self.size * digest:
            raise InputError(message)


@contextmanager
def _told_if_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(
            "another process of this run has ended: resume it with the same command and --resume"
        ) from error


@contextmanager
def joined(device: str | torch.device = "auto") -> Iterator[Ranks]:
    """Join the processes that torchrun started, each with a GPU of its own if there are GPUs.

    If a process fails, only the first one to do so raises its error.
    """
    size = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    chosen = resolve_device(device)
    if size == 1:
        yield Ranks(device=chosen)
        return
    rank = int(os.environ["RANK"])
    try:
        if chosen.type == "cuda":
            chosen = _own_gpu(chosen)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=TIMEOUT)
            atexit.register(_leave)
        yield Ranks(rank, size, chosen)
    except (Exception, KeyboardInterrupt):
        atexit.unregister(_leave)
        if chosen.type == "cpu":  # leaving NCCL might wait for the others
            _leave()
        if not _fails_first(rank):
            raise SystemExit(1) from None
        raise


def _own_gpu(device: torch.device) -> torch.device:
    """Return the GPU of this process, which torchrun numbers."""
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if int(os.environ["LOCAL_WORLD_SIZE"]) > gpus:
        raise InputError(
            f"each process needs a GPU, but there are {gpus}: lower --nproc-per-node, or use "
            "--device cpu"
        )
    if device.index not in (None, local):
        raise InputError(f"torchrun chooses the GPUs: use the device cuda, not {device}")
    own = torch.device("cuda", local)
    torch.cuda.set_device(own)
    return own


def _leave() -> None:
    """Leave the other processes, so that those that wait for this one notice."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _fails_first(rank: int) -> bool:
    """Return whether this process was the first to fail; if not, let the other one say why."""
    # Builds of torch without distributed training lack this module.
    from torch.distributed.rendezvous import rendezvous

    try:
        store, *_ = next(iter(rendezvous("env://")))
        first = bool(store.compare_set("ecinn/failed", "", str(rank)) == str(rank).encode())
    except RuntimeError:  # the others have ended
        first = False
    if not first:
        time.sleep(2)  # torchrun ends all processes with the first that ends
    return first


def require_divisible(recipe: Recipe, images: int, ranks: Ranks) -> None:
    """Raise an `InputError` if the batches of a recipe cannot be divided between processes."""
    if ranks.size == 1:
        return
    if recipe.architecture.norm == "batch":
        raise InputError(
            f"{recipe.name} has BatchNorm, which needs whole batches: start it without torchrun"
        )
    sizes = [recipe.batch_size, recipe.finetuning.batch_size if recipe.finetuning else images]
    if min(*sizes, images) < 2 * ranks.size:
        raise InputError(
            f"batches of {min(*sizes, images)} images are too small for {ranks.size} processes, "
            "which need two each: use larger batches or fewer processes"
        )


class SharedDropout(nn.Module):
    """Dropout of units or channels: the mask of the whole batch is drawn, of which rows are used.

    So every image has the mask that it would have in one process.
    """

    def __init__(self, p: float, batch_size: int, rows: Int[Tensor, " rows"]) -> None:
        super().__init__()
        self.p, self.batch_size, self.rows = p, batch_size, rows

    def forward(self, x: Float[Tensor, "rows channels *sides"]) -> Tensor:
        """Set a share p of the channels to zero and scale the others up."""
        if not self.training:
            return x
        shape = (self.batch_size, x.shape[1], *(1 for _ in x.shape[2:]))
        mask = x.new_empty(shape).bernoulli_(1 - self.p).div_(1 - self.p)
        return x * mask[self.rows]


def share_dropout(network: nn.Module, batch_size: int, rows: Int[Tensor, " rows"]) -> None:
    """Replace all dropout of a network by `SharedDropout`."""
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Dropout | nn.Dropout2d):
                setattr(parent, name, SharedDropout(child.p, batch_size, rows))
