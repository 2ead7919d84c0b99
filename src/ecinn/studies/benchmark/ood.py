"""Measure what the out-of-distribution detector of a digit model catches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ecinn import equations
from ecinn.data.dataset import Dataset, Split
from ecinn.data.mnist import read_mnist
from ecinn.data.pen import page_pens, redraw
from ecinn.data.photographs import read_photograph
from ecinn.drawing.table import Table
from ecinn.errors import InputError
from ecinn.metrics.statistics import Interval, proportion
from ecinn.model import Model
from ecinn.pixels import StoredImages, to_pixels
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark.record import table

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LOOK_ALIKES = "BIOSZ"
"""Letters that are drawn like an 8, 1, 0, 5 and 2."""
FONTS: Mapping[Split, tuple[str, ...]] = {
    "test": (
        "DejaVuSans", "DejaVuSans-Oblique", "DejaVuSans-Bold", "DejaVuSansMono",
        "DejaVuSansMono-Oblique", "DejaVuSerif", "DejaVuSerif-Italic", "DejaVuSerif-Bold",
    ),
    "validation": (
        "STIXGeneral", "STIXGeneralItalic", "STIXGeneralBol", "cmr10", "cmss10", "cmti10",
        "cmtt10", "cmb10",
    ),
}  # fmt: skip
"""Fonts that come with matplotlib: those that choices are made on, and those that score."""
_DRAWS = 3
"""Pictures of each letter in each font, rotated and slanted at random."""
_NOISE = 500
_REDRAWN = 2000
"""Digits that are drawn again with the page's pen."""
_BATCH = 500
_SIDE = 280

Score = Float[Tensor, " images"]


@dataclass(frozen=True)
class Caught:
    """What the detector makes of one kind of images."""

    auroc: Mapping[str, float]
    """P(score of such an image > score of a digit) of each score; 0.5 is chance."""
    flagged: Interval
    """Share that is flagged for any reason."""


@dataclass(frozen=True)
class Detection:
    """Digits, which should not be flagged, and images of other kinds, which should."""

    split: Split
    seed: int
    digits: Interval
    """Share of the digits that is flagged."""
    kinds: Mapping[str, Caught]
    redrawn: Interval
    """Share of digits, drawn again with the web page's pen, that is flagged."""
    by_letter: Mapping[str, Mapping[str, float]]
    """For printed and drawn letters, share of every letter's pictures that is flagged."""


def measure_detection(
    model: Model,
    digits: Dataset,
    fashion: StoredImages | None = None,
    *,
    split: Split = "test",
    seed: int = 0,
    observe: Observer = ignore,
) -> Detection:
    """Compare the scores of digits with those of letters, noise and clothes.

    Other splits than test use other fonts.
    """
    if model.image_shape != (1, 28, 28):
        raise InputError("these letters are framed as digits are: give a model of 28×28 digits")
    letters = draw_letters(FONTS["test" if split == "test" else "validation"], seed).flatten(0, 1)
    plain = torch.tensor([letter not in LOOK_ALIKES for letter in LETTERS])
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(256, (_NOISE, 1, 28, 28), generator=generator, dtype=torch.uint8)
    drawn = redraw(letters, page_pens(len(letters)))
    others = {"letters": letters, "drawn letters": drawn, "noise": noise}
    if fashion is not None:
        others["Fashion-MNIST"] = fashion
    few = digits.first(_REDRAWN).images
    again = redraw(few, page_pens(len(few)))
    of_digits, of_redrawn, *of_others = _scores(
        model, [digits.images, again, *others.values()], observe
    )
    kinds, by_letter = {}, {}
    for name, (scores, flags) in zip(others, of_others, strict=True):
        same_pen, _ = of_redrawn if name == "drawn letters" else of_digits
        kinds[name] = _caught(same_pen, scores, flags)
        if name.endswith("letters"):
            per_letter = flags.reshape(len(LETTERS), -1)
            rows = plain.repeat_interleave(per_letter.shape[1])
            chosen = {score: values[rows] for score, values in scores.items()}
            without = f"{name} without {' '.join(LOOK_ALIKES)}"
            kinds[without] = _caught(same_pen, chosen, flags[rows])
            shares = per_letter.double().mean(1).tolist()
            by_letter[name] = dict(zip(LETTERS, shares, strict=True))
    alarms = proportion(of_digits[1]), proportion(of_redrawn[1])
    return Detection(split, seed, alarms[0], kinds, alarms[1], by_letter)


