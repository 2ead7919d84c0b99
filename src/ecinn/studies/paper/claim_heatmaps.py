"""Claims about heatmaps on digits: noise, faithfulness, and what ReLU has to do with it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ecinn.attribution.heatmaps import DEFAULTS, METHODS, HeatmapMethod, Heatmaps, heatmaps
from ecinn.attribution.scores import ExplainedINN
from ecinn.data.dataset import Dataset
from ecinn.metrics.heatmaps import blurred, noise_like
from ecinn.metrics.statistics import Interval, bootstrap_interval, paired_difference_interval
from ecinn.model import Model
from ecinn.pixels import Images, to_pixels
from ecinn.studies.benchmark.heatmap_measures import LABELS, Reader, noisiness, verdict
from ecinn.studies.benchmark.heatmaps import BLUR, SAMPLE
from ecinn.studies.benchmark.side_by_side import Pairs
from ecinn.studies.judges import ConvolutionalNetwork, scaled
from ecinn.studies.paper.claim import Claim, number, of_votes, table

GRADIENT_METHODS: tuple[HeatmapMethod, ...] = METHODS[1:]
COMMAND = "ecinn benchmark heatmaps --model celeba-smile --celeba DIR --cnn FILE"
ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}
"""Of networks that are alike in all else."""
Noise = dict[str, dict[str, Tensor]]
"""By method and measure, a value per image."""


class OnPixels(nn.Module):
    """A judge's network, which reads k/255 − ½, on pixels (k + ½)/256."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Images) -> Tensor:
        """Logits."""
        logits: Tensor = self.network((256 * x - 0.5) / 255 - 0.5)
        return logits


@dataclasses.dataclass(frozen=True)
class Explained:
    """Digits with their pairs, and what the gradient methods compare with."""

    model: Model
    x: Images
    p: Tensor
    q: Tensor
    training: Float[Tensor, "sample channels height width"]
    """As pixels, drawn at random."""

    @property
    def inn(self) -> ExplainedINN:
        """The model as `heatmaps` takes it."""
        return ExplainedINN(self.model.classifier, self.model.mu_bar)

    def maps(self, network: ExplainedINN | nn.Module, method: HeatmapMethod) -> Heatmaps:
        """Of every digit."""
        return heatmaps(
            network,
            self.x,
            self.p,
            self.q,
            method,
            baseline=self.training.mean(0),
            baselines=self.training[: DEFAULTS.baselines],
        )

    def all_maps(
        self,
        network: ExplainedINN | nn.Module,
        methods: Sequence[HeatmapMethod],
        observe: Callable[[int], None] = lambda done: None,
    ) -> dict[str, Heatmaps]:
        """Of several methods."""
        made: dict[str, Heatmaps] = {}
        for number_, method in enumerate(methods, 1):
            made[method] = self.maps(network, method)
            observe(number_)
        return made


def explained_digits(
    model: Model, pairs: Pairs, training: Dataset, n: int, seed: int
) -> Explained:
    """The first pairs, and a random sample of training images."""
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
    p, q = (labels[:n].to(model.device) for labels in (pairs.p, pairs.q))
    sample = model.pixels(training.images[order[:SAMPLE]])
    return Explained(model, model.pixels(pairs.images[:n]), p, q, sample)


def noise_of(made: Mapping[str, Heatmaps]) -> Noise:
    """Total variation, spatial coherence and share of high frequencies, per image."""
    return {
        method: {measure.name: values for measure, values in noisiness(each.maps).items()}
        for method, each in made.items()
    }


def less_noisy(noise: Noise, network: str = "MNIST's INN") -> Claim:
    """ECINNh against every other method, paired over images."""
    better = {"total variation": "less", "spatial coherence": "more", "high-frequency share": ""}
    votes = []
    for method in GRADIENT_METHODS:
        for measure in better:
            wanted = "more" if better[measure] == "more" else "less"
            difference = _difference(noise["ecinn"][measure], noise[method][measure])
            votes.append(verdict(difference, wanted) == "better")  # type: ignore[arg-type]
    rows = [
        [LABELS[method], *(number(_interval(noise[method][measure])) for measure in better)]
        for method in noise
    ]
    n = len(noise["ecinn"]["total variation"])
    return Claim(
        "less-noisy",
        "4.3",
        "On INNs ECINNh's heatmaps are coherent where those of established methods are noisy.",
        of_votes(votes),
        f"ECINNh is less noisy in {sum(votes)} of {len(votes)} paired comparisons over {n} digits "
        f"of {network}. Total variation of Gaussian noise is 2.83, its spatial coherence 0.",
        figure="figure-9",
        command=COMMAND,
        numbers={method: _means(values) for method, values in noise.items()},
        detail=table(["method", *(f"{name} {_ARROWS[name]}" for name in better)], rows),
    )


