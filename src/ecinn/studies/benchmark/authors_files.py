"""Read what ECINN's authors published: counterfactuals, scores and Keras autoencoders.

Their repository is EvaluatingCounterfactuals; the autoencoders are read without TensorFlow.
"""

import importlib
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor, nn

from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.pixels import Images, Labels, StoredImages
from ecinn.studies.judges import scaled

BenchmarkName = Literal["mnist", "fake_mnist"]
METHODS = ("GB", "GL", "GEN")
"""Gradients on pixels, gradients in a latent space, and the generative method, ECINN."""
FAILED = -1
_CLASSES = 10
_SIDE = 28
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

    def first(self, n: int) -> "StoredCounterfactuals":
        """Return the first n counterfactuals."""
        tensors = (self.images, self.p, self.q, self.predicted)
        return StoredCounterfactuals(self.method, *(tensor[:n] for tensor in tensors))


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
        made = {name: stored.first(n) for name, stored in self.counterfactuals.items()}
        return replace(self, originals=self.originals.first(n), counterfactuals=made)


def load_authors(folder: Path, name: BenchmarkName) -> AuthorsBenchmark:
    """Read the files of one dataset from a copy of the authors' repository."""
    originals = _originals(folder / "data" / "Real" / f"{name}.npz")
    counterfactuals = {
        method: _counterfactuals(folder / "data" / method / f"{name}.npz", method, len(originals))
        for method in METHODS
    }
    return AuthorsBenchmark(
        name=name,
        originals=originals,
        counterfactuals=counterfactuals,
        published=_published(folder / "output" / f"{name}_[0]" / "results.json"),
        autoencoders=folder / "ckpts" / DATASETS[name] / "aes",
    )


def _originals(path: Path) -> Dataset:
    x, y = _read_npz(path, None, x=(np.uint8, _SIDE, _SIDE, 1), y=(np.float32, _CLASSES))
    if not (((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all()):
        raise InputError(f"{path}: the rows of y should be one-hot (one 1, otherwise 0)")
    return Dataset(
        images=torch.from_numpy(np.ascontiguousarray(x[..., 0]))[:, None],
        labels=torch.from_numpy(y.argmax(1)),
        class_names=tuple(str(digit) for digit in range(_CLASSES)),
    )


def _counterfactuals(path: Path, method: str, n: int) -> StoredCounterfactuals:
    one: tuple[Any, ...] = (np.int64,)
    images, *classes = _read_npz(
        path, n, cfs=(np.uint8, _SIDE, _SIDE), orig_pred=one, q=one, cf_pred=one
    )
    for key, values, lowest in zip(
        ("orig_pred", "q", "cf_pred"), classes, (0, FAILED, FAILED), strict=True
    ):
        if n and not lowest <= values.min() <= values.max() < _CLASSES:
            raise InputError(
                f"{path}: {key} should lie in {lowest}…{_CLASSES - 1}, "
                f"not {values.min()}…{values.max()}"
            )
    p, q, predicted = (torch.from_numpy(values) for values in classes)
    if bool(((q == FAILED) & (predicted != FAILED)).any()):
        raise InputError(f"{path}: a counterfactual without a target q should have cf_pred −1")
    return StoredCounterfactuals(method, torch.from_numpy(images)[:, None], p, q, predicted)


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path} is missing: give a whole copy of EvaluatingCounterfactuals ({error.strerror})"
        ) from None


def _read_npz(path: Path, n: int | None, **expected: tuple[Any, ...]) -> list[NDArray[Any]]:
    """Read the named arrays of n rows, or all of one length; archives with pickle are refused.

    Args:
        expected: for every array its type, then the shape of a row.
    """
    file = io.BytesIO(_contents(path))
    try:
        with np.load(file, allow_pickle=False) as archive:
            names = archive.files
            arrays = {name: archive[name] for name in expected if name in names}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{path} is not an archive of plain numpy arrays ({reason}): fetch it again"
        ) from error
    if len(arrays) < len(expected):
        raise InputError(f"{path} should hold {', '.join(expected)} but holds {', '.join(names)}")
    n = len(next(iter(arrays.values()))) if n is None else n
    for key, (dtype, *row) in expected.items():
        array, shape = arrays[key], (n, *row)
        if array.dtype != dtype or array.shape != shape:
            raise InputError(
                f"{path}: {key} should be {np.dtype(dtype)} of shape {shape}, "
                f"not {array.dtype} of shape {array.shape}"
            )
    return list(arrays.values())


