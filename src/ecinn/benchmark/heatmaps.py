"""ECINNh beside gradient methods on the same images and pairs: where maps point, noise, cost."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ecinn.benchmark.heatmap_tables import (
    LABELS,
    RANDOM_ORDER,
    SHOWN,
    Block,
    Comparison,
    Convergence,
    Cost,
    HeatmapBenchmark,
    Measure,
    Row,
    Section,
    Shown,
    verdict,
)
from ecinn.benchmark.quality import CUES, Observe
from ecinn.benchmark.random_weights import randomised_cnn, randomised_inn
from ecinn.benchmark.side_by_side import Pairs, draw_pairs
from ecinn.data.dataset import Dataset
from ecinn.data.face_regions import REGION_NAMES, region_mask
from ecinn.errors import InputError
from ecinn.evaluation import random_offsets
from ecinn.explanation import Images
from ecinn.heatmaps import (
    METHODS,
    Classes,
    ExplainedINN,
    HeatmapMethod,
    Heatmaps,
    _captum,
    ecinn_heatmaps,
    heatmaps,
)
from ecinn.metrics import heatmaps as metrics
from ecinn.metrics.heatmaps import Importance, PerImage
from ecinn.metrics.intervals import Interval, confidence_interval
from ecinn.metrics.replacement import area_under_curve, blurred, noise_like, replacement_curve
from ecinn.model.classifier import GenerativeClassifier
from ecinn.pixels import to_pixels, to_uint8
from ecinn.precision import exact_convolutions
from ecinn.pretrained import Model

BATCH_SIZE = {"cpu": 32, "cuda": 128}
"""Images at once with gradients; without them four times as many."""
CHECKED = 100
"""Stability, random weights and the other logit take all maps again: of the first images only."""
SAMPLE = 200
"""Training images that μ̄ of random weights is measured on; the SHAP methods' are among them."""
RESAMPLES = 1000
BLUR = 0.1
"""Standard deviation of the blur, of the shorter side."""
NOISE = 0.01
"""Standard deviation of the noise that a map should stand, in pixels of [0, 1]."""
ATTRIBUTE_PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Smiling": ("mouth",),
        "High_Cheekbones": ("cheeks",),
        "Wearing_Lipstick": ("mouth",),
        "Heavy_Makeup": ("mouth", "eyes", "cheeks"),
    }
)
"""Where people would look; what the network looks at nobody knows."""


@dataclass(frozen=True)
class Subject:
    """Who is explained: ECINNh is always of the INN, the other methods of the network."""

    inn: ExplainedINN
    cnn: nn.Module | None = None
    """None: the INN is the network."""

    def of(self, method: HeatmapMethod) -> ExplainedINN | nn.Module:
        """What the method explains."""
        return self.inn if method == "ecinn" or self.cnn is None else self.cnn


Made = tuple[Heatmaps, float]
"""A method's maps of all images, and the seconds that they took."""


@dataclass(frozen=True)
class Bench:
    """What all methods share."""

    dataset: str
    methods: tuple[HeatmapMethod, ...]
    baselines: Images
    checked: int
    seed: int
    batch_size: int
    observe: Observe = lambda what, done, total: None

    def make(
        self, subject: Subject, x: Images, p: Tensor, q: Tensor, method: HeatmapMethod, what: str
    ) -> Made:
        """Maps in batches; those of the first images do not depend on how many follow them."""
        rows = torch.arange(len(x), device=x.device)
        size, first = self.batch_size, self.checked
        parts, began = [], time.perf_counter()
        for part in (*rows[:first].split(size), *rows[first:].split(size)):
            if not len(part):
                continue
            made = heatmaps(
                subject.of(method),
                x[part],
                p[part],
                q[part],
                method,
                baselines=self.baselines,
                batch_size=size,
            )
            parts.append(made)
            self.observe(what, int(part[-1]) + 1, len(x))
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        seconds = time.perf_counter() - began
        maps = torch.cat([part.maps for part in parts])
        changes = [part.output_change for part in parts if part.output_change is not None]
        change = torch.cat(changes) if changes else None
        return Heatmaps(method, maps, change, parts[0].passes), seconds

    def interval(self, values: Tensor) -> Interval:
        """Resampled alike for every measure, so that what is proportional is judged alike."""
        generator = torch.Generator().manual_seed(self.seed)
        return confidence_interval(values.double(), resamples=RESAMPLES, generator=generator)


