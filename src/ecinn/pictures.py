"""Pictures of explanations: knows images, numbers and names, nothing of networks."""

import io
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from ecinn.explain import Explanation

from torch import Tensor

INK = (28, 32, 38)
MUTED = (108, 116, 126)
WARNING = (176, 74, 0)
PAPER = (255, 255, 255)
ADDED = np.array([178, 24, 43])
"""Red where the counterfactual adds light."""
REMOVED = np.array([33, 102, 172])
"""Blue where it takes light away; the pair stays apart under every common colour blindness."""


def image_array(pixels: Tensor) -> NDArray[np.uint8]:
    """An 8-bit (channels, height, width) tensor as height × width × 3."""
    array = pixels.detach().cpu().numpy()
    return np.ascontiguousarray(np.broadcast_to(array.transpose(1, 2, 0), (*array.shape[1:], 3)))


def heatmap_array(heatmap: Tensor, limit: float | None = None) -> NDArray[np.uint8]:
    """A signed (channels, height, width) map in colour: zero white, the scale symmetric.

    Args:
        limit: the value that gets full colour; by default the map's own largest.
    """
    values = heatmap.detach().float().mean(0).cpu().numpy()
    limit = limit or float(np.abs(values).max()) or 1.0
    strength = np.clip(np.abs(values) / limit, 0, 1)[..., None]
    colour = np.where(values[..., None] > 0, ADDED, REMOVED)
    return (255 + strength * (colour - 255)).round().astype(np.uint8)


def to_image(array: NDArray[np.uint8]) -> Image.Image:
    """An array as a picture; grey where all three colours agree."""
    grey = bool((array == array[..., :1]).all())
    return Image.fromarray(np.ascontiguousarray(array[..., 0]) if grey else array)


def png_bytes(picture: Image.Image) -> bytes:
    """The picture as a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def explanation_picture(
    explanation: "Explanation", index: int | None = None, tile: int = 112
) -> Image.Image:
    """Input, tipping point, convincing counterfactual and heatmap; a column per target.

    Args:
        index: which image; by default all of them, one block below the other.
        tile: side of an image in the picture.
    """
    rows = range(len(explanation.x)) if index is None else [index]
    blocks = [_block(explanation, row, tile) for row in rows]
    picture = Image.new(
        "RGB", (max(b.width for b in blocks), sum(b.height for b in blocks)), PAPER
    )
    top = 0
    for block in blocks:
        picture.paste(block, (0, top))
        top += block.height
    return picture


def _block(e: "Explanation", row: int, tile: int) -> Image.Image:
    """One image against all of its targets."""
    targets = e.q.shape[1]
    gap, margin, label_width, line = tile // 12, tile // 6, int(1.25 * tile), tile // 6
    header, caption = 2 * line, int(1.15 * line)
    pitch_x, pitch_y = tile + gap, tile + caption + gap
    width = 2 * margin + label_width + targets * pitch_x
    width = max(width, 2 * margin + label_width + 3 * tile)
    height = 2 * margin + header + 4 * pitch_y + line
    canvas = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(canvas)
    small, normal = _font(int(line * 0.68)), _font(int(line * 0.82))
    name = e.class_names
    source = int(e.p[row])
    left = margin + label_width

    def text(x: float, y: float, words: str, **style: object) -> None:
        options = {"fill": INK, "font": normal, "anchor": "ma"} | style
        draw.text((x, y), words, **options)  # type: ignore[arg-type]

    for line_number, words in enumerate(_headline(e, row)):
        colour = INK if not line_number else WARNING
        text(margin, margin + line_number * line, words, anchor="la", fill=colour)
    heat_limit = float(e.heatmap[row].mean(1).abs().max())
    labels = [
        ("input", f"{name[source]}  {_percent(float(e.posterior[row, source]))}"),
        ("tipping point", f"{name[source]} and q tie"),
        ("convincing", "read as q"),
        ("heatmap", "red: light added\nblue: taken away"),
    ]
    for line_number, (title, note) in enumerate(labels):
        middle = margin + header + line_number * pitch_y + tile / 2
        text(margin, middle - line, title, anchor="la")
        draw.multiline_text((margin, middle), note, fill=MUTED, font=small)
    for column in range(targets):
        q = int(e.q[row, column])
        x = left + column * pitch_x
        pictures = [
            image_array(_stored(e.x[row])),
            image_array(e.stored_tipping_point[row, column]),
            image_array(e.stored_convincing[row, column]),
            heatmap_array(e.heatmap[row, column], heat_limit),
        ]
        tipping, convincing = e.tipping_certificate, e.convincing_certificate
        captions = [
            (f"why not {name[q]}?", INK),
            _verdict(tipping.winner[row, column], tipping, row, column, name, expected={source, q}),
            _verdict(convincing.winner[row, column], convincing, row, column, name, expected={q}),
            (f"α₀ {float(e.alpha_0[row, column]):.2f}  α₁ {float(e.alpha_1[row, column]):.2f}", MUTED),
        ]
        for line_number, (array, (words, colour)) in enumerate(zip(pictures, captions, strict=True)):
            y = margin + header + line_number * pitch_y
            canvas.paste(_enlarge(array, tile), (x, y))
            draw.rectangle((x, y, x + tile - 1, y + tile - 1), outline=(205, 210, 216))
            text(x + tile / 2, y + tile + 3, words, font=small, fill=colour)
    return canvas


def _headline(e: "Explanation", row: int) -> list[str]:
    lines = [f"Why is this {e.class_names[int(e.p[row])]}, and not …?"]
    if e.typical is not None and not bool(e.typical[row]):
        lines.append("Caution: this picture is unlike those the model was trained on.")
    return lines


def _verdict(
    winner: Tensor,
    certificate: object,
    row: int,
    column: int,
    names: tuple[str, ...],
    expected: set[int],
) -> tuple[str, tuple[int, int, int]]:
    """What the classifier says of it, in a warning colour where that was not intended."""
    from ecinn.explain import Certificate

    assert isinstance(certificate, Certificate)
    label = int(winner)
    posterior = certificate.stored_posterior
    posterior = certificate.posterior if posterior is None else posterior
    words = f"{names[label]}  {_percent(float(posterior[row, column, label]))}"
    return words, INK if label in expected else WARNING


def _stored(pixels: Tensor) -> Tensor:
    from ecinn.pixels import to_uint8

    return to_uint8(pixels)


def _percent(share: float) -> str:
    """Never 100 % for what is not certain."""
    percent = 100 * share
    if percent > 99.95:
        return "> 99.9 %"
    return f"{percent:.1f} %"


def _enlarge(array: NDArray[np.uint8], tile: int) -> Image.Image:
    """Small images keep their square pixels; larger ones are resampled."""
    image = Image.fromarray(array)
    small = max(image.size) <= tile
    method = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    return image.resize((tile, tile), method)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
