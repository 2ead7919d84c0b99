"""Image files from untrusted clients."""

import base64
import io
import struct
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from torch import Tensor

from ecinn.data.face_crop import FaceCrop
from ecinn.errors import InputError
from ecinn.model import Model
from ecinn.web.uploads import (
    MAX_SCANS,
    TooLargeError,
    WrongTypeError,
    decode_base64,
    read_images,
    read_pixels,
)
from helpers.builders import small_model

LIMIT = 1_000_000


def read_image(data: bytes, model: Model, limit: int) -> tuple[Tensor, tuple[str, ...]]:
    (photograph,) = read_images([data], model, limit)
    return photograph.image, photograph.notes


def encoded(kind: str, size: tuple[int, int] = (28, 28), mode: str = "L", **more: object) -> bytes:
    values = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(values).convert(mode).save(buffer, kind, **more)
    return buffer.getvalue()


def animation(kind: str) -> bytes:
    frames = [Image.new("RGB", (28, 28), (shade, 0, 0)) for shade in (0, 100, 200)]
    buffer = io.BytesIO()
    frames[0].save(buffer, kind, save_all=True, append_images=frames[1:], duration=50)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a PNG whose header announces this size, with the little data of a bomb."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes(10_000_000))
    start = b"\x89PNG\r\n\x1a\n"
    return start + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_lossless_kinds_give_the_pixels_back(mnist: Model, kind: str, mode: str) -> None:
    data = encoded(kind, mode=mode, **({"lossless": True} if kind == "WEBP" else {}))
    image, _ = read_image(data, mnist, LIMIT)
    grey = np.asarray(Image.open(io.BytesIO(data)).convert("L"))
    border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    expected = 255 - grey if np.median(border) > 127 else grey
    assert np.abs(image[0].numpy().astype(int) - expected).max() <= 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "WEBP"])
def test_large_pictures_are_read_at_any_size(mnist: Model, kind: str) -> None:
    image, notes = read_image(encoded(kind, (901, 1000), "RGB"), mnist, 2 * LIMIT)
    assert image.shape == (1, 28, 28)
    assert notes


@pytest.mark.parametrize("crop", [None, FaceCrop(), FaceCrop(100)])
def test_faces_are_cropped_as_the_model_was_trained(crop: FaceCrop | None) -> None:
    model = small_model(channels=3)
    recipe = replace(model.recipe, mnist_framing=False, face_crop=crop)
    model = Model(replace(model.checkpoint, recipe=recipe), "cpu")
    data = encoded("JPEG", (178, 218), "RGB")
    image, notes = read_image(data, model, LIMIT)
    face = Image.open(io.BytesIO(data))
    stretched = face.resize((8, 8), Image.Resampling.LANCZOS), "stretched from 178×218 to 8×8"
    expected, note = crop.fit(face, (8, 8)) if crop else stretched
    assert np.array_equal(image.permute(1, 2, 0), np.asarray(expected))
    assert notes == (note,)


@pytest.mark.parametrize("size", [(20_000, 20_000), (65_000, 65_000), (2**31 - 1, 2**31 - 1)])
def test_bombs_are_refused_before_they_are_decoded(mnist: Model, size: tuple[int, int]) -> None:
    data = png_header(*size)
    tracemalloc.start()
    with pytest.raises((TooLargeError, InputError)) as refused:
        read_image(data, mnist, LIMIT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("size", [(24_000_000, 1), (1, 24_000_000), (2101, 100)])
def test_narrow_images_are_refused_before_they_are_decoded(
    mnist: Model, size: tuple[int, int]
) -> None:
    data = png_header(*size)
    tracemalloc.start()
    with pytest.raises(TooLargeError, match="narrow"):
        read_image(data, mnist, 24_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
    assert read_image(encoded("PNG", (2000, 100)), mnist, LIMIT)[0].shape == (1, 28, 28)


@pytest.mark.parametrize("mode", ["1", "P", "I;16", "LA"])
def test_large_images_of_every_mode_are_reduced_before_they_become_floats(
    mnist: Model, mode: str
) -> None:
    side = 4000
    picture = Image.new(mode, (side, side))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    tracemalloc.start()  # numpy's arrays are traced
    _, notes = read_image(buffer.getvalue(), mnist, side**2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * side**2
    assert any("cropped from 1334×1334" in note for note in notes)


def test_a_large_photograph_is_still_turned_upright(mnist: Model) -> None:
    picture = Image.new("L", (2400, 2100), 255)
    picture.paste(0, (300, 400, 500, 1800))
    exif, turned = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    picture.save(turned, "PNG", exif=exif)
    upright = io.BytesIO()
    picture.transpose(Image.Transpose.ROTATE_270).save(upright, "PNG")
    images = [
        read_image(file.getvalue(), mnist, 24_000_000)[0].float() for file in (turned, upright)
    ]
    assert images[0].max() > 200
    assert (images[0] - images[1]).abs().mean() < 2


def test_pixels_of_webp_files_count_twice(mnist: Model) -> None:
    file = encoded("WEBP", (100, 100))
    read_image(file, mnist, 20_000)
    with pytest.raises(TooLargeError):
        read_image(file, mnist, 19_999)


def test_the_limit_of_pixels_is_that_of_the_settings(mnist: Model) -> None:
    read_image(encoded("PNG", (100, 100)), mnist, 10_000)
    with pytest.raises(TooLargeError, match="100×101"):
        read_image(encoded("PNG", (100, 101)), mnist, 10_000)
    two = [encoded("PNG", (100, 60))] * 2
    assert len(read_images(two, mnist, 12_000)) == 2
    with pytest.raises(TooLargeError, match="5,999 are left"):
        read_images(two, mnist, 11_999)


@pytest.mark.parametrize(
    "data",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"<?xml version='1.0'?><svg/>",
        b"GIF89a" + bytes(30),
        b"%PDF-1.7",
        b"II*\x00" + bytes(30),
        b"\x80\x04\x95pickle",
        b"",
        b"P6 1 1 255 abc",
        b"\x00\x00\x01\x00" + bytes(40),
    ],
)
def test_other_kinds_are_not_even_opened(mnist: Model, data: bytes) -> None:
    with pytest.raises(WrongTypeError):
        read_image(data, mnist, LIMIT)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animations_are_refused(mnist: Model, kind: str) -> None:
    with pytest.raises(WrongTypeError, match="animated"):
        read_image(animation(kind), mnist, LIMIT)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "WEBP"])