@torch.no_grad()
def posterior(
    network: GenerativeClassifier | nn.Module, x: Images, size: int
) -> Float[Tensor, "batch classes"]:
    """p(y|x), so many images at a time."""
    if isinstance(network, GenerativeClassifier):
        with exact_convolutions():
            return torch.cat([network.log_posterior(part).exp() for part in x.split(size)])
    return torch.cat([network(part).softmax(1) for part in x.split(size)])


def _curves(
    score: Callable[[Tensor], Tensor],
    x: Images,
    replacements: Mapping[str, Images],
    order: Importance,
    section: Section,
) -> dict[Measure, PerImage]:
    """Areas under the score of p while pixels are replaced, or come back."""
    by = ", by the CNN" if section == "cross-check" else ""
    areas = {}
    for what, replacement in replacements.items():
        for insertion in (False, True):
            name = f"{'insertion' if insertion else 'deletion'} AUC, {what}{by}"
            measure = Measure(section, name, "more" if insertion else "less")
            curve = replacement_curve(score, x, replacement, order, insertion=insertion)
            areas[measure] = area_under_curve(curve)
    return areas


def _localisation(dataset: str, s: Importance, p: Classes, q: Classes) -> dict[Measure, PerImage]:
    """Where the importance is: in a planted cue's marks, or in the parts of a face."""

    def measure(name: str, better: Literal["more", "less"] | None = "more") -> Measure:
        return Measure("localisation", name, better)

    kind, _, attribute = dataset.partition("/")
    if dataset in CUES:
        marks = CUES[dataset].stencils.to(s.device)
        pair = marks[p] | marks[q]
        return {
            measure("share in the marks of p and q"): metrics.share_inside(s, pair),
            measure("relative density in them"): metrics.relative_density(s, pair),
            measure("pointing game"): metrics.pointing_game(s, pair).double(),
            measure("localisation AUC"): metrics.localisation_auc(s, pair),
            measure("share in the marks of all classes"): metrics.share_inside(s, marks.any(0)),
        }
    if kind != "celeba":
        return {}
    values = {}
    for what, of in (("share", metrics.share_inside), ("density", metrics.relative_density)):
        for name in REGION_NAMES:
            wanted = name in (*ATTRIBUTE_PARTS.get(attribute, ()), "face")
            better = "more" if wanted else "less" if name == "background" else None
            mask = region_mask(name, *s.shape[1:]).to(s.device)
            values[measure(f"{what}, {name}", better)] = of(s, mask)  # type: ignore[arg-type]
    return values


def _noise(maps: Images) -> dict[Measure, PerImage]:
    return {
        Measure("noise", "total variation", "less"): metrics.total_variation(maps),
        Measure("noise", "spatial coherence", "more"): metrics.spatial_coherence(maps),
        Measure("noise", "high-frequency share", "less"): metrics.high_frequency_share(maps),
    }


def _likeness(
    section: Literal["stability", "random weights"], maps: Images, other: Images
) -> dict[Measure, PerImage]:
    """Of maps to those of noisy images, or of random weights, where the sign is random too."""
    cosine = metrics.map_similarity(maps, other)
    ranks = metrics.rank_similarity(metrics.importance(maps), metrics.importance(other))
    if section == "stability":
        return {
            Measure(section, "cosine, noisy image", "more"): cosine,
            Measure(section, "rank correlation, noisy image", "more"): ranks,
        }
    return {
        Measure(section, "|cosine|, random weights", "less"): cosine.abs(),
        Measure(section, "rank correlation, random weights", "less"): ranks,
    }


