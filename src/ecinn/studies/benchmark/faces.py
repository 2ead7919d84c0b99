"""Measure models of faces on all faces of a split, and draw random and difficult examples."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from ecinn.data.celeba import ATTRIBUTES
from ecinn.data.dataset import Dataset, Split
from ecinn.drawing import pictures
from ecinn.drawing.grid import Grid, Panel, draw
from ecinn.drawing.table import Table
from ecinn.errors import InputError
from ecinn.explanation.result import ALPHA_1, Confidence, Explanation, request_in_words
from ecinn.explanation.sheet import drawn_request
from ecinn.metrics.statistics import Interval, wilson
from ecinn.model import Model
from ecinn.pixels import Labels, StoredImages, to_pixels, to_uint8
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark import face_quality
from ecinn.studies.benchmark.face_quality import Convinced, Realism
from ecinn.studies.benchmark.quality import log_density
from ecinn.studies.benchmark.record import table
from ecinn.studies.inception.training import load_inception
from ecinn.studies.published import face_errors
from ecinn.training.evaluation import Evaluation, evaluate

BATCH = 50
TIPPING = "tipping points"
CONFIDENCE = 0.99
"""Requested besides α₁ from models that have no default of their own."""
SAMPLES = 500
TEMPERATURE = 0.7
"""Sampling temperature of the judged samples."""
HARDEST = 40
MOUTHS = ("Smiling", "High_Cheekbones")
"""Attributes for which a closed mouth has to open; the hardest of these are chosen among such."""
SHEETS = {
    "random": "random faces",
    "worst": "least likely counterfactuals",
    "hardest": "counterfactuals that convince the judges least",
}
"""Titles of the pictures."""


@dataclass(frozen=True)
class FaceResult:
    """One model on all faces of a split."""

    evaluation: Evaluation
    inception_error: Interval | None
    """Test error of Inception-V3 on the same faces, where it was trained."""
    paper_error: tuple[float, float] | None
    """Test errors of the paper's INN and Inception-V3."""
    convinced: tuple[Convinced, ...]
    """Predictions of the judges, and of Inception-V3 if it is available."""
    realism: tuple[Realism, ...]
    random: tuple[int, ...]
    """Faces of the random sheet."""
    worst: tuple[int, ...]
    """Faces whose stored default counterfactuals have the lowest log p(x̂), lowest first."""
    hardest: tuple[int, ...]
    """Faces whose default counterfactuals have the lowest probability of q by the judges."""


@dataclass(frozen=True)
class Changed:
    """The stored counterfactuals of all faces to the other class, on the CPU."""

    p: Labels
    images: Mapping[str, StoredImages]
    """Tipping points, and convincing counterfactuals by their requests in words."""
    default: str
    """The request that is the model's default."""
    log_p: Float[Tensor, " batch"]
    """log p(x̂) of the default counterfactuals."""


def measure_faces(
    model: Model,
    data: Dataset,
    panel: face_quality.JudgePanel,
    reference: Dataset,
    *,
    n: int = 10,
    seed: int = 0,
    inception_error: Interval | None = None,
    hardest: tuple[int, ...] | None = None,
    observe: Observer = ignore,
) -> tuple[FaceResult, dict[str, Image.Image]]:
    """Measure one model; draw n random faces, the n least likely and the forty hardest.

    Args:
        reference: real faces of another split, with which counterfactuals are compared.
        hardest: the faces to draw as the hardest; None chooses them for this model.
    """
    if hardest and max(hardest) >= len(data):
        raise InputError(f"the hardest faces are not among these {len(data)}: use more faces")
    evaluation = evaluate(model, data, seed=seed, batch_size=BATCH, observe=observe)
    changed = change_faces(model, data.images, observe)
    x, convincing = data.images, changed.images[changed.default]
    generator = torch.Generator().manual_seed(seed)
    random = torch.randperm(len(data), generator=generator)[:n]
    worst = changed.log_p.argsort()[:n]
    said = panel.judges.probabilities(convincing, panel.attribute)
    of_one = torch.stack(list(said.values())).mean(0)
    of_q = torch.where(changed.p == 0, of_one, 1 - of_one)
    chosen = hardest_faces(data, changed.p, of_q) if hardest is None else torch.tensor(hardest)
    result = FaceResult(
        evaluation=evaluation,
        inception_error=inception_error,
        paper_error=face_errors(model.recipe.dataset),
        convinced=ask_panel(model, data, changed, panel, seed),
        realism=face_quality.measure_realism(
            panel.judges,
            data,
            changed.p,
            {name: images for name, images in changed.images.items() if name != TIPPING},
            reference,
            generator,
        ),
        random=tuple(random.tolist()),
        worst=tuple(worst.tolist()),
        hardest=tuple(chosen.tolist()),
    )
    titles = {kind: f"{model.name}: {title}" for kind, title in SHEETS.items()}
    sheets = {
        kind: face_sheet(model.explain(x[rows]), titles[kind])
        for kind, rows in {"random": random, "worst": worst}.items()
    }
    if len(chosen):
        title = f"{titles['hardest']}, {drawn_request(changed.default)}"
        pairs = pair_grid(x[chosen], convincing[chosen], of_q[chosen], title)
        sheets["hardest"] = draw(pairs, pictures.tile_for(x.shape[-1]))
    return result, sheets


