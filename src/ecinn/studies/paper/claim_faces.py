"""Claims about faces, which need CelebA's pictures."""

from collections.abc import Callable, Mapping

import torch

from ecinn.attribution.heatmaps import HeatmapMethod, heatmaps
from ecinn.attribution.scores import ExplainedINN
from ecinn.auditing.measurement import Audit, Rate, audit, rate
from ecinn.data.dataset import Dataset
from ecinn.metrics.heatmaps import importance, rank_similarity
from ecinn.metrics.statistics import bootstrap_interval, paired_difference_interval
from ecinn.model import Model
from ecinn.studies.benchmark.heatmap_measures import LABELS
from ecinn.studies.paper.artefact import Context
from ecinn.studies.paper.claim import (
    CLAIMS_COMMAND,
    Claim,
    number,
    of_share,
    of_votes,
    percent,
    table,
    worst,
)

COMMAND = f"{CLAIMS_COMMAND} --celeba DIR"
AUDIT_COMMAND = "ecinn audit celeba-lipstick --with celeba-makeup --celeba DIR"
MODELS = {
    "celeba-smile": "celeba/Smiling",
    "celeba-cheekbones": "celeba/High_Cheekbones",
    "celeba-lipstick": "celeba/Wearing_Lipstick",
    "celeba-makeup": "celeba/Heavy_Makeup",
}
METHOD: HeatmapMethod = "gradient_shap"
"""The established method that two models' maps are compared by: the cheapest that converges."""

SURE = 1 - 1e-4
"""Figure 8's p(q)."""
ASKED = 1 - 1e-5
"""As `confidence=`, so that rounding to 8 bits leaves more than `SURE`."""

Observe = Callable[[str, int, int], None]


def face_claims(context: Context, n: int, maps: int) -> list[Claim]:
    """All of them, from two audits."""
    lipstick = _audit(context, "celeba-lipstick", "celeba-makeup", n)
    smile = _audit(context, "celeba-smile", "celeba-cheekbones", n)
    models = {name: context.model(name) for name in ("celeba-lipstick", "celeba-makeup")}
    training = context.data(MODELS["celeba-lipstick"], "train")
    return [
        balanced_labels(context),
        smiles_reach(smile, *sure_when_asked(context.model("celeba-smile"), smile, maps)),
        background_stays(smile),
        lipstick_is_makeup(lipstick, {name: recipe(model) for name, model in models.items()}),
        others_do_not_see(lipstick, training, models, maps, context.seed, context.observe),
        whole_face(lipstick),
        smile_is_cheekbones(smile),
    ]


def _audit(context: Context, name: str, other: str, n: int) -> Audit:
    return audit(
        context.model(name),
        context.data(MODELS[name], "test"),
        others={other: context.model(other)},
        n=n,
        seed=context.seed,
        observe=lambda what, done, total: context.observe(f"{name}: {what}", done, total),
    )


def balanced_labels(context: Context) -> Claim:
    """How often each label occurs."""
    shares = {
        name: rate(context.data(dataset, "test").labels == 1) for name, dataset in MODELS.items()
    }
    said = "; ".join(f"{name.removeprefix('celeba-')} {percent(s)}" for name, s in shares.items())
    return Claim(
        "labels",
        "4.3",
        "Every label that is predicted occurs in at least 45 % of the faces.",
        of_votes([share.high >= 0.45 for share in shares.values()]),
        f"In the test faces here: {said}. The paper counts CelebA-HQ, another selection.",
        command=COMMAND,
        numbers=shares,
    )


def sure_when_asked(model: Model, smile: Audit, n: int) -> tuple[Rate, float]:
    """How often p(q) of stored faces exceeds 1 − 10⁻⁴ if that is asked for, and at which α."""
    q = smile.flips.q[:n]
    made = model.explain(smile.images[:n], q[:, None], confidence=ASKED)
    of_q = made.convincing_certificate.verdict[:, 0].cpu().gather(1, q[:, None])[:, 0]
    return rate(of_q > SURE), float(made.alpha.mean())


