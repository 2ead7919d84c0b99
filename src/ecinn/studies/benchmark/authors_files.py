"""Read what ECINN's authors published: counterfactuals, scores and Keras autoencoders.

Their repository is EvaluatingCounterfactuals; the autoencoders are read without TensorFlow.
"""

import importlib
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor, nn

from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.pixels import Images, Labels, StoredImages

BenchmarkName = Literal["mnist", "fake_mnist"]
METHODS = ("GB", "GL", "GEN")
"""Gradients on pixels, gradients in a latent space, and the generative method, ECINN."""
FAILED = -1
_CLASSES = 10
_IMAGE = (28, 28)
DATASETS: Mapping[BenchmarkName, str] = MappingProxyType(
    {"mnist": "mnist", "fake_mnist": "fakemnist"}
)
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
    def black(self) -> Bool[Tensor, " batch"]:
        """True where all pixels are 0: failures, and NaN stored as 8 bits."""
        return (self.images == 0).flatten(1).all(1)

    def first(self, n: int) -> "StoredCounterfactuals":
        """Return the first n counterfactuals."""
        return StoredCounterfactuals(
            self.method, self.images[:n], self.p[:n], self.q[:n], self.predicted[:n]
        )


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
        return replace(
            self, originals=self.originals.first(n), counterfactuals=MappingProxyType(made)
        )


def load_authors(folder: Path, name: BenchmarkName) -> AuthorsBenchmark:
    """Read the files of one dataset from a copy of the authors' repository."""
    if not folder.is_dir():
        raise InputError(
            f"no folder {folder}: give a copy of EvaluatingCounterfactuals, "
            "with data/, output/ and ckpts/ in it"
        )
    originals = _originals(folder / "data" / "Real" / f"{name}.npz")
    counterfactuals = {
        method: _counterfactuals(folder / "data" / method / f"{name}.npz", method, len(originals))
        for method in METHODS
    }
    return AuthorsBenchmark(
        name=name,
        originals=originals,
        counterfactuals=MappingProxyType(counterfactuals),
        published=_published(folder / "output" / f"{name}_[0]" / "results.json"),
        autoencoders=folder / "ckpts" / DATASETS[name] / "aes",
    )


