"""Compare ECINNh with gradient methods on the same images, classes and networks."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ecinn.attribution.gradients import captum
from ecinn.attribution.heatmaps import DEFAULTS, METHODS, HeatmapMethod, Heatmaps, heatmaps
from ecinn.attribution.scores import ExplainedINN
from ecinn.data.dataset import Dataset
from ecinn.data.planted import Cue
from ecinn.metrics.heatmaps import PerImage, blurred, importance, noise_like
from ecinn.metrics.statistics import Interval, bootstrap_interval
from ecinn.model import Model
from ecinn.pixels import Images, to_pixels, to_uint8
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark import heatmap_measures as measures
from ecinn.studies.benchmark.heatmap_measures import (
    LABELS,
    Baseline,
    Block,
    HeatmapBenchmark,
    Measure,
    Reader,
    Row,
    Shown,
    noisiness,
    relative_noisiness,
)
from ecinn.studies.benchmark.quality import CUES
from ecinn.studies.benchmark.random_weights import randomised_cnn, randomised_inn
from ecinn.studies.benchmark.side_by_side import Pairs, draw_pairs, require_known
from ecinn.training.evaluation import random_offsets

BATCH_SIZE = {"cpu": 32, "cuda": 100}
"""Images per batch with gradients; four times as many without."""
SAMPLE = 200
"""Training images whose mean is the baseline of Integrated Gradients and DeepLift, and that the
class means of random weights are measured on; the first are the baselines of the SHAP methods."""
NORMED = 32
"""Training images that the batch norms of random weights are fitted to."""
BLUR = 0.1
"""Standard deviation of the blur, as a fraction of the shorter side."""
SHOWN = 4

Made = tuple[Heatmaps, float]
"""A method's maps of all images, and the seconds they took."""
Values = Mapping[Measure, Tensor]
"""One value per image; some measures take the first images only."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the benchmark."""

    checked: int = 100
    """First images, for everything that computes maps again or uses another network; also the
    number of images that share their random baselines."""
    sample: int = SAMPLE
    resamples: int = 1000
    noise: float = 0.01
    """Standard deviation of the noise of stability, in pixels of [0, 1]."""


SETTINGS = Settings()


@dataclass(frozen=True)
class Subject:
    """A network, its twin with random weights, and the classes to explain."""

    name: str
    network: ExplainedINN | nn.Module
    random: ExplainedINN | nn.Module
    pairs: Pairs
    predict: Callable[[Images], Float[Tensor, "batch classes"]]


