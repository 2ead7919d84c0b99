"""The counterfactuals and scores that ECINN's authors published (EvaluatingCounterfactuals)."""

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from ecinn.data.dataset import Dataset
from ecinn.errors import InputError

BenchmarkName = Literal["mnist", "fake_mnist"]
METHODS = ("GB", "GL", "GEN")
"""Gradients in pixels, gradients in a latent space, and the generative one, which is ECINN."""
FAILED = -1
_CLASSES = 10
_IMAGE = (28, 28)
_AUTOENCODERS: Mapping[BenchmarkName, str] = {"mnist": "mnist", "fake_mnist": "fakemnist"}


@dataclass(frozen=True)
class StoredCounterfactuals:
    """One 8-bit counterfactual for every original, as a method left them."""

    method: str
    images: UInt8[Tensor, "batch 1 28 28"]
    p: Int[Tensor, " batch"]
    """What the method's classifier reads the original as."""
    q: Int[Tensor, " batch"]
    """The target; −1 where the method failed."""
    read_as: Int[Tensor, " batch"]
    """What the method's classifier reads the counterfactual as; −1 where the method failed."""

    @property
    def failed(self) -> Bool[Tensor, " batch"]:
        """Where the method found no counterfactual."""
        return self.read_as == FAILED

    @property
    def black(self) -> Bool[Tensor, " batch"]:
        """Where all pixels are 0: failures, and NaN that was stored as 8 bits."""
        return (self.images == 0).flatten(1).all(1)


@dataclass(frozen=True)
class PublishedScore:
    """A mean, half the width of its 95 % interval and the images it is over, where there are."""

    mean: float
    half_width: float | None
    n: int | None


@dataclass(frozen=True)
class AuthorsBenchmark:
    """Originals, the counterfactuals of three methods, and the scores published for them."""

    name: BenchmarkName
    originals: Dataset
    counterfactuals: Mapping[str, StoredCounterfactuals]
    published: Mapping[str, Mapping[str, PublishedScore]]
    """By metric, then by method."""
    autoencoders: Path
    """The folder of the autoencoders of IM1 and IM2."""


def load_authors(folder: Path, name: BenchmarkName) -> AuthorsBenchmark:
    """Read what the authors published for one data set from a copy of their repository."""
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
        autoencoders=folder / "ckpts" / _AUTOENCODERS[name] / "aes",
    )


def _originals(path: Path) -> Dataset:
    arrays = _read_npz(path, ("x", "y"))
    x, y = arrays["x"], arrays["y"]
    _expect(path, "x", x, np.uint8, (len(x), *_IMAGE, 1))
    _expect(path, "y", y, np.float32, (len(x), _CLASSES))
    if not (((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all()):
        raise InputError(f"{path}: the rows of y should be one-hot (one 1, otherwise 0)")
    return Dataset(
        images=torch.from_numpy(np.ascontiguousarray(x[..., 0]))[:, None],
        labels=torch.from_numpy(y.argmax(1)),
        class_names=tuple(str(digit) for digit in range(_CLASSES)),
    )


def _counterfactuals(path: Path, method: str, n: int) -> StoredCounterfactuals:
    arrays = _read_npz(path, ("cfs", "orig_pred", "q", "cf_pred"))
    _expect(path, "cfs", arrays["cfs"], np.uint8, (n, *_IMAGE))
    for key, lowest in (("orig_pred", 0), ("q", FAILED), ("cf_pred", FAILED)):
        _expect(path, key, arrays[key], np.int64, (n,))
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
        read_as=torch.from_numpy(arrays["cf_pred"]),
    )


def _read_npz(path: Path, keys: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """The named arrays; an archive that would need pickle is refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = sorted(entry.removesuffix(".npy") for entry in archive.namelist())
        if not set(keys) <= set(found):
            raise InputError(f"{path} should hold {', '.join(keys)} but holds {', '.join(found)}")
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


def _expect(
    path: Path, key: str, array: NDArray[Any], dtype: type[Any], shape: tuple[int, ...]
) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise InputError(
            f"{path}: {key} should be {np.dtype(dtype)} of shape {shape}, "
            f"not {array.dtype} of shape {array.shape}"
        )


def _published(path: Path) -> Mapping[str, Mapping[str, PublishedScore]]:
    """results.json: a list of {method, scores: [mean, half width, n]} under every metric.

    Where the scores of a metric have names of their own, these follow the metric's after a space.
    """
    scores: dict[str, dict[str, PublishedScore]] = {}
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


def _score(values: Any) -> PublishedScore:  # noqa: ANN401
    """−1 stands for what there is not."""
    mean, half_width, n = values
    if n == -1:
        return PublishedScore(float(mean), None, None)
    return PublishedScore(float(mean), float(half_width), int(n))
