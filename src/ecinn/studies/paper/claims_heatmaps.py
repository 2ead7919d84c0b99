"""Measure claims about heatmaps of digits: noise, faithfulness, and the role of ReLU."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecinn.attribution.heatmaps import METHODS, HeatmapMethod, Heatmaps
from ecinn.data.dataset import Dataset
from ecinn.metrics.heatmaps import blurred, noise_like
from ecinn.metrics.statistics import Interval, bootstrap_interval, paired_difference_interval
from ecinn.model import Model
from ecinn.pixels import Images, Labels, to_pixels
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark.heatmap_measures import (
    LABELS,
    WHITE_NOISE,
    Reader,
    noisiness,
    verdict,
)
from ecinn.studies.benchmark.heatmaps import BLUR, SAMPLE
from ecinn.studies.benchmark.side_by_side import Pairs, draw_pairs
from ecinn.studies.judges import ConvolutionalNetwork, load_judges, scaled
from ecinn.studies.paper.artefact import Context
from ecinn.studies.paper.claim import Measurement, limits
from ecinn.studies.paper.measuring import GRADIENT_METHODS, RESAMPLES, ExplainedImages, Sizes
from ecinn.studies.paper.words import show
from ecinn.training.networks import one_cycle, seeded, train_network

ACTIVATIONS = {"ReLU": nn.ReLU, "softplus": nn.Softplus, "tanh": nn.Tanh}
BETTER = {"total variation": "less", "spatial coherence": "more", "high-frequency share": "less"}
"""Measures of noise, and the direction that is better."""
Noise = dict[str, dict[str, Tensor]]
"""A value per image, by method and measure."""
Twins = Mapping[str, Sequence[tuple[float, Noise]]]
"""Test error and noise of the maps of several networks, by activation."""


def measure(context: Context, sizes: Sizes) -> Iterator[Measurement]:
    """Measure all of them on the same digits."""
    model, seed, n = context.model("mnist"), context.seed, sizes.maps
    test, training = context.data("mnist", "test"), context.data("mnist", "train")
    digits = explained_digits(model, draw_pairs(model, test, n, seed), training, n, seed)
    done = counter(context.observe, "heatmaps of digits", len(METHODS))
    maps = digits.maps(digits.inn, METHODS, done)
    inn = noise_of(maps)
    noise = digits.white_noise(digits.inn, torch.Generator().manual_seed(seed))
    yield less_noisy(inn | {WHITE_NOISE: _noise(noise)})
    yield faithful(digits, maps, seed)
    judge = OnPixels(load_judges("mnist").convolutional).to(model.device).eval()
    yield less_noisy_with_relu(inn, noise_of(digits.maps(judge)))
    images = training.first(sizes.twin_images), test.first(2000)
    twins = relu_twins(digits, *images, networks=sizes.twins, observe=context.observe)
    yield relu_is_the_cause(twins, inn)


class OnPixels(nn.Module):
    """A judge's network, which reads k/255 − ½, on pixels (k + ½)/256."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Images) -> Tensor:
        """Return logits."""
        logits: Tensor = self.network((256 * x - 0.5) / 255 - 0.5)
        return logits


def explained_digits(
    model: Model, pairs: Pairs, training: Dataset, n: int, seed: int
) -> ExplainedImages:
    """Take the first pairs, and a random sample of training images."""
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
    p, q = (labels[:n].to(model.device) for labels in (pairs.p, pairs.q))
    sample = model.pixels(training.images[order[:SAMPLE]])
    return ExplainedImages(model, model.pixels(pairs.images[:n]), p, q, sample)


def noise_of(maps: Mapping[str, Heatmaps]) -> Noise:
    """Total variation, spatial coherence and share of high frequencies, per image."""
    return {method: _noise(made.maps) for method, made in maps.items()}


