"""Measure claims about faces, which need the pictures of CelebA."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ecinn.attribution.heatmaps import METHODS, HeatmapMethod, heatmaps
from ecinn.attribution.scores import ExplainedINN
from ecinn.auditing import Audit, audit
from ecinn.data.celeba import ATTRIBUTES
from ecinn.data.dataset import Dataset
from ecinn.data.face_regions import region_mask
from ecinn.metrics.heatmaps import importance, map_similarity, rank_similarity
from ecinn.metrics.statistics import Interval, proportion
from ecinn.model import Model
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark.face_quality import REAL, REFERENCE, REFERENCE_FACES, measure_realism
from ecinn.studies.benchmark.heatmap_measures import LABELS
from ecinn.studies.benchmark.side_by_side import Pairs
from ecinn.studies.face_judges import LABELS as FACE_LABELS
from ecinn.studies.face_judges import FaceJudges, load_face_judges
from ecinn.studies.judges import shipped_judges
from ecinn.studies.paper.artefact import Context
from ecinn.studies.paper.claim import Measurement, limits, share_votes
from ecinn.studies.paper.claims_heatmaps import faithful
from ecinn.studies.paper.columns import stages
from ecinn.studies.paper.measuring import Bench, mean_difference, means

SMILE, CHEEKBONES, LIPSTICK, MAKEUP = DATASETS = tuple(f"celeba/{label}" for label in FACE_LABELS)
"""The labels of the paper's Figure 9."""
METHOD: HeatmapMethod = "gradient_shap"
"""The established method used to compare the maps of two models: the cheapest that converges."""
BATCH_SIZE = 8
"""Faces that go through the network with gradients at once."""

SURE = 1 - 1e-4
"""The p(q) of Figure 8."""
REQUESTED = 1 - 1e-5
"""The `confidence` to request, so that rounding to 8 bits leaves more than `SURE`."""


def measure(bench: Bench, models: Mapping[str, Model]) -> Iterator[Measurement]:
    """Measure the claims whose models are at hand: one audit of smiles, one of lipstick."""
    if SMILE in models:
        yield from measure_smiles(bench, models[SMILE], models.get(CHEEKBONES))
    if LIPSTICK in models:
        yield from measure_lipstick(bench, models[LIPSTICK], models.get(MAKEUP))


def measure_smiles(bench: Bench, model: Model, cheekbones: Model | None) -> Iterator[Measurement]:
    """Measure all claims about smiles."""
    smile, test, sizes = audited(bench, model, cheekbones), bench.test(model), bench.sizes
    yield smiles_reach(smile, *sure_when_requested(model, smile, sizes.face_maps))
    yield background_stays(smile)
    assert test.attributes is not None
    is_open = test.attributes[smile.index, ATTRIBUTES.index("Mouth_Slightly_Open")].bool()
    yield hard_mouths(smile, is_open.cpu(), bench.context.seed)
    judges, seed = bench.once(face_judges), bench.context.seed
    if judges is not None:
        reference = bench.context.data(model.recipe.dataset, REFERENCE["test"])
        yield unrealistic(smile, judges, reference.first(REFERENCE_FACES), seed)
    if cheekbones is not None:
        yield smile_is_cheekbones(smile)
    pairs = Pairs(smile.index, smile.images, smile.flips.p, smile.flips.q)
    faces = bench.explained(model, pairs, sizes.face_maps)
    done = counter(bench.context.observe, f"heatmaps of {model.name}", len(METHODS))
    maps = faces.maps(faces.inn, METHODS, done, BATCH_SIZE)
    yield faithful(model, faces, maps, seed)


def measure_lipstick(bench: Bench, model: Model, makeup: Model | None) -> Iterator[Measurement]:
    """Measure all claims about lipstick, compared with makeup where there is such a model."""
    lipstick = audited(bench, model, makeup)
    yield whole_face(lipstick)
    if makeup is not None:
        models, context = {each.name: each for each in (model, makeup)}, bench.context
        yield lipstick_is_makeup(lipstick, {name: stages(m) for name, m in models.items()})
        training, n = bench.training(model), bench.sizes.face_maps
        yield others_miss_it(lipstick, training, models, n, context.seed, context.observe)


def audited(bench: Bench, model: Model, other: Model | None) -> Audit:
    """Audit a model on random test faces, compared with another one."""
    context = bench.context
    return audit(
        model,
        bench.test(model),
        others=[] if other is None else [other],
        n=bench.sizes.faces,
        confidence="alpha_1",
        seed=context.seed,
        observe=context.observe,
    )


