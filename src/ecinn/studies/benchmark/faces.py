"""Measure models of faces on all test faces, and draw random and least likely examples."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from ecinn.data.dataset import Dataset
from ecinn.drawing import pictures
from ecinn.drawing.grid import Grid, Panel, draw
from ecinn.drawing.table import Table, percent
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import counterfactual
from ecinn.explanation.result import Explanation
from ecinn.metrics.statistics import Interval, wilson
from ecinn.model import Model
from ecinn.pixels import StoredImages, to_pixels, to_uint8
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark.quality import log_density
from ecinn.studies.benchmark.record import note
from ecinn.studies.inception.training import load_inception
from ecinn.studies.published import face_errors
from ecinn.training.evaluation import Evaluation, evaluate

BATCH = 50
LEVELS = (None, 0.99)
"""Asked confidences of the counterfactuals shown to Inception-V3; None is plain α₁."""
SHEETS = {"random": "random test faces", "worst": "least likely counterfactuals"}
"""Titles of the pictures."""


@dataclass(frozen=True)
class Convinced:
    """Counterfactuals that convince another network."""

    confidence: float | None
    """Asked confidence; None for plain α₁."""
    judged: int
    """Faces that both networks classify alike before any change."""
    convinced: int
    """Stored counterfactuals of these that the other network classifies as q."""
    change: float
    """Mean |x̂ − x| of these, in pixels of [0, 1]."""


@dataclass(frozen=True)
class FaceResult:
    """One model on all test faces."""

    evaluation: Evaluation
    change: float
    """Mean |x̂ − x| at α₁, in pixels of [0, 1]."""
    inception_error: float | None
    """Test error of Inception-V3 on the same faces, where it was trained."""
    paper_error: tuple[float, float] | None
    """Test errors of the paper's INN and Inception-V3."""
    random: tuple[int, ...]
    """Test faces of the random sheet."""
    worst: tuple[int, ...]
    """Test faces whose stored counterfactuals have the lowest log p(x̂), lowest first."""
    convinced: tuple[Convinced, ...] = ()
    """Predictions of Inception-V3 for the counterfactuals, if it is available."""


def measure_faces(
    model: Model,
    data: Dataset,
    *,
    n: int = 10,
    seed: int = 0,
    inception_error: float | None = None,
    inception: nn.Module | None = None,
    observe: Observer = ignore,
) -> tuple[FaceResult, dict[str, Image.Image]]:
    """Measure one model; draw n random faces and the n least likely counterfactuals."""
    evaluation = evaluate(model, data, seed=seed, batch_size=BATCH, observe=observe)
    count = counter(observe, f"{model.name}: finding the least likely", len(data))
    log_p, change = [], 0.0
    for start in range(0, len(data), BATCH):
        likelihood, distance = _likelihood_and_change(model, data.images[start : start + BATCH])
        log_p.append(likelihood.cpu())
        change += float(distance.sum())
        count(start + len(distance))
    generator = torch.Generator().manual_seed(seed)
    random = torch.randperm(len(data), generator=generator)[:n]
    worst = torch.cat(log_p).argsort()[:n]
    convinced: tuple[Convinced, ...] = ()
    if inception is not None:
        asking = counter(observe, f"{model.name}: asking Inception-V3", len(data))
        convinced = convince(inception, model, data.images, count=asking)
    result = FaceResult(
        evaluation=evaluation,
        change=change / len(data),
        inception_error=inception_error,
        paper_error=face_errors(model.recipe.dataset),
        random=tuple(random.tolist()),
        worst=tuple(worst.tolist()),
        convinced=convinced,
    )
    sheets = {
        kind: face_sheet(model.explain(data.images[rows]), f"{model.name}: {title}")
        for (kind, title), rows in zip(SHEETS.items(), (random, worst), strict=True)
    }
    return result, sheets


@torch.inference_mode()
def _likelihood_and_change(model: Model, images: StoredImages) -> tuple[Tensor, Tensor]:
    """Return log p of the stored counterfactuals, and their mean |x̂ − x|."""
    x = model.pixels(images)
    q = 1 - model.predict(x).argmax(1)
    convincing = counterfactual(model, model.mu_bar, x, q)
    log_p = log_density(model, to_pixels(to_uint8(convincing)))
    return log_p, (convincing - x).abs().flatten(1).mean(1)


@torch.inference_mode()
def convince(
    network: nn.Module,
    model: Model,
    images: StoredImages,
    *,
    levels: Sequence[float | None] = LEVELS,
    batch_size: int = BATCH,
    count: Callable[[int], None] = lambda done: None,
) -> tuple[Convinced, ...]:
    """Count the stored counterfactuals of a model of two classes that convince another network.

    Args:
        network: returns logits of the model's classes from pixels in [0, 1].
    """
    judged, convinced, change = 0, [0] * len(levels), [0.0] * len(levels)
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        before = network(model.pixels(batch)).argmax(1).cpu()
        agreed = before == model.predict(batch).argmax(1).cpu()
        judged += int(agreed.sum())
        for number, confidence in enumerate(levels):
            if not agreed.any():
                break
            explanation = model.explain(batch[agreed], confidence=confidence)
            stored = to_pixels(explanation.stored_convincing[:, 0].cpu())
            after = network(stored.to(model.device)).argmax(1).cpu()
            convinced[number] += int((after == explanation.q[:, 0].cpu()).sum())
            moved = (stored - to_pixels(batch[agreed])).abs().flatten(1).mean(1)
            change[number] += float(moved.sum())
        count(start + len(batch))
    return tuple(
        Convinced(confidence, judged, successes, moved / max(judged, 1))
        for confidence, successes, moved in zip(levels, convinced, change, strict=True)
    )


