"""An explanation as a sheet of pictures with captions."""

from PIL import Image

from ecinn.drawing import pictures
from ecinn.drawing.grid import Grid, Panel
from ecinn.drawing.heatmaps import colour_bar
from ecinn.drawing.pictures import PAPER, percent
from ecinn.explanation.result import ALPHA_1, Explanation
from ecinn.pixels import to_uint8

_MARGIN = 18


def explanation_sheet(e: Explanation, row: int) -> Grid:
    """Lay out one image: input, tipping point, counterfactual and heatmap for every target."""
    p = int(e.p[row])
    name = e.named(p)
    reasons = ", ".join(e.reasons(row))
    target = f"“{e.named(int(e.q[row, 0]))}”" if e.q.shape[1] == 1 else "…"
    by_user = e.confidence != ALPHA_1 and not e.confidence_by_default
    columns = [_column(e, row, column) for column in range(e.q.shape[1])]
    return Grid(
        tuple(zip(*columns, strict=True)),
        title=f"Why is this “{name}”, and not {target}?",
        caution=f"Caution: this image is out of distribution ({reasons})." if reasons else "",
        names=(
            ("input", f"{name}  {percent(float(e.reading[row, p]))}{_reader(e)}"),
            ("tipping point", _tie(e)),
            (
                "as requested" if by_user else "convincing",
                drawn_request(e.requested, break_line=True),
            ),
            (
                "heatmap",
                "what changes;\nbelow it: alpha",
            ),
        ),
    )


def _reader(e: Explanation) -> str:
    return "" if e.verification is None else f"\nread by {e.verification.classifier}"


def _tie(e: Explanation) -> str:
    """Describe the tie, and what the percentages below the pictures are about."""
    if e.verification is not None:
        return "nearest to a tie\nfor the classifier"
    if e.tipping_certificate.stored_posterior is None:
        return "both classes tie"
    return (
        "as stored; nearest\nto a tie" if e.corrected else "as stored; a tie\nonly before rounding"
    )


def drawn_request(words: str, *, break_line: bool = False) -> str:
    """Return `Explanation.requested` for a picture, whose font has no Greek letters.

    >>> drawn_request("α₁ (the paper's)")
    'as far as in the paper'
    """
    if words.startswith("α₁"):
        return "as far as\nin the paper" if break_line else "as far as in the paper"
    return words.replace(" (", "\n(") if break_line else words


def with_scale(sheet: Image.Image, limit: float) -> Image.Image:
    """Add the scale of the heatmaps below a sheet: a colour bar with the changes at its ends."""
    bar = colour_bar((f"-{scale(limit)} darker", f"+{scale(limit)} lighter"), 96, 12)
    whole = Image.new("RGB", (max(sheet.width, bar.width), sheet.height + bar.height), PAPER)
    whole.paste(sheet, (0, 0))
    whole.paste(bar, (max(whole.width - bar.width - _MARGIN, 0), sheet.height - _MARGIN // 2))
    return whole


def scale(limit: float) -> str:
    """A change of brightness in percent, with two significant digits.

    >>> scale(1.0), scale(0.25), scale(0.0312)
    ('100 %', '25 %', '3.1 %')
    """
    value = 100 * limit
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %"


def _column(e: Explanation, row: int, column: int) -> tuple[Panel, ...]:
    q = int(e.q[row, column])
    alphas = f"tips {e.alpha_0[row, column]:.2f}, ends {e.alpha[row, column]:.2f}"
    shown = int(e.convincing_certificate.winner[row, column])
    missed = shown != q
    if e.confidence != ALPHA_1:
        shown, missed = q, not bool(e.as_requested[row, column])
    share = float(e.convincing_certificate.verdict[row, column, shown])
    caption = f"{e.named(shown)}  {percent(share)}"
    if e.explained is not None and not bool(e.explained[row, column]):
        caption, missed = f"not explained: {caption}", True
    heatmap = pictures.heatmap_array(e.heatmap[row, column], e.heatmap_limit(row))
    return (
        Panel(pictures.image_array(to_uint8(e.x[row])), f"to {e.named(q)}"),
        Panel(
            pictures.image_array(e.stored_tipping_point[row, column]),
            *_tipping_caption(e, row, column),
        ),
        Panel(
            pictures.image_array(e.stored_convincing[row, column]),
            caption,
            missed,
        ),
        Panel(heatmap, alphas),
    )


def _tipping_caption(e: Explanation, row: int, column: int) -> tuple[str, bool]:
    """Both probabilities of the stored tipping point; a warning if a third class wins there."""
    verdict = e.tipping_certificate.verdict[row, column]
    pair, winner = (int(e.p[row]), int(e.q[row, column])), int(verdict.argmax())
    said = "  ".join(f"{e.class_names[y]}: {100 * verdict[y]:.0f} %" for y in pair)
    if winner in pair:
        return said, False
    return f"{said}\n{e.class_names[winner]} wins: {100 * verdict[winner]:.0f} %", True