def balanced_labels(context: Context) -> Measurement:
    """Count how often each label occurs."""
    labels = {name: context.data(name, "test").labels for name in DATASETS}
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


def hard_mouths(smile: Audit, is_open: Bool[Tensor, " batch"], seed: int) -> Measurement:
    """Compare closed with open mouths where faces turn to a smile, and the reverse for a frown.

    By p(q) of the stored counterfactual at α₁, and by the mean |x̂ − x| at the mouth.
    """
    q, generator = smile.flips.q, torch.Generator().manual_seed(seed)
    p_q = smile.after.posterior.double().gather(1, q[:, None])[:, 0]
    mask = region_mask("mouth", *smile.images.shape[2:])
    change = smile.flips.change.double().abs().mean(1)[:, mask].mean(1)
    reached = smile.after.posterior.argmax(1) == q

    def turned(rows: Tensor) -> dict[str, Interval]:
        share = proportion(reached[rows])
        both = means(p_q[rows], change[rows], seed=seed) if rows.any() else [share] * 2
        return {"reached": share, "p_q": both[0], "change": both[1]}

    def compared(target: int) -> dict[str, Any]:
        """Compare mouths in the wrong state for the target with those in the right one."""
        wrong, right = ((q == target) & (is_open == state) for state in (target == 0, target == 1))
        return {
            "wrong": turned(wrong),
            "right": turned(right),
            "less_sure": mean_difference(p_q[wrong], p_q[right], generator),
            "more_change": mean_difference(change[wrong], change[right], generator),
        }

    found = {"opened": compared(1), "closed": compared(0)}
    rows = [
        [turn, mouth, of["reached"].n, of["p_q"], of["reached"], of["change"]]
        for turn, mouth, of in (
            ("a smile", "closed", found["opened"]["wrong"]),
            ("a smile", "open", found["opened"]["right"]),
            ("a frown", "open", found["closed"]["wrong"]),
            ("a frown", "closed", found["closed"]["right"]),
        )
    ]
    votes = []
    for both in found.values():
        votes += [both["less_sure"].high < 0, both["more_change"].low > 0]
    return Measurement("hard-mouths", found, [votes], rows=rows)


def face_judges(bench: Bench) -> FaceJudges | None:
    """Return the shipped judges of faces, if they ship."""
    shipped = "celeba" in shipped_judges()
    return load_face_judges("celeba", bench.context.device) if shipped else None


def unrealistic(smile: Audit, judges: FaceJudges, reference: Dataset, seed: int) -> Measurement:
    """Compare counterfactuals with real faces: shares inside the manifold, Fréchet distances."""
    data = Dataset(smile.images, smile.labels, smile.class_names)
    generator, made = torch.Generator().manual_seed(seed), "counterfactuals"
    changed = {made: smile.flips.counterfactuals}
    found = measure_realism(judges, data, smile.flips.p, changed, reference, generator)
    sets = {(result.target, result.images): result for result in found}
    outside, farther, rows = [], [], []
    for (target, images), result in sets.items():
        distances, shares = result.frechet, result.precision
        means = [distance.mean for distance in distances.values()]
        rows.append([target, images, result.n, *means, *shares.values()])
        if images == made:
            real = sets[target, REAL]
            outside += [share.high < real.precision[judge].low for judge, share in shares.items()]
            farther += [each.low > real.frechet[judge].high for judge, each in distances.items()]
    return Measurement(
        "faces-realistic",
        {"sets": found},
        [outside + farther],
        {"outside": sum(outside), "farther": sum(farther), "compared": len(outside)},
        rows=rows,
    )


def lipstick_is_makeup(lipstick: Audit, trained: Mapping[str, str]) -> Measurement:
    """Compare the maps of both models for the same faces; maps of other faces are the control."""
    measured = _similar(lipstick, "lipstick-makeup", "identical")
    numbers = {"mean_maps": lipstick.comparisons[0].mean_maps, "recipes": dict(trained)}
    said = " and ".join(f"{name} was {how}" for name, how in trained.items())
    alike = "same" if len(set(trained.values())) == 1 else "different"
    return replace(
        measured,
        numbers={**measured.numbers, **numbers},
        words={**measured.words, "trained": said},
        chosen={"recipes_differ": [alike]},
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
            batch_size=BATCH_SIZE,
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
