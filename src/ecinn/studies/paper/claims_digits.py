"""Measure claims about digits: samples, oracles, realism, and what is preserved."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ecinn.data.dataset import Dataset
from ecinn.metrics import counterfactuals as metrics
from ecinn.metrics.statistics import Interval, proportion, wilson
from ecinn.metrics.strokes import FEATURES
from ecinn.model import Model
from ecinn.pixels import Labels, StoredImages, to_uint8
from ecinn.studies.benchmark.quality import MAIN_ORACLE
from ecinn.studies.judges import Judges
from ecinn.studies.paper.claim import Measurement, limits, share_votes
from ecinn.studies.paper.measuring import RESAMPLES, Bench, Sample, means, pearson, spearman

POOL = 2000
"""Real images from which the mean of a feature is taken for every class."""

Features = Float[Tensor, "images features"]
ClassMeans = Mapping[str, Float[Tensor, " classes"]]
"""The mean of every feature of strokes, by class."""


def measure(bench: Bench, model: Model) -> Iterator[Measurement]:
    """Measure all of them on one sample of test digits."""
    sample, judges, seed = bench.sample(model), bench.judges, bench.context.seed
    yield sampling(model, judges, bench.sizes.samples, seed)
    yield from (torn_oracles(sample, judges), convinces_oracles(sample, judges))
    yield realistic(sample, judges, bench.once(real_features))
    kept = kept_features(sample, bench.once(real_class_means), seed)
    yield features_kept(kept, len(sample.q))
    yield from (diverse(sample), comparable_errors(sample, judges))


def real_features(bench: Bench) -> Features:
    """Features of all test digits, for the Fréchet distance."""
    return bench.judges.features(bench.context.data("mnist", "test").images)


def real_class_means(bench: Bench) -> ClassMeans:
    """Means of the features of strokes over the first test digits."""
    return class_means(bench.context.data("mnist", "test").first(POOL))


def class_means(data: Dataset) -> ClassMeans:
    """Average every feature of strokes over the images of each class."""
    classes = range(len(data.class_names))
    found = {}
    for name, feature in FEATURES.items():
        values = feature(data.images)
        found[name] = torch.stack([values[data.labels == label].nanmean() for label in classes])
    return found


@torch.inference_mode()
def draw_digits(
    model: Model, n: int, generator: torch.Generator, batch_size: int = 125
) -> tuple[StoredImages, Tensor]:
    """Draw x ~ p(x|y), all classes in turn: f⁻¹(μ_y + ε) with ε of variance 1."""
    labels = torch.arange(n) % len(model.class_names)
    noise = torch.randn((n, model.mu.shape[1]), generator=generator)
    parts = [
        to_uint8(model.decode(model.mu[label.to(model.device)] + part.to(model.device))).cpu()
        for label, part in zip(labels.split(batch_size), noise.split(batch_size), strict=True)
    ]
    return torch.cat(parts), labels


def agreement(judges: Judges, images: StoredImages, labels: Labels) -> dict[str, Interval]:
    """Share of the images that each family of oracles classifies as these labels."""
    return {family: proportion(said == labels) for family, said in judges.verdicts(images).items()}


def sampling(model: Model, judges: Judges, n: int, seed: int) -> Measurement:
    """Let two families of oracles classify samples of p(x|y) at temperature 1."""
    images, labels = draw_digits(model, n, torch.Generator().manual_seed(seed))
    shares, wanted = agreement(judges, images, labels), limits("sampling")["share"]
    votes = [share_votes(share, wanted) for share in shares.values()]
    return Measurement("sampling", shares, votes, {"n": n})


def torn_oracles(sample: Sample, judges: Judges) -> Measurement:
    """Let oracles classify tipping points; count where they find p and q about equally likely."""
    images = sample.gather(lambda e: e.stored_tipping_point[:, 0])
    pair, limit = torch.stack([sample.p, sample.q], 1), limits("torn")
    numbers = {}
    for family, scores in judges.scores(images).items():
        predicted = scores.argmax(1)
        p_q = scores.double().gather(1, pair).softmax(1)[:, 1]
        numbers[family] = {
            "p": proportion(predicted == sample.p),
            "q": proportion(predicted == sample.q),
            "another": proportion((predicted != sample.p) & (predicted != sample.q)),
            "torn": proportion((p_q >= limit["low"]) & (p_q <= limit["high"])),
        }
    refuted = all(shares["torn"].high < limit["many"] for shares in numbers.values())
    return Measurement(
        "torn",
        numbers,
        [[False, not refuted]],  # without asking people it cannot be supported
        chosen={"who": ["refuted" if refuted else "open"]},
        rows=[[family, *shares.values()] for family, shares in numbers.items()],
    )


def convinces_oracles(sample: Sample, judges: Judges) -> Measurement:
    """Let two families of oracles classify counterfactuals, and real images of q."""
    made, real = (agreement(judges, x, sample.q) for x in (sample.stored, sample.real))
    return Measurement(
        "convincing",
        made,
        [share_votes(share, limits("convincing")["share"]) for share in made.values()],
        rows=[[family, share, real[family]] for family, share in made.items()],
    )


def realistic(sample: Sample, judges: Judges, features: Features) -> Measurement:
    """Fréchet distance to the features of real images, compared with that of real images."""
    ours, real, originals = (
        metrics.frechet_distance(judges.features(images), features).mean
        for images in (sample.stored, sample.real, sample.images)
    )
    clamped = sample.gather(lambda e: e.convincing_certificate.clamped[:, 0])
    chance, limit = max(real, originals), limits("realistic")
    return Measurement(
        "realistic",
        {"frechet": ours, "frechet_real": real, "frechet_originals": originals},
        [[ours <= limit["near"] * chance, ours <= limit["far"] * chance]],
        {"clamped": float(clamped.mean())},
    )


@dataclass(frozen=True)
class Kept:
    """Correlations of a feature before and after, over images."""

    r: Interval
    rho: Interval
    within: Interval
    """Pearson's r of the deviations from the class means, to which classes do not contribute."""
    control: Interval
    """Pearson's r with a random real image of q."""
    change: float
    """Mean |difference|."""
    control_change: float

    @property
    def kept(self) -> bool:
        """True if r within classes is high enough and both correlations beat the control."""
        beyond = max(self.control.high, 0.0)
        strong = self.within.mean >= limits("features-kept")["kept"]
        return strong and min(self.r.low, self.within.low) > beyond


