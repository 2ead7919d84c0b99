"""Regions of the face: places and areas at any size, and the effect of a smile on real faces."""

import io
import itertools
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from ecinn.data.face_regions import FACE, FACE_REGIONS, REGION_NAMES, Box, region_mask
from ecinn.errors import InputError
from helpers.paths import SHARED

CELEBA = SHARED / "celeba"
SIZES = [(64, 64), (32, 32), (128, 128), (218, 178), (7, 9)]


def area(box: Box) -> float:
    return (box.bottom - box.top) * (box.right - box.left)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FACE_REGIONS)
def test_mask_is_the_pixels_whose_centres_are_in_a_box(name: str, size: tuple[int, int]) -> None:
    height, width = size
    expected = [
        [
            any(
                box.top <= (row + 0.5) / height < box.bottom
                and box.left <= (column + 0.5) / width < box.right
                for box in FACE_REGIONS[name]
            )
            for column in range(width)
        ]
        for row in range(height)
    ]
    assert region_mask(name, height, width).tolist() == expected


@pytest.mark.parametrize("size", SIZES)
def test_regions_are_disjoint_and_inside_the_face(size: tuple[int, int]) -> None:
    masks = {name: region_mask(name, *size) for name in REGION_NAMES}
    for one, other in itertools.combinations(FACE_REGIONS, 2):
        assert not (masks[one] & masks[other]).any()
    for name in FACE_REGIONS:
        assert not (masks[name] & ~masks["face"]).any()
    assert torch.equal(masks["background"], ~masks["face"])


def test_areas_are_those_of_the_boxes_and_of_the_oval() -> None:
    for name, boxes in FACE_REGIONS.items():
        share = float(region_mask(name, 1000, 900).double().mean())
        assert share == pytest.approx(sum(area(box) for box in boxes), abs=1e-12)
    share = float(region_mask("face", 1000, 900).double().mean())
    assert share == pytest.approx(np.pi / 4 * area(FACE), abs=1e-3)
    rows, columns = region_mask("face", 1000, 1000).nonzero(as_tuple=True)
    edges = (rows.min(), columns.min(), rows.max() + 1, columns.max() + 1)
    expected = (FACE.top, FACE.left, FACE.bottom, FACE.right)
    assert [int(edge) / 1000 for edge in edges] == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("name", REGION_NAMES)
def test_left_and_right_mirror_each_other(name: str) -> None:
    mask = region_mask(name, 64, 64)
    assert torch.equal(mask, mask.flip(1))


def test_two_eyes_above_two_cheeks_above_the_mouth() -> None:
    assert [len(FACE_REGIONS[name]) for name in ("eyes", "cheeks", "mouth")] == [2, 2, 1]
    (mouth,) = FACE_REGIONS["mouth"]
    for eye, cheek in zip(FACE_REGIONS["eyes"], FACE_REGIONS["cheeks"], strict=True):
        assert eye.bottom <= cheek.top
        assert cheek.top < mouth.top
        assert (eye.right < 0.5) == (cheek.right < 0.5)


def test_unknown_region_lists_the_known() -> None:
    with pytest.raises(InputError, match=r"'nose'.*mouth, eyes, cheeks, face, background"):
        region_mask("nose", 64, 64)


@pytest.mark.celeba
@pytest.mark.skipif(not CELEBA.is_dir(), reason="needs ../shared/data/celeba")
def test_a_smile_changes_the_face_and_most_of_all_the_mouth() -> None:
    header, *rows = (CELEBA / "list_attr_celeba.txt").read_text().splitlines()[1:1502]
    column = 1 + header.split().index("Smiling")
    faces: dict[str, list[np.ndarray]] = {"1": [], "-1": []}
    with zipfile.ZipFile(CELEBA / "img_align_celeba.zip") as archive:
        for row in rows:
            fields = row.split()
            picture = Image.open(io.BytesIO(archive.read(f"img_align_celeba/{fields[0]}")))
            faces[fields[column]].append(np.asarray(picture.convert("RGB"), dtype=np.float64))
    smiling, serious = (np.mean(faces[value], 0) for value in ("1", "-1"))
    difference = torch.from_numpy(np.abs(smiling - serious).mean(-1))
    change = {name: float(difference[region_mask(name, 64, 64)].mean()) for name in REGION_NAMES}
    assert change["mouth"] > 2 * change["background"]
    assert change["cheeks"] > 1.5 * change["background"]
    assert change["mouth"] == max(change.values())
    # Eyes are the darkest of the three; a box next to them would not be.
    brightness = torch.from_numpy((smiling + serious).mean(-1))
    shade = {name: float(brightness[region_mask(name, 64, 64)].mean()) for name in FACE_REGIONS}
    assert shade["eyes"] == min(shade.values())