@torch.inference_mode()
def change_faces(model: Model, images: StoredImages, observe: Observer = ignore) -> Changed:
    """Make tipping points and counterfactuals of all faces, by a model of two classes.

    The counterfactuals lie at α₁ and at the model's default, or at `CONFIDENCE` if it has none.
    """
    count = counter(observe, f"{model.name}: changing faces", len(images))
    confidence, own = model.request(None)
    default = request_in_words(confidence, by_default=own)
    requests: tuple[Confidence | None, ...] = (ALPHA_1, None if own else CONFIDENCE)
    predicted, log_p = [], []
    made: dict[str, list[Tensor]] = {TIPPING: []}
    for batch in images.split(BATCH):
        for request in requests:
            e = model.explain(batch, confidence=request, check=False)
            stored = e.stored_convincing[:, 0]
            made.setdefault(e.requested, []).append(stored.cpu())
            if e.requested == default:
                log_p.append(log_density(model, to_pixels(stored)).cpu())
        predicted.append(e.p.cpu())
        made[TIPPING].append(e.stored_tipping_point[:, 0].cpu())
        count(sum(map(len, predicted)))
    joined = {name: torch.cat(parts) for name, parts in made.items()}
    return Changed(torch.cat(predicted), joined, default, torch.cat(log_p))


def ask_panel(
    model: Model, data: Dataset, changed: Changed, panel: face_quality.JudgePanel, seed: int
) -> tuple[Convinced, ...]:
    """Show real faces, all counterfactuals and samples to a panel."""
    before = panel.read(data.images)
    judged = {name: read == changed.p for name, read in before.items()}
    return (
        face_quality.convinced(panel, face_quality.REAL, data.images, data.labels),
        *(
            face_quality.convinced(panel, name, images, 1 - changed.p, judged, data.images)
            for name, images in changed.images.items()
        ),
        face_quality.show_samples(panel, model, SAMPLES, TEMPERATURE, seed),
    )


def hardest_faces(
    data: Dataset, p: Labels, of_q: Float[Tensor, " batch"]
) -> Int[Tensor, " chosen"]:
    """Return the faces with the lowest probability of q, lowest first.

    For smiles and cheekbones, only closed mouths of faces without the attribute count, because
    those have to open.
    """
    candidates = torch.ones_like(p, dtype=torch.bool)
    mouths = [ATTRIBUTES.index(name) for name in MOUTHS]
    if data.attributes is not None and data.attribute in mouths:
        closed = data.attributes[:, ATTRIBUTES.index("Mouth_Slightly_Open")] == 0
        candidates = closed & (data.labels == 0) & (p == 0)
    rows = candidates.nonzero()[:, 0]
    return rows[of_q[rows].argsort()[:HARDEST]]


def read_inception(folder: Path, model: Model) -> tuple[Interval, nn.Module | None]:
    """Read the test error of the model's label from a folder written by `ecinn inception`.

    The network itself comes with it if its large file is there too.
    """
    attribute = model.recipe.dataset.partition("/")[2]
    path, weights = (folder / f"{attribute}.{end}" for end in ("json", "safetensors"))
    try:
        record = json.loads(path.read_text())
        share, n = float(record["errors"]["test"]), int(record["images"]["test"])
    except OSError:
        raise InputError(
            f"{path} is missing: make it with `ecinn inception celeba/{attribute} --out {weights}`"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} was not written by `ecinn inception`: make it again") from None
    error = wilson(round(share * n), n)
    if not weights.is_file():
        return error, None
    return error, load_inception(weights, model.device, model.class_names).classifier


