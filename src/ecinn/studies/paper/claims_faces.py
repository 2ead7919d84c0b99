"""Measure claims about faces, which need CelebA, and about β, which need trained models."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ecinn.attribution.heatmaps import HeatmapMethod, heatmaps
from ecinn.attribution.scores import ExplainedINN
from ecinn.auditing import Audit, audit
from ecinn.data.dataset import Dataset
from ecinn.metrics.heatmaps import importance, map_similarity, rank_similarity
from ecinn.metrics.statistics import Interval, proportion, wilson
from ecinn.model import Model
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark.heatmap_measures import LABELS
from ecinn.studies.paper import beta_models
from ecinn.studies.paper.artefact import Context
from ecinn.studies.paper.beta_models import TradeOff
from ecinn.studies.paper.claim import Measurement, limits, share_votes
from ecinn.studies.paper.measuring import Sizes, means

MODELS = {
    "celeba-smile": "celeba/Smiling",
    "celeba-cheekbones": "celeba/High_Cheekbones",
    "celeba-lipstick": "celeba/Wearing_Lipstick",
    "celeba-makeup": "celeba/Heavy_Makeup",
}
COMPARED = (("celeba-smile", "celeba-cheekbones"), ("celeba-lipstick", "celeba-makeup"))
METHOD: HeatmapMethod = "gradient_shap"
"""The established method used to compare the maps of two models: the cheapest that converges."""

SURE = 1 - 1e-4
"""The p(q) of Figure 8."""
REQUESTED = 1 - 1e-5
"""The `confidence` to request, so that rounding to 8 bits leaves more than `SURE`."""


def measure(context: Context, sizes: Sizes) -> Iterator[Measurement]:
    """Measure all claims about faces with two audits."""
    models = {name: context.model(name) for name in MODELS}
    smile, lipstick = (
        audit(
            models[name],
            context.data(MODELS[name], "test"),
            others={other: models[other]},
            n=sizes.faces,
            seed=context.seed,
            observe=context.observe,
        )
        for name, other in COMPARED
    )
    yield from (balanced_labels(context), background_stays(smile), smile_is_cheekbones(smile))
    requested = sure_when_requested(models["celeba-smile"], smile, sizes.face_maps)
    yield smiles_reach(smile, *requested)
    painted = {name: models[name] for name in COMPARED[1]}
    yield lipstick_is_makeup(lipstick, {name: stages(model) for name, model in painted.items()})
    training = context.data(MODELS["celeba-lipstick"], "train")
    yield others_miss_it(
        lipstick, training, painted, sizes.face_maps, context.seed, context.observe
    )
    yield whole_face(lipstick)


def balanced_labels(context: Context) -> Measurement:
    """Count how often each label occurs."""
    labels = {name: context.data(dataset, "test").labels for name, dataset in MODELS.items()}
    shares = {name: proportion(values == 1) for name, values in labels.items()}
    least = limits("labels")["least"]
    return Measurement("labels", shares, [[share.high >= least for share in shares.values()]])


def sure_when_requested(model: Model, smile: Audit, n: int) -> tuple[Interval, float]:
    """Share of stored faces with p(q) > 1 − 10⁻⁴ if that is requested, and the mean α."""
    q = smile.flips.q[:n]
    made = model.explain(smile.images[:n], q[:, None], confidence=REQUESTED)
    p_q = made.convincing_certificate.verdict[:, 0].cpu().gather(1, q[:, None])[:, 0]
    return proportion(p_q > SURE), float(made.alpha.mean())


def smiles_reach(smile: Audit, requested: Interval, alpha: float) -> Measurement:
    """C(x̂) = q, and p(q)."""
    q, posterior = smile.flips.q, smile.after.posterior.double()
    p_q = posterior.gather(1, q[:, None])[:, 0]
    reached, sure = proportion(posterior.argmax(1) == q), proportion(p_q > SURE)
    wanted = limits("faces-sure")["share"]
    return Measurement(
        "faces-sure",
        {
            "reached": reached,
            "sure": sure,
            "sure_when_asked": requested,
            "alpha_when_asked": alpha,
            "median_p_q": float(p_q.median()),
        },
        [share_votes(reached, wanted), share_votes(sure, wanted)],
        {"requested": REQUESTED},
    )


def background_stays(smile: Audit) -> Measurement:
    """Density of the change by region, where 1 is as much as the area."""
    density = {region.name: region.density for region in smile.regions}
    limit = limits("background")
    votes = [
        density["mouth"].low > limit["density"],
        density["face"].low > limit["density"],
        density["background"].high < limit["background"],
    ]
    return Measurement("background", density, [votes], {"change": smile.overall.change})


def stages(model: Model) -> str:
    """Name the stages of training that the model went through."""
    distilled = ["distilled from a teacher"] if model.recipe.distillation_weight > 0 else []
    refined = ["fine-tuned"] if model.recipe.finetuning is not None else []
    return " and ".join(distilled + refined) or "neither distilled nor fine-tuned"


def lipstick_is_makeup(lipstick: Audit, trained: Mapping[str, str]) -> Measurement:
    """Compare the maps of both models for the same faces; maps of other faces are the control."""
    measured = _similar(lipstick, "lipstick-makeup", "identical")
    numbers = {"mean_maps": lipstick.comparisons[0].mean_maps, "recipes": dict(trained)}
    alike = len(set(trained.values())) == 1
    return replace(
        measured,
        numbers={**measured.numbers, **numbers},
        words={
            **measured.words,
            "trained": " and ".join(f"{name} was {how}" for name, how in trained.items()),
        },
        chosen={"recipes_differ": ["same" if alike else "different"]},
    )


def _similar(result: Audit, name: str, threshold: str) -> Measurement:
    compared = result.comparisons[0]
    same, control = compared.same.absolute, compared.shuffled.absolute
    return Measurement(
        name,
        {"same": compared.same, "shuffled": compared.shuffled, "agreement": compared.agreement},
        [[same.low > control.high, same.low > limits(name)[threshold]]],
        {"n": compared.n},
    )


def smile_is_cheekbones(smile: Audit) -> Measurement:
    """Compare the models of smiles and high cheekbones in the same way."""
    return _similar(smile, "smile-cheekbones", "similar")


def others_miss_it(
    lipstick: Audit,
    training: Dataset,
    models: Mapping[str, Model],
    n: int,
    seed: int,
    observe: Observer = ignore,
) -> Measurement:
    """Make the same comparison with the maps of an established method."""
    n = min(n, len(lipstick.index))
    images, maps = lipstick.images[:n], []
    done = counter(observe, f"{LABELS[METHOD]} of lipstick and makeup", len(models))
    for model in models.values():
        p = torch.cat([model.predict(part) for part in images.split(25)]).argmax(1)
        made = heatmaps(
            ExplainedINN(model.classifier, model.mu_bar),
            model.pixels(images),
            p,
            1 - p,
            METHOD,
            baselines=model.pixels(training.images[:20]),
            generator=torch.Generator().manual_seed(seed),
            batch_size=8,
        )
        maps.append(made.maps.cpu())
        done(len(maps))
    a, b = map(importance, maps)
    ranks, rolled = (rank_similarity(a, other).double() for other in (b, b.roll(1, 0)))
    columns = (map_similarity(*maps).abs(), ranks, rolled, ranks - rolled)
    cosine, same, control, beyond = means(*columns, seed=seed)
    ours = lipstick.comparisons[0].same.absolute
    return Measurement(
        "others-miss-it",
        {"cosine": cosine, "rank": same, "rank_control": control, "ecinn": ours},
        [[cosine.high < ours.low, not beyond.low > 0]],
        {"n": n, "method": LABELS[METHOD]},
    )


def whole_face(lipstick: Audit) -> Measurement:
    """Locate the change that the lipstick model makes."""
    density = {region.name: region.density for region in lipstick.regions}
    share = {region.name: region.share for region in lipstick.regions}
    limit = limits("whole-face")
    votes = [
        density["eyes"].low > limit["chance"],
        density["cheeks"].low > limit["chance"],
        share["mouth"] < limit["mouth"],
    ]
    rows = [[region.name, region.share, region.density] for region in lipstick.regions]
    return Measurement("whole-face", {"density": density, "share": share}, [votes], rows=rows)


def measure_trade_off(context: Context) -> Iterator[Measurement]:
    """Measure the claim about β where models trained at increasing β are at hand."""
    path = beta_models.find(context.beta)
    if path is not None:
        yield trade_off(beta_models.read(path))


def trade_off(result: TradeOff) -> Measurement:
    """Errors and quality should fall with β, and both be nearly the best at β near one."""
    n, models = result.training["test_images"], range(len(result.beta))
    errors = [wilson(round(error * n), n) for error in result.error]
    convinced = [wilson(result.convinced[k], result.judged[k]) for k in models]
    near = min(models, key=lambda k: abs(math.log(result.beta[k])))
    best = max(convinced, key=lambda share: share.mean)
    least = min(errors, key=lambda share: share.mean)
    falls = {
        "errors_fall": falling([error.mean for error in errors]),
        "fewer_convince": falling([share.mean for share in convinced]),
        "distance_grows": falling([-distance for distance in result.frechet]),
    }
    votes = {name: share >= limits("beta")["monotone"] for name, share in falls.items()} | {
        "convinces_best": convinced[near].mean >= best.low,
        "errs_least": errors[near].mean <= least.high,
    }
    columns = {
        "beta": result.beta,
        "error": errors,
        "bits_per_dim": result.bits_per_dim,
        "reached_q": result.reached_q,
        "convinced": convinced,
        "frechet": result.frechet,
    }
    return Measurement(
        "beta",
        columns,
        [list(votes.values())],
        {
            "models": len(result.beta),
            "training": result.training,
            "near": result.beta[near],
            "convinced_near": convinced[near],
            "convinced_best": best,
            "error_near": errors[near],
            "error_least": least,
            "falls": falls,
        },
        {
            "held": [name for name, holds in votes.items() if holds],
            "failed": [name for name, holds in votes.items() if not holds],
        },
        list(zip(*columns.values(), strict=True)),
    )


def falling(values: Sequence[float]) -> float:
    """Share of all pairs of which the later value is the smaller."""
    pairs = list(itertools.combinations(values, 2))
    return sum(b < a for a, b in pairs) / max(len(pairs), 1)