@dataclass(frozen=True)
class Bench:
    """Everything that all methods share."""

    about: HeatmapBenchmark
    """The conditions, without results."""
    cue: Cue | None
    x: Images
    inn: Subject
    methods: tuple[HeatmapMethod, ...]
    sample: Float[Tensor, "sample channels height width"]
    """Training images: baselines of the SHAP methods."""
    baseline: Float[Tensor, "channels height width"]
    """Reference of Integrated Gradients and DeepLift."""
    resamples: int
    observe: Observer

    def generator(self) -> torch.Generator:
        """Start the random draws anew."""
        return torch.Generator().manual_seed(self.about.seed)

    def attribute(
        self, explained: ExplainedINN | nn.Module, *images: Tensor, **options: object
    ) -> Heatmaps:
        """Compute maps of images with their classes p and q."""
        few = self.sample[: DEFAULTS.baselines]
        given = {"baseline": self.baseline, "baselines": few, "batch_size": self.about.batch_size}
        return heatmaps(explained, *images, **given | options)  # type: ignore[arg-type]

    def maps(
        self, explained: ExplainedINN | nn.Module, images: Sequence[Tensor], method: str, task: str
    ) -> Made:
        """Compute maps that depend neither on the batch size nor on the number of images."""
        n, device = len(images[0]), images[0].device
        generator = self.generator()
        count = counter(self.observe, task, n)
        parts, began = [], _seconds(device)
        for rows in torch.arange(n, device=device).split(self.about.checked):
            some = (tensor[rows] for tensor in images)
            parts.append(self.attribute(explained, *some, method=method, generator=generator))
            count(int(rows[-1]) + 1)
        seconds = _seconds(device) - began
        maps = torch.cat([part.maps for part in parts])
        changes = [part.output_change for part in parts if part.output_change is not None]
        change = torch.cat(changes) if changes else None
        return dataclasses.replace(parts[0], maps=maps, output_change=change), seconds

    def measure(
        self, subject: Subject, cross_check: Subject | None
    ) -> tuple[Block, dict[str, Made]]:
        """Measure every method on one network; `cross_check` also evaluates replaced pixels."""
        x, first, name = self.x, slice(self.about.checked), subject.name
        p, q = subject.pairs.p.to(x.device), subject.pairs.q.to(x.device)
        generator = self.generator()
        change = self.attribute(self.inn.network, x, p, q, method="ecinn").maps
        replacements = {
            measures.COUNTERFACTUAL: to_pixels(to_uint8(x + change)),
            "blur": blurred(x, BLUR),
            "noise": noise_like(x, generator),
        }
        noise = torch.randn(x[first].shape, generator=generator).to(x)
        noisy = (x[first] + self.about.noise * noise).clamp(0, 1)
        any_order = torch.rand((len(x), *x.shape[2:]), generator=generator).to(x)
        few = (x[first], p[first], {kind: images[first] for kind, images in replacements.items()})
        reading = (4 * self.about.batch_size, self.about.seed)
        readers = [Reader("replacement", subject.predict, x, p, replacements, *reading)]
        if cross_check is not None:
            readers.append(Reader("cross-check", cross_check.predict, *few, *reading))
        by_magnitude = Reader("magnitude", subject.predict, *few, *reading)

        made: dict[str, Made] = {}
        values: dict[str, Values] = {}
        nulls = {each.name: self.null(each) for each in (subject, self.inn)}
        count = counter(self.observe, f"{name}, pixels replaced", len(self.methods) + 1)
        for number, method in enumerate(self.methods, 1):
            task = f"{name}, {LABELS[method]}"
            explained = self.inn if method == "ecinn" else subject
            # Two maps that are not timed: the first ones take longer.
            self.attribute(explained.network, x[:2], p[:2], q[:2], method=method)
            made[method] = self.maps(explained.network, (x, p, q), method, task)
            classes = (p[first], q[first])
            again, _ = self.maps(explained.network, (noisy, *classes), method, f"{task}: noise")
            other, _ = self.maps(explained.random, (x[first], *classes), method, f"{task}: random")
            maps = made[method][0].maps
            ordered = (readers[0], by_magnitude, *readers[1:])
            areas = [reader.of_maps(made[method][0]) for reader in ordered]
            measured = noisiness(maps)
            values[method] = {
                **_joined(areas),
                **measures.localisation(self.about.dataset, self.cue, importance(maps), p, q),
                **measured,
                **relative_noisiness(measured, nulls[explained.name]),
                **measures.similarity("stability", maps[first], again.maps),
                **measures.similarity("random weights", maps[first], other.maps),
            }
            count(number)
        # The order of |h| means nothing here.
        random = _joined([reader.areas(any_order[: len(reader.x)]) for reader in readers])
        controls = {**nulls[name], **relative_noisiness(nulls[name], nulls[name])}
        values |= {measures.RANDOM_ORDER: random, measures.WHITE_NOISE: controls}
        count(len(self.methods) + 1)
        same = float((subject.pairs.p == self.inn.pairs.p).double().mean())
        rows = tuple(self._row(method, values, made) for method in values)
        return Block(name, same, tuple(values["ecinn"]), rows), made

    def null(self, subject: Subject) -> dict[Measure, PerImage]:
        """Measure maps of the same images whose gradient is white noise."""
        images = (self.x, self.baseline, self.generator(), 4 * self.about.batch_size)
        return noisiness(measures.white_noise_maps(subject.network, *images))

    def _row(self, method: str, values: Mapping[str, Values], made: Mapping[str, Made]) -> Row:
        figures = {measure.name: self._interval(v) for measure, v in values[method].items()}
        against = {}
        for measure, value in values[method].items():
            if method != "ecinn" and measure.role != "shown":
                difference = self._interval(values["ecinn"][measure].double() - value.double())
                word = measures.verdict(difference, measure.better)
                against[measure.name] = measures.Comparison(difference, word)
        if method not in made:
            return Row(method, figures, against)
        (maps, seconds), (_, ecinn_seconds) = made[method], made["ecinn"]
        cost = measures.Cost(maps.passes, seconds / len(maps.maps), seconds / ecinn_seconds)
        return Row(method, figures, against, cost, _convergence(maps))

    def logit_row(self, made: Heatmaps) -> Row:
        """Measure noise and convergence of one method on one logit."""
        noise = {measure.name: self._interval(v) for measure, v in noisiness(made.maps).items()}
        return Row(made.method, noise, {}, None, _convergence(made))

    def _interval(self, values: PerImage) -> Interval:
        """Use the same resamples for every measure: proportional measures get equal verdicts."""
        resamples, generator = self.resamples, self.generator()
        return bootstrap_interval(values.double(), resamples=resamples, generator=generator)


