"""Read what ECINN's authors published: counterfactuals, scores and Keras autoencoders.

Their repository is EvaluatingCounterfactuals; the autoencoders are read without TensorFlow.
"""

import importlib
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor, nn

from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.pixels import Images, Labels, StoredImages
from ecinn.studies.judges import Autoencoder, scaled

T = TypeVar("T")
BenchmarkName = Literal["mnist", "fake_mnist"]
METHODS = ("GB", "GL", "GEN")
"""Gradients on pixels, gradients in a latent space, and the generative method, ECINN."""
FAILED = -1
DATASETS: Mapping[BenchmarkName, str] = {"mnist": "mnist", "fake_mnist": "fakemnist"}
"""Our names of the authors' datasets."""


@dataclass(frozen=True)
class StoredCounterfactuals:
    """One 8-bit counterfactual of every original, by one method."""

    method: str
    images: UInt8[Tensor, "batch 1 28 28"]
    p: Int[Tensor, " batch"]
    """Class of the original by the method's classifier."""
    q: Int[Tensor, " batch"]
    """Target class; −1 where the method failed."""
    predicted: Int[Tensor, " batch"]
    """Class of the counterfactual by the method's classifier; −1 where the method failed."""

    @property
    def failed(self) -> Bool[Tensor, " batch"]:
        """True where the method found no counterfactual."""
        return self.predicted == FAILED

    @property
    def kept(self) -> Bool[Tensor, " batch"]:
        """True where neither the method failed nor all pixels are 0, such as NaN in 8 bits."""
        return ~self.failed & (self.images > 0).flatten(1).any(1)


@dataclass(frozen=True)
class Score:
    """A mean, half the width of its 95 % interval and the number of images, if published."""

    mean: float
    half_width: float | None
    n: int | None


@dataclass(frozen=True)
class AuthorsBenchmark:
    """Originals, counterfactuals by three methods, and their published scores."""

    name: BenchmarkName
    originals: Dataset
    counterfactuals: Mapping[str, StoredCounterfactuals]
    published: Mapping[str, Mapping[str, Score]]
    """By metric, then by method."""
    autoencoders: Path
    """Folder of the autoencoders that IM1 and IM2 need."""

    def first(self, n: int | None) -> "AuthorsBenchmark":
        """Return the first n images, or all."""
        if n is None or n >= len(self.originals):
            return self
        made = {
            name: replace(s, images=s.images[:n], p=s.p[:n], q=s.q[:n], predicted=s.predicted[:n])
            for name, s in self.counterfactuals.items()
        }
        return replace(self, originals=self.originals.first(n), counterfactuals=made)


def load_authors(folder: Path, name: BenchmarkName) -> AuthorsBenchmark:
    """Read the files of one dataset from a copy of the authors' repository."""
    originals = _read(folder / "data" / "Real" / f"{name}.npz", _originals)
    counterfactuals = {}
    for method in METHODS:
        made = _read(folder / "data" / method / f"{name}.npz", _counterfactuals)
        if made.images.shape != originals.images.shape:
            raise InputError(f"{method} should have {len(originals)} images, as Real has")
        counterfactuals[method] = replace(made, method=method)
    return AuthorsBenchmark(
        name=name,
        originals=originals,
        counterfactuals=counterfactuals,
        published=_read(folder / "output" / f"{name}_[0]" / "results.json", _published),
        autoencoders=folder / "ckpts" / DATASETS[name] / "aes",
    )


def _read(path: Path, read: Callable[[Path], T]) -> T:
    """Read a file, or say which one is missing or not as the authors published it."""
    damage = (AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError)
    try:
        return read(path)
    except (OSError, zipfile.BadZipFile, zlib.error, *damage) as error:
        what = "not as the authors published it" if path.is_file() else "missing"
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path} is {what}: give a whole copy of EvaluatingCounterfactuals ({reason})"
        ) from error


