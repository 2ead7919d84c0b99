"""MNIST, read from the four idx files that ship with the package or from a folder of them.

MNIST has 60,000 training digits and no validation split, so one is held out here: a random
thirtieth, 2,000 digits, drawn once with a fixed seed. Models are chosen and calibrated on these
2,000, trained on the other 58,000, and tested on MNIST's own 10,000 test digits.
"""

import gzip
import lzma
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ecinn.data.dataset import Dataset, Split
from ecinn.errors import InputError
from ecinn.files import ASSETS

SHIPPED = ASSETS / "mnist"
_HELD_OUT = 30
"""Hold out one in this many training digits."""
_SEED = 2_000
_READERS: Mapping[str, Callable[[bytes], bytes]] = {
    ".xz": lzma.decompress,
    ".gz": gzip.decompress,
    "": bytes,
}
"""Decompress a file by its suffix; the package ships .xz."""


def load_mnist(split: Split, folder: Path = SHIPPED) -> Dataset:
    """Load 58,000 training, 2,000 validation or 10,000 test digits, in the order of the files."""
    return select_split(read_mnist("test" if split == "test" else "train", folder), split)


def select_split(data: Dataset, split: Split) -> Dataset:
    """Select a split from all 60,000 training digits; test digits stay as they are."""
    if split == "test":
        return data
    shuffled = torch.randperm(len(data), generator=torch.Generator().manual_seed(_SEED))
    held_out, kept = shuffled.tensor_split([len(data) // _HELD_OUT])
    rows = (held_out if split == "validation" else kept).sort().values
    return data.select(rows)


def read_mnist(part: Literal["train", "test"], folder: Path = SHIPPED) -> Dataset:
    """Read the 60,000 training or the 10,000 test digits as they were published."""
    prefix = {"train": "train", "test": "t10k"}[part]
    images = _read_idx(folder / f"{prefix}-images-idx3-ubyte", dimensions=3)
    labels = _read_idx(folder / f"{prefix}-labels-idx1-ubyte", dimensions=1)
    if len(images) != len(labels):
        raise InputError(f"{folder}: {len(images)} images but {len(labels)} labels")
    return Dataset(
        images=torch.from_numpy(images)[:, None],
        labels=torch.from_numpy(labels).long(),
        class_names=tuple(str(digit) for digit in range(10)),
    )


def _read_idx(stem: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read the idx format: two zero bytes, type 8 (uint8), the rank, the sizes, the values."""
    paths = {stem.with_name(stem.name + suffix): read for suffix, read in _READERS.items()}
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise InputError(f"{stem} is missing: put MNIST's four idx files there, plain, .gz or .xz")
    try:
        data = paths[path](path.read_bytes())
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{path} is not readable ({error}): fetch it again") from None
    header = 4 + 4 * dimensions
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) < header:
        raise InputError(f"{path} is not an idx file of {dimensions} dimensions: fetch it again")
    sizes = np.frombuffer(data, ">u4", count=dimensions, offset=4).astype(int)
    if len(data) != header + sizes.prod():
        raise InputError(
            f"{path} should hold {sizes.prod()} values but holds {len(data) - header}: "
            "fetch it again"
        )
    return np.frombuffer(bytearray(data), np.uint8, offset=header).reshape(*sizes)
