"""CelebA and CelebA-HQ: faces labelled by any of forty attributes, at any size."""

import difflib
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from ecinn.data.dataset import Dataset, Split
from ecinn.data.decoded_images import ImageFiles, decode_images, image_names
from ecinn.data.face_crop import CELEBA_CROP, FaceCrop
from ecinn.errors import InputError
from ecinn.progress import Observer, ignore

ATTRIBUTES = (
    "5_o_Clock_Shadow", "Arched_Eyebrows", "Attractive", "Bags_Under_Eyes", "Bald", "Bangs",
    "Big_Lips", "Big_Nose", "Black_Hair", "Blond_Hair", "Blurry", "Brown_Hair", "Bushy_Eyebrows",
    "Chubby", "Double_Chin", "Eyeglasses", "Goatee", "Gray_Hair", "Heavy_Makeup",
    "High_Cheekbones", "Male", "Mouth_Slightly_Open", "Mustache", "Narrow_Eyes", "No_Beard",
    "Oval_Face", "Pale_Skin", "Pointy_Nose", "Receding_Hairline", "Rosy_Cheeks", "Sideburns",
    "Smiling", "Straight_Hair", "Wavy_Hair", "Wearing_Earrings", "Wearing_Hat",
    "Wearing_Lipstick", "Wearing_Necklace", "Wearing_Necktie", "Young",
)  # fmt: skip
"""In the order of list_attr_celeba.txt."""
_ADJECTIVES = frozenset({"Attractive", "Bald", "Blurry", "Chubby", "Male", "Smiling", "Young"})
_IRREGULAR = {
    "5_o_Clock_Shadow": ("no 5 o'clock shadow", "5 o'clock shadow"),
    "Mouth_Slightly_Open": ("mouth not open", "mouth slightly open"),
    "No_Beard": ("beard", "no beard"),
}
_HELP = (
    "expected are img_align_celeba/ or img_align_celeba.zip, list_attr_celeba.txt and "
    "list_eval_partition.txt of CelebA (mmlab.ie.cuhk.edu.hk/projects/CelebA.html), or "
    "CelebA-HQ-img/, CelebAMask-HQ-attribute-anno.txt and CelebA-HQ-to-CelebA-mapping.txt of "
    "CelebAMask-HQ (github.com/switchablenorms/CelebAMask-HQ); "
    "set the folder with --celeba DIR or ECINN_CELEBA"
)
_LAST_OF_SPLIT = (162_770, 182_637)
"""Numbers of the last training and the last validation image in CelebA's official partition."""
_SUBFOLDERS = ("", "Img", "Anno", "Eval")
"""CelebA's own download sorts its files into these; most people take them out."""
_BITS = {"1": 1, "-1": 0, "0": 0}


@dataclass(frozen=True)
class CelebAFiles:
    """All faces in a folder, in the order of the attribute table."""

    images: ImageFiles
    attributes: UInt8[Tensor, "batch 40"]
    partition: Int[Tensor, " batch"]
    """0 training, 1 validation, 2 test."""
    hq: bool
    """CelebA-HQ, whose framing differs."""


def load_celeba(
    attribute: str,
    split: Split,
    folder: Path | None = None,
    *,
    size: tuple[int, int] = (64, 64),
    crop: FaceCrop | None = CELEBA_CROP,
    observe: Observer = ignore,
) -> Dataset:
    """Load faces labelled 1 if they have the attribute, else 0, together with all attributes.

    Args:
        folder: CelebA or CelebAMask-HQ; None tries ECINN_CELEBA, ./celeba and ./data/celeba.
        size: height and width. The first call with a size decodes and caches all splits.
        crop: the square to take; None takes the largest about the centre.
        observe: called while images are decoded; not called if they are cached.
    """
    names = class_names(attribute)
    folder = find_folder(folder)
    files = read_files(folder)
    rows = (files.partition == get_args(Split).index(split)).nonzero()[:, 0]
    if not len(rows):
        raise InputError(f"{folder} has no images of the {split} split: add some from CelebA")
    column = ATTRIBUTES.index(attribute)
    return Dataset(
        images=decode_images(files.images, rows.tolist(), size, observe, crop=crop, hq=files.hq),
        labels=files.attributes[rows, column].long(),
        class_names=names,
        attributes=files.attributes[rows],
        attribute=column,
    )


def relabelled(data: Dataset, name: str) -> Dataset:
    """Return the same faces with the labels of the dataset celeba/ATTRIBUTE.

    Other datasets, which have one set of labels, are returned as they are.
    """
    attribute = name.removeprefix("celeba/")
    table = data.attributes
    if table is None or table.shape[1] != len(ATTRIBUTES) or attribute not in ATTRIBUTES:
        return data
    column = ATTRIBUTES.index(attribute)
    return replace(
        data,
        labels=table[:, column].long(),
        class_names=class_names(attribute),
        attribute=column,
    )


def class_names(attribute: str) -> tuple[str, str]:
    """Name the classes of faces without and with the attribute.

    >>> class_names("Wearing_Lipstick")
    ('not wearing lipstick', 'wearing lipstick')
    """
    if attribute not in ATTRIBUTES:
        known = {name.lower(): name for name in ATTRIBUTES}
        wanted = attribute.lower().replace(" ", "_")
        close = [known[name] for name in difflib.get_close_matches(wanted, known, cutoff=0.5)]
        advice = f"did you mean {' or '.join(close)}?"
        if not close:
            advice = f"choose one of {', '.join(ATTRIBUTES)}"
        raise InputError(f"CelebA has no attribute {attribute!r}; {advice}")
    if attribute in _IRREGULAR:
        return _IRREGULAR[attribute]
    words = attribute.replace("_", " ").lower()
    adjective = attribute in _ADJECTIVES or attribute.startswith("Wearing_")
    return (f"not {words}" if adjective else f"no {words}", words)


