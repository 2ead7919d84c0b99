"""Faces in the square that the models know: aligned, CelebA-HQ, cropped already, or neither."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ecinn.data.celeba import load_celeba, read_files
from ecinn.data.face_crop import CELEBA_CROP, FaceCrop
from helpers.paths import SHARED

ORIGINALS = SHARED / "celeba_originals"
PLAIN = FaceCrop(webp_quality=None)
RANDOM = np.random.default_rng(5)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(RANDOM.integers(0, 256, (height, width, 3), dtype=np.uint8))


def resized(values: np.ndarray, side: int = 64) -> np.ndarray:
    return np.asarray(Image.fromarray(values).resize((side, side), Image.Resampling.LANCZOS))


def stored(values: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(values).save(file, "WEBP", quality=quality, method=6)
    return np.asarray(Image.open(file).convert("RGB"))


def test_an_aligned_face_keeps_the_central_148_pixels() -> None:
    face = noise(178, 218)
    square = np.asarray(face)[35:183, 15:163]
    for crop, expected in (
        (PLAIN, resized(square)),
        (CELEBA_CROP, stored(resized(square), 88)),
        (FaceCrop(webp_quality=40), stored(resized(square), 40)),
    ):
        fitted, note = crop.fit(face, (64, 64))
        assert np.array_equal(fitted, expected)
        assert "178×218" in note
        assert "148×148" in note


def test_the_crop_scales_with_the_aligned_face() -> None:
    side = 2 * int(RANDOM.integers(40, 89))
    for scale in (1, 2, 3):
        face = noise(178 * scale, 218 * scale)
        left, top = scale * (178 - side) // 2, scale * (218 - side) // 2
        square = np.asarray(face)[top : top + scale * side, left : left + scale * side]
        fitted, _ = FaceCrop(side, webp_quality=None).fit(face, (32, 32))
        assert np.array_equal(fitted, resized(square, 32))


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((200, 200), (0, 0, 200, 200)),
        ((4, 4), (0, 0, 4, 4)),
        ((300, 200), (50, 0, 250, 200)),
        ((90, 160), (0, 35, 90, 125)),
        ((218, 178), (20, 0, 198, 178)),
        ((800, 1000), (0, 100, 800, 900)),
    ],
)
def test_squares_are_taken_whole_and_other_pictures_about_the_centre(
    size: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    picture = noise(*size)
    left, top, right, bottom = box
    expected = resized(np.asarray(picture)[top:bottom, left:right])
    fitted, note = PLAIN.fit(picture, (64, 64))
    assert np.array_equal(fitted, expected)
    assert f"{size[0]}×{size[1]}" in note
    assert (f"{right - left}×{bottom - top}" in note) or size[0] == size[1]
    assert "eyes level at half the height" in note
    assert np.array_equal(CELEBA_CROP.fit(picture, (64, 64))[0], stored(expected, 88))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_picture_of_the_models_size_is_not_changed(mode: str) -> None:
    picture = noise(64, 64).convert(mode)
    fitted, note = CELEBA_CROP.fit(picture, (64, 64))
    assert np.array_equal(fitted, picture)
    assert note == ""
    assert CELEBA_CROP.fit(noise(178, 218).convert(mode), (64, 64))[0].mode == mode


def hq_of(face: Image.Image, eyes: np.ndarray, mouth: np.ndarray) -> Image.Image:
    """The square of Karras et al. (2018), appendix C, around landmarks given as (x, y)."""
    middle = eyes.mean(0)
    across, down = eyes[1] - eyes[0], mouth - middle
    half = max(2 * np.hypot(*across), 1.8 * np.hypot(*down))
    left, top = middle + 0.1 * down - half
    box = (left, top, left + 2 * half, top + 2 * half)
    return face.resize((1024, 1024), Image.Resampling.BICUBIC, box=box)


@pytest.mark.parametrize("side", [130, 148])
def test_celeba_hq_gets_the_square_of_the_aligned_faces(side: int) -> None:
    """Blurred noise, so that a pixel's place shows, in both framings."""
    # CelebA's own alignment (counted from 1) moved to the centres of pixels.
    eyes, mouth = (
        np.array([[70.745, 112], [108.237, 112]]) - 0.5,
        np.array([89.432, 153.514]) - 0.5,
    )
    coarse = noise(18, 22)
    face = coarse.resize((178, 218), Image.Resampling.BICUBIC)
    crop = FaceCrop(side, webp_quality=None)
    expected = np.asarray(crop.fit(face, (64, 64))[0]).astype(float)
    fitted = np.asarray(crop.fit(hq_of(face, eyes, mouth), (64, 64), hq=True)[0]).astype(float)
    # The upper rows of the larger square lie outside CelebA-HQ's picture and are mirrored.
    missing = 0 if side == 130 else 3
    assert np.abs(fitted - expected)[missing:].mean() < 1.5
    assert np.abs(np.roll(fitted, 1, 0) - expected)[missing + 1 :].mean() > 4
    assert np.abs(np.roll(fitted, 1, 1) - expected)[missing:, 1:].mean() > 4


def test_what_celeba_hq_lacks_is_mirrored() -> None:
    face = noise(150, 150)
    fitted, _ = FaceCrop(178, webp_quality=None).fit(face, (178, 178), hq=True)
    values = np.asarray(face)
    rows = np.abs(np.arange(178) - 21)
    columns = np.abs(np.arange(178) - 14)
    rows, columns = (np.where(at > 149, 298 - at, at) for at in (rows, columns))
    assert np.array_equal(fitted, values[rows][:, columns])


@pytest.mark.celeba
@pytest.mark.skipif(not ORIGINALS.is_dir(), reason="needs ../shared/data/celeba_originals")
def test_original_faces_become_the_reduced_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECINN_CACHE", str(tmp_path / "cache"))
    every, others = read_files(ORIGINALS), read_files(SHARED / "celeba")
    assert len(every.attributes) == 989
    assert torch.equal(every.attributes, others.attributes[others.partition == 2])
    table = (ORIGINALS / "list_attr_celeba.txt").read_text().splitlines()
    faces = []
    for folder in (ORIGINALS, SHARED / "celeba"):
        part = tmp_path / folder.name
        part.mkdir()
        (part / "list_attr_celeba.txt").write_text("\n".join(["100", *table[1:102]]))
        for name in ("list_eval_partition.txt", "img_align_celeba.zip"):
            (part / name).symlink_to(folder / name)
        faces.append(load_celeba("Smiling", "test", part).images)
    originals, reduced = faces
    assert originals.shape == reduced.shape == (100, 3, 64, 64)
    # Equal with libwebp 1.6; another version may encode a little differently.
    assert (originals.int() - reduced.int()).abs().float().mean() < 0.5