def draw_letters(fonts: Sequence[str], seed: int) -> Tensor:
    """Return "letters draws 1 28 28": capitals, as the model would read a scan of them."""
    try:
        from matplotlib import get_data_path
    except ImportError:
        raise InputError(
            "the letters need matplotlib's fonts: pip install 'ecinn[benchmark]'"
        ) from None
    folder = Path(get_data_path()) / "fonts" / "ttf"
    random = np.random.default_rng(seed)
    loaded = [ImageFont.truetype(folder / f"{name}.ttf", 150) for name in fonts]
    drawn = []
    for letter in LETTERS:
        pictures = [
            _letter(letter, font, random.uniform(-8, 8), random.uniform(-0.15, 0.15))
            for font in loaded
            for _ in range(_DRAWS)
        ]
        framed = [read_photograph(each, (1, 28, 28), digit=True).image for each in pictures]
        drawn.append(torch.stack(framed))
    return torch.stack(drawn)


def _letter(
    letter: str, font: ImageFont.FreeTypeFont, degrees: float, slant: float
) -> Image.Image:
    middle = _SIDE / 2
    paper = Image.new("L", (_SIDE, _SIDE))
    ImageDraw.Draw(paper).text((middle, middle), letter, 255, font, anchor="mm")
    shear = (1.0, slant, -slant * middle, 0.0, 1.0, 0.0)
    smooth = Image.Resampling.BILINEAR
    slanted = paper.transform(paper.size, Image.Transform.AFFINE, shear, smooth)
    return slanted.rotate(degrees, smooth)


def load_fashion(folder: Path, split: Split) -> StoredImages:
    """Read Fashion-MNIST, whose files are named like MNIST's: test, or the first of training."""
    data = read_mnist("test" if split == "test" else "train", folder)
    return data.first(10_000).images


@torch.inference_mode()
def _scores(
    model: Model, kinds: Sequence[StoredImages], observe: Observer
) -> list[tuple[dict[str, Score], Bool[Tensor, " images"]]]:
    """Return the scores of every image, and whether it is flagged, for each kind of images."""
    shape, done, found = model.ood.shape, 0, []
    count = counter(observe, "images", sum(map(len, kinds)))
    for images in kinds:
        parts = []
        for batch in images.split(_BATCH):
            x = to_pixels(batch.to(model.device))
            z, log_det = model.encode_with_log_det(x)
            log_p = equations.log_marginal(equations.log_likelihood(z, log_det, model.mu))
            residual = z - model.mu_bar[equations.predicted_class(z, model.mu)]
            flags = model.ood.flags(z, residual, log_p).any(1)
            scores = {"−log p(x)": -log_p, "distance": residual.square().sum(1)}
            scores |= {} if shape is None else {"shape": shape.score(z)}
            parts.append((flags, *scores.values()))
            done += len(x)
            count(done)
        flagged, *columns = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
        found.append((dict(zip(scores, columns, strict=True)), flagged))
    return found


def _caught(
    usual: Mapping[str, Float[Tensor, " digits"]],
    scores: Mapping[str, Score],
    flags: Bool[Tensor, " images"],
) -> Caught:
    aurocs = {name: auroc(usual[name], values) for name, values in scores.items()}
    return Caught(aurocs, proportion(flags))


def auroc(usual: Float[Tensor, " usual"], unusual: Float[Tensor, " unusual"]) -> float:
    """P(unusual > usual) + ½ P(equal): area under the ROC curve of a detector."""
    ranked = usual.double().sort().values
    below = torch.searchsorted(ranked, unusual.double())
    not_above = torch.searchsorted(ranked, unusual.double(), right=True)
    return float((below + not_above).double().mean() / (2 * len(usual)))


def detection_table(result: Detection) -> Table:
    """Lay out a row for the digits and one for every other kind of images."""
    digits = {
        f"{result.split} digits": Caught({}, result.digits),
        "the first of them, drawn again": Caught({}, result.redrawn),
    }
    rows = [{"name": k, **vars(caught)} for k, caught in {**digits, **result.kinds}.items()]
    said = {
        name.split()[0]: ", ".join(f"{letter} {100 * shares[letter]:.0f} %" for letter in least)
        for name, shares in result.by_letter.items()
        for least in [sorted(shares, key=lambda letter: shares[letter])[:8]]
    }
    fonts = ", ".join(FONTS["test" if result.split == "test" else "validation"])
    shape = "shape" in rows[-1]["auroc"]
    return table("ood", "table", rows, fonts=fonts, draws=_DRAWS, shape=shape, **said)
