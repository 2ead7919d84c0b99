"""Claims about FakeMNIST, where the class is one dot and so the right answer is known."""

import torch

from ecinn.auditing.measurement import rate
from ecinn.data.planted import Cue
from ecinn.metrics import counterfactuals, heatmaps
from ecinn.metrics.statistics import bootstrap_interval
from ecinn.studies.judges import Judges
from ecinn.studies.paper.claim import Claim, Verdict, number, of_share, of_votes, percent, worst
from ecinn.studies.paper.claim_measures import Sample

COMMAND = "ecinn benchmark counterfactuals --model fakemnist"
INSIDE = 0.9
"""Share of the change in the two dots from which on it is only theirs."""
UNSEEN = 0.1
"""Of black to white: no other pixel may change by more."""
CERTAIN = 0.95
"""p(q) from which on a classifier is nearly certain, and the share that must be."""


def few_class_pixels(cue: Cue) -> Claim:
    """10 of 784."""
    share = float(cue.mask.double().mean())
    return Claim(
        "few-pixels",
        "4.1",
        "Less than two percent of the pixels depend on the class.",
        "supported" if share < 0.02 else "refuted",
        f"{int(cue.mask.sum())} of {cue.mask.numel()} pixels: {100 * share:.2f} %.",
        figure="figure-3",
        numbers={"share": share},
    )


def only_dots_change(sample: Sample, cue: Cue, judges: Judges, seed: int) -> Claim:
    """Where the change is, by squares and by absolute values, and how much is left elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    dots = cue.stencils[sample.p] | cue.stencils[sample.q]
    change = sample.change
    squared, absolute = (
        bootstrap_interval(share, generator=generator)
        for share in (
            counterfactuals.share_inside(change, dots),
            heatmaps.share_inside(heatmaps.importance(change), dots),
        )
    )
    outside = change.abs() * ~cue.mask
    largest = outside.flatten(1).amax(1)
    seen = rate(largest > UNSEEN)
    elsewhere = outside.flatten(1).sum(1) / int((~cue.mask).sum())
    level = bootstrap_interval(256 * elsewhere, generator=generator)
    before, after = judges.verdicts(sample.images), judges.verdicts(sample.stored)
    kept = {family: rate(after[family] == before[family]) for family in before}
    truth = rate(cue.read(sample.stored) == sample.q)
    votes = [
        squared.low > INSIDE,
        absolute.low > INSIDE,
        float(largest.max()) <= UNSEEN,
        level.high < 1,
        *(share.low > 0.95 for share in kept.values()),
    ]
    families = ", ".join(percent(share) for share in kept.values())
    return Claim(
        "only-dots",
        "4.1",
        "Only the dots change; the digit, which says nothing of the class, stays.",
        of_votes(votes) if truth.high > 0.95 else "refuted",
        f"Of the squared change {number(squared)} is in the dots of p and q, of the absolute "
        f"change {number(absolute)}: squares hide many small changes. Pixels outside of the ten "
        f"dots change by {number(level, 2)} grey levels on average, by "
        f"{256 * float(largest.max()):.0f} of 256 at most; one changes by more than "
        f"{256 * UNSEEN:.0f} in {percent(seen)} of the images. The dot of q is the brightest in "
        f"{percent(truth)}; the two oracles read the same digit as before in {families}.",
        figure="figure-4",
        command=COMMAND,
        numbers={
            "inside_squared": squared,
            "inside_absolute": absolute,
            "outside_grey_levels": level,
            "outside_at_most": 256 * float(largest.max()),
            "seen_outside": seen,
            "truth": truth,
            "kept": kept,
        },
    )


def tipping_points_have_no_dot(sample: Sample, cue: Cue) -> Claim:
    """How bright the dots of p and q are at α₀."""
    images = sample.gather(lambda e: e.stored_tipping_point[:, 0])[:, 0].double() / 255
    rows = torch.arange(len(images))
    dots = [images[rows][cue.stencils[label]] for label in (sample.p, sample.q)]
    generator = torch.Generator().manual_seed(0)
    of_p, of_q = (bootstrap_interval(each, generator=generator) for each in dots)
    brightest = bootstrap_interval(torch.stack(dots).amax(0), generator=generator)
    verdict: Verdict = "supported" if brightest.high < 0.2 else "partly"
    return Claim(
        "no-dot",
        "4.1",
        "At tipping points there is almost no dot.",
        "refuted" if brightest.low > 0.5 else verdict,
        f"Brightness of the dot of p {number(of_p, 2)} and of q {number(of_q, 2)}, of the "
        f"brighter of the two {number(brightest, 2)}, where 1 is white. The paper shows one "
        "image.",
        figure="figure-4",
        numbers={"p": of_p, "q": of_q, "brighter": brightest},
    )


@torch.inference_mode()
def nothing_says_nothing(sample: Sample, cue: Cue) -> Claim:
    """p(y|x) of images whose dots are wiped out, against 1/K."""
    blank = sample.images.masked_fill(cue.mask, cue.off)
    parts = blank.split(250)
    posterior = torch.cat([sample.model.predict(part) for part in parts]).cpu().double()
    distance = (posterior - 1 / cue.classes).abs().sum(1) / 2
    generator = torch.Generator().manual_seed(0)
    apart = bootstrap_interval(distance, generator=generator)
    sure = bootstrap_interval(posterior.amax(1), generator=generator)
    verdict: Verdict = "supported" if apart.high < 0.1 else "partly"
    most = 1 - 1 / cue.classes
    return Claim(
        "no-dot-no-class",
        "4.1",
        "Without a dot an image is equally likely to be of any class.",
        "refuted" if apart.low > most / 2 else verdict,
        f"With all dots wiped out the surest class has {number(sure, 2)}, where 1/{cue.classes} "
        f"is asked for; total variation distance from uniform {number(apart, 2)}, of "
        f"{most:.1f} at most. True of the data; no such image is among them, so the classifier "
        "is free to say anything.",
        figure="figure-4",
        numbers={"surest": sure, "from_uniform": apart},
    )


def reaches_target(sample: Sample) -> Claim:
    """p(q) near 1 at α₁, of the stored image."""
    reached = rate(sample.gather(lambda e: e.convincing_certificate.reached[:, 0]))
    posterior = sample.gather(lambda e: e.convincing_certificate.verdict[:, 0])
    of_q = posterior.double().gather(1, sample.q[:, None])[:, 0]
    certain = rate(of_q >= CERTAIN)
    return Claim(
        "fake-reaches-q",
        "4.1",
        "At α₁ the classifier is nearly certain of q: p(q) is close to 1.",
        worst([of_share(reached, 0.99), of_share(certain, CERTAIN)]),
        f"{percent(reached, 2)} of {len(of_q):,} stored counterfactuals are read as q; p(q) is "
        f"{CERTAIN} or more in {percent(certain)}, {float(of_q.median()):.4f} in the median and "
        f"{float(of_q.min()):.4f} at least. Its smoothed labels ask for "
        f"{sample.smoothed_label:.3f}.",
        figure="figure-4",
        command="ecinn evaluate fakemnist",
        numbers={"reached": reached, "certain": certain, "median_p_q": float(of_q.median())},
    )
