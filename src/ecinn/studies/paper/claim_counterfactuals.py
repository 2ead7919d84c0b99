"""Claims about counterfactuals of digits: cost, tipping points, who is convinced, what is kept."""

import functools

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ecinn import equations
from ecinn.auditing.measurement import rate
from ecinn.data.dataset import Dataset
from ecinn.explanation.counterfactual import counterfactual
from ecinn.flow.precision import exact_convolutions
from ecinn.metrics import counterfactuals as metrics
from ecinn.metrics.statistics import bootstrap_interval
from ecinn.progress import ignore
from ecinn.studies.benchmark.quality import MAIN_ORACLE
from ecinn.studies.benchmark.side_by_side import METHODS, Pairs, make
from ecinn.studies.judges import Judges
from ecinn.studies.paper.claim import (
    Claim,
    Verdict,
    number,
    of_share,
    of_votes,
    percent,
    table,
    worst,
)
from ecinn.studies.paper.claim_measures import CountedClassifier, Sample, median_seconds

TIE = 1e-3
"""How near p(p) and p(q) must be to count as equal."""
IN_TIME = 2.5
"""Up to so many times a forward pass is "the time of two"."""
MINIMAL = 1.1
"""What is longer than so many times another way is not minimal."""
TORN = (0.25, 0.75)
"""An oracle whose p(q) of p and q alone lies here takes an image for either."""
MANY = 0.25
"""From this share on, cases are many."""
SEARCHES = ("pixel-gradient-l1", "latent-gradient")
COUNTERFACTUALS_COMMAND = "ecinn benchmark counterfactuals --model mnist"


def two_evaluations(sample: Sample, repeats: int = 15) -> Claim:
    """Count what one counterfactual asks of the network, and time it."""
    model, x = sample.model, sample.model.pixels(sample.images[:1])
    q = sample.q[:1].to(model.device)
    counted = CountedClassifier(model.classifier)
    # Without gradients: what would need one, would fail.
    with torch.inference_mode(), exact_convolutions():
        counterfactual(counted, model.mu_bar, x, q)
        both = median_seconds(
            lambda: counterfactual(model.classifier, model.mu_bar, x, q), repeats, x.device
        )
        forward = median_seconds(lambda: model.classifier.encode(x), repeats, x.device)
    encodes, decodes = len(counted.encoded), len(counted.decoded)
    in_time: Verdict = "supported" if both <= IN_TIME * forward else "partly"
    return Claim(
        "two-evaluations",
        "1",
        "A counterfactual takes one evaluation of f and one of its inverse, in the time of two; "
        "no search, no gradients.",
        in_time if (encodes, decodes) == (1, 1) else "refuted",
        f"{encodes} encode and {decodes} decode of one image, counted at the network, with "
        f"gradients switched off; {both / forward:.2f} times one forward pass (medians of "
        f"{repeats} on this machine; up to {IN_TIME} counts as two). The means μ̄ take one "
        "pass over the training images, once.",
        command="make bench",
        numbers={"encodes": encodes, "decodes": decodes, "times_forward": both / forward},
    )


def searches(sample: Sample, judges: Judges, n: int) -> Claim:
    """Two gradient searches on the same classifier: what they cost and whom they convince."""
    pairs = Pairs(sample.index[:n], sample.images[:n], sample.p[:n], sample.q[:n])
    rows, numbers = [], {}
    most = 0.0
    for name in ("ecinn", *SEARCHES):
        prepare = functools.partial(METHODS[name], sample.model, _no_training, ignore)
        made = make(prepare, pairs, sample.model.device)
        convinced = rate(judges.verdicts(made.images)[MAIN_ORACLE] == pairs.q)
        passes = float(made.passes.double().mean())
        most = max(most, passes)
        rows.append([name, f"{passes:.1f}", percent(convinced)])
        numbers[name] = {"passes": passes, "convinced": convinced}
    return Claim(
        "competitors",
        "1",
        "Competing methods query the classifier many times, some a thousand times or more.",
        of_votes([most > 2, most >= 1000]),
        f"Over {n} digits the costlier of two gradient searches asks this classifier {most:.0f} "
        "times on average. (alibi 0.9.6 with the settings of its MNIST examples took 3,491 to "
        "20,002; measured once, not by this command.) What separates the methods is less the "
        "count than who is convinced by what comes out.",
        command=COUNTERFACTUALS_COMMAND,
        numbers=numbers,
        detail=table(["method", "passes", "convolutional oracle reads q"], rows),
    )


