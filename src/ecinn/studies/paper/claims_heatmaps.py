"""Measure claims about heatmaps: noise, altered pixels, faithfulness, and the role of ReLU."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn.attribution.heatmaps import METHODS, HeatmapMethod, Heatmaps
from ecinn.data.dataset import Dataset
from ecinn.drawing.words import show
from ecinn.metrics.heatmaps import blurred, importance, noise_like
from ecinn.metrics.statistics import Interval, bootstrap_interval, proportion
from ecinn.model import Model
from ecinn.pixels import Images, Labels, to_pixels
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark.heatmap_measures import (
    LABELS,
    NOISE,
    WHITE_NOISE,
    Better,
    Reader,
    noisiness,
    verdict,
)
from ecinn.studies.benchmark.heatmaps import BLUR, SAMPLE
from ecinn.studies.judges import load_judges, scaled
from ecinn.studies.paper.claim import Measurement, limits
from ecinn.studies.paper.measuring import (
    GRADIENT_METHODS,
    RESAMPLES,
    Bench,
    ExplainedImages,
    Sample,
)
from ecinn.training.evaluation import random_offsets
from ecinn.training.networks import ConvolutionalNetwork, one_cycle, seeded, train_network

ACTIVATIONS = {"ReLU": nn.ReLU, "softplus": nn.Softplus, "tanh": nn.Tanh}
BETTER = {name: better for name, better, _ in NOISE}
"""Measures of noise, and the direction that is better."""
ALTERED = (0.1, 0.25, 0.5)
"""Shares of the pixels that are altered."""
KINDS = ("noise", "mean", "permutation")
"""Replacements: uniform noise, the mean of training images, the same values in another order."""
TWIN_TEST = 2000
"""Test digits that the errors of the networks are measured on."""
Noise = dict[str, dict[str, Tensor]]
"""A value per image, by method and measure."""
Twins = Mapping[str, Sequence[tuple[float, Noise]]]
"""Test error and noise of the maps of several networks, by activation."""


def measure(bench: Bench, model: Model) -> Iterator[Measurement]:
    """Measure all claims about heatmaps of digits on the same digits."""
    sample, sizes, seed = bench.sample(model), bench.sizes, bench.context.seed
    digits = bench.explained(model, sample, sizes.maps)
    done = counter(bench.context.observe, f"heatmaps of {model.name}", len(METHODS))
    inn = noise_of(digits.maps(digits.inn, METHODS, done))
    noise = digits.white_noise(digits.inn, torch.Generator().manual_seed(seed))
    yield less_noisy(inn | {WHITE_NOISE: _noise(noise)})
    judge = OnPixels(load_judges("mnist").convolutional).to(model.device).eval()
    yield less_noisy_with_relu(inn, noise_of(digits.maps(judge)))
    yield relu_is_the_cause(bench.once(twins_of_digits), inn)
    few = min(sizes.few, sizes.digits)
    yield unchanged_pixels(sample, digits.training.mean(0), few, seed)


class OnPixels(nn.Module):
    """A judge's network, which reads k/255 − ½, on pixels (k + ½)/256."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Images) -> Tensor:
        """Return logits."""
        logits: Tensor = self.network((256 * x - 0.5) / 255 - 0.5)
        return logits


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


def faithful(
    model: Model, explained: ExplainedImages, maps: Mapping[str, Heatmaps], seed: int
) -> Measurement:
    """Delete and insert pixels, with replacements that no method made."""
    generator, x = torch.Generator().manual_seed(seed), explained.x
    replacements = {"blur": blurred(x, BLUR), "noise": noise_like(x, generator)}
    reader = Reader("replacement", model.predict, x, explained.p, replacements, 128, seed)
    areas = {method: reader.of_maps(made) for method, made in maps.items()}
    order = torch.rand((len(x), *x.shape[2:]), generator=generator)
    areas["random order"] = reader.areas(order.to(x))
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
            "n": len(x),
            "wins": wins,
            "losses": losses,
            "beats_random": verdicts["random order"].count("better"),
            "measures": len(measures),
        },
        rows=[[LABELS.get(m, m), *values.values()] for m, values in numbers.items()],
    )


