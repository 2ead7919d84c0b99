"""Pages and grids: pixels as they are, words as words, the same bytes every time."""

import io
import itertools
import re
import struct
import zlib

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from ecinn.studies.paper import style
from helpers.paper import pdf_contents, pdf_text


def random_array(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def pdf_images(data: bytes) -> list[np.ndarray]:
    """Embedded images of more than 256 colours, as they appear on the page."""
    turned = re.findall(rb" 0 0 (-?)[\d.]+ \S+ \S+ cm /I\d+ Do", pdf_contents(data))
    heads = re.finditer(rb"<<([^<]*?/Subtype /Image.*?)>>\s*stream\r?\n", data, re.DOTALL)
    found = []
    for upside_down, head in zip(turned, heads, strict=True):
        size = [int(re.search(rb"/%s (\d+)" % key, head[1])[1]) for key in (b"Width", b"Height")]
        raw = zlib.decompressobj().decompress(data[head.end() :])
        # Rows are filtered as PNG's are, so that Pillow can read them.
        chunks = {
            b"IHDR": struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0),
            b"IDAT": zlib.compress(raw),
            b"IEND": b"",
        }
        png = b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
            for name, body in chunks.items()
        )
        image = np.asarray(Image.open(io.BytesIO(png)))
        found.append(image[::-1] if upside_down else image)
    return found


def test_a_pdf_embeds_images_exactly_and_text_as_text() -> None:
    figure, axes = style.page(2.0, 1.0)
    first, second = random_array(20, 30), random_array(28, 28, 1)
    style.place(axes, first, 0.1, 0.1, 5)
    style.place(axes, second, 1.0, 0.1, 3)
    style.write(axes, 0.5, 0.8, "a caption")
    data = style.pdf_bytes(figure)
    assert data.startswith(b"%PDF")
    images = pdf_images(data)
    assert len(images) == 2
    assert np.array_equal(images[0], first)
    assert np.array_equal(images[1], second)
    assert "acaption" in pdf_text(data).replace(" ", "")
    assert b"/Interpolate true" not in data


def test_a_png_shows_every_pixel_as_an_equally_large_square() -> None:
    array = random_array(28, 28)
    panels = (style.Panel(array, "5: .97"), style.Panel(array[::-1].copy(), "6: .98"))
    figure = style.draw_grid(style.Grid((panels,), ("input",), ("5 → 6", "5 → 7")), times=3)
    shown = np.asarray(Image.open(io.BytesIO(style.png_bytes(figure))).convert("RGB"))
    edges = np.array([image.get_extent() for image in figure.axes[0].images]) * style.DPI
    assert np.abs(edges - edges.round()).max() < 1e-6
    for wanted in (array, array[::-1]):
        large = wanted.repeat(3, 0).repeat(3, 1)
        # Inside of the frame, which lies over the outermost pixels.
        inner = large[3:-3, 3:-3]
        rows, columns = np.nonzero((shown == inner[0, 0]).all(-1))
        tall, wide = inner.shape[:2]
        assert any(
            np.array_equal(shown[row : row + tall, column : column + wide], inner)
            for row, column in zip(rows, columns, strict=True)
        )


def test_the_same_figure_gives_the_same_bytes_and_no_date() -> None:
    def draw() -> tuple[bytes, bytes]:
        figure = style.draw_grid(
            style.Grid(((style.Panel(random_array(8, 8), r"$\alpha_0$: .5"),),))
        )
        return style.pdf_bytes(figure), style.png_bytes(figure)

    assert draw() == draw()
    pdf, png = draw()
    assert b"CreationDate" not in pdf
    assert b"matplotlib" not in pdf.lower()
    assert b"tEXt" not in png


def test_a_book_has_a_page_for_every_figure() -> None:
    pages = [style.page(2.0, 1.0)[0] for _ in range(3)]
    assert len(re.findall(rb"/Type /Page\b", style.pdf_bytes(pages))) == 3


def test_settings_are_restored() -> None:
    before = dict(mpl.rcParams)
    style.png_bytes(style.draw_grid(style.Grid(((style.Panel(random_array(4, 4), "x"),),))))
    assert dict(mpl.rcParams) == before


def test_printed_letters_are_legible() -> None:
    panels = tuple(style.Panel(random_array(28, 28), "3: .43\n8: .44") for _ in range(9))
    nine = style.Grid(
        (panels,) * 4, ("input", r"$\alpha_0$", r"$\alpha_1$", "$h$"), ("3 → 8",) * 9
    )
    figure = style.draw_grid(nine)
    assert figure.get_size_inches()[0] <= style.COLUMN
    assert min(text.get_fontsize() for text in figure.axes[0].texts) >= 6
    figure.canvas.draw()
    # No caption reaches into the next one's place.
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if ".43" in text.get_text()]
    for one, other in itertools.pairwise(boxes[:9]):
        assert one.x1 < other.x0


def test_ten_faces_fit_on_a_page() -> None:
    panels = tuple(style.Panel(random_array(64, 64), "¬cheekb.: >.99") for _ in range(10))
    figure = style.draw_grid(style.Grid((panels,), ("input",), ("→ ¬cheekb.",) * 10))
    # As far apart as the page allows.
    assert figure.get_size_inches()[0] == pytest.approx(style.TEXT, abs=0.005)
    lefts = [image.get_extent()[:2] for image in figure.axes[0].images]
    assert all(one[1] < other[0] for one, other in itertools.pairwise(lefts))
    figure.canvas.draw()
    words = [text for text in figure.axes[0].texts if "cheekb" in text.get_text()]
    boxes = [text.get_window_extent() for text in words]
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes[:10]))
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes[10:]))


def test_warning_captions_have_another_colour() -> None:
    array = random_array(8, 8)
    panels = style.Panel(array, "as asked"), style.Panel(array, "not so", warning=True)
    (axes,) = style.draw_grid(style.Grid((panels,))).axes
    colours = {text.get_text(): text.get_color() for text in axes.texts}
    assert (colours["as asked"], colours["not so"]) == (style.INK, style.WARNING)
    assert style.INK != style.WARNING


def test_magnified_pixels_stand_left_of_their_image() -> None:
    array = random_array(28, 28)
    panel = style.Panel(array, magnified=array[:10, :2])
    figure = style.draw_grid(style.Grid(((panel,),)), times=5)
    image, strip = figure.axes[0].images
    assert np.array_equal(strip.get_array(), array[:10, :2])
    left, right, bottom, top = strip.get_extent()
    assert right < image.get_extent()[0]
    pixels = (bottom - top) / 10 * style.DPI, (right - left) / 2 * style.DPI
    assert pixels == pytest.approx((14, 14))


@pytest.mark.parametrize(
    ("p", "words"), [(0.994, ">.99"), (0.98, ".98"), (0.5, ".50"), (0.004, "<.01")]
)
def test_shares(p: float, words: str) -> None:
    assert style.share(p) == words
