"""MNIST, read from the four idx files that ship with the package or from a folder of them."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ecinn.data.dataset import Dataset, Split
from ecinn.errors import InputError
from ecinn.files import ASSETS

SHIPPED = ASSETS / "mnist"
_PREFIX: dict[Split, str] = {"train": "train", "test": "t10k"}


def load_mnist(split: Split, folder: Path = SHIPPED) -> Dataset:
    """Load the 60,000 training or the 10,000 test digits."""
    if split not in _PREFIX:
        raise InputError("MNIST has no validation images: use the train or the test split")
    prefix = _PREFIX[split]
    images = _read_idx(folder / f"{prefix}-images-idx3-ubyte.gz", dimensions=3)
    labels = _read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", dimensions=1)
    if len(images) != len(labels):
        raise InputError(f"{folder}: {len(images)} images but {len(labels)} labels")
    return Dataset(
        images=torch.from_numpy(images)[:, None],
        labels=torch.from_numpy(labels).long(),
        class_names=tuple(str(digit) for digit in range(10)),
    )


def _read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read the idx format: two zero bytes, type 8 (uint8), the rank, the sizes, the values."""
    try:
        data = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path} is missing: put MNIST's four idx.gz files there") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a readable gzip file ({error}): fetch it again") from None
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
