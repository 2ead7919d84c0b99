"""Every claim of the paper, measured: `ecinn paper claims`."""

from dataclasses import dataclass

from ecinn.attribution.heatmaps import METHODS
from ecinn.data.planted import FAKE_MNIST_CUE
from ecinn.studies.benchmark.record import jsonable
from ecinn.studies.benchmark.side_by_side import draw_pairs
from ecinn.studies.judges import Judges, load_judges
from ecinn.studies.paper import claim_counterfactuals as digits
from ecinn.studies.paper import claim_heatmaps as maps
from ecinn.studies.paper import claim_planted as planted
from ecinn.studies.paper import claim_wording as wording
from ecinn.studies.paper.artefact import Artefact, Context, Made
from ecinn.studies.paper.claim import Claim, page
from ecinn.studies.paper.claim_averages import averages_cancel
from ecinn.studies.paper.claim_faces import COMMAND, face_claims
from ecinn.studies.paper.claim_measures import explained_sample
from ecinn.studies.paper.claim_strokes import features_kept
from ecinn.studies.paper.claim_trade_off import trade_off_found

INTRODUCTION = """# The paper's claims, tested

Every claim of the paper in our words, with what was measured of it here. Written by
`ecinn paper claims --celeba DIR` from the shipped models and test images drawn at random.
The limits between verdicts are ours. Brackets are intervals of 95 %: Wilson's for shares, the
bootstrap's for the rest, unless another is named. *Vague* means that the text leaves
open what is meant."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured; the defaults take some minutes on two CPU cores."""

    digits: int = 1000
    searched: int = 64
    """Digits that gradient searches are run on."""
    maps: int = 32
    """Digits whose heatmaps are made."""
    twins: int = 6
    """Networks of every activation, and the images that each is trained on."""
    twin_images: int = 16_384
    averaged: int = 400
    """Training images of every class, for means of latents and of features."""
    faces: int = 100
    face_maps: int = 8


def measure_claims(
    context: Context,
    sizes: Sizes = Sizes(),  # noqa: B008
) -> list[Claim]:
    """All claims; those of faces only where CelebA is given."""
    judges = load_judges("mnist")
    claims = [
        *_digit_claims(context, sizes, judges),
        *_planted_claims(context, sizes, judges),
        *_heatmap_claims(context, sizes, judges),
    ]
    if context.celeba is None:
        claims.append(_without_faces())
    else:
        claims += face_claims(context, sizes.faces, sizes.face_maps)
    return [*claims, trade_off_found(context.beta), *wording.untested()]


def _digit_claims(context: Context, sizes: Sizes, judges: Judges) -> list[Claim]:
    data, seed = context.data("mnist", "test"), context.seed

    def observe(done: int) -> None:
        context.observe("explaining digits", done, sizes.digits)

    sample = explained_sample(context.model("mnist"), data, sizes.digits, seed, observe)
    return [
        digits.two_evaluations(sample),
        digits.searches(sample, judges, min(sizes.searched, sizes.digits)),
        digits.exact_inverse(sample),
        digits.nearest_mean(sample, min(200, sizes.digits)),
        averages_cancel(context, judges, sizes.digits, sizes.averaged),
        digits.minimal(sample, min(200, sizes.digits)),
        digits.tipping_points(sample),
        wording.third_class(sample),
        digits.reaches_target(sample),
        wording.alpha_1(sample),
        wording.which_alpha(sample),
        wording.same_class(sample),
        digits.torn_oracles(sample, judges),
        digits.convinces_others(sample, judges),
        digits.realistic(sample, judges, data),
        features_kept(sample, data, seed),
        digits.diverse(sample),
        wording.comparable_errors(sample, judges),
        wording.bits_per_dim(sample),
    ]


def _planted_claims(context: Context, sizes: Sizes, judges: Judges) -> list[Claim]:
    data, cue = context.data("fakemnist", "test"), FAKE_MNIST_CUE

    def observe(done: int) -> None:
        context.observe("explaining dots", done, sizes.digits)

    model = context.model("fakemnist")
    sample = explained_sample(model, data, sizes.digits, context.seed, observe)
    return [
        planted.few_class_pixels(cue),
        planted.only_dots_change(sample, cue, judges, context.seed),
        planted.reaches_target(sample),
        planted.tipping_points_have_no_dot(sample, cue),
        planted.nothing_says_nothing(sample, cue),
    ]


def _heatmap_claims(context: Context, sizes: Sizes, judges: Judges) -> list[Claim]:
    model, seed, n = context.model("mnist"), context.seed, sizes.maps
    test, training = context.data("mnist", "test"), context.data("mnist", "train")
    pairs = draw_pairs(model, test, n, seed)
    explained = maps.explained_digits(model, pairs, training, n, seed)
    steps = len(METHODS)
    made = explained.all_maps(
        explained.inn,
        METHODS,
        lambda done: context.observe("heatmaps of digits", done, steps),
    )
    inn = maps.noise_of(made)
    cnn = maps.OnPixels(judges.networks.convolutional).to(model.device).eval()
    on_cnn = maps.noise_of(explained.all_maps(cnn, maps.GRADIENT_METHODS))
    networks = len(maps.ACTIVATIONS) * sizes.twins
    twins = maps.relu_twins(
        explained,
        training,
        test.first(2000),
        images=sizes.twin_images,
        networks=sizes.twins,
        observe=lambda done: context.observe("networks without ReLU", done, networks),
    )
    return [
        maps.less_noisy(inn),
        maps.faithful(explained, made, seed),
        maps.less_noisy_with_relu(inn, on_cnn),
        maps.relu_is_the_cause(twins, inn),
    ]


def _without_faces() -> Claim:
    return Claim(
        "faces",
        "4.3",
        "Faces: smiles that open, lipstick that is read from makeup, backgrounds that stay.",
        "untested",
        f"Needs CelebA's pictures: `{COMMAND}`.",
        figure="figure-8",
        command=COMMAND,
    )


def _make(context: Context) -> Made:
    claims = measure_claims(context)
    return Made(pages={"claims": page(claims, INTRODUCTION)}, data={"claims": jsonable(claims)})


CLAIMS = Artefact("claims", "Every claim of the paper with what was measured of it here", _make)