def _arrays(path: Path, **expected: tuple[Any, ...]) -> list[NDArray[Any]]:
    """Read the named arrays, each of this type and with rows of this shape."""
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
        arrays = [archive[name] for name in expected]
    for array, (name, (dtype, *row)) in zip(arrays, expected.items(), strict=True):
        if array.dtype != dtype or array.shape != (len(arrays[0]), *row):
            raise ValueError(f"{name} is {array.dtype} of shape {array.shape}")
    return arrays


def _originals(path: Path) -> Dataset:
    x, y = _arrays(path, x=(np.uint8, 28, 28, 1), y=(np.float32, 10))
    names = tuple(str(digit) for digit in range(10))
    images = torch.from_numpy(np.ascontiguousarray(x[..., 0]))[:, None]
    return Dataset(images, torch.from_numpy(y.argmax(1)), names)


def _counterfactuals(path: Path) -> StoredCounterfactuals:
    one = (np.int64,)
    arrays = _arrays(path, cfs=(np.uint8, 28, 28), orig_pred=one, q=one, cf_pred=one)
    images, p, q, predicted = map(torch.from_numpy, arrays)
    return StoredCounterfactuals("", images[:, None], p, q, predicted)


def _published(path: Path) -> dict[str, dict[str, Score]]:
    """Read results.json: under every metric a list of {method, scores: [mean, half width, n]}.

    If the scores of a metric are named, the name follows the metric's after a space. A number of
    images of −1 stands for a missing interval.
    """
    scores: dict[str, dict[str, Score]] = {}
    for metric, rows in json.loads(path.read_text()).items():
        for row in rows:
            named = row["scores"] if isinstance(row["scores"], dict) else {"": row["scores"]}
            for name, (mean, half_width, n) in named.items():
                interval = (None, None) if n == -1 else (float(half_width), int(n))
                by_method = scores.setdefault(f"{metric} {name}".strip(), {})
                by_method[row["method"]] = Score(float(mean), *interval)
    return scores


@dataclass(frozen=True)
class ClassAutoencoders:
    """One autoencoder per class, trained on that class only, and one trained on all."""

    by_class: Sequence[nn.Module]
    by_all: nn.Module
    batch_size: int = 32
    """Small batches fit into the processor's cache and are faster."""

    @torch.inference_mode()
    def reconstruct(self, images: StoredImages, labels: Labels | None = None) -> Images:
        """AE_label(c) of c = k/255 − ½, or AE_all(c) without labels."""
        pixels = scaled(images).to(memory_format=torch.channels_last)
        if labels is None:
            return self._in_batches(self.by_all, pixels)
        reconstructed = torch.empty_like(pixels)
        for label in labels.unique().tolist():
            rows = labels == label
            reconstructed[rows] = self._in_batches(self.by_class[label], pixels[rows])
        return reconstructed

    def _in_batches(self, autoencoder: nn.Module, pixels: Images) -> Images:
        return torch.cat([autoencoder(batch) for batch in pixels.split(self.batch_size)])


def load_autoencoders(folder: Path) -> ClassAutoencoders:
    """Read ae_0.h5, ae_1.h5, … and ae_all.h5."""
    *by_class, by_all = (_read(folder / f"ae_{of}.h5", read_keras) for of in (*range(10), "all"))
    return ClassAutoencoders(by_class, by_all)


def read_keras(path: Path) -> nn.Module:
    """Put the kernels and biases of a Keras file, in its order, into the same layers of torch."""
    with importlib.import_module("h5py").File(path, "r") as file:
        layers = file["model_weights"]
        arrays = [
            layers[layer][name][()]
            for layer in layers.attrs["layer_names"]
            for name in layers[layer].attrs["weight_names"]
        ]
    weights = (
        torch.from_numpy(array.transpose(3, 2, 0, 1).copy() if array.ndim == 4 else array)
        for array in arrays
    )
    with torch.device("meta"):  # draws no random weights
        autoencoder = Autoencoder(channels=1, width=16)
    state = dict(zip(autoencoder.state_dict(), weights, strict=True))
    autoencoder.load_state_dict(state, assign=True)
    return autoencoder.eval().requires_grad_(requires_grad=False)