def find_folder(folder: Path | None) -> Path:
    """Return the given folder, else that of ECINN_CELEBA, else the first default that exists."""
    given = folder or os.environ.get("ECINN_CELEBA")
    for candidate in (given,) if given else ("celeba", "data/celeba"):
        if Path(candidate).is_dir():
            return Path(candidate)
    problem = (
        f"there is no folder {given}" if given else "CelebA is not in ./celeba or ./data/celeba"
    )
    raise InputError(f"{problem}: {_HELP}")


def read_files(folder: Path) -> CelebAFiles:
    """Read the tables of either layout; rows without an image are left out."""
    hq = (folder / "CelebA-HQ-img").is_dir()
    hq = hq or _find(folder, "CelebAMask-HQ-attribute-anno.txt") is not None
    if hq:
        images = _require(folder, "CelebA-HQ-img")
        table = _require(folder, "CelebAMask-HQ-attribute-anno.txt")
        splits = _require(folder, "CelebA-HQ-to-CelebA-mapping.txt")
        partition = _read_splits(splits, columns=3)
    else:
        images = _require(folder, "img_align_celeba", "img_align_celeba.zip")
        if (nested := images / "img_align_celeba").is_dir():  # as in Kaggle's copy
            images = nested
        table = _require(folder, "list_attr_celeba.txt", "list_attr_celeba.csv")
        splits = _require(folder, "list_eval_partition.txt", "list_eval_partition.csv")
        partition = _read_splits(splits, columns=2)
    names = {_face_number(name): name for name in reversed(image_names(images))}
    rows = [(face, bits) for face, bits in _read_attributes(table) if face in names]
    if not rows:
        raise InputError(f"{images} holds none of the images that {table} names: {_HELP}")
    if missing := next((face for face, _ in rows if face not in partition), None):
        raise InputError(f"{splits} has no row for the image {names[missing]}: fetch it again")
    return CelebAFiles(
        ImageFiles(images, tuple(names[face] for face, _ in rows)),
        torch.tensor([bits for _, bits in rows], dtype=torch.uint8),
        torch.tensor([partition[face] for face, _ in rows]),
        hq,
    )


def _read_attributes(path: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield every face's number and its attributes as 0 or 1, in the order of `ATTRIBUTES`."""
    lines = _read_lines(path)
    line, header = next(lines, (0, []))
    promised = None
    if len(header) == 1 and header[0].isdigit():
        promised = int(header[0])
        line, header = next(lines, (0, []))
    if header[:1] == ["image_id"]:
        header = header[1:]
    if sorted(header) != sorted(ATTRIBUTES):
        start = " ".join(header[:2])
        wanted = f"CelebA's {len(ATTRIBUTES)} attributes"
        raise _fault(path, line, f"should name {wanted}, not {len(header)} words like {start!r}")
    columns = [header.index(attribute) + 1 for attribute in ATTRIBUTES]
    rows = 0
    for line, fields in lines:
        if len(fields) != 1 + len(ATTRIBUTES):
            raise _fault(path, line, f"has {len(fields)} columns instead of {1 + len(ATTRIBUTES)}")
        try:
            bits = [_BITS[fields[column]] for column in columns]
        except KeyError as error:
            raise _fault(path, line, f"attributes are 1 or -1, not {error}") from None
        rows += 1
        yield _face_number(fields[0]), bits
    if promised is not None and promised != rows:
        raise InputError(
            f"{path}: line 1 says {promised} rows, but the file has {rows}: fetch it again, "
            "or correct the number if you removed rows"
        )


def _read_splits(path: Path, columns: int) -> Mapping[str, int]:
    """Read the split of every face: 0 training, 1 validation, 2 test.

    Two columns, of CelebA: name and split. Three columns, of CelebA-HQ: idx, orig_idx and
    orig_file, whose number determines the split (it begins at 1; orig_idx is one less).
    """
    partition = {}
    for line, fields in _read_lines(path):
        if fields[0] in ("image_id", "idx"):
            continue
        if len(fields) != columns:
            raise _fault(path, line, f"has {len(fields)} columns instead of {columns}")
        if columns == 2 and fields[1] not in ("0", "1", "2"):
            raise _fault(path, line, f"the split is 0, 1 or 2, not {fields[1]!r}")
        number = _face_number(fields[-1])
        if not number.isdigit():
            raise _fault(path, line, f"{fields[-1]!r} is not an image of CelebA")
        split = int(number) if columns == 2 else bisect_left(_LAST_OF_SPLIT, int(number))
        partition[_face_number(fields[0])] = split
    return partition


def _read_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield number and fields of every non-empty line; spaces or commas separate the fields."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if fields := line.replace(",", " ").split():
                    yield number, fields
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a readable text file ({error}): fetch it again") from None


def _fault(path: Path, line: int, problem: str) -> InputError:
    return InputError(f"{path}, line {line}: {problem}: fetch it again")


def _face_number(name: str) -> str:
    """Return "1" for 000001.jpg, 1.png and img_align_celeba/000001.webp: the same face."""
    return name.rsplit("/", 1)[-1].rsplit(".", 1)[0].lstrip("0") or "0"


def _find(folder: Path, *names: str) -> Path | None:
    candidates = (folder / subfolder / name for name in names for subfolder in _SUBFOLDERS)
    return next((path for path in candidates if path.exists()), None)


def _require(folder: Path, *names: str) -> Path:
    path = _find(folder, *names)
    if path is None:
        raise InputError(f"{folder} has no {' or '.join(names)}: {_HELP}")
    return path