def less_noisy(noise: Noise) -> Measurement:
    """Compare ECINNh with every other method, paired over images; also show white noise."""
    votes = [
        _better(noise["ecinn"][name], noise[method][name], better)
        for method in GRADIENT_METHODS
        for name, better in BETTER.items()
    ]
    numbers = {method: _means(values) for method, values in noise.items()}
    return Measurement(
        "less-noisy",
        numbers,
        [votes],
        {"won": sum(votes), "compared": len(votes)},
        rows=[[LABELS.get(m, m), *(numbers[m][name] for name in BETTER)] for m in noise],
    )


def faithful(digits: ExplainedImages, maps: Mapping[str, Heatmaps], seed: int) -> Measurement:
    """Delete and insert pixels, with replacements that no method made."""
    generator = torch.Generator().manual_seed(seed)
    replacements = {"blur": blurred(digits.x, BLUR), "noise": noise_like(digits.x, generator)}
    images = digits.x, digits.p, replacements
    reader = Reader("replacement", digits.model.predict, *images, 128, seed)
    areas = {method: reader.of_maps(made) for method, made in maps.items()}
    order = torch.rand((len(digits.x), *digits.x.shape[2:]), generator=generator)
    areas["random order"] = reader.areas(order.to(digits.x))
    measures = list(areas["ecinn"])
    verdicts = {
        method: [
            verdict(_difference(areas["ecinn"][measure], areas[method][measure]), measure.better)
            for measure in measures
        ]
        for method in (*GRADIENT_METHODS, "random order")
    }
    against = [outcome for method in GRADIENT_METHODS for outcome in verdicts[method]]
    wins, losses = against.count("better"), against.count("worse")
    numbers = {
        method: {measure.name: _interval(area) for measure, area in values.items()}
        for method, values in areas.items()
    }
    return Measurement(
        "faithful",
        numbers,
        [[wins > 0, losses == 0], [wins >= losses]],
        {
            "compared": len(against),
            "n": len(digits.x),
            "wins": wins,
            "losses": losses,
            "beats_random": verdicts["random order"].count("better"),
            "measures": len(measures),
        },
        rows=[[LABELS.get(m, m), *values.values()] for m, values in numbers.items()],
    )


def less_noisy_with_relu(inn: Noise, cnn: Noise) -> Measurement:
    """Compare the same methods on an INN and on a network with ReLUs."""
    votes, rows = [], []
    for method in GRADIENT_METHODS:
        row = [LABELS[method]]
        for name, better in BETTER.items():
            both = inn[method][name], cnn[method][name]
            votes.append(_better(both[1], both[0], better))
            row.append(" → ".join(f"{float(values.mean()):.3f}" for values in both))
        rows.append(row)
    return Measurement(
        "relu-network",
        {
            name: {method: _means(noise[method]) for method in GRADIENT_METHODS}
            for name, noise in (("inn", inn), ("cnn", cnn))
        },
        [votes],
        {"won": sum(votes), "compared": len(votes)},
        rows=rows,
    )


def relu_twins(
    digits: ExplainedImages,
    training: Dataset,
    test: Dataset,
    *,
    networks: int,
    width: int = 16,
    methods: Sequence[HeatmapMethod] = GRADIENT_METHODS,
    observe: Observer = ignore,
) -> dict[str, list[tuple[float, Noise]]]:
    """Train networks that differ only in the activation; return test errors and noise."""
    twins: dict[str, list[tuple[float, Noise]]] = {name: [] for name in ACTIVATIONS}
    runs = [(name, seed) for name in ACTIVATIONS for seed in range(networks)]
    done = counter(observe, "networks without ReLU", len(runs))
    for number, (name, seed) in enumerate(runs, 1):
        network = train_twin(training, ACTIVATIONS[name], seed, width)
        with torch.no_grad():
            read = network(to_pixels(test.images)).argmax(1)
        error = float((read != test.labels).double().mean())
        maps = digits.maps(network.to(digits.x.device), methods)
        twins[name].append((error, noise_of(maps)))
        done(number)
    return twins