def recipe(model: Model) -> str:
    """Which stages of training it went through."""
    recipe = model.checkpoint.recipe
    taught, refined = recipe.distillation_weight > 0, recipe.finetuning is not None
    if taught and refined:
        return "taught and refined"
    return "taught" if taught else "refined" if refined else "neither taught nor refined"


def smiles_reach(smile: Audit, asked: Rate, alpha: float) -> Claim:
    """C(x̂) = q, and how sure."""
    q = smile.flips.q
    reached = rate(smile.after.posterior.argmax(1) == q)
    of_q = smile.after.posterior.double().gather(1, q[:, None])[:, 0]
    sure = rate(of_q > SURE)
    return Claim(
        "faces-sure",
        "4.3",
        "Convincing faces are read as q with p(q) above 1 − 10⁻⁴.",
        worst([of_share(reached, 0.9), of_share(sure, 0.9)]),
        f"{percent(reached)} of {len(q)} stored faces are read as q; p(q) exceeds 1 − 10⁻⁴ in "
        f"{percent(sure)}, its median is {float(of_q.median()):.4f}. Smoothed labels and a "
        "teacher's probabilities, both ours, teach this classifier not to be surer. A higher "
        f"confidence can be asked for: with `confidence={ASKED}` p(q) of the stored face "
        f"exceeds 1 − 10⁻⁴ in {percent(asked)} of {asked.n}, at α = {alpha:.1f} on average. The "
        "paper says it of the ten faces shown.",
        figure="figure-8",
        command="ecinn benchmark faces --celeba DIR",
        numbers={
            "reached": reached,
            "sure": sure,
            "sure_when_asked": asked,
            "alpha_when_asked": alpha,
            "median_p_q": float(of_q.median()),
        },
    )


def background_stays(smile: Audit) -> Claim:
    """Density of the change by region: 1 is as much as the area."""
    density = {region.name: region.density for region in smile.regions}
    mouth, background = density["mouth"], density["background"]
    votes = [mouth.low > 1, density["face"].low > 1, background.high < 0.5]
    return Claim(
        "background",
        "4.3",
        "For a smile lips, cheeks and eyes change; hair, skin colour and background stay as they "
        "are.",
        of_votes(votes),
        f"Per pixel the mouth changes {number(mouth, 2)} times as much as the picture on average, "
        f"eyes {number(density['eyes'], 2)}, cheeks {number(density['cheeks'], 2)}, the "
        f"background, hair included, {number(background, 2)}: less, but not nothing. Mean change "
        f"{number(smile.overall.change)} of pixels in [0, 1].",
        figure="figure-8",
        command="ecinn audit celeba-smile --celeba DIR",
        numbers=density,
    )


def lipstick_is_makeup(lipstick: Audit, recipes: Mapping[str, str]) -> Claim:
    """Likeness of both models' maps of the same faces, with other faces' maps as the control."""
    compared = lipstick.comparisons[0]
    same, control = compared.same, compared.shuffled
    alike, alike_control = same.absolute, control.absolute
    votes = [alike.low > alike_control.high, alike.low > 0.8]
    made = " and ".join(f"{name} is {how}" for name, how in recipes.items())
    alone = (
        "Both were trained alike"
        if len(set(recipes.values())) == 1
        else "So two recipes are compared beside two labels, and a part of what differs may be "
        "the recipe's"
    )
    return Claim(
        "lipstick-makeup",
        "4.3",
        "Up to a sign, the heatmaps of the lipstick and the makeup model are almost identical.",
        of_votes(votes),
        f"|cos| of the two models' maps of the same {compared.n} faces {number(alike, 2)}, of "
        f"different faces {number(alike_control, 2)}; with both turned to the same class "
        f"{number(same.turned, 2)}; rank correlation of what changes {number(same.rank, 2)}. The "
        f"mean maps are alike to {compared.mean_maps:.2f}. Both predict the same in "
        f"{percent(compared.agreement)}. Almost identical would be above .8. Of the two models "
        f"{made}. {alone}.",
        figure="figure-9",
        command=AUDIT_COMMAND,
        numbers={
            "same": same,
            "shuffled": control,
            "mean_maps": compared.mean_maps,
            "recipes": dict(recipes),
        },
    )