def _measure(
    bench: Bench,
    name: str,
    subject: Subject,
    random: Subject,
    x: Images,
    pairs: Pairs,
    cross: nn.Module | None,
) -> tuple[Block, dict[str, Made]]:
    """Every method on one network; `cross` reads the same replaced images besides."""
    p, q = pairs.p.to(x.device), pairs.q.to(x.device)
    inn, first = subject.inn, slice(bench.checked)
    generator = torch.Generator().manual_seed(bench.seed)
    change = ecinn_heatmaps(inn.classifier, inn.mu_bar, x, p, q).maps
    replacements = {
        "counterfactual": to_pixels(to_uint8(x + change)),
        "blur": blurred(x, BLUR),
        "noise": noise_like(x, generator),
    }
    noise = torch.randn(x[first].shape, generator=generator).to(x)
    noisy = (x[first] + NOISE * noise).clamp(0, 1)
    any_order = torch.rand((len(x), *x.shape[2:]), generator=generator).to(x)
    readers: dict[Section, nn.Module] = {"replacement": subject.cnn or inn.classifier}
    if cross is not None:
        readers["cross-check"] = cross

    def curves(order: Importance) -> dict[Measure, PerImage]:
        areas: dict[Measure, PerImage] = {}
        for section, network in readers.items():

            def of_p(some: Tensor, network: nn.Module = network) -> Tensor:
                answer = posterior(network, some, 4 * bench.batch_size)
                return answer.gather(1, p[:, None])[:, 0]

            areas |= _curves(of_p, x, replacements, order, section)
        return areas

    made: dict[str, Made] = {}
    values: dict[str, dict[Measure, PerImage]] = {}
    total = len(bench.methods) + 1
    for number, method in enumerate(bench.methods, 1):
        what = f"{name}, {LABELS[method]}"
        made[method] = bench.make(subject, x, p, q, method, what)
        again, _ = bench.make(subject, noisy, p[first], q[first], method, f"{what}: noise")
        other, _ = bench.make(random, x[first], p[first], q[first], method, f"{what}: random")
        maps = made[method][0].maps
        order = metrics.importance(maps)
        values[method] = {
            **curves(order),
            **_localisation(bench.dataset, order, p, q),
            **_noise(maps),
            **_likeness("stability", maps[first], again.maps),
            **_likeness("random weights", maps[first], other.maps),
        }
        bench.observe(f"{name}, pixels replaced", number, total)
    values[RANDOM_ORDER] = curves(any_order)
    bench.observe(f"{name}, pixels replaced", total, total)
    rows = tuple(_row(bench, method, values, made) for method in values)
    return Block(name, 1.0, tuple(values["ecinn"]), rows), made


def _row(
    bench: Bench,
    method: str,
    values: Mapping[str, Mapping[Measure, PerImage]],
    made: Mapping[str, Made],
) -> Row:
    figures, against = {}, {}
    for measure, mine in values[method].items():
        figures[measure.name] = bench.interval(mine)
        if method != "ecinn":
            difference = bench.interval(values["ecinn"][measure].double() - mine.double())
            against[measure.name] = Comparison(difference, verdict(difference, measure.better))
    if method not in made:
        return Row(method, figures, against)
    (own, seconds), (_, ecinn_seconds) = made[method], made["ecinn"]
    cost = Cost(own.passes, seconds / len(own.maps), seconds / ecinn_seconds)
    return Row(method, figures, against, cost, _convergence(own))


def _convergence(made: Heatmaps) -> Convergence | None:
    if made.convergence_delta is None or made.output_change is None:
        return None
    delta = made.convergence_delta.double().abs()
    relative = delta / made.output_change.double().abs()
    return Convergence(float(delta.median()), float(relative.median()))