_ARROWS = {"total variation": "↓", "spatial coherence": "↑", "high-frequency share": "↓"}


def faithful(digits: Explained, made: Mapping[str, Heatmaps], seed: int) -> Claim:
    """Deletion and insertion, with replacements that neither side made."""
    generator = torch.Generator().manual_seed(seed)
    replacements = {"blur": blurred(digits.x, BLUR), "noise": noise_like(digits.x, generator)}
    reader = Reader(
        "replacement", digits.model.predict, digits.x, digits.p, replacements, 128, seed
    )
    areas = {method: reader.of_maps(each) for method, each in made.items()}
    any_order = torch.rand((len(digits.x), *digits.x.shape[2:]), generator=generator)
    areas["random order"] = reader.areas(any_order.to(digits.x))
    measures = list(areas["ecinn"])
    verdicts = {
        method: [
            verdict(_difference(areas["ecinn"][measure], areas[method][measure]), measure.better)
            for measure in measures
        ]
        for method in (*GRADIENT_METHODS, "random order")
    }
    against = [each for method in GRADIENT_METHODS for each in verdicts[method]]
    wins, losses = against.count("better"), against.count("worse")
    chance = verdicts["random order"].count("better")
    rows = [
        [
            LABELS.get(method, method),
            *(number(_interval(areas[method][measure])) for measure in measures),
        ]
        for method in areas
    ]
    arrows = {"less": "↓", "more": "↑"}
    return Claim(
        "faithful",
        "4.3",
        "ECINNh's heatmaps are more faithful than, and outperform, those of established methods.",
        of_votes([wins > 0, losses == 0]) if wins >= losses else "refuted",
        f"Of {len(against)} paired comparisons of deletion and insertion over {len(digits.x)} "
        f"digits ECINNh wins {wins} and loses {losses}; it beats a random order in {chance} of "
        f"{len(measures)}. Pixels go in each method's own order: signed evidence, and |h| for "
        "ECINNh, which has none; the command also shows |h| for all. It tells where "
        "another class differs, not which pixels hold this one; signed evidence of the "
        "classifier's own gradient is the better guide to that. The paper measures neither.",
        figure="figure-9",
        command=COMMAND,
        numbers={
            method: {measure.name: _interval(area) for measure, area in each.items()}
            for method, each in areas.items()
        },
        detail=table(
            ["order", *(f"{m.name} {arrows[m.better or 'more']}" for m in measures)], rows
        ),
    )


def less_noisy_with_relu(inn: Noise, cnn: Noise) -> Claim:
    """The same methods on an INN and on a ReLU network."""
    votes, rows = [], []
    for method in GRADIENT_METHODS:
        row = [LABELS[method]]
        for measure, arrow in _ARROWS.items():
            difference = _difference(cnn[method][measure], inn[method][measure])
            wanted = "less" if arrow == "↓" else "more"
            votes.append(verdict(difference, wanted) == "better")  # type: ignore[arg-type]
            both = (inn[method][measure], cnn[method][measure])
            row.append(" → ".join(f"{float(v.mean()):.3f}" for v in both))
        rows.append(row)
    n = len(inn["integrated_gradients"]["total variation"])
    return Claim(
        "relu-network",
        "4.3",
        "The established methods are less noisy on a network with ReLUs than on an INN.",
        of_votes(votes),
        f"INN → convolutional network with ReLUs, the same {n} digits, p and q: less noisy in "
        f"{sum(votes)} of {len(votes)} comparisons whose interval excludes 0. For faces, "
        "Inception-V3 beside the INN: the command.",
        figure="figure-9",
        command=COMMAND,
        numbers={
            "inn": {method: _means(inn[method]) for method in GRADIENT_METHODS},
            "cnn": {method: _means(cnn[method]) for method in GRADIENT_METHODS},
        },
        detail=table(["method", *(f"{name} {a}" for name, a in _ARROWS.items())], rows),
    )


def relu_twins(
    digits: Explained,
    training: Dataset,
    test: Dataset,
    *,
    images: int,
    networks: int,
    width: int = 16,
    observe: Callable[[int], None] = lambda done: None,
) -> dict[str, list[tuple[float, Noise]]]:
    """Networks that differ in nothing but the activation: test error, and noise of all methods."""
    twins: dict[str, list[tuple[float, Noise]]] = {}
    for name, activation in ACTIVATIONS.items():
        twins[name] = []
        for seed in range(networks):
            network = _train(training.first(images), activation, seed, width)
            with torch.no_grad():
                read = network(to_pixels(test.images)).argmax(1)
            error = float((read != test.labels).double().mean())
            network = network.to(digits.x.device)
            twins[name].append((error, noise_of(digits.all_maps(network, GRADIENT_METHODS))))
            observe(len(twins) * networks - networks + seed + 1)
    return twins