def train_twin(
    data: Dataset, activation: Callable[[], nn.Module], seed: int, width: int
) -> OnPixels:
    """Train one epoch with AdamW; weights and order start the same for every activation."""
    with seeded(torch.device("cpu"), seed):
        network = ConvolutionalNetwork(data.images.shape[1], len(data.class_names), width)
    for position, module in enumerate(network.body):
        if isinstance(module, nn.ReLU):
            network.body[position] = activation()

    def loss(batch: Labels) -> tuple[Tensor, None]:
        return F.cross_entropy(network(scaled(data.images[batch])), data.labels[batch]), None

    train_network(
        network,
        loss,
        torch.optim.AdamW(network.parameters(), 4e-3),
        images=len(data),
        batch_size=64,
        epochs=1,
        generator=torch.Generator().manual_seed(seed),
        schedule=one_cycle(4e-3, extra_steps=1),
    )
    return OnPixels(network).eval().requires_grad_(requires_grad=False)


def relu_is_the_cause(twins: Twins, inn: Noise) -> Measurement:
    """Fraction of the ReLU-to-INN noise gap closed by replacing ReLU."""
    means = {
        activation: {
            name: torch.stack([_mean_over_methods(noise, name) for _, noise in several])
            for name in BETTER
        }
        for activation, several in twins.items()
    }
    seeds, inn_means = len(twins["ReLU"]), {n: _mean_over_methods(inn, n) for n in BETTER}
    errors = {name: sum(error for error, _ in several) / seeds for name, several in twins.items()}
    closed = {}
    for activation in (name for name in means if name != "ReLU"):
        without, relu = means[activation], means["ReLU"]
        gaps = [(without[n] - relu[n]) / (inn_means[n] - relu[n]) for n in BETTER]
        closed[activation] = _range(torch.stack(gaps).mean(0))
    limit, shares = limits("relu-cause"), closed.values()
    most = min(share.low for share in shares) >= limit["most"]
    some = max(share.low for share in shares) >= limit["part"]
    undecided = max(share.high for share in shares) >= limit["most"]
    return Measurement(
        "relu-cause",
        {
            "way": closed,
            "means": {a: {n: v.tolist() for n, v in by.items()} for a, by in means.items()},
            "errors": errors,
        },
        [[most, some or undecided]],
        {
            "seeds": seeds,
            "closed": " and ".join(f"{show(s, '.0%')} ({name})" for name, s in closed.items()),
            "enclosed": 1 - 2 ** (1 - seeds),
            "errors_in_words": ", ".join(f"{show(e, '.1%')} ({n})" for n, e in errors.items()),
        },
        rows=[
            *([n, show(errors[n], ".1%"), *map(_range, means[n].values())] for n in twins),
            ["the INN", "", *map(float, inn_means.values())],
        ],
    )


def _range(values: Tensor) -> Interval:
    """Mean, minimum and maximum of values that are too few for a bootstrap."""
    return Interval(float(values.mean()), float(values.min()), float(values.max()), len(values))


def _noise(maps: Images) -> dict[str, Tensor]:
    return {measure.name: values for measure, values in noisiness(maps).items()}


def _mean_over_methods(noise: Noise, name: str) -> Tensor:
    return torch.stack([noise[method][name].mean() for method in GRADIENT_METHODS]).mean()


def _means(values: Mapping[str, Tensor]) -> dict[str, Interval]:
    return {name: _interval(column) for name, column in values.items()}


def _better(a: Tensor, b: Tensor, better: str) -> bool:
    return verdict(_difference(a, b), better) == "better"  # type: ignore[arg-type]


def _interval(values: Tensor) -> Interval:
    generator = torch.Generator().manual_seed(0)
    return bootstrap_interval(values, resamples=RESAMPLES, generator=generator)


def _difference(a: Tensor, b: Tensor) -> Interval:
    generator = torch.Generator().manual_seed(0)
    return paired_difference_interval(a, b, resamples=RESAMPLES, generator=generator)