def _seconds(device: torch.device) -> float:
    """Read the clock after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _joined(parts: Sequence[Values]) -> Values:
    return {measure: value for part in parts for measure, value in part.items()}


def _convergence(made: Heatmaps) -> measures.Convergence | None:
    if made.convergence_delta is None or made.output_change is None:
        return None
    delta = made.convergence_delta.double().abs()
    relative = delta / made.output_change.double().abs()
    return measures.Convergence(float(delta.median()), float(relative.median()))


def _first(made: Heatmaps, n: int) -> Heatmaps:
    change = None if made.output_change is None else made.output_change[:n]
    return dataclasses.replace(made, maps=made.maps[:n], output_change=change)


def require_methods(names: Sequence[str]) -> tuple[HeatmapMethod, ...]:
    """Return the named methods in the usual order, with ECINNh always first."""
    if names:
        require_known(names, METHODS)
    chosen = tuple(method for method in METHODS if method in names or method == "ecinn")
    if set(chosen) - {"ecinn", "gradient_shap"}:
        captum()  # fail before anything takes long
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
    baseline: Baseline = "mean",
    settings: Settings = SETTINGS,
    cues: Mapping[str, Cue] = CUES,
    observe: Observer = ignore,
    keep: Callable[[HeatmapBenchmark], None] = lambda result: None,
) -> tuple[HeatmapBenchmark, Shown]:
    """Measure all methods on random test images, and keep some maps to show.

    Args:
        cnn: another network of the same classes, in evaluation mode, on the model's device.
        baseline: "black" puts Integrated Gradients and DeepLift at a disadvantage, because real
            pixels are rarely black.
        keep: receives the results after every network.
    """
    chosen = require_methods(methods)
    pairs = draw_pairs(model, data, n, seed)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
    sample = model.pixels(training.images[order[: settings.sample]])
    dataset = model.recipe.dataset
    result = HeatmapBenchmark(
        dataset=dataset,
        planted=dataset in cues,
        n=n,
        checked=min(settings.checked, n),
        seed=seed,
        batch_size=batch_size or BATCH_SIZE.get(model.device.type, 32),
        baseline=baseline,
        noise=settings.noise,
    )
    inn = ExplainedINN(model.classifier, model.mu_bar)
    random_inn = randomised_inn(model, sample, seed)
    bench = Bench(
        about=result,
        cue=cues.get(dataset),
        x=model.pixels(pairs.images),
        inn=Subject("INN", inn, random_inn, pairs, model.predict),
        methods=chosen,
        sample=sample,
        baseline=sample.mean(0) if baseline == "mean" else torch.zeros_like(sample[0]),
        resamples=settings.resamples,
        observe=observe,
    )
    subjects = [bench.inn]
    if cnn is not None:
        subjects.append(_cnn_subject(cnn, bench, len(model.class_names)))
    made: dict[str, dict[str, Made]] = {}
    for subject in subjects:
        cross_check = None if cnn is None or subject.name == "CNN" else subjects[1]
        block, made[subject.name] = bench.measure(subject, cross_check)
        result = dataclasses.replace(result, blocks=(*result.blocks, block))
        keep(result)
    linear, density = [], []
    first = [tensor[: result.checked].to(bench.x.device) for tensor in (bench.x, pairs.p, pairs.q)]
    other_logit = dataclasses.replace(inn, logit="density")
    for method in chosen[1:]:
        other_maps, _ = bench.maps(other_logit, first, method, f"INN, {LABELS[method]}: density")
        linear.append(bench.logit_row(_first(made["INN"][method][0], result.checked)))
        density.append(bench.logit_row(other_maps))
    maps = {
        (network, method): heatmap.maps[:SHOWN].cpu()
        for network, by_method in made.items()
        for method, (heatmap, _) in by_method.items()
    }
    shown = Shown(
        pairs=Pairs(*(tensor[:SHOWN] for tensor in vars(pairs).values())),
        counterfactuals=to_uint8(bench.x[:SHOWN].cpu() + maps["INN", "ecinn"]),
        maps=maps,
        other_pair={
            s.name: tuple(((s.pairs.p != pairs.p) | (s.pairs.q != pairs.q))[:SHOWN].tolist())
            for s in subjects
        },
    )
    return dataclasses.replace(result, density=tuple(density), linear=tuple(linear)), shown


def _cnn_subject(cnn: nn.Module, bench: Bench, classes: int) -> Subject:
    """Explain a CNN for the classes that it predicts itself."""
    predict = nn.Sequential(cnn, nn.Softmax(1)).eval()
    with torch.no_grad():
        parts = [predict(part) for part in bench.x.split(4 * bench.about.batch_size)]
    p = torch.cat(parts).argmax(1).cpu()
    q = (p + random_offsets(len(p), classes, bench.about.seed)) % classes
    random = randomised_cnn(cnn, bench.sample[:NORMED], bench.about.seed)
    return Subject("CNN", cnn, random, dataclasses.replace(bench.inn.pairs, p=p, q=q), predict)
