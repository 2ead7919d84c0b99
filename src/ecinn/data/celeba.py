"""CelebA and CelebA-HQ: faces labelled by any of forty attributes, at any size."""

import difflib
from pathlib import Path
from typing import get_args

from jaxtyping import UInt8
from torch import Tensor

from ecinn.data.celeba_files import ATTRIBUTES, CelebAFiles, find_folder, read_files
from ecinn.data.dataset import Dataset, Split
from ecinn.data.decoded_images import Observer, decode_images
from ecinn.errors import InputError

__all__ = ["ATTRIBUTES", "class_names", "load_attributes", "load_celeba"]

_SPLITS: tuple[Split, ...] = get_args(Split)
"""By the number that stands for them in list_eval_partition.txt."""
_ADJECTIVES = frozenset({"Attractive", "Bald", "Blurry", "Chubby", "Male", "Smiling", "Young"})
_OTHERS = {
    "5_o_Clock_Shadow": ("no 5 o'clock shadow", "5 o'clock shadow"),
    "Mouth_Slightly_Open": ("mouth not open", "mouth slightly open"),
    "No_Beard": ("beard", "no beard"),
}


def load_celeba(
    attribute: str,
    split: Split,
    folder: Path | None = None,
    *,
    size: tuple[int, int] = (64, 64),
    observe: Observer = lambda done, total: None,
) -> Dataset:
    """Faces labelled 1 where they have the attribute, else 0.

    Args:
        folder: CelebA's or CelebAMask-HQ's; None looks at ECINN_CELEBA, ./celeba, ./data/celeba.
        size: height and width. The first call with a size decodes all splits and keeps them.
        observe: told how many images are decoded and of how many; not called if they are kept.
    """
    names = class_names(attribute)
    files, rows = _split(split, folder)
    return Dataset(
        images=decode_images(files.images, rows.tolist(), size, observe),
        labels=files.attributes[rows, ATTRIBUTES.index(attribute)].long(),
        class_names=names,
    )


def load_attributes(split: Split, folder: Path | None = None) -> UInt8[Tensor, "batch 40"]:
    """All attributes of every image, 0 or 1, in the order of `load_celeba` and `ATTRIBUTES`."""
    files, rows = _split(split, folder)
    return files.attributes[rows]


def class_names(attribute: str) -> tuple[str, str]:
    """What faces without and with the attribute are called.

    >>> class_names("Wearing_Lipstick")
    ('not wearing lipstick', 'wearing lipstick')
    """
    if attribute not in ATTRIBUTES:
        raise InputError(f"CelebA has no attribute {attribute!r}; {_closest(attribute)}")
    if attribute in _OTHERS:
        return _OTHERS[attribute]
    words = attribute.replace("_", " ").lower()
    denied = attribute in _ADJECTIVES or attribute.startswith("Wearing_")
    return (f"not {words}" if denied else f"no {words}", words)


def _closest(attribute: str) -> str:
    known = {name.lower(): name for name in ATTRIBUTES}
    wanted = attribute.lower().replace(" ", "_")
    if close := difflib.get_close_matches(wanted, known, cutoff=0.5):
        return f"did you mean {' or '.join(known[name] for name in close)}?"
    return f"there are: {', '.join(ATTRIBUTES)}"


def _split(split: Split, folder: Path | None) -> tuple[CelebAFiles, Tensor]:
    if split not in _SPLITS:
        raise InputError(f"CelebA has no split {split!r}; there are: {', '.join(_SPLITS)}")
    place = find_folder(folder)
    files = read_files(place)
    rows = (files.partition == _SPLITS.index(split)).nonzero()[:, 0]
    if not len(rows):
        raise InputError(f"{place} has no images of the {split} split: add some of CelebA's")
    return files, rows