def relu_is_the_cause(twins: Mapping[str, Sequence[tuple[float, Noise]]], inn: Noise) -> Claim:
    """How much of the way from a ReLU network's noise to an INN's taking ReLU away goes."""
    means = {
        name: {
            measure: torch.stack([_mean_over_methods(noise, measure) for _, noise in several])
            for measure in _ARROWS
        }
        for name, several in twins.items()
    }
    errors = {name: sum(error for error, _ in several) for name, several in twins.items()}
    seeds = len(twins["ReLU"])
    way = {name: _way(of, means["ReLU"], inn) for name, of in means.items() if name != "ReLU"}
    rows = [
        [
            name,
            f"{100 * errors[name] / seeds:.1f} %",
            *(number(_range(means[name][measure])) for measure in _ARROWS),
        ]
        for name in twins
    ]
    rows.append(["the INN", "", *(f"{float(_mean_over_methods(inn, m)):.3f}" for m in _ARROWS)])
    goes = " and ".join(
        f"{100 * share.mean:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}] ({name})"
        for name, share in way.items()
    )
    erring = ", ".join(f"{100 * e / seeds:.1f} % ({name})" for name, e in errors.items())
    some = max(share.low for share in way.values()) >= 0.1
    undecided = max(share.high for share in way.values()) >= 0.5
    most = min(share.low for share in way.values()) >= 0.5
    return Claim(
        "relu-cause",
        "4.3",
        "The cause is the absence of ReLU activations, which filter out noise; those in an INN's "
        "subnets (a footnote) do not help.",
        "supported" if most else "partly" if some or undecided else "refuted",
        f"Convolutional networks trained alike but for the activation, {seeds} of each from "
        "different seeds; means of the four methods. Taking ReLU away goes "
        f"{goes} of the way from the ReLU network's noise to the INN's; the cause would have to "
        "go most of it, a part of the cause a tenth. Brackets are the least and the most of the "
        f"seeds, which hold the median with {100 * (1 - 2 ** (1 - seeds)):.0f} %. The networks "
        f"are small (one epoch) and err in {erring}: a worse fit may make a part of the noise. "
        "An INN differs in more: it keeps all information, pools nothing, and nothing is averaged "
        "before its output. Ours has ReLUs where the footnote says, and its maps are noisy all "
        "the same. The paper says itself that it cannot conclude on the cause.",
        numbers={
            "way": way,
            "means": {name: {k: v.tolist() for k, v in of.items()} for name, of in means.items()},
            "errors": {name: total / seeds for name, total in errors.items()},
        },
        detail=table(
            ["activation", "mean test error", *(f"{m} {a}" for m, a in _ARROWS.items())], rows
        ),
    )


def _way(of: Mapping[str, Tensor], relu: Mapping[str, Tensor], inn: Noise) -> Interval:
    """(without − ReLU) / (INN − ReLU) of networks of one seed, the mean over measures."""
    shares = [(of[m] - relu[m]) / (_mean_over_methods(inn, m) - relu[m]) for m in _ARROWS]
    return _range(torch.stack(shares).mean(0))


def _range(values: Tensor) -> Interval:
    """The mean, the least and the most: too few for a bootstrap."""
    return Interval(float(values.mean()), float(values.min()), float(values.max()), len(values))


def _train(data: Dataset, activation: Callable[[], nn.Module], seed: int, width: int) -> nn.Module:
    """One epoch of AdamW; the same first weights and order for every activation."""
    channels = data.images.shape[1]
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        network = ConvolutionalNetwork(channels, len(data.class_names), width)
    for place, module in enumerate(network.body):
        if isinstance(module, nn.ReLU):
            network.body[place] = activation()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).split(64)
    optimiser = torch.optim.AdamW(network.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=len(order) + 1)
    for batch in order:
        loss = F.cross_entropy(network(scaled(data.images[batch])), data.labels[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return OnPixels(network).eval().requires_grad_(requires_grad=False)


def _mean_over_methods(noise: Noise, measure: str) -> Tensor:
    return torch.stack([noise[method][measure].mean() for method in GRADIENT_METHODS]).mean()


def _means(values: Mapping[str, Tensor]) -> dict[str, Interval]:
    return {measure: _interval(each) for measure, each in values.items()}


def _interval(values: Tensor) -> Interval:
    return bootstrap_interval(
        values.double().cpu(), resamples=1000, generator=torch.Generator().manual_seed(0)
    )


def _difference(a: Tensor, b: Tensor) -> Interval:
    return paired_difference_interval(
        a.double().cpu(),
        b.double().cpu(),
        resamples=1000,
        generator=torch.Generator().manual_seed(0),
    )