def _density_row(
    bench: Bench, inn: ExplainedINN, x: Images, p: Classes, q: Classes, method: HeatmapMethod
) -> Row:
    subject = Subject(dataclasses.replace(inn, logit="density"))
    what = f"INN, {LABELS[method]}: density"
    made, _ = bench.make(subject, x, p.to(x.device), q.to(x.device), method, what)
    figures = {measure.name: bench.interval(v) for measure, v in _noise(made.maps).items()}
    return Row(method, figures, {}, None, _convergence(made))


def require_methods(names: Sequence[str]) -> tuple[HeatmapMethod, ...]:
    """Every name once and known; ECINNh, which all are compared with, always and first."""
    for name in names:
        if name not in METHODS:
            raise InputError(f"no method is called {name!r}; there are: {', '.join(METHODS)}")
        if list(names).count(name) > 1:
            raise InputError(f"the method {name} is named twice: name every method once")
    chosen = tuple(method for method in METHODS if method in names or method == "ecinn")
    if set(chosen) - {"ecinn", "gradient_shap"}:
        _captum()  # before anything takes long
    return chosen


def measure_heatmaps(
    model: Model,
    data: Dataset,
    training: Dataset,
    *,
    cnn: nn.Module | None = None,
    methods: Sequence[str] = METHODS,
    n: int = 500,
    seed: int = 0,
    batch_size: int | None = None,
    observe: Observe = lambda what, done, total: None,
) -> tuple[HeatmapBenchmark, Shown]:
    """All measures of all methods on random test images, and some maps to look at.

    Args:
        training: where baselines, and the means of random weights, come from.
        cnn: another network of the same classes, in evaluation mode, on the model's device.
        batch_size: images at once with gradients; by default as many as the device likes.
    """
    chosen = require_methods(methods)
    pairs = draw_pairs(model, data, n, seed)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
    sample = model.pixels(training.images[order[:SAMPLE]])
    dataset = model.checkpoint.experiment.dataset
    size = batch_size or BATCH_SIZE.get(model.device.type, 32)
    bench = Bench(dataset, chosen, sample, min(CHECKED, n), seed, size, observe)
    inn = ExplainedINN(model.classifier, model.mu_bar)
    random_inn = randomised_inn(model.classifier, sample, seed)
    x = model.pixels(pairs.images)
    subjects = {"INN": (Subject(inn), Subject(random_inn), pairs)}
    if cnn is not None:
        random_cnn = randomised_cnn(cnn, sample[:size], seed)
        p = posterior(cnn, x, 4 * size).argmax(1).cpu()
        classes = len(model.class_names)
        own = dataclasses.replace(pairs, p=p, q=(p + random_offsets(n, classes, seed)) % classes)
        subjects["CNN"] = (Subject(inn, cnn), Subject(random_inn, random_cnn), own)
    blocks: list[Block] = []
    maps: dict[tuple[str, str], Images] = {}
    for name, (subject, random, own) in subjects.items():
        cross = cnn if name == "INN" else None
        block, made = _measure(bench, name, subject, random, x, own, cross)
        same = float((own.p == pairs.p).double().mean())
        blocks.append(dataclasses.replace(block, same_prediction=same))
        maps |= {(name, method): each.maps[:SHOWN].cpu() for method, (each, _) in made.items()}
    first = slice(min(CHECKED, n))
    density = tuple(
        _density_row(bench, inn, x[first], pairs.p[first], pairs.q[first], method)
        for method in chosen[1:]
    )
    shown = Shown(
        pairs=Pairs(*(getattr(pairs, field.name)[:SHOWN] for field in dataclasses.fields(pairs))),
        counterfactuals=to_uint8(x[:SHOWN].cpu() + maps["INN", "ecinn"]),
        maps=maps,
        other_pair={
            name: tuple(((own.p != pairs.p) | (own.q != pairs.q))[:SHOWN].tolist())
            for name, (_, _, own) in subjects.items()
        },
    )
    result = HeatmapBenchmark(dataset, n, bench.checked, seed, size, tuple(blocks), NOISE, density)
    return result, shown
