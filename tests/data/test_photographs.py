"""Image files as people have them: framing, colours, notes and refusals."""

import gc
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from ecinn.data.framing import Framing, Intensity
from ecinn.data.mnist import load_mnist
from ecinn.data.photographs import LARGE_SIDE, read_photograph, shrink
from ecinn.errors import InputError

DIGIT = (1, 28, 28)


def drawn_digit(size: tuple[int, int], ink: int, ground: int) -> Image.Image:
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


def test_pixels_without_a_value_are_black_and_noted() -> None:
    values = np.linspace(0, 2, 28 * 28, dtype=np.float32).reshape(28, 28)
    values[20, 3:6] = np.nan
    read = read_photograph(Image.fromarray(values), (1, 28, 28), digit=False)
    assert "pixels without a value (NaN) were read as 0: 3" in read.notes
    assert read.image[0, 20, 3:6].tolist() == [0, 0, 0]
    assert int(read.image.max()) == 255
    values[np.isnan(values)] = 1
    read = read_photograph(Image.fromarray(values), (1, 28, 28), digit=False)
    assert not any("NaN" in note for note in read.notes)


def test_dark_on_light_is_inverted_and_noted() -> None:
    image = load_mnist("test").images[0]
    negative = Image.fromarray(255 - image[0].numpy())
    fitted = read_photograph(negative, DIGIT, digit=True)
    assert torch.equal(fitted.image, image)
    assert fitted.notes == ("inverted: the background was lighter than the digit",)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "P", "1", "CMYK", "I;16", "I", "F"])
@pytest.mark.parametrize("ground", [0, 255])
def test_every_mode_and_polarity_of_a_scan_gives_the_same_digit(mode: str, ground: int) -> None:
    reference = read_photograph(drawn_digit((300, 400), 255, 0), DIGIT, digit=True).image.float()
    scan = drawn_digit((300, 400), 255 - ground, ground)
    if mode == "I;16":
        scan = Image.fromarray(np.asarray(scan).astype(np.uint16) * 257)
    else:
        scan = scan.convert(mode)
    fitted = read_photograph(scan, DIGIT, digit=True)
    assert (fitted.image.float() - reference).abs().max() <= 8
    assert any("cropped" in note for note in fitted.notes)


def test_a_scan_is_framed_as_mnist_frames_digits() -> None:
    framed = read_photograph(drawn_digit((600, 300), 0, 255), DIGIT, digit=True).image[0].float()
    rows, columns = framed.sum(1).nonzero()[:, 0], framed.sum(0).nonzero()[:, 0]
    assert max(rows[-1] - rows[0], columns[-1] - columns[0]) + 1 == 20
    grid = torch.arange(28.0)
    centre = (framed.sum(1) @ grid / framed.sum(), framed.sum(0) @ grid / framed.sum())
    assert all(abs(float(c) - 13.5) <= 0.75 for c in centre)


def test_transparent_areas_become_white() -> None:
    image = Image.new("RGBA", (60, 60), (0, 0, 0, 0))
    ImageDraw.Draw(image).line([(30, 10), (30, 50)], fill=(0, 0, 0, 255), width=6)
    fitted = read_photograph(image, DIGIT, digit=True)
    assert any("transparent" in note for note in fitted.notes)
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
    fitted = read_photograph(Image.new("RGB", (100, 80), (200, 100, 0)), (3, 64, 64), digit=False)
    assert fitted.image.shape == (3, 64, 64)
    assert fitted.image.float().mean((1, 2)).tolist() == [200, 100, 0]
    assert fitted.notes == ("stretched from 100×80 to 64×64",)


def test_proportions_may_be_kept() -> None:
    fitted = read_photograph(Image.new("RGB", (32, 32)), (3, 64, 64), digit=False)
    assert fitted.notes == ("resized from 32×32 to 64×64",)


def test_grey_images_are_noted_for_colour_models_only() -> None:
    grey, colour = (
        read_photograph(Image.new(mode, (8, 8), 90), (3, 8, 8), digit=False)
        for mode in ("L", "RGB")
    )
    assert grey.notes == ("the image is grey, but the model was trained on colour images",)
    assert colour.notes == ()
    assert grey.image.unique().tolist() == [90]