def others_do_not_see(
    lipstick: Audit,
    training: Dataset,
    models: dict[str, Model],
    n: int,
    seed: int,
    observe: Observe,
) -> Claim:
    """The same comparison with an established method's maps."""
    n = min(n, len(lipstick.index))
    images = lipstick.images[:n]
    maps = []
    for number_, model in enumerate(models.values(), 1):
        x = model.pixels(images)
        p = torch.cat([model.predict(part) for part in images.split(25)]).argmax(1)
        inn = ExplainedINN(model.classifier, model.mu_bar)
        generator = torch.Generator().manual_seed(seed)
        made = heatmaps(
            inn, x, p, 1 - p, METHOD, baselines=model.pixels(training.images[:20]),
            generator=generator, batch_size=8,
        )  # fmt: skip
        maps.append(made.maps.cpu())
        observe(f"{LABELS[METHOD]} of lipstick and makeup", number_, len(models))
    a, b = maps
    cosine = (a * b).flatten(1).sum(1) / (a.flatten(1).norm(dim=1) * b.flatten(1).norm(dim=1))
    generator = torch.Generator().manual_seed(seed)
    own = bootstrap_interval(cosine.abs().double(), generator=generator)
    ranks = rank_similarity(importance(a), importance(b))
    rolled = rank_similarity(importance(a), importance(b.roll(1, 0)))
    same, control = (bootstrap_interval(v, generator=generator) for v in (ranks, rolled))
    beyond = paired_difference_interval(ranks, rolled, generator=generator)
    ours = lipstick.comparisons[0].same.absolute
    return Claim(
        "others-miss-it",
        "4.3",
        "ECINNh shows that lipstick is read from makeup; established methods do not.",
        of_votes([own.high < ours.low, not beyond.low > 0]),
        f"{LABELS[METHOD]} on {n} faces: |cos| {number(own, 2)} (ECINNh {number(ours, 2)}), rank "
        f"correlation {number(same, 2)} against {number(control, 2)} of different faces. Ranks "
        "are alike in part because every such map has x minus a baseline as a factor.",
        figure="figure-9",
        command=COMMAND,
        numbers={"cosine": own, "rank": same, "rank_control": control, "ecinn": ours},
    )


def whole_face(lipstick: Audit) -> Claim:
    """Where the lipstick model's change is."""
    density = {region.name: region.density for region in lipstick.regions}
    share = {region.name: region.share for region in lipstick.regions}
    votes = [density["eyes"].low > 1, density["cheeks"].low > 1, share["mouth"] < 0.5]
    return Claim(
        "whole-face",
        "4.3",
        "The lipstick model looks at the whole face and not just the lips.",
        of_votes(votes),
        f"{100 * share['mouth']:.0f} % of the change lies in the mouth's region; density there "
        f"{number(density['mouth'], 2)}, at the eyes {number(density['eyes'], 2)}, at the cheeks "
        f"{number(density['cheeks'], 2)}, in the face {number(density['face'], 2)}, outside "
        f"{number(density['background'], 2)}; 1 is chance.",
        figure="figure-9",
        command=AUDIT_COMMAND,
        numbers={"density": density, "share": share},
        detail=table(
            ["region", "share of the change", "density"],
            [[r.name, f"{100 * r.share:.1f} %", number(r.density, 2)] for r in lipstick.regions],
        ),
    )


def smile_is_cheekbones(smile: Audit) -> Claim:
    """The same of smiles and high cheekbones."""
    compared = smile.comparisons[0]
    alike, control = compared.same.absolute, compared.shuffled.absolute
    return Claim(
        "smile-cheekbones",
        "4.3",
        "A similar observation can be made between smiles and high cheekbones.",
        of_votes([alike.low > control.high, alike.low > 0.5]),
        f"|cos| {number(alike, 2)} on the same {compared.n} faces, {number(control, 2)} on "
        f"different ones; both predict the same in {percent(compared.agreement)}.",
        figure="figure-9",
        command="ecinn audit celeba-smile --with celeba-cheekbones --celeba DIR",
        numbers={"same": compared.same, "shuffled": compared.shuffled},
    )
