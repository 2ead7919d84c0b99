"""MNIST as it travels, augmentation, and image files as people have them."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from ecinn.data.augmentation import Augmentation, augment
from ecinn.data.dataset import load_dataset
from ecinn.data.mnist import SHIPPED, load_mnist
from ecinn.data.photographs import fit_photograph, read_photograph
from ecinn.errors import InputError

DIGIT = (1, 28, 28)


def test_mnist_is_the_known_set() -> None:
    train, test = load_mnist("train"), load_mnist("test")
    assert (len(train), len(test)) == (60_000, 10_000)
    assert test.labels[:8].tolist() == [7, 2, 1, 0, 4, 1, 4, 9]
    assert torch.bincount(train.labels).tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip
    assert round(train.images.float().mean().item() / 255, 4) == 0.1307


@pytest.mark.parametrize("damage", ["missing", "truncated", "not gzip", "not idx", "short"])
def test_damaged_mnist_says_what_to_do(damage: str, tmp_path: Path) -> None:
    for file in SHIPPED.glob("*.gz"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    broken = tmp_path / "t10k-labels-idx1-ubyte.gz"
    data = broken.read_bytes()
    if damage == "missing":
        broken.unlink()
    elif damage == "truncated":
        broken.write_bytes(data[: len(data) // 2])
    elif damage == "not gzip":
        broken.write_bytes(b"<html>404</html>")
    elif damage == "not idx":
        broken.write_bytes(gzip.compress(b"nothing of the kind"))
    else:
        broken.write_bytes(gzip.compress(gzip.decompress(data)[:-7]))
    with pytest.raises(InputError, match="t10k-labels"):
        load_mnist("test", tmp_path)


def test_unknown_data_set_lists_the_known() -> None:
    with pytest.raises(InputError, match="mnist"):
        load_dataset("imagenet", "train")


def test_no_augmentation_is_no_change(generator: torch.Generator) -> None:
    images = torch.randint(256, (3, 1, 8, 8), generator=generator, dtype=torch.uint8)
    assert augment(images, Augmentation(), generator) is images
    same = augment(images, Augmentation(shift=2.0, share=0.0), generator)
    assert torch.equal(same, images)


def test_shift_moves_by_at_most_that_many_pixels(generator: torch.Generator) -> None:
    images = torch.zeros((300, 1, 15, 15), dtype=torch.uint8)
    images[:, :, 7, 7] = 255
    moved = augment(images, Augmentation(shift=3.0), generator).float()
    grid = torch.arange(15.0)
    mass = moved.sum((1, 2, 3))
    for axis in (2, 3):
        centre = (moved.sum(5 - axis)[:, 0] * grid).sum(1) / mass - 7
        assert centre.abs().max() <= 3.05
        assert centre.min() < -2
        assert centre.max() > 2


def test_whole_pixels_are_copied_not_blurred(generator: torch.Generator) -> None:
    """Every shift of −2 … 2 occurs, and what comes in from outside is the mirrored edge."""
    image = torch.randint(256, (3, 9, 11), generator=generator, dtype=torch.uint8)
    padded = torch.from_numpy(np.pad(image.numpy(), ((0, 0), (2, 2), (2, 2)), mode="symmetric"))
    moved = augment(
        image.expand(400, -1, -1, -1), Augmentation(shift=2.0, whole_pixels=True), generator
    )
    expected = [padded[:, y : y + 9, x : x + 11] for y in range(5) for x in range(5)]
    counts = [sum(torch.equal(one, other) for one in moved) for other in expected]
    assert sum(counts) == 400
    assert min(counts) > 4
    assert max(counts) < 35


def test_flip_mirrors_about_half_of_the_images(generator: torch.Generator) -> None:
    images = torch.zeros((200, 1, 4, 6), dtype=torch.uint8)
    images[:, :, :, 0] = 200
    flipped = augment(images, Augmentation(flip=True), generator)
    mirrored = (flipped[:, 0, 0, 5] == 200) & (flipped[:, 0, 0, 0] == 0)
    kept = flipped[:, 0, 0, 0] == 200
    assert (mirrored | kept).all()
    assert 60 < int(mirrored.sum()) < 140


def test_rotation_keeps_the_middle_and_scale_changes_the_size(generator: torch.Generator) -> None:
    images = torch.zeros((100, 1, 21, 21), dtype=torch.uint8)
    images[:, :, 6:15, 6:15] = 255
    turned = augment(images, Augmentation(rotate=45.0), generator)
    assert (turned[:, 0, 10, 10] == 255).all()
    areas = augment(images, Augmentation(scale=0.3), generator).float().sum((1, 2, 3)) / 255
    assert areas.min() < 60
    assert areas.max() > 110


def _drawn_digit(size: tuple[int, int], ink: int, ground: int) -> Image.Image:
    """A seven, off centre, in a large picture."""
    image = Image.new("L", size, ground)
    draw = ImageDraw.Draw(image)
    w, h = size
    draw.line(
        [(w * 0.2, h * 0.2), (w * 0.5, h * 0.2), (w * 0.3, h * 0.7)], fill=ink, width=w // 20
    )
    return image


def test_an_image_of_the_right_size_is_taken_as_it_is(tmp_path: Path) -> None:
    image = load_mnist("test").images[0]
    Image.fromarray(image[0].numpy()).save(tmp_path / "seven.png")
    read = read_photograph(tmp_path / "seven.png", DIGIT, digit=True)
    assert torch.equal(read.image, image)
    assert read.notes == ()


def test_dark_on_light_is_inverted_and_says_so() -> None:
    image = load_mnist("test").images[0]
    negative = Image.fromarray(255 - image[0].numpy())
    fitted = fit_photograph(negative, DIGIT, digit=True)
    assert torch.equal(fitted.image, image)
    assert any("inverted" in note for note in fitted.notes)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "P", "1", "CMYK", "I;16", "I", "F"])
@pytest.mark.parametrize("ground", [0, 255])
def test_every_mode_and_polarity_of_a_scan_gives_the_same_digit(mode: str, ground: int) -> None:
    reference = fit_photograph(_drawn_digit((300, 400), 255, 0), DIGIT, digit=True).image.float()
    scan = _drawn_digit((300, 400), 255 - ground, ground)
    if mode == "I;16":
        scan = Image.fromarray(np.asarray(scan).astype(np.uint16) * 257)
    else:
        scan = scan.convert(mode)
    fitted = fit_photograph(scan, DIGIT, digit=True)
    assert (fitted.image.float() - reference).abs().max() <= 8
    assert any("cropped" in note for note in fitted.notes)


def test_a_scan_is_framed_as_mnist_frames_digits() -> None:
    framed = fit_photograph(_drawn_digit((600, 300), 0, 255), DIGIT, digit=True).image[0].float()
    rows, columns = framed.sum(1).nonzero()[:, 0], framed.sum(0).nonzero()[:, 0]
    assert max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1 == 20
    grid = torch.arange(28.0)
    centre = (framed.sum(1) @ grid / framed.sum(), framed.sum(0) @ grid / framed.sum())
    assert all(abs(float(c) - 13.5) <= 0.75 for c in centre)


def test_transparency_is_laid_on_white() -> None:
    image = Image.new("RGBA", (60, 60), (0, 0, 0, 0))
    ImageDraw.Draw(image).line([(30, 10), (30, 50)], fill=(0, 0, 0, 255), width=6)
    fitted = fit_photograph(image, DIGIT, digit=True)
    assert any("transparency" in note for note in fitted.notes)
    assert fitted.image[0, 14, 12:16].max() > 200
    assert fitted.image[0, :, 0].max() == 0


def test_exif_rotation_is_undone(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90° clockwise to see it upright
    image.save(tmp_path / "phone.jpg", exif=exif, quality=95)
    fitted = read_photograph(tmp_path / "phone.jpg", (3, 20, 10), digit=False)
    assert any("upright" in note for note in fitted.notes)
    assert fitted.image[:, :8].min() > 200
    assert fitted.image[:, 12:].max() < 50


def test_colour_models_get_colour_at_their_size() -> None:
    fitted = fit_photograph(Image.new("RGB", (100, 80), (200, 100, 0)), (3, 64, 64), digit=False)
    assert fitted.image.shape == (3, 64, 64)
    assert fitted.image.float().mean((1, 2)).tolist() == [200, 100, 0]
    assert fitted.notes == ("resized from 100×80 to 64×64, stretched",)


def test_a_grey_picture_is_told_to_a_model_of_colours() -> None:
    told = {
        mode: fit_photograph(Image.new(mode, (8, 8), 90), (3, 8, 8), digit=False)
        for mode in ("L", "RGB")
    }
    assert told["L"].notes == ("grey, where the model knows colours",)
    assert told["RGB"].notes == ()
    assert told["L"].image.unique().tolist() == [90]


def test_a_blank_page_is_no_error() -> None:
    blank = fit_photograph(Image.new("L", (50, 50), 255), DIGIT, digit=True)
    assert blank.image.max() == 0


def _enormous_png(path: Path, side: int) -> None:
    """A valid PNG header that promises side × side pixels, without holding them."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0"))
        + chunk(b"IEND", b"")
    )  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["missing", "folder", "text", "empty", "truncated", "huge", "bomb", "zero"]
)
def test_bad_files_are_refused_in_words(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file.png"
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("hello")
    elif kind == "empty":
        path.touch()
    elif kind == "truncated":
        generator = np.random.default_rng(0)
        Image.fromarray(generator.integers(0, 255, (99, 99), dtype=np.uint8)).save(path)
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "huge":
        _enormous_png(path, 9_000)
    elif kind == "bomb":
        _enormous_png(path, 20_000)
    elif kind == "zero":
        _enormous_png(path, 0)
    with pytest.raises(InputError, match=r"file\.png"):
        read_photograph(path, DIGIT, digit=True)


@pytest.mark.parametrize(
    ("name", "split", "words"),
    [
        ("cifar", "train", "mnist, fakemnist, celeba/ATTRIBUTE"),
        ("celeba", "train", "celeba/ATTRIBUTE"),
        ("mnist", "validation", "no validation images"),
    ],
)
def test_data_sets_that_do_not_exist(name: str, split, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_dataset(name, split)