def _no_training() -> Dataset:
    raise AssertionError("no search here needs training images")


def exact_inverse(sample: Sample) -> Claim:
    """max |x − f⁻¹(f(x))|, in grey levels."""
    error = 256 * float(sample.gather(lambda e: e.round_trip_error).max())
    return Claim(
        "exact-inverse",
        "1",
        "An INN recovers its inputs exactly from its outputs.",
        "supported" if error < 0.5 else "refuted",
        f"Largest error over {len(sample.q):,} digits: {error:.4f} grey levels of 256. In "
        "arithmetic of finite precision “exactly” means this.",
        command="ecinn evaluate mnist",
        numbers={"grey_levels": error},
    )


def nearest_mean(sample: Sample, n: int) -> Claim:
    """Whether the density's argmax, Jacobian and all, is the nearest mean."""
    model = sample.model
    with torch.inference_mode(), exact_convolutions():
        z, log_det = model.classifier.encode_with_log_det(model.pixels(sample.images[:n]))
    by_density = equations.log_likelihood(z, log_det, model.classifier.mu).argmax(1)
    nearest = torch.cdist(z.double(), model.classifier.mu.double()).argmin(1)
    same = rate((by_density == nearest).cpu())
    return Claim(
        "nearest-mean",
        "3.2",
        "The predicted class is that of the nearest mean, whatever the Jacobian (Eq. 2).",
        of_share(same, 0.95),
        f"{percent(same)} of {n} digits. The formula itself is loose: log p(y|x) is not "
        "proportional to −‖f(x) − μ_y‖² but equal to −½‖f(x) − μ_y‖² minus a constant that all "
        "classes share.",
        numbers={"same": same},
    )


def minimal(sample: Sample, n: int) -> Claim:
    """The way along Δ to the boundary over that along w = μ_q − μ_p, in z and in x."""
    model, (p, q) = sample.model, (sample.p[:n], sample.q[:n])
    mu, mu_bar = (means.detach().cpu().double() for means in (model.classifier.mu, model.mu_bar))
    first, second = torch.combinations(torch.arange(len(mu))).unbind(1)
    delta = equations.latent_direction(mu_bar, first, second)
    # |α₀|‖Δ‖ over |wᵀz + b| / ‖w‖, in which z cancels.
    latent = 1 / F.cosine_similarity(delta, mu[second] - mu[first]).abs()
    along_delta = _change_at_boundary(sample, n, equations.latent_direction(mu_bar, p, q))
    along_w = _change_at_boundary(sample, n, mu[q] - mu[p])
    longer = along_delta / along_w
    of_input = bootstrap_interval(longer, generator=torch.Generator().manual_seed(0))
    shorter = rate(along_w < along_delta)
    mean, low, high = (float(v) for v in (latent.mean(), latent.min(), latent.max()))
    return Claim(
        "minimal",
        "3.1",
        "Tipping points identify a minimal correction to the input.",
        of_votes([high < MINIMAL, of_input.high < MINIMAL]),
        "To the boundary it is nearest along w = μ_q − μ_p. The way along Δ is 1/|cos(Δ, w)| "
        f"times as long, whatever the image: in latent space {mean:.2f} times on average over "
        f"all {len(latent)} pairs of classes, {low:.2f} to {high:.2f}. Of the input, ‖x̂ − x‖ "
        f"there is {number(of_input, 2)} times that of the way along w ({n} digits), which is "
        f"the smaller correction in {percent(shorter)}. Minimal is α₀ among the points of one "
        "line. That smaller correction changes this classifier's mind and hardly anybody else's "
        "(`model-means` in the benchmark); the paper grants that minimal changes of images are "
        "hard to measure in a way that means something.",
        figure="figure-2",
        command=COUNTERFACTUALS_COMMAND,
        numbers={
            "latent": {"mean": mean, "least": low, "most": high, "pairs": len(latent)},
            "input": of_input,
            "along_w_is_smaller": shorter,
        },
    )