def test_a_colour_scan_of_a_digit_has_all_its_notes() -> None:
    scan = drawn_digit((300, 400), 0, 255).convert("RGB")
    assert read_photograph(scan, DIGIT, digit=True).notes == (
        "converted from colour to grey",
        "inverted: the background was lighter than the digit",
        "cropped from 300×400 to the digit and centred",
    )


def test_a_blank_page_is_noted() -> None:
    blank = read_photograph(Image.new("L", (50, 50), 255), DIGIT, digit=True)
    assert blank.image.max() == 0
    assert any("blank" in note for note in blank.notes)


def test_every_kind_of_source_gives_the_same_image(tmp_path: Path) -> None:
    path = tmp_path / "seven.png"
    drawn_digit((60, 80), 255, 0).save(path)
    with Image.open(path) as picture:
        expected = read_photograph(picture, DIGIT, digit=True)
    with path.open("rb") as file:
        for source in (path, str(path), path.read_bytes(), file, io.BytesIO(path.read_bytes())):
            photograph = read_photograph(source, DIGIT, digit=True)
            assert torch.equal(photograph.image, expected.image)
            assert photograph.notes == expected.notes


def test_only_the_first_frame_of_an_animation_is_used(tmp_path: Path) -> None:
    frames = [Image.new("L", (8, 8), value) for value in (10, 200, 90)]
    frames[0].save(tmp_path / "film.gif", save_all=True, append_images=frames[1:])
    photograph = read_photograph(tmp_path / "film.gif", (1, 8, 8), digit=False)
    assert photograph.image.unique().tolist() == [10]
    assert photograph.notes[0] == "only the first of 3 frames was used"
    with Image.open(tmp_path / "film.gif") as picture:
        picture.seek(1)
        chosen = read_photograph(picture, (1, 8, 8), digit=False)
    assert chosen.image.unique().tolist() == [200]
    assert "frames" not in " ".join(chosen.notes)


def test_previews_in_a_phones_photograph_are_not_noted(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), (value, 0, 0)) for value in (10, 200)]
    frames[0].save(tmp_path / "phone.mpo", save_all=True, append_images=frames[1:])
    assert read_photograph(tmp_path / "phone.mpo", (3, 8, 8), digit=False).notes == ()