def _published(path: Path) -> Mapping[str, Mapping[str, Score]]:
    """Read results.json: under every metric a list of {method, scores: [mean, half width, n]}.

    If the scores of a metric are named, the name follows the metric's after a space. A number of
    images of −1 stands for a missing interval.
    """
    contents = _contents(path)
    scores: dict[str, dict[str, Score]] = {}
    try:
        for metric, rows in json.loads(contents).items():
            for row in rows:
                named = row["scores"] if isinstance(row["scores"], dict) else {"": row["scores"]}
                for name, (mean, half_width, n) in named.items():
                    interval = (None, None) if n == -1 else (float(half_width), int(n))
                    by_method = scores.setdefault(f"{metric} {name}".strip(), {})
                    by_method[row["method"]] = Score(float(mean), *interval)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} should hold, under every metric, rows of a method and its scores "
            f"[mean, half width, n] ({error}): fetch it again"
        ) from error
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


def load_autoencoders(
    folder: Path, classes: int = _CLASSES, shape: tuple[int, int, int] = (1, _SIDE, _SIDE)
) -> ClassAutoencoders:
    """Read ae_0.h5, ae_1.h5, … and ae_all.h5, which take images of this shape."""
    by_class = [read_keras(folder / f"ae_{label}.h5", shape) for label in range(classes)]
    return ClassAutoencoders(by_class, read_keras(folder / "ae_all.h5", shape))


def read_keras(path: Path, shape: tuple[int, int, int]) -> nn.Module:
    """Build the chain of convolutions, poolings and upsamplings that the file describes."""
    h5py = importlib.import_module("h5py")
    if not path.is_file():
        raise InputError(
            f"{path} is missing: give the folder with ae_0.h5, ae_1.h5, … and ae_all.h5"
        )
    try:
        with h5py.File(path, "r") as file:
            layers = json.loads(file.attrs["model_config"])["config"]["layers"]
            modules = [
                module
                for group, layer in _chain(layers)
                for module in _modules(layer, file["model_weights"][group])
            ]
        autoencoder = nn.Sequential(*modules).eval().requires_grad_(requires_grad=False)
        _, height, width, channels = layers[0]["config"]["batch_input_shape"]
        answer = autoencoder(torch.zeros(1, channels, height, width))
        if not (channels, height, width) == tuple(answer.shape[1:]) == shape:
            raise ValueError(
                f"it maps {(channels, height, width)} to {tuple(answer.shape[1:])}, not {shape}"
            )
    except (OSError, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{path} is not a Keras autoencoder that can be read here ({reason}): "
            "give the authors' ae_*.h5"
        ) from error
    return autoencoder


def _chain(layers: list[Any], group: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield every layer in order with its outermost group, which holds the weights."""
    for before, layer in zip([None, *layers[:-1]], layers, strict=True):
        sources = [node[0][0] for node in layer["inbound_nodes"] if len(node) == 1]
        if before is not None and before["name"] not in sources:
            raise ValueError(
                f"layer {layer['name']} is not connected to {before['name']} before it"
            )
        name = group or layer["name"]
        if layer["class_name"] == "Functional":
            yield from _chain(layer["config"]["layers"], name)
        elif layer["class_name"] != "InputLayer":
            yield name, layer


_SUPPORTED: Mapping[str, Mapping[str, Any]] = {
    "Conv2D": {
        "padding": "same", "strides": [1, 1], "dilation_rate": [1, 1], "groups": 1,
        "use_bias": True,
    },
    "MaxPooling2D": {"pool_size": [2, 2], "strides": [2, 2]},
    "UpSampling2D": {"size": [2, 2], "interpolation": "nearest"},
}  # fmt: skip
"""Kinds of layers with the settings that `_modules` converts."""


def _modules(layer: Any, weights: Any) -> list[nn.Module]:  # noqa: ANN401
    """Convert a Keras layer to torch modules."""
    kind, config, name = layer["class_name"], layer["config"], layer["name"]
    if kind not in _SUPPORTED:
        raise ValueError(f"{name} is a {kind}")
    for setting, value in {**_SUPPORTED[kind], "data_format": "channels_last"}.items():
        if config[setting] != value:
            raise ValueError(f"{name} has {setting} {config[setting]!r}, not {value!r}")
    if kind == "MaxPooling2D":
        return [nn.MaxPool2d(2, ceil_mode=config["padding"] == "same")]
    if kind == "UpSampling2D":
        return [nn.Upsample(scale_factor=2, mode="nearest")]
    if config["activation"] not in ("linear", "relu"):
        raise ValueError(f"{name} has activation {config['activation']!r}, not linear or relu")
    kernel, bias = (torch.from_numpy(weights[name][f"{key}:0"][()]) for key in ("kernel", "bias"))
    # Without skip_init torch would draw weights from the global generator.
    convolution = nn.utils.skip_init(
        nn.Conv2d, kernel.shape[2], config["filters"], config["kernel_size"], padding="same"
    )
    convolution.load_state_dict({"weight": kernel.permute(3, 2, 0, 1), "bias": bias})
    return [convolution] if config["activation"] == "linear" else [convolution, nn.ReLU()]