@torch.inference_mode()
def _change_at_boundary(
    sample: Sample, n: int, direction: Float[Tensor, "batch dim"]
) -> Float[Tensor, " batch"]:
    """‖f⁻¹(z + αd) − x‖ where z + αd meets the boundary of p and q."""
    classifier = sample.model.classifier
    x = sample.model.pixels(sample.images[:n])
    p, q = (labels[:n].to(x.device) for labels in (sample.p, sample.q))
    mu, direction = classifier.mu.double(), direction.to(x.device)
    with exact_convolutions():
        z = classifier.encode(x).double()
        alpha = equations.tipping_point_alpha(z, direction, mu[p], mu[q])
        x_hat = classifier.decode(equations.corrected_latent(z, alpha, direction).to(x.dtype))
    length: Tensor = (x_hat - x).flatten(1).double().norm(dim=1)
    return length.cpu()


def tipping_points(sample: Sample) -> Claim:
    """|p(p) − p(q)| at α₀, in latent space and of the stored image."""
    latent = sample.gather(lambda e: e.tipping_certificate.posterior[:, 0])
    stored = sample.gather(lambda e: e.tipping_certificate.verdict[:, 0])
    pair = torch.stack([sample.p, sample.q], 1)
    of_latent, of_stored = (each.double().gather(1, pair) for each in (latent, stored))
    apart = (of_latent[:, 0] - of_latent[:, 1]).abs()
    tied = rate(apart <= TIE)
    stored_apart = (of_stored[:, 0] - of_stored[:, 1]).abs()
    renormalised = of_stored / of_stored.sum(1, keepdim=True)
    between = (renormalised[:, 0] - renormalised[:, 1]).abs()
    return Claim(
        "tipping-points",
        "3.3",
        "At α₀ the classifier finds p and q equally likely.",
        of_share(tied, 0.99),
        f"In latent space {percent(tied, 2)} of {len(apart):,} tipping points have "
        f"|p(p) − p(q)| ≤ {TIE} (largest {float(apart.max()):.1e}). Stored with 8 bits, "
        f"{percent(rate(stored_apart <= TIE))} still do and {percent(rate(stored_apart <= 0.1))} "
        f"are within 0.1; the median is {float(stored_apart.median()):.3f}, and with p and q "
        f"alone, renormalised, {float(between.median()):.3f}.",
        figure="figure-5",
        command="ecinn benchmark consistency --model mnist",
        numbers={
            "tied": tied,
            "largest": float(apart.max()),
            "stored_median": float(stored_apart.median()),
            "stored_within_0.1": rate(stored_apart <= 0.1),
            "stored_renormalised_median": float(between.median()),
        },
    )


def torn_oracles(sample: Sample, judges: Judges) -> Claim:
    """What oracles read at tipping points, and how often p and q are about as likely to them."""
    images = sample.gather(lambda e: e.stored_tipping_point[:, 0])
    pair = torch.stack([sample.p, sample.q], 1)
    rows, numbers, torn = [], {}, []
    for family, scores in judges.scores(images).items():
        read = scores.argmax(1)
        of_q = scores.double().gather(1, pair).softmax(1)[:, 1]
        shares = {
            "p": rate(read == sample.p),
            "q": rate(read == sample.q),
            "another": rate((read != sample.p) & (read != sample.q)),
            "torn": rate((of_q >= TORN[0]) & (of_q <= TORN[1])),
        }
        rows.append([family, *(percent(share) for share in shares.values())])
        numbers[family] = shares
        torn.append(shares["torn"])
    refuted = all(share.high < MANY for share in torn)
    said = "By two networks; untested on people, who" if refuted else "People"
    still = " and ".join(f"{100 * of['p'].share:.0f} %" for of in numbers.values())
    either = f"{TORN[0]:g} to {TORN[1]:g}"
    return Claim(
        "torn",
        "4.2",
        "Tipping points are in many cases such that even a human might mistake them for both the "
        "input's and the target's class.",
        "refuted" if refuted else "partly",
        f"{said} were not asked. Torn between p and q, with a posterior of q, of p and q alone, "
        f"from {either}, are two independent oracles in "
        + " and ".join(percent(share) for share in torn)
        + f" of {len(pair):,} tipping points, where many would be {100 * MANY:.0f} % or more; "
        f"where this classifier ties, they read p in {still}. The paper shows nine, of one three.",
        figure="figure-5",
        numbers=numbers,
        detail=table(["oracle", "reads p", "reads q", "another", f"p(q) from {either}"], rows),
    )