def _originals(path: Path) -> Dataset:
    arrays = _read_npz(path, ("x", "y"))
    x, y = arrays["x"], arrays["y"]
    _expect_array(path, "x", x, np.uint8, (len(x), *_IMAGE, 1))
    _expect_array(path, "y", y, np.float32, (len(x), _CLASSES))
    if not (((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all()):
        raise InputError(f"{path}: the rows of y should be one-hot (one 1, otherwise 0)")
    return Dataset(
        images=torch.from_numpy(np.ascontiguousarray(x[..., 0]))[:, None],
        labels=torch.from_numpy(y.argmax(1)),
        class_names=tuple(str(digit) for digit in range(_CLASSES)),
    )


def _counterfactuals(path: Path, method: str, n: int) -> StoredCounterfactuals:
    arrays = _read_npz(path, ("cfs", "orig_pred", "q", "cf_pred"))
    _expect_array(path, "cfs", arrays["cfs"], np.uint8, (n, *_IMAGE))
    for key, lowest in (("orig_pred", 0), ("q", FAILED), ("cf_pred", FAILED)):
        _expect_array(path, key, arrays[key], np.int64, (n,))
        if n and not lowest <= arrays[key].min() <= arrays[key].max() < _CLASSES:
            raise InputError(
                f"{path}: {key} should lie in {lowest}…{_CLASSES - 1}, "
                f"not {arrays[key].min()}…{arrays[key].max()}"
            )
    if ((arrays["q"] == FAILED) & (arrays["cf_pred"] != FAILED)).any():
        raise InputError(f"{path}: a counterfactual without a target q should have cf_pred −1")
    return StoredCounterfactuals(
        method=method,
        images=torch.from_numpy(arrays["cfs"])[:, None],
        p=torch.from_numpy(arrays["orig_pred"]),
        q=torch.from_numpy(arrays["q"]),
        predicted=torch.from_numpy(arrays["cf_pred"]),
    )


def _read_npz(path: Path, keys: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """Read the named arrays; archives that need pickle are refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(entry.removesuffix(".npy") for entry in archive.namelist())
        if not set(keys) <= set(names):
            raise InputError(f"{path} should hold {', '.join(keys)} but holds {', '.join(names)}")
        with np.load(path, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in keys}
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing: fetch the whole of EvaluatingCounterfactuals"
        ) from None
    except InputError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{path} is not an archive of plain numpy arrays ({reason}): fetch it again"
        ) from error


def _expect_array(
    path: Path, key: str, array: NDArray[Any], dtype: type[Any], shape: tuple[int, ...]
) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise InputError(
            f"{path}: {key} should be {np.dtype(dtype)} of shape {shape}, "
            f"not {array.dtype} of shape {array.shape}"
        )


def _published(path: Path) -> Mapping[str, Mapping[str, Score]]:
    """Read results.json: under every metric a list of {method, scores: [mean, half width, n]}.

    If the scores of a metric are named, the name follows the metric's after a space.
    """
    scores: dict[str, dict[str, Score]] = {}
    try:
        for metric, rows in json.loads(path.read_text()).items():
            for row in rows:
                named = row["scores"] if isinstance(row["scores"], dict) else {"": row["scores"]}
                for name, values in named.items():
                    by_method = scores.setdefault(f"{metric} {name}".strip(), {})
                    by_method[row["method"]] = _score(values)
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing: fetch the whole of EvaluatingCounterfactuals"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} should hold, under every metric, rows of a method and its scores "
            f"[mean, half width, n] ({error}): fetch it again"
        ) from error
    return MappingProxyType({metric: MappingProxyType(row) for metric, row in scores.items()})


def _score(values: Any) -> Score:  # noqa: ANN401
    """Convert [mean, half width, n]; −1 stands for a missing value."""
    mean, half_width, n = values
    if n == -1:
        return Score(float(mean), None, None)
    return Score(float(mean), float(half_width), int(n))


@dataclass(frozen=True)
class Reconstructions:
    """A counterfactual c in the autoencoders' units, and its three reconstructions."""

    pixels: Images
    by_p: Images
    by_q: Images
    by_all: Images


class Autoencoder(nn.Sequential):
    """Layers that reconstruct images of one shape: channels, height, width."""

    def __init__(self, layers: Sequence[nn.Module], image_shape: tuple[int, int, int]) -> None:
        super().__init__(*layers)
        self.image_shape = image_shape


class ClassAutoencoders(nn.Module):
    """One autoencoder per class, trained on that class only, and one trained on all."""

    def __init__(self, by_class: Sequence[Autoencoder], by_all: Autoencoder) -> None:
        super().__init__()
        shapes = {autoencoder.image_shape for autoencoder in (*by_class, by_all)}
        if len(shapes) > 1:
            raise InputError(f"all autoencoders must have one image shape, not {shapes}")
        self.by_class = nn.ModuleList(by_class)
        self.by_all = by_all

    @torch.inference_mode()
    def reconstruct(
        self, images: StoredImages, p: Labels, q: Labels, batch_size: int = 32
    ) -> Reconstructions:
        """AE_p(c), AE_q(c) and AE_all(c) of c = k/255 − ½.

        Args:
            batch_size: small batches fit into the processor's cache and are faster.
        """
        if tuple(images.shape[1:]) != self.by_all.image_shape:
            raise InputError(
                f"the autoencoders take images of shape {self.by_all.image_shape}, "
                f"not {tuple(images.shape[1:])}"
            )
        pixels = (images.float() / 255 - 0.5).to(memory_format=torch.channels_last)
        return Reconstructions(
            pixels=pixels,
            by_p=self._of_class(pixels, p, batch_size),
            by_q=self._of_class(pixels, q, batch_size),
            by_all=_in_batches(self.by_all, pixels, batch_size),
        )

    def _of_class(self, pixels: Images, label: Labels, batch_size: int) -> Images:
        wrong = label[(label < 0) | (label >= len(self.by_class))]
        if len(wrong):
            raise InputError(
                f"no autoencoder of class {int(wrong[0])}: "
                f"classes are 0 to {len(self.by_class) - 1}"
            )
        answer = torch.empty_like(pixels)
        for number, autoencoder in enumerate(self.by_class):
            rows = label == number
            if bool(rows.any()):
                answer[rows] = _in_batches(autoencoder, pixels[rows], batch_size)
        return answer


def load_autoencoders(folder: Path, classes: int = 10) -> ClassAutoencoders:
    """Read ae_0.h5, ae_1.h5, … and ae_all.h5."""
    by_class = [read_keras(folder / f"ae_{label}.h5") for label in range(classes)]
    return ClassAutoencoders(by_class, read_keras(folder / "ae_all.h5"))


def read_keras(path: Path) -> Autoencoder:
    """Build the chain of convolutions, poolings and upsamplings that the file describes."""
    try:
        h5py = importlib.import_module("h5py")
    except ImportError:
        raise InputError(
            f"reading {path.name} needs h5py: pip install 'ecinn[benchmark]'"
        ) from None
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
        _, height, width, channels = layers[0]["config"]["batch_input_shape"]
        autoencoder = Autoencoder(modules, (channels, height, width))
        answer = autoencoder(torch.zeros(1, channels, height, width))
        if tuple(answer.shape[1:]) != autoencoder.image_shape:
            raise ValueError(f"it maps {autoencoder.image_shape} to {tuple(answer.shape[1:])}")
    except (OSError, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path} is not a Keras autoencoder that can be read here ({reason}): "
            "give the authors' ae_*.h5"
        ) from error
    return autoencoder.eval().requires_grad_(requires_grad=False)


def _chain(layers: list[Any], group: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield every layer in order with its outermost group, which holds the weights."""
    for before, layer in zip([None, *layers[:-1]], layers, strict=True):
        sources = [node[0][0] for node in layer["inbound_nodes"] if len(node) == 1]
        if before is not None and before["name"] not in sources:
            raise ValueError(f"{layer['name']} does not follow {before['name']}")
        name = group or layer["name"]
        if layer["class_name"] == "Functional":
            yield from _chain(layer["config"]["layers"], name)
        elif layer["class_name"] != "InputLayer":
            yield name, layer


def _modules(layer: Any, weights: Any) -> list[nn.Module]:  # noqa: ANN401
    """Convert a Keras layer to torch modules."""
    kind, config = layer["class_name"], layer["config"]
    if kind == "Conv2D":
        _expect(config, padding="same", strides=[1, 1], dilation_rate=[1, 1])
        _expect(config, groups=1, data_format="channels_last", use_bias=True)
        return _convolution(config, weights[layer["name"]])
    if kind == "MaxPooling2D":
        _expect(config, pool_size=[2, 2], strides=[2, 2], data_format="channels_last")
        return [nn.MaxPool2d(2, ceil_mode=config["padding"] == "same")]
    if kind == "UpSampling2D":
        _expect(config, size=[2, 2], interpolation="nearest", data_format="channels_last")
        return [nn.Upsample(scale_factor=2, mode="nearest")]
    raise ValueError(f"{layer['name']} is a {kind}")


def _convolution(config: Any, weights: Any) -> list[nn.Module]:  # noqa: ANN401
    kernel = torch.from_numpy(weights["kernel:0"][()])
    bias = torch.from_numpy(weights["bias:0"][()])
    height, width, channels, filters = kernel.shape
    if [height, width, filters] != [*config["kernel_size"], config["filters"]] or bias.shape != (
        filters,
    ):
        raise ValueError(
            f"{config['name']} should have {config['filters']} filters of {config['kernel_size']}"
            f" but holds {tuple(kernel.shape)} and {tuple(bias.shape)}"
        )
    # Without skip_init torch would draw weights from the global generator.
    convolution = nn.utils.skip_init(nn.Conv2d, channels, filters, (height, width), padding="same")
    convolution.load_state_dict({"weight": kernel.permute(3, 2, 0, 1), "bias": bias})
    if config["activation"] == "linear":
        return [convolution]
    _expect(config, activation="relu")
    return [convolution, nn.ReLU()]


def _expect(config: Any, **settings: object) -> None:  # noqa: ANN401
    for name, value in settings.items():
        if config[name] != value:
            raise ValueError(f"{config['name']} has {name} {config[name]!r}, not {value!r}")


def _in_batches(autoencoder: nn.Module, pixels: Images, batch_size: int) -> Images:
    return torch.cat([autoencoder(batch) for batch in pixels.split(batch_size)])