def enormous_png(path: Path, side: int) -> None:
    """A valid PNG header that promises side × side pixels, without holding them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0"))
        + chunk(b"IEND", b"")
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "no such file"),
        ("folder", "is a folder"),
        ("text", "not an image"),
        ("empty", "is empty"),
        ("truncated", "is damaged or incomplete"),
        ("huge", "is too large"),
        ("bomb", "is too large"),
        ("zero", "not an image"),
    ],
)
def test_unusable_files_are_refused_in_one_line(kind: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "file.png"
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("hello")
    elif kind == "empty":
        path.touch()
    elif kind == "truncated":
        noise = np.random.default_rng(0).integers(0, 255, (99, 99), dtype=np.uint8)
        Image.fromarray(noise).save(path)
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "huge":
        enormous_png(path, 9_000)
    elif kind == "bomb":
        enormous_png(path, 20_000)
    elif kind == "zero":
        enormous_png(path, 0)
    with pytest.raises(InputError, match=words) as error:
        read_photograph(path, DIGIT, digit=True)
    assert "file.png" in str(error.value)
    assert "\n" not in str(error.value)
    if kind not in ("missing", "folder"):
        with pytest.raises(InputError, match=f"the image.*({words})"):
            read_photograph(path.read_bytes(), DIGIT, digit=True)


def test_a_file_is_refused_by_its_header_before_the_rest_is_read(tmp_path: Path) -> None:
    """Both files are sparse: 64 GB that nothing may read into memory."""
    for kind, words in (("text", "not an image"), ("huge", "is too large")):
        path = tmp_path / f"{kind}.png"
        enormous_png(path, 9_000)
        with path.open("r+b") as file:
            file.write(b"hello, world" if kind == "text" else b"")
            file.truncate(2**36)
            for source in (path, file):
                with pytest.raises(InputError, match=words):
                    read_photograph(source, DIGIT, digit=True)
            assert not file.closed


def test_narrow_pictures_are_refused_unless_the_environment_allows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    narrow, large = Image.new("L", (1010, 10)), Image.new("L", (50, 50))
    with pytest.raises(InputError, match="too narrow"):
        read_photograph(narrow, DIGIT, digit=True)
    monkeypatch.setenv("ECINN_MAX_ASPECT", "101")
    assert read_photograph(narrow, DIGIT, digit=True).image.shape == DIGIT
    monkeypatch.setenv("ECINN_MAX_PIXELS", "2499")
    with pytest.raises(InputError, match="too large"):
        read_photograph(large, DIGIT, digit=True)
    monkeypatch.setenv("ECINN_MAX_PIXELS", "2500")
    assert read_photograph(large, DIGIT, digit=True).image.shape == DIGIT
    monkeypatch.setenv("ECINN_MAX_PIXELS", "many")
    with pytest.raises(InputError, match="above 0"):
        read_photograph(large, DIGIT, digit=True)


def test_enormous_pictures_are_reduced_and_that_is_noted() -> None:
    picture = Image.new("L", (2 * LARGE_SIDE + 1, 100), 60)
    read = read_photograph(picture, (1, 8, 8), digit=False)
    assert read.image.unique().tolist() == [60]
    assert read.notes[0] == f"reduced from {2 * LARGE_SIDE + 1}×100 to {LARGE_SIDE + 1}×50"


@pytest.mark.parametrize("mode", ["1", "P", "L", "RGB", "CMYK", "I;16", "F"])
@pytest.mark.parametrize("seed", range(3))
def test_reducing_takes_the_mean_of_blocks(
    mode: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(seed)
    height, width = generator.integers(40, 90, 2)
    monkeypatch.setattr("ecinn.data.photographs.STRIP_PIXELS", int(generator.integers(1, 2000)))
    values = generator.integers(0, 256, (height, width, 3), np.uint8)
    if mode == "I;16":
        picture = Image.fromarray(values[..., 0].astype(np.uint16) * 200)
    else:
        picture = Image.fromarray(values).convert(mode)
    whole = picture.convert({"1": "L", "P": "RGB", "I;16": "I"}.get(mode, mode))
    factor = max(height, width) // 20
    small = np.asarray(shrink(picture, 20), dtype=np.float64)
    full = np.asarray(whole, dtype=np.float64)
    for y, x in np.ndindex(small.shape[:2]):
        block = full[y * factor : (y + 1) * factor, x * factor : (x + 1) * factor]
        assert np.abs(small[y, x] - block.mean((0, 1))).max() <= 1
    assert small.shape[:2] == (-(-height // factor), -(-width // factor))
    assert max(small.shape[:2]) < 41


def test_reducing_keeps_transparency() -> None:
    """Half of every block is transparent black: the other half alone has a colour."""
    values = np.zeros((64, 64, 4), np.uint8)
    values[::2] = (200, 100, 50, 255)
    reduced = shrink(Image.fromarray(values), 16)
    assert reduced.size == (16, 16)
    assert np.abs(np.asarray(reduced).astype(int) - (200, 100, 50, 128)).max() <= 2
    palette = Image.new("P", (64, 64), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.info["transparency"] = 1
    assert np.asarray(shrink(palette, 16)).reshape(-1, 4)[:, 3].max() == 0


def test_files_are_closed_unless_the_caller_opened_them(tmp_path: Path) -> None:
    """Pillow keeps files of several frames open; pytest makes the warning of a leak an error."""
    frames = [Image.new("L", (8, 8), value) for value in (10, 200)]
    for kind in ("gif", "tiff"):
        path = tmp_path / f"film.{kind}"
        frames[0].save(path, save_all=True, append_images=frames[1:])
        with path.open("rb") as file:
            for source in (path, file):
                photograph = read_photograph(source, (1, 8, 8), digit=False)
                assert photograph.image.unique().tolist() == [10]
            assert not file.closed
        gc.collect()


@pytest.mark.parametrize(
    ("source", "kind"), [(7, "int"), (None, "NoneType"), (io.StringIO("x"), "str")]
)
def test_other_objects_are_refused(source: object, kind: str) -> None:
    with pytest.raises(InputError, match=f"opened in binary mode.*not {kind}"):
        # __wrapped__ skips the runtime type checker, which users do not have.
        read_photograph.__wrapped__(source, DIGIT, digit=True)


def test_a_pillow_image_without_pixels_is_refused() -> None:
    with pytest.raises(InputError, match="no pixels"):
        read_photograph(Image.new("L", (0, 5)), DIGIT, digit=True)


def twelve_bits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4096, (9, 9), dtype=np.uint16)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_a_model_of_twelve_bits_reads_twelve_bits(suffix: str, tmp_path: Path) -> None:
    values = twelve_bits(1)
    Image.fromarray(values).save(tmp_path / f"scan.{suffix}")
    framing = Framing(intensity=Intensity(0.0, 4095.0, "12 bits"))
    read = read_photograph(tmp_path / f"scan.{suffix}", (1, 9, 9), digit=False, framing=framing)
    assert np.array_equal(read.image[0], np.round(values / 4095 * 255))
    assert read.notes == ("values of 0 to 4095 (12 bits) became black to white",)


def test_more_bits_are_noted_by_a_model_of_eight(tmp_path: Path) -> None:
    values = twelve_bits(2)
    Image.fromarray(values).save(tmp_path / "scan.png")
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "scan.tif")
    wide = read_photograph(tmp_path / "scan.png", (1, 9, 9), digit=False)
    assert np.array_equal(wide.image[0], np.round(values / 65535 * 255))
    assert "0 to 65535 (16 bits)" in wide.notes[0]
    assert "save it with 8 bits" in wide.notes[0]
    floats = read_photograph(tmp_path / "scan.tif", (1, 9, 9), digit=False)
    assert np.array_equal(floats.image[0], np.round(values / values.max() * 255))
    assert "its brightest pixel" in floats.notes[0]


def test_eight_bits_are_noted_by_a_model_of_more() -> None:
    framing = Framing(intensity=Intensity(-100.0, 300.0, "DICOM window"))
    read = read_photograph(Image.new("L", (8, 8), 90), (1, 8, 8), digit=False, framing=framing)
    assert read.image.unique().tolist() == [90]
    assert "-100 to 300 (DICOM window)" in read.notes[0]


def test_lost_bits_of_colours_are_noted(tmp_path: Path) -> None:
    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    values = np.random.default_rng(3).integers(0, 65536, (8, 8, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0))
    data = (
        b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )
    read = read_photograph(data, (3, 8, 8), digit=False)
    assert np.array_equal(read.image.permute(1, 2, 0), values >> 8)
    assert read.notes == ("only the upper 8 of 16 bits a colour were used",)


CAUTIONS = ("several separate strokes", "low contrast", "touches the border")


def cautions(image: Image.Image) -> set[str]:
    notes = read_photograph(image, DIGIT, digit=True).notes
    return {caution for caution in CAUTIONS for note in notes if caution in note}


@pytest.mark.parametrize("ground", [0, 255])
@pytest.mark.parametrize("size", [28, 300])
def test_digits_that_are_easily_misread_are_noted(size: int, ground: int) -> None:
    scale, ink = size / 28, 255 - ground

    def drawn(strokes: list[int], value: int, shadow: int | None = None) -> Image.Image:
        image = Image.new("L", (size, size), ground)
        draw = ImageDraw.Draw(image)
        if shadow is not None:
            draw.rectangle((0, 0, 6 * scale, size), fill=shadow)
        for x in strokes:
            draw.line([(x * scale, 7 * scale), (x * scale, 20 * scale)], value, int(2.5 * scale))
        return image

    assert cautions(drawn([14], ink)) == set()
    assert cautions(drawn([11, 18], ink)) == {"several separate strokes"}
    assert cautions(drawn([14], ground + (60 if ground == 0 else -60))) == {"low contrast"}
    assert "touches the border" in cautions(drawn([14], ink, ground + (ink - ground) // 2))


def test_few_real_digits_get_a_caution() -> None:
    images = load_mnist("validation").images[:500, 0].numpy()
    noted = sum(bool(cautions(Image.fromarray(image))) for image in images)
    assert noted < 0.01 * len(images)
