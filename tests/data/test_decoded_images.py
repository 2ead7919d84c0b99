"""Images of a folder or an archive: cropped, resized, decoded once, cached, never stale."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ecinn.data.decoded_images import (
    ImageFiles,
    cache_folder,
    decode_images,
    fit,
    image_names,
)
from ecinn.data.face_crop import FaceCrop
from ecinn.progress import Progress

COUNT = 8
States = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECINN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def noise(width: int, height: int, seed: int = 1) -> Image.Image:
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> ImageFiles:
    (tmp_path / "images").mkdir()
    for seed in range(COUNT):
        noise(9, 7, seed).save(tmp_path / "images" / f"{seed}.png")
    return ImageFiles(tmp_path / "images", tuple(image_names(tmp_path / "images")))


@pytest.fixture
def archive(folder: ImageFiles, tmp_path: Path) -> ImageFiles:
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for name in folder.names:
            archive.write(folder.path / name, f"in/{name}")
    return ImageFiles(tmp_path / "images.zip", tuple(image_names(tmp_path / "images.zip")))


def decode(
    files: ImageFiles, rows: list[int], size: tuple[int, int] = (7, 9)
) -> tuple[Tensor, States]:
    seen: States = []

    def observe(progress: Progress) -> None:
        assert progress.task == "decoding images"
        seen.append((progress.done, progress.total))

    return decode_images(files, rows, size, observe), seen


def originals(rows: list[int]) -> Tensor:
    arrays = [np.asarray(noise(9, 7, row)).transpose(2, 0, 1) for row in rows]
    return torch.from_numpy(np.stack(arrays))


@pytest.mark.parametrize(
    ("source", "size", "box"),
    [
        ((178, 218), (64, 64), (0, 20, 178, 198)),
        ((178, 218), (218, 178), (0, 0, 178, 218)),
        ((100, 40), (20, 20), (30, 0, 70, 40)),
        ((90, 90), (16, 32), (0, 22.5, 90, 67.5)),
    ],
)
def test_the_centre_is_cropped_to_the_shape_asked(
    source: tuple[int, int], size: tuple[int, int], box: tuple[float, ...]
) -> None:
    picture = noise(*source)
    expected = picture.resize(size[::-1], Image.Resampling.LANCZOS, box=box)
    assert np.array_equal(fit(picture, size), np.asarray(expected).transpose(2, 0, 1))


def test_images_of_that_size_and_grey_ones_are_taken_as_they_are() -> None:
    picture = noise(64, 64)
    assert np.array_equal(fit(picture, (64, 64)), np.asarray(picture).transpose(2, 0, 1))
    grey = picture.convert("L")
    assert np.array_equal(fit(grey, (64, 64)), np.stack([np.asarray(grey)] * 3))


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_all_are_decoded_once_and_any_rows_taken(
    kind: str, request: pytest.FixtureRequest, cache: Path
) -> None:
    files = request.getfixturevalue(kind)
    images, seen = decode(files, [5, 0, 2])
    assert torch.equal(images, originals([5, 0, 2]))
    assert seen == [(COUNT, COUNT)]
    images.zero_()
    images, seen = decode(files, [0, 7])
    assert torch.equal(images, originals([0, 7]))
    assert seen == []
    assert decode(files, [0], (4, 4))[1] == [(COUNT, COUNT)]
    assert len(list(cache.iterdir())) == 2


def test_successive_rows_are_mapped_into_memory(folder: ImageFiles, cache: Path) -> None:
    """What changes in the cache changes in the images, and not the other way round."""
    images, _ = decode(folder, [2, 3, 4])
    copied, _ = decode(folder, [4, 2, 3])
    assert torch.equal(images, copied[[1, 2, 0]])
    (path,) = cache.glob("*.npy")
    stored = np.load(path, mmap_mode="r+")
    stored[3] = 255 - stored[3]
    assert torch.equal(images[1], 255 - copied[2])
    images[:] = 7
    assert not (stored[2:5] == 7).all()


def test_many_chunks_keep_their_order(tmp_path: Path) -> None:
    for seed in range(130):
        noise(9, 7, seed).save(tmp_path / f"{seed:03}.png")
    rows = list(range(130))
    images, seen = decode(ImageFiles(tmp_path, tuple(image_names(tmp_path))), rows)
    assert torch.equal(images, originals(rows))
    assert seen == [(64, 130), (128, 130), (130, 130)]


@pytest.mark.parametrize("change", ["content", "time"])
@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_changed_files_are_decoded_anew(
    kind: str, change: str, request: pytest.FixtureRequest
) -> None:
    files = request.getfixturevalue(kind)
    decode(files, [0])
    changed = files.path / "3.png" if kind == "folder" else files.path
    time = changed.stat().st_mtime_ns
    if change == "time":
        os.utime(changed, ns=(time, time + 1000))
        assert decode(files, [3])[1] == [(COUNT, COUNT)]
        return
    if kind == "folder":
        noise(30, 30, 99).save(changed)
    else:
        with zipfile.ZipFile(changed, "w") as archive:
            for name in files.names:
                with archive.open(name, "w") as file:
                    noise(30, 30, 99).save(file, "png")
    os.utime(changed, ns=(time, time))
    images, _ = decode(files, [3])
    assert np.array_equal(images[0], fit(noise(30, 30, 99), (7, 9)))


def test_each_crop_has_a_cache_of_its_own(tmp_path: Path, cache: Path) -> None:
    picture = noise(178, 218)
    picture.save(tmp_path / "face.png")
    files = ImageFiles(tmp_path, ("face.png",))
    crops = (None, FaceCrop(), FaceCrop(100), FaceCrop(webp_quality=50))
    for number, (crop, hq) in enumerate([*((crop, False) for crop in crops), (FaceCrop(), True)]):
        for _ in range(2):
            (image,) = decode_images(files, [0], (8, 8), crop=crop, hq=hq)
            assert np.array_equal(image, fit(picture, (8, 8), crop, hq=hq))
        assert len(list(cache.iterdir())) == number + 1


@pytest.mark.parametrize("damage", ["cut off", "rubbish", "another shape"])
def test_damaged_cache_is_built_again(damage: str, folder: ImageFiles, cache: Path) -> None:
    decode(folder, [0])
    (path,) = cache.iterdir()
    if damage == "cut off":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "rubbish":
        path.write_bytes(b"rubbish")
    else:
        np.save(path, np.zeros((3, 3), np.uint8))
    assert torch.equal(decode(folder, [4])[0], originals([4]))
    assert np.load(path).shape == (COUNT, 3, 7, 9)
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("reason", ["a file is in the way", "the disk is full"])
def test_without_a_cache_only_the_rows_are_decoded(
    reason: str, folder: ImageFiles, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "a file is in the way":
        cache.touch()
    else:
        monkeypatch.setattr(os, "posix_fallocate", _no_space, raising=False)
    images, seen = decode(folder, [6, 1])
    assert torch.equal(images, originals([6, 1]))
    assert seen == [(2, 2)]
    assert cache.is_file() or not list(cache.iterdir())


def _no_space(file: int, offset: int, size: int) -> None:
    assert size > 3 * 7 * 9 * COUNT
    raise OSError(28, "No space left on device")


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECINN_CACHE", "a")
    monkeypatch.setenv("XDG_CACHE_HOME", "b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("a")
    monkeypatch.delenv("ECINN_CACHE")
    assert cache_folder() == Path("b/ecinn")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/c/.cache/ecinn")