def read_inception(folder: Path, model: Model) -> tuple[float, nn.Module | None]:
    """Read the test error of the model's label from a folder written by `ecinn inception`.

    The network itself comes with it if its large file is there too.
    """
    attribute = model.recipe.dataset.partition("/")[2]
    path, weights = (folder / f"{attribute}.{end}" for end in ("json", "safetensors"))
    try:
        error = float(json.loads(path.read_text())["errors"]["test"])
    except OSError:
        raise InputError(
            f"{path} is missing: make it with `ecinn inception celeba/{attribute} --out {weights}`"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} was not written by `ecinn inception`: make it again") from None
    if not weights.is_file():
        return error, None
    return error, load_inception(weights, model.device, model.class_names).classifier


def face_sheet(explanation: Explanation, title: str) -> Image.Image:
    """Draw input, tipping point, convincing counterfactual and heatmap; a column per face."""
    return draw(face_grid(explanation, title), pictures.tile_for(explanation.x.shape[-1]))


def face_grid(explanation: Explanation, title: str) -> Grid:
    """Lay out the sheet; captions warn where the stored counterfactual is not classified as q."""
    names = explanation.class_names
    columns = []
    for row in range(len(explanation.x)):
        p, q = int(explanation.p[row]), int(explanation.q[row, 0])
        verdict = explanation.convincing_certificate.verdict[row, 0]
        heatmap = explanation.heatmap[row, 0]
        before = pictures.percent(float(explanation.posterior[row, p]))
        after = pictures.percent(float(verdict[q]))
        images = (
            to_uint8(explanation.x[row]),
            explanation.stored_tipping_point[row, 0],
            explanation.stored_convincing[row, 0],
        )
        x, tipping_point, convincing = map(pictures.image_array, images)
        columns.append(
            (
                Panel(x, f"{names[p]}\n{before}"),
                Panel(tipping_point),
                Panel(convincing, f"{names[q]}\n{after}", int(verdict.argmax()) != q),
                Panel(pictures.heatmap_array(heatmap, pictures.robust_limit(heatmap))),
            )
        )
    return Grid(
        rows=tuple(zip(*columns, strict=True)),
        title=title,
        names=(
            ("input", "and its posterior"),
            ("tipping point", "both equally likely"),
            ("convincing", "and its posterior,\nas stored"),
            ("heatmap", "red: lighter\nblue: darker"),
        ),
    )


def face_tables(results: Mapping[str, FaceResult]) -> list[Table]:
    """Lay out one row per model and, where Inception-V3 is available, one per asked confidence."""
    n = max(result.evaluation.n for result in results.values())
    tables = [
        Table.of(
            f"On {n:,} test faces",
            [_face_cells(name, result) for name, result in results.items()],
            [note("faces", "models")],
        )
    ]
    convinced = [
        _convinced_cells(name, level, result.inception_error)
        for name, result in results.items()
        for level in result.convinced
    ]
    if convinced:
        tables.append(Table.of("Who else is convinced", convinced, [note("faces", "convinced")]))
    return tables


def _face_cells(name: str, result: FaceResult) -> dict[str, str]:
    evaluation = result.evaluation
    error = wilson(round(evaluation.error * evaluation.n), evaluation.n)
    paper_inn, paper_inception = result.paper_error or (None, None)
    return {
        "model": name,
        "error %": _with_interval(evaluation.error, error),
        "paper's INN": percent(paper_inn),
        "Inception-V3": percent(result.inception_error),
        "paper's Inception-V3": percent(paper_inception),
        "bits/dim": f"{evaluation.bits_per_dim:.3f}",
        "in the paper's convention": f"{evaluation.bits_per_dim_paper:.3f}",
        "reached q %": percent(evaluation.reached_q),
        "corrected": percent(evaluation.reached_q_corrected),
        "round trip": f"{evaluation.round_trip_error:.1e}",
        "mean change": f"{result.change:.4f}",
    }


def _convinced_cells(name: str, level: Convinced, error: float | None) -> dict[str, str]:
    share = wilson(level.convinced, level.judged)
    return {
        "model": name,
        "asked confidence %": "α₁" if level.confidence is None else percent(level.confidence, 0),
        "faces": str(level.judged),
        "Inception-V3 says q %": _with_interval(share.mean, share),
        "mean change": f"{level.change:.4f}",
        "its accuracy on real faces %": percent(None if error is None else 1 - error),
    }


def _with_interval(share: float, interval: Interval) -> str:
    return f"{percent(share)} ({percent(interval.low, 1)} – {percent(interval.high, 1)})"