@torch.inference_mode()
def unchanged_pixels(
    sample: Sample, mean: Float[Tensor, "channels height width"], n: int, seed: int
) -> Measurement:
    """Alter the pixels with the smallest |h|, as many random ones, or those with the largest."""
    model, p, generator = sample.model, sample.p[:n], torch.Generator().manual_seed(seed)
    x, size = model.pixels(sample.images[:n]).cpu(), importance(sample.change[:n])
    orders = {"smallest": size, "random": torch.rand(size.shape, generator=generator)}
    orders["largest"] = -size
    replacements = {"noise": noise_like(x, generator), "mean": mean.cpu().expand_as(x)}
    limit, stays = limits("unchanged-pixels"), dict[tuple[float, str, str], Tensor]()
    for share, (name, order) in itertools.product(ALTERED, orders.items()):
        places = order.flatten(1).argsort(1)[:, : round(share * order[0].numel())]
        shuffled = torch.rand(places.shape, generator=generator).argsort(1)
        sources = {kind: (images, places) for kind, images in replacements.items()}
        sources["permutation"] = (x, places.gather(1, shuffled))
        for kind, (images, taken) in sources.items():
            altered = model.predict(with_pixels(x, places, images, taken)).argmax(1).cpu()
            stays[share, kind, name] = altered == p
    shares = {key: proportion(same) for key, same in stays.items()}
    at, votes = limit["pixels"], []
    for kind in KINDS:
        smallest, random = stays[at, kind, "smallest"], stays[at, kind, "random"]
        votes += [
            shares[at, kind, "smallest"].low >= limit["stay"],
            _difference(smallest.double(), random.double()).high >= 0,
        ]
    table = {
        f"{share:.0%}": {
            kind: {name: shares[share, kind, name] for name in orders} for kind in KINDS
        }
        for share in ALTERED
    }
    rows = [[s, kind, *of.values()] for s, kinds in table.items() for kind, of in kinds.items()]
    return Measurement("unchanged-pixels", table, [votes], {"n": n}, rows=rows)


def with_pixels(
    x: Images, places: Int[Tensor, "batch k"], images: Images, taken: Int[Tensor, "batch k"]
) -> Images:
    """Replace the pixels of x at some places by pixels of other images, in all channels."""
    to, source = (index[:, None].expand(-1, x.shape[1], -1) for index in (places, taken))
    values = images.flatten(2).gather(2, source)
    return x.flatten(2).scatter(2, to, values).reshape(x.shape)


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


def twins_of_digits(bench: Bench) -> Twins:
    """Train networks with and without ReLU, and explain why a digit has its label."""
    context, sizes = bench.context, bench.sizes
    test, training = context.data("mnist", "test"), context.data("mnist", "train")
    classes, n = len(test.class_names), min(sizes.maps, len(test))
    generator = torch.Generator().manual_seed(context.seed)
    index = torch.randperm(len(test), generator=generator)[:n]
    order = torch.randperm(len(training), generator=generator)[:SAMPLE]
    p = test.labels[index]
    q = (p + random_offsets(n, classes, context.seed)) % classes
    x, compared = to_pixels(test.images[index]), to_pixels(training.images[order])
    placed = (values.to(context.device) for values in (x, p, q, compared))
    digits = ExplainedImages(None, *placed)
    images = training.first(sizes.twin_images), test.first(TWIN_TEST)
    return relu_twins(digits, *images, networks=sizes.twins, observe=context.observe)


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


def _better(a: Tensor, b: Tensor, better: Better) -> bool:
    return verdict(_difference(a, b), better) == "better"


def _interval(values: Tensor) -> Interval:
    generator = torch.Generator().manual_seed(0)
    return bootstrap_interval(values, resamples=RESAMPLES, generator=generator)


def _difference(a: Tensor, b: Tensor) -> Interval:
    return _interval(a.double() - b.double())
