"""The models of faces on all test faces, and pictures that were drawn at random, or the worst."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor, nn

from ecinn.data.dataset import Dataset
from ecinn.drawing import pictures
from ecinn.explanation.counterfactual import counterfactual
from ecinn.explanation.result import Explanation
from ecinn.flow.precision import exact_convolutions
from ecinn.metrics.statistics import wilson_interval
from ecinn.model import Model
from ecinn.pixels import to_pixels, to_uint8
from ecinn.studies.benchmark.face_jury import Convinced, ask
from ecinn.studies.benchmark.tables import Table, percent
from ecinn.training.evaluation import Evaluation, evaluate

BATCH = 50

PAPER_ERROR = {
    "celeba/Smiling": (0.0742, 0.0662),
    "celeba/High_Cheekbones": (0.1438, 0.1374),
    "celeba/Wearing_Lipstick": (0.0487, 0.0570),
    "celeba/Heavy_Makeup": (0.1268, 0.1084),
}
"""Table 1 of the paper, on CelebA-HQ: its INN's error and Inception-V3's."""


@dataclass(frozen=True)
class FaceResult:
    """One model on all test faces."""

    evaluation: Evaluation
    change: float
    """Mean |x̂ − x| at α₁, in pixels of [0, 1]."""
    inception_error: float | None
    """Of Inception-V3 on the same faces, where it was trained."""
    paper_error: tuple[float, float] | None
    random: tuple[int, ...]
    """Which test faces were drawn."""
    worst: tuple[int, ...]
    """The test faces whose stored counterfactuals have the lowest log p(x̂), lowest first."""
    convinced: tuple[Convinced, ...] = ()
    """What Inception-V3 says of the counterfactuals, where it is at hand."""


@dataclass(frozen=True)
class FaceSheets:
    """The pictures of one model."""

    random: Image.Image
    worst: Image.Image


def measure_faces(
    model: Model,
    data: Dataset,
    *,
    n: int = 10,
    seed: int = 0,
    inception_error: float | None = None,
    inception: nn.Module | None = None,
    observe: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> tuple[FaceResult, FaceSheets]:
    """Measure one model, and draw n random faces and the n of the least likely counterfactuals."""
    name = model.checkpoint.recipe.name
    evaluation = evaluate(
        model,
        data,
        seed=seed,
        batch_size=BATCH,
        observe=lambda p: observe(f"{name}: measuring", p.done, p.total),
    )
    log_p, change = [], 0.0
    for start in range(0, len(data), BATCH):
        likelihood, distance = _likelihood_and_change(model, data.images[start : start + BATCH])
        log_p.append(likelihood.cpu())
        change += float(distance.sum())
        observe(f"{name}: looking for the worst", start + len(distance), len(data))
    generator = torch.Generator().manual_seed(seed)
    random = torch.randperm(len(data), generator=generator)[:n]
    worst = torch.cat(log_p).argsort()[:n]
    result = FaceResult(
        evaluation,
        change / len(data),
        inception_error,
        PAPER_ERROR.get(model.checkpoint.recipe.dataset),
        tuple(random.tolist()),
        tuple(worst.tolist()),
        ()
        if inception is None
        else ask(
            inception,
            model,
            data.images,
            batch_size=BATCH,
            observe=lambda done: observe(f"{name}: asking Inception-V3", done, len(data)),
        ),
    )
    sheets = FaceSheets(
        face_sheet(model.explain(data.images[random]), f"{name}: drawn at random"),
        face_sheet(model.explain(data.images[worst]), f"{name}: the least likely of all"),
    )
    return result, sheets


@torch.inference_mode()
def _likelihood_and_change(model: Model, images: Tensor) -> tuple[Tensor, Tensor]:
    """log p of the stored counterfactuals, and the mean |x̂ − x| of each."""
    x = model.pixels(images)
    with exact_convolutions():
        q = 1 - model.classifier.predict(x)
        convincing = counterfactual(model.classifier, model.mu_bar, x, q)
        log_p = model.classifier.log_marginal(to_pixels(to_uint8(convincing)))
    return log_p, (convincing - x).abs().flatten(1).mean(1)


def face_sheet(explanation: Explanation, title: str) -> Image.Image:
    """Input, tipping point, convincing counterfactual and heatmap; a column per face."""
    names = explanation.class_names
    columns = []
    for row in range(len(explanation.x)):
        p, q = int(explanation.p[row]), int(explanation.q[row, 0])
        verdict = explanation.convincing_certificate.verdict[row, 0]
        heatmap = explanation.heatmap[row, 0]
        limit = pictures.robust_limit(heatmap)
        sure = pictures.percent(float(explanation.posterior[row, p]))
        columns.append(
            (
                _cell(to_uint8(explanation.x[row]), f"{names[p]}\n{sure}"),
                _cell(explanation.stored_tipping_point[row, 0], ""),
                _cell(
                    explanation.stored_convincing[row, 0],
                    f"{names[q]}\n{pictures.percent(float(verdict[q]))}",
                    warning=int(verdict.argmax()) != q,
                ),
                pictures.Cell(pictures.heatmap_array(heatmap, limit), ""),
            )
        )
    return pictures.draw(
        pictures.Sheet(
            title=title,
            caution="",
            rows=(
                ("input", "and how sure"),
                ("tipping point", "both equally likely"),
                ("convincing", "and how sure,\nas stored"),
                ("heatmap", "red: light added\nblue: taken away"),
            ),
            columns=tuple(columns),
        ),
        pictures.tile_for(explanation.x.shape[-1]),
    )


def _cell(image: Tensor, caption: str, *, warning: bool = False) -> pictures.Cell:
    return pictures.Cell(pictures.image_array(image), caption, warning)


def faces_table(results: Mapping[str, FaceResult]) -> Table:
    """A row per model; a share's interval is Wilson's of 95 %."""
    rows = []
    for name, result in results.items():
        e = result.evaluation
        low, high = wilson_interval(round(e.error * e.n), e.n)
        ours, theirs = result.paper_error or (math.nan, math.nan)
        rows.append(
            (
                name,
                f"{percent(e.error)} ({percent(low, 1)} – {percent(high, 1)})",
                percent(ours),
                percent(result.inception_error),
                percent(theirs),
                f"{e.bits_per_dim:.3f}",
                f"{e.bits_per_dim_paper:.3f}",
                percent(e.reached_q),
                percent(e.reached_q_corrected),
                f"{e.round_trip_error:.1e}",
                f"{result.change:.4f}",
            )
        )
    return Table(
        title=f"On {max(result.evaluation.n for result in results.values()):,} test faces",
        head=(
            "model",
            "error %",
            "paper's INN",
            "Inception-V3",
            "paper's Inception-V3",
            "bits/dim",
            "in the paper's convention",
            "reached q %",
            "verified",
            "round trip",
            "mean change",
        ),
        rows=tuple(rows),
        notes=(
            "In brackets Wilson's interval of 95 %. The paper's figures are of CelebA-HQ, which "
            "is another set of pictures; Inception-V3's is of all test faces. Reached q is of "
            "stored 8-bit counterfactuals at α₁; verified, where α is corrected if need be. The "
            "mean change is |x̂ − x| of pixels in [0, 1].",
        ),
    )