@pytest.mark.parametrize("tail", [b"PK\x05\x06" + bytes(18), b"<script>alert(1)</script>"])
@pytest.mark.parametrize("end", [b"", b"\xff\xd9"])
def test_files_that_are_two_kinds_at_once_are_refused(
    mnist: Model, kind: str, tail: bytes, end: bytes
) -> None:
    with pytest.raises(WrongTypeError, match="and more"):
        read_image(encoded(kind) + tail + end, mnist, LIMIT)


def test_a_jpeg_without_its_end_is_no_way_around(mnist: Model) -> None:
    whole = encoded("JPEG")
    assert whole.endswith(b"\xff\xd9")
    with pytest.raises(WrongTypeError, match="and more"):
        read_image(whole[:-2] + b"PK\x03\x04" + bytes(18), mnist, LIMIT)


def test_jpegs_of_very_many_scans_are_refused_before_they_are_decoded(mnist: Model) -> None:
    usual = encoded("JPEG", (300, 300), "RGB", progressive=True)
    scan = usual.rindex(b"\xff\xda")
    assert 2 < usual.count(b"\xff\xda") <= MAX_SCANS
    assert read_image(usual, mnist, LIMIT)[0].shape == (1, 28, 28)
    more = usual[scan:-2] * (MAX_SCANS - usual.count(b"\xff\xda"))
    read_image(usual[:-2] + more + b"\xff\xd9", mnist, LIMIT)
    with pytest.raises(TooLargeError, match="progressive"):
        read_image(usual[:-2] + more + usual[scan:], mnist, LIMIT)


def test_many_small_parts_of_a_jpeg_are_not_walked_through_for_ever(mnist: Model) -> None:
    with pytest.raises(TooLargeError):
        read_image(b"\xff\xd8" + b"\xff\xfe\x00\x02" * 100_000, mnist, LIMIT)
    with pytest.raises(InputError, match="damaged"):
        read_image(b"\xff\xd8" + b"\xff" * 3_000_000 + b"\x00", mnist, LIMIT)


def test_what_a_phone_puts_behind_a_jpeg_is_left_alone(mnist: Model) -> None:
    image, _ = read_image(encoded("JPEG") + b"SEFHe\x00\x00\x00" * 9, mnist, LIMIT)
    assert image.shape == (1, 28, 28)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "WEBP"])
def test_damaged_files_are_refused_in_one_line(mnist: Model, kind: str) -> None:
    whole = encoded(kind, (200, 200), "RGB")
    generator = np.random.default_rng(1)
    for cut in (9, 20, len(whole) // 2, len(whole) - 5):
        for data in (whole[:cut], whole[:cut] + generator.bytes(len(whole) - cut)):
            message = ""
            try:
                read_image(data, mnist, LIMIT)
            except (InputError, TooLargeError, WrongTypeError) as error:
                message = str(error)
            assert "\n" not in message


def test_base64_with_and_without_the_head_of_a_data_url() -> None:
    text = base64.b64encode(b"picture").decode()
    assert decode_base64(text) == decode_base64(f"data:image/png;base64,{text}") == b"picture"
    for wrong in ("###", "a", "Zg=", "ä"):
        with pytest.raises(InputError):
            decode_base64(wrong)


def test_pixels_are_rows_of_the_models_own_size() -> None:
    grey = read_pixels([[1, 2], [3, 4], [5, 6]], (1, 3, 2))
    assert grey.tolist() == [[[1, 2], [3, 4], [5, 6]]]
    colour = read_pixels([[[1, 2, 3], [4, 5, 6]]], (3, 1, 2))
    assert colour.tolist() == [[[1, 4]], [[2, 5]], [[3, 6]]]
    for rows, shape in (([[1, 2], [3]], (1, 2, 2)), ([[1, 2]], (1, 2, 2)), ([[1]], (3, 1, 1))):
        with pytest.raises(InputError, match="pixels of this model are"):
            read_pixels(rows, shape)


@pytest.mark.parametrize("value", [-1, 256, 2**70, 1.0, True, "1", None, [1], {}])
def test_pixels_are_whole_numbers_of_eight_bits(value: object) -> None:
    with pytest.raises(InputError, match="0 to 255"):
        read_pixels([[1, 2], [3, value]], (1, 2, 2))
