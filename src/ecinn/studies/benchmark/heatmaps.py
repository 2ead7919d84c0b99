"""ECINNh beside gradient methods on the same images and pairs: where maps point, noise, cost."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ecinn.attribution.gradients import captum
from ecinn.attribution.heatmaps import (
    DEFAULTS,
    METHODS,
    HeatmapMethod,
    Heatmaps,
    ecinn_heatmaps,
    heatmaps,
)
from ecinn.attribution.scores import ExplainedINN
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.explanation.result import Images
from ecinn.metrics import heatmaps as metrics
from ecinn.metrics.heatmaps import PerImage
from ecinn.metrics.replacement import blurred, noise_like
from ecinn.metrics.statistics import Interval, bootstrap_interval, paired_difference_interval
from ecinn.model import Model
from ecinn.pixels import to_pixels, to_uint8
from ecinn.studies.benchmark.heatmap_curves import COUNTERFACTUAL, Reader, posterior
from ecinn.studies.benchmark.heatmap_measures import likeness, localisation, noisiness
from ecinn.studies.benchmark.heatmap_results import (
    LABELS,
    RANDOM_ORDER,
    SHOWN,
    Baseline,
    Block,
    Comparison,
    Convergence,
    Cost,
    HeatmapBenchmark,
    Measure,
    Row,
    Shown,
    verdict,
)
from ecinn.studies.benchmark.quality import Observe
from ecinn.studies.benchmark.random_weights import randomised_cnn, randomised_inn
from ecinn.studies.benchmark.side_by_side import Pairs, draw_pairs
from ecinn.training.evaluation import random_offsets

BATCH_SIZE = {"cpu": 32, "cuda": 100}
"""Images at once with gradients; without them four times as many."""
CHECKED = 100
"""So many at a time draw their baselines. Stability, random weights and the other logit take all
maps again, a cross-check another network, |h| another order: of the first so many only."""
SAMPLE = 200
"""Training images that μ̄ of random weights is measured on; their mean is the baseline of
Integrated Gradients and DeepLift, and the first of them are the SHAP methods'."""
NORMED = 32
"""Of them that the batch norms of random weights are fitted to."""
RESAMPLES = 1000
BLUR = 0.1
"""Standard deviation of the blur, of the shorter side."""
NOISE = 0.01
"""Standard deviation of the noise that a map should stand, in pixels of [0, 1]."""


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
    baseline: Float[Tensor, "channels height width"]
    baselines: Images
    checked: int
    seed: int
    batch_size: int
    observe: Observe = lambda what, done, total: None

    def make(
        self, subject: Subject, x: Images, p: Tensor, q: Tensor, method: HeatmapMethod, what: str
    ) -> Made:
        """Maps that depend neither on the batch size nor, the first ones', on how many follow."""
        rows = torch.arange(len(x), device=x.device)
        generator = torch.Generator().manual_seed(self.seed)
        parts = []
        began = _seconds(x.device)
        for part in rows.split(self.checked):
            made = self._maps(subject, x[part], p[part], q[part], method, generator)
            parts.append(made)
            self.observe(what, int(part[-1]) + 1, len(x))
        seconds = _seconds(x.device) - began
        maps = torch.cat([part.maps for part in parts])
        changes = [part.output_change for part in parts if part.output_change is not None]
        change = torch.cat(changes) if changes else None
        return Heatmaps(method, maps, change, parts[0].passes), seconds

    def warm_up(
        self, subject: Subject, x: Images, p: Tensor, q: Tensor, method: HeatmapMethod
    ) -> None:
        """Two maps that nobody times: what is done first takes longer."""
        self._maps(subject, x[:2], p[:2], q[:2], method, torch.Generator().manual_seed(0))

    def _maps(
        self,
        subject: Subject,
        x: Images,
        p: Tensor,
        q: Tensor,
        method: HeatmapMethod,
        generator: torch.Generator,
    ) -> Heatmaps:
        return heatmaps(
            subject.of(method),
            x,
            p,
            q,
            method,
            baseline=self.baseline,
            baselines=self.baselines,
            generator=generator,
            batch_size=self.batch_size,
        )

    def interval(self, values: Tensor) -> Interval:
        """Resampled alike for every measure, so that what is proportional is judged alike."""
        return bootstrap_interval(values.double(), resamples=RESAMPLES, generator=self._resample)

    def difference(self, ecinn: Tensor, other: Tensor) -> Interval:
        """Of ECINNh − other, on the same images."""
        return paired_difference_interval(
            ecinn.double(), other.double(), resamples=RESAMPLES, generator=self._resample
        )

    @property
    def _resample(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def _seconds(device: torch.device) -> float:
    """The clock, when the device has done all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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
        COUNTERFACTUAL: to_pixels(to_uint8(x + change)),
        "blur": blurred(x, BLUR),
        "noise": noise_like(x, generator),
    }
    noise = torch.randn(x[first].shape, generator=generator).to(x)
    noisy = (x[first] + NOISE * noise).clamp(0, 1)
    any_order = torch.rand((len(x), *x.shape[2:]), generator=generator).to(x)
    size, seed = 4 * bench.batch_size, bench.seed
    network = subject.cnn or inn.classifier
    some = {what: images[first] for what, images in replacements.items()}
    readers = [
        Reader("replacement", network, x, p, replacements, size, seed),
        Reader("magnitude", network, x[first], p[first], some, size, seed),
    ]
    if cross is not None:
        readers.append(Reader("cross-check", cross, x[first], p[first], some, size, seed))

    made: dict[str, Made] = {}
    values: dict[str, dict[Measure, PerImage]] = {}
    total = len(bench.methods) + 1
    for number, method in enumerate(bench.methods, 1):
        what = f"{name}, {LABELS[method]}"
        bench.warm_up(subject, x, p, q, method)
        made[method] = bench.make(subject, x, p, q, method, what)
        again, _ = bench.make(subject, noisy, p[first], q[first], method, f"{what}: noise")
        other, _ = bench.make(random, x[first], p[first], q[first], method, f"{what}: random")
        maps = made[method][0].maps
        areas = [reader.of_maps(_first(made[method][0], len(reader.x))) for reader in readers]
        values[method] = {
            **{measure: area for each in areas for measure, area in each.items()},
            **localisation(bench.dataset, metrics.importance(maps), p, q),
            **noisiness(maps),
            **likeness("stability", maps[first], again.maps),
            **likeness("random weights", maps[first], other.maps),
        }
        bench.observe(f"{name}, pixels replaced", number, total)
    controls = [
        reader.areas(any_order[: len(reader.x)])
        for reader in readers
        if reader.section != "magnitude"
    ]
    values[RANDOM_ORDER] = {measure: area for each in controls for measure, area in each.items()}
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
        if method != "ecinn" and measure.role != "shown":
            difference = bench.difference(values["ecinn"][measure], mine)
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


def _logit_row(bench: Bench, made: Heatmaps) -> Row:
    figures = {measure.name: bench.interval(v) for measure, v in noisiness(made.maps).items()}
    return Row(made.method, figures, {}, None, _convergence(made))


def _first(made: Heatmaps, n: int) -> Heatmaps:
    change = None if made.output_change is None else made.output_change[:n]
    return dataclasses.replace(made, maps=made.maps[:n], output_change=change)


def require_methods(names: Sequence[str]) -> tuple[HeatmapMethod, ...]:
    """Every name once and known; ECINNh, which all are compared with, always and first."""
    for name in names:
        if name not in METHODS:
            raise InputError(f"no method is called {name!r}; there are: {', '.join(METHODS)}")
        if list(names).count(name) > 1:
            raise InputError(f"the method {name} is named twice: name every method once")
    chosen = tuple(method for method in METHODS if method in names or method == "ecinn")
    if set(chosen) - {"ecinn", "gradient_shap"}:
        captum()  # before anything takes long
    return chosen


def require_baseline(name: str) -> Baseline:
    """One of the two."""
    for known in get_args(Baseline):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise InputError(f"a baseline is {' or '.join(get_args(Baseline))}, not {name!r}")


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
    baseline: str = "mean",
    observe: Observe = lambda what, done, total: None,
    keep: Callable[[HeatmapBenchmark], None] = lambda result: None,
) -> tuple[HeatmapBenchmark, Shown]:
    """All measures of all methods on random test images, and some maps to look at.

    Args:
        training: where baselines, and the means of random weights, come from.
        cnn: another network of the same classes, in evaluation mode, on the model's device.
        batch_size: images at once with gradients; by default as many as the device likes.
        baseline: "mean" of a sample of training images, or "black", which is darker than
            real pixels are and so handicaps Integrated Gradients and DeepLift.
        keep: told what is measured after every network.
    """
    chosen, against = require_methods(methods), require_baseline(baseline)
    pairs = draw_pairs(model, data, n, seed)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
    sample = model.pixels(training.images[order[:SAMPLE]])
    dataset = model.checkpoint.recipe.dataset
    size = batch_size or BATCH_SIZE.get(model.device.type, 32)
    start = sample.mean(0) if against == "mean" else torch.zeros_like(sample[0])
    some = sample[: DEFAULTS.baselines]
    bench = Bench(dataset, chosen, start, some, min(CHECKED, n), seed, size, observe)
    inn = ExplainedINN(model.classifier, model.mu_bar)
    random_inn = randomised_inn(model.classifier, sample, seed)
    x = model.pixels(pairs.images)
    subjects = {"INN": (Subject(inn), Subject(random_inn), pairs)}
    if cnn is not None:
        random_cnn = randomised_cnn(cnn, sample[:NORMED], seed)
        p = posterior(cnn, x, 4 * size).argmax(1).cpu()
        classes = len(model.class_names)
        own = dataclasses.replace(pairs, p=p, q=(p + random_offsets(n, classes, seed)) % classes)
        subjects["CNN"] = (Subject(inn, cnn), Subject(random_inn, random_cnn), own)
    result = HeatmapBenchmark(dataset, n, bench.checked, seed, size, against, (), NOISE)
    linear: tuple[Row, ...] = ()
    maps: dict[tuple[str, str], Images] = {}
    for name, (subject, random, own) in subjects.items():
        cross = cnn if name == "INN" else None
        block, made = _measure(bench, name, subject, random, x, own, cross)
        same = float((own.p == pairs.p).double().mean())
        block = dataclasses.replace(block, same_prediction=same)
        result = dataclasses.replace(result, blocks=(*result.blocks, block))
        keep(result)
        if name == "INN":
            some_made = [_first(made[method][0], bench.checked) for method in chosen[1:]]
            linear = tuple(_logit_row(bench, each) for each in some_made)
        maps |= {(name, method): each.maps[:SHOWN].cpu() for method, (each, _) in made.items()}
    first = slice(bench.checked)
    p, q = (classes[first].to(x.device) for classes in (pairs.p, pairs.q))
    other = Subject(dataclasses.replace(inn, logit="density"))
    density = []
    for method in chosen[1:]:
        what = f"INN, {LABELS[method]}: density"
        density.append(_logit_row(bench, bench.make(other, x[first], p, q, method, what)[0]))
    shown = Shown(
        pairs=Pairs(*(getattr(pairs, field.name)[:SHOWN] for field in dataclasses.fields(pairs))),
        counterfactuals=to_uint8(x[:SHOWN].cpu() + maps["INN", "ecinn"]),
        maps=maps,
        other_pair={
            name: tuple(((own.p != pairs.p) | (own.q != pairs.q))[:SHOWN].tolist())
            for name, (_, _, own) in subjects.items()
        },
    )
    return dataclasses.replace(result, density=tuple(density), linear=linear), shown