def reaches_target(sample: Sample) -> Claim:
    """C(x̂) = q of the stored image at α₁."""
    reached = rate(sample.gather(lambda e: e.convincing_certificate.reached[:, 0]))
    posterior = sample.gather(lambda e: e.convincing_certificate.posterior[:, 0])
    of_q = posterior.double().gather(1, sample.q[:, None])[:, 0]
    taught = sample.smoothed_label
    return Claim(
        "reaches-q",
        "3.3",
        "At α₁ the target q is predicted, though nothing guarantees it.",
        of_share(reached, 0.99),
        f"{percent(reached, 2)} of {len(sample.q):,} stored 8-bit counterfactuals are read as q; "
        f"median p(q) in latent space {float(of_q.median()):.4f}, "
        f"{percent(rate(of_q > 0.99))} above .99 (its smoothed labels ask for {taught:.3f}). "
        "`--correct` corrects α for the rest.",
        figure="figure-6",
        command="ecinn evaluate mnist",
        numbers={"reached": reached, "median_p_q": float(of_q.median())},
    )


def convinces_others(sample: Sample, judges: Judges) -> Claim:
    """Oracles of two families on counterfactuals, and on real images of q."""
    real = judges.verdicts(sample.real)
    shares, rows = {}, []
    for family, read in judges.verdicts(sample.stored).items():
        shares[family] = rate(read == sample.q)
        control = rate(real[family] == sample.q)
        rows.append([family, percent(shares[family]), percent(control)])
    votes = [of_share(share, 0.95) for share in shares.values()]
    return Claim(
        "convincing",
        "4.2",
        "A convincing counterfactual has successfully become a digit of the target class.",
        worst(votes),
        "Two networks that took no part in training read them so.",
        figure="figure-5",
        command=COUNTERFACTUALS_COMMAND,
        numbers=shares,
        detail=table(["oracle", "counterfactuals read as q", "random real images of q"], rows),
    )


def realistic(sample: Sample, judges: Judges, data: Dataset) -> Claim:
    """The Fréchet distance to real images, beside that of real images; and what is typical."""
    features = judges.features(data.images)
    ours, real, originals = (
        metrics.frechet_distance(judges.features(images), features)
        for images in (sample.stored, sample.real, sample.images)
    )
    clamped = sample.gather(lambda e: e.convincing_certificate.clamped[:, 0])
    # Ten times what chance gives is a picture nobody takes for real (the authors' own have 2.7).
    chance = max(real, originals)
    verdict: Verdict = "partly" if ours > 2 * chance else "supported"
    return Claim(
        "realistic",
        "4.2",
        "Counterfactuals look realistic.",
        "refuted" if ours > 10 * chance else verdict,
        f"Fréchet distance to all test digits {ours:.2f}, against {real:.2f} of as many random "
        f"real images of the same targets and {originals:.2f} of the originals: near, but an "
        f"oracle's features can tell them apart. {100 * float(clamped.mean()):.1f} % of the "
        "pixels had to be clamped.",
        figure="figure-5",
        command="ecinn benchmark authors --data DIR",
        numbers={"frechet": ours, "frechet_real": real, "frechet_originals": originals},
    )


def diverse(sample: Sample) -> Claim:
    """Mean distance between counterfactuals of a class, over that of its real images."""
    values = []
    for label in sample.q.unique().tolist():
        rows = sample.q == label
        if int(rows.sum()) > 1:
            values.append(metrics.diversity(sample.stored[rows], sample.real[rows]))
    ratio = bootstrap_interval(
        torch.tensor(values, dtype=torch.float64), generator=torch.Generator().manual_seed(0)
    )
    return Claim(
        "diverse",
        "4.2",
        "Counterfactuals for one target differ as their inputs do.",
        of_votes([ratio.low > 0.5, ratio.low > 0.75]),
        f"The mean distance between two of them is {number(ratio, 2)} of that between two real "
        f"images of the class ({len(values)} target classes); 0 would be always the same picture.",
        figure="figure-7",
        command=COUNTERFACTUALS_COMMAND,
        numbers={"ratio": ratio},
    )
