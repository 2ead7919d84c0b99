"""The files of CelebA and of CelebAMask-HQ: which faces there are, their attributes and splits."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from ecinn.data.decoded_images import ImageFiles, image_names
from ecinn.errors import InputError

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

PLACES = (Path("celeba"), Path("data") / "celeba")
"""Where the files are looked for when no folder is named."""
HELP = (
    "expected are img_align_celeba/ or img_align_celeba.zip, list_attr_celeba.txt and "
    "list_eval_partition.txt of CelebA (mmlab.ie.cuhk.edu.hk/projects/CelebA.html), or "
    "CelebA-HQ-img/, CelebAMask-HQ-attribute-anno.txt and CelebA-HQ-to-CelebA-mapping.txt of "
    "CelebAMask-HQ (github.com/switchablenorms/CelebAMask-HQ); "
    "--celeba DIR or ECINN_CELEBA names the folder"
)
_LAST_OF_TRAINING, _LAST_OF_VALIDATION = 162_770, 182_637
"""Numbers in CelebA's file names at which its official partition changes."""
_SHELVES = ("", "Img", "Anno", "Eval")
"""CelebA's own download sorts its files into these folders; most people take them out."""
_BITS = {"1": 1, "-1": 0, "0": 0}


@dataclass(frozen=True)
class CelebAFiles:
    """All faces that are there, in the order of the attribute rows."""

    images: ImageFiles
    attributes: UInt8[Tensor, "batch 40"]
    partition: Int[Tensor, " batch"]
    """0 training, 1 validation, 2 test."""


def find_folder(folder: Path | None) -> Path:
    """The folder named, else the one of ECINN_CELEBA, else the first of the usual places."""
    named = folder or (Path(own) if (own := os.environ.get("ECINN_CELEBA")) else None)
    if named is not None:
        if not named.is_dir():
            raise InputError(f"no folder {named}: {HELP}")
        return named
    for place in PLACES:
        if place.is_dir():
            return place
    usual = " or ".join(f"./{place.as_posix()}" for place in PLACES)
    raise InputError(f"CelebA is not in {usual}: {HELP}")


def read_files(folder: Path) -> CelebAFiles:
    """Either layout. Rows without an image are left out: parts of CelebA are welcome."""
    if (folder / "CelebA-HQ-img").is_dir() or _find(folder, "CelebAMask-HQ-attribute-anno.txt"):
        images = _require(folder, "CelebA-HQ-img")
        table = _require(folder, "CelebAMask-HQ-attribute-anno.txt")
        mapping = _require(folder, "CelebA-HQ-to-CelebA-mapping.txt")
        splits, partition = mapping, _partition_of_originals(mapping)
    else:
        images = _aligned_images(folder)
        table = _require(folder, "list_attr_celeba.txt", "list_attr_celeba.csv")
        splits = _require(folder, "list_eval_partition.txt", "list_eval_partition.csv")
        partition = _partition(splits)
    names = {_number(name): name for name in reversed(image_names(images))}
    rows = [(number, bits) for number, bits in _attribute_rows(table) if number in names]
    if not rows:
        raise InputError(f"{images} holds none of the images that {table} names: {HELP}")
    if missing := next((number for number, _ in rows if number not in partition), None):
        raise InputError(f"{splits} has no row for the image {names[missing]}: fetch it again")
    return CelebAFiles(
        ImageFiles(images, tuple(names[number] for number, _ in rows)),
        torch.tensor([bits for _, bits in rows], dtype=torch.uint8),
        torch.tensor([partition[number] for number, _ in rows]),
    )


def _aligned_images(folder: Path) -> Path:
    """Kaggle's copy has the folder twice, one inside the other."""
    found = _require(folder, "img_align_celeba", "img_align_celeba.zip")
    nested = found / "img_align_celeba"
    return nested if nested.is_dir() else found


def _attribute_rows(path: Path) -> Iterator[tuple[str, list[int]]]:
    """The image's number and its attributes as 0 or 1, in the order of `ATTRIBUTES`."""
    lines = _lines(path)
    number, header = next(lines, (0, []))
    count = None
    if len(header) == 1 and header[0].isdigit():
        count = int(header[0])
        number, header = next(lines, (0, []))
    if header[:1] == ["image_id"]:
        header = header[1:]
    if sorted(header) != sorted(ATTRIBUTES):
        raise InputError(
            f"{path}, line {number}: should name CelebA's {len(ATTRIBUTES)} attributes, "
            f"not {len(header)} words beginning with {' '.join(header[:2])!r}: fetch it again"
        )
    columns = [header.index(attribute) + 1 for attribute in ATTRIBUTES]
    rows = 0
    for number, fields in lines:
        _expect_columns(path, number, fields, 1 + len(ATTRIBUTES))
        try:
            bits = [_BITS[fields[column]] for column in columns]
        except KeyError as error:
            raise InputError(
                f"{path}, line {number}: attributes are 1 or -1, not {error}: fetch it again"
            ) from None
        rows += 1
        yield _number(fields[0]), bits
    if count is not None and count != rows:
        raise InputError(
            f"{path} says on line 1 that it has {count} rows but has {rows}: fetch it again, "
            "or correct the number if you took rows out"
        )


def _partition(path: Path) -> Mapping[str, int]:
    """list_eval_partition: the image's name and 0, 1 or 2."""
    partition = {}
    for number, fields in _lines(path):
        if fields[0] == "image_id":
            continue
        _expect_columns(path, number, fields, 2)
        if fields[1] not in ("0", "1", "2"):
            raise InputError(
                f"{path}, line {number}: the split is 0, 1 or 2, not {fields[1]!r}: fetch it again"
            )
        partition[_number(fields[0])] = int(fields[1])
    return partition


def _partition_of_originals(path: Path) -> Mapping[str, int]:
    """The mapping's columns idx, orig_idx, orig_file: the split that the original is in.

    The number in orig_file counts, which begins at 1; orig_idx is one less.
    """
    partition = {}
    for number, fields in _lines(path):
        if fields[0] == "idx":
            continue
        _expect_columns(path, number, fields, 3)
        original = _number(fields[2])
        if not original.isdigit():
            raise InputError(
                f"{path}, line {number}: {fields[2]!r} is no image of CelebA: fetch it again"
            )
        partition[_number(fields[0])] = (int(original) > _LAST_OF_TRAINING) + (
            int(original) > _LAST_OF_VALIDATION
        )
    return partition


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of every line that is not empty; blanks or commas part the fields."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if fields := line.replace(",", " ").split():
                    yield number, fields
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a readable text file ({error}): fetch it again") from None


def _expect_columns(path: Path, number: int, fields: list[str], columns: int) -> None:
    if len(fields) != columns:
        raise InputError(
            f"{path}, line {number}: has {len(fields)} columns instead of {columns}: "
            "fetch it again"
        )


def _number(name: str) -> str:
    """000001.jpg, 1.png and img_align_celeba/000001.webp are the same face."""
    return name.rsplit("/", 1)[-1].rsplit(".", 1)[0].lstrip("0") or "0"


def _find(folder: Path, *names: str) -> Path | None:
    candidates = (folder / shelf / name for name in names for shelf in _SHELVES)
    return next((path for path in candidates if path.exists()), None)


def _require(folder: Path, *names: str) -> Path:
    found = _find(folder, *names)
    if found is None:
        raise InputError(f"{folder} has no {' or '.join(names)}: {HELP}")
    return found