def kept_features(
    sample: Sample, real: ClassMeans, seed: int, resamples: int = RESAMPLES
) -> dict[str, Kept]:
    """Measure every feature of strokes before and after."""
    generator = torch.Generator().manual_seed(seed)
    features = {}
    for name, feature in FEATURES.items():
        before, after, control = (
            feature(images) for images in (sample.images, sample.stored, sample.real)
        )
        by_class = real[name]
        features[name] = Kept(
            pearson(before, after, generator, resamples),
            spearman(before, after, generator, resamples),
            pearson(before - by_class[sample.p], after - by_class[sample.q], generator, resamples),
            pearson(before, control, generator, resamples),
            float((after - before).abs().nanmean()),
            float((control - before).abs().nanmean()),
        )
    return features


def features_kept(features: dict[str, Kept], n: int) -> Measurement:
    """Judge thickness, slant, size and the bounding box."""
    least = limits("features-kept")["kept"]
    lost = [name for name, feature in features.items() if not feature.kept]
    plain = [name for name, feature in features.items() if feature.r.mean < least]
    return Measurement(
        "features-kept",
        features,
        [[feature.kept for feature in features.values()]],
        {"n": n, "lost": ", ".join(lost) or "none", "plain": ", ".join(plain) or "none"},
        rows=[
            [name, f.r, f.rho, f.within, f.control, f"{f.change:.2f} ({f.control_change:.2f})"]
            for name, f in features.items()
        ],
    )


def diverse(sample: Sample) -> Measurement:
    """Mean distance between counterfactuals of a class, over that of its real images."""
    ratios = []
    for label in sample.q.unique().tolist():
        rows = sample.q == label
        if int(rows.sum()) > 1:
            ratios.append(metrics.diversity(sample.stored[rows], sample.real[rows]).mean)
    (ratio,), limit = means(torch.tensor(ratios, dtype=torch.float64)), limits("diverse")
    votes = [[ratio.low > limit["half"], ratio.low > limit["most"]]]
    return Measurement("diverse", {"ratio": ratio}, votes, {"classes": len(ratios)})


def comparable_errors(sample: Sample, judges: Judges) -> Measurement:
    """Compare the recorded test errors of the INN and of the convolutional judge."""
    ours, judge = sample.model.checkpoint.metrics, judges.record
    inn, cnn = (
        wilson(round(float(error) * n), n)
        for error, n in (
            (ours["error"], int(ours["n"])),
            (1 - float(judge["accuracy"][MAIN_ORACLE]), int(judge["test_images"])),
        )
    )
    votes = [[inn.low <= cnn.high, inn.mean <= limits("errors")["times"] * cnn.mean]]
    return Measurement("errors", {"INN": inn, "CNN": cnn}, votes)