def read_hardest(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the hardest faces of every model from the results of an earlier run."""
    try:
        results = json.loads(path.read_text())["results"]
        return {name: tuple(map(int, each["hardest"])) for name, each in results.items()}
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"{path} does not name the hardest faces: give a celeba.json that "
            "`ecinn benchmark faces` wrote"
        ) from None


def face_sheet(explanation: Explanation, title: str) -> Image.Image:
    """Draw input, tipping point, convincing counterfactual and heatmap; a column per face."""
    return draw(face_grid(explanation, title), pictures.tile_for(explanation.x.shape[-1]))


def face_grid(explanation: Explanation, title: str) -> Grid:
    """Lay out the sheet; captions warn where the stored counterfactual is not classified as q."""
    e, columns = explanation, []
    for row in range(len(e.x)):
        p, q, heatmap = int(e.p[row]), int(e.q[row, 0]), e.heatmap[row, 0]
        verdict = e.convincing_certificate.verdict[row, 0]
        before, after = (
            f"{e.class_names[y]}\n{pictures.percent(float(posterior[y]))}"
            for y, posterior in ((p, e.posterior[row]), (q, verdict))
        )
        images = to_uint8(e.x[row]), e.stored_tipping_point[row, 0], e.stored_convincing[row, 0]
        x, tipping_point, convincing = map(pictures.image_array, images)
        columns.append(
            (
                Panel(x, before),
                Panel(tipping_point),
                Panel(convincing, after, int(verdict.argmax()) != q),
                Panel(pictures.heatmap_array(heatmap, pictures.robust_limit(heatmap))),
            )
        )
    names = (
        ("input", "and its posterior"),
        ("tipping point", "a tie before rounding"),
        ("convincing", f"{drawn_request(e.requested, break_line=True)}\nposterior as stored"),
        ("heatmap", "red: lighter\nblue: darker"),
    )
    return Grid(tuple(zip(*columns, strict=True)), title=title, names=names)


def pair_grid(
    before: StoredImages, after: StoredImages, of_q: Float[Tensor, " batch"], title: str
) -> Grid:
    """Lay out faces above their counterfactuals, ten to a row, with the judges' mean p(q)."""
    rows: list[tuple[Panel, ...]] = []
    for some in torch.arange(len(before)).split(10):
        inputs = tuple(Panel(pictures.image_array(before[row])) for row in some.tolist())
        answers = tuple(
            Panel(
                pictures.image_array(after[row]),
                pictures.percent(float(of_q[row])),
                bool(of_q[row] < 0.5),
            )
            for row in some.tolist()
        )
        rows += [inputs, answers]
    names = (("input", ""), ("counterfactual", "judges' mean p(q)"))
    return Grid(tuple(rows), title=title, names=names * (len(rows) // 2))


def face_tables(results: Mapping[str, FaceResult], split: Split = "test") -> list[Table]:
    """Lay out one row per model, and what other networks say about its faces."""
    convinced, realism = (
        [{"name": name, **vars(each)} for name, r in results.items() for each in getattr(r, of)]
        for of in ("convinced", "realism")
    )
    values: Any = {
        "n": max(result.evaluation.n for result in results.values()),
        "split": split,
        "reference": face_quality.REFERENCE[split],
        "k": face_quality.NEIGHBOURS,
    }
    return [
        table("faces", "models", [_shares(*each) for each in results.items()], **values),
        table("faces", "convinced", convinced, **values),
        table("faces", "realism", realism, **values),
    ]


def _shares(name: str, result: FaceResult) -> dict[str, Any]:
    """Return the results of a model, with the intervals of its shares."""
    measured, n = result.evaluation, result.evaluation.n
    shares = {
        share: wilson(round(getattr(measured, share) * n), n)
        for share in ("error", "reached_q", "reached_q_corrected")
    }
    return {"name": name, **vars(result), **shares}
