"""The claims page: columns and their models, verdicts, entries, and the images it measures."""

import dataclasses
import datetime
import functools
import json
import types
from collections.abc import Mapping
from pathlib import Path

import pytest
import scipy.stats
import torch

from ecinn.classifier.checkpoint import Checkpoint, shipped_models
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.classifier.recipes import MNIST, RECIPES
from ecinn.data.dataset import Dataset
from ecinn.drawing.table import Table
from ecinn.drawing.words import show
from ecinn.errors import InputError
from ecinn.flow.network import Stage
from ecinn.metrics.statistics import Interval, bootstrap_interval, proportion
from ecinn.model import Model
from ecinn.pixels import to_pixels
from ecinn.studies.paper import claims, claims_heatmaps, columns
from ecinn.studies.paper.artefact import ARTEFACTS, Context, command
from ecinn.studies.paper.claim import (
    CLAIMS_COMMAND,
    Claim,
    Judgement,
    Measurement,
    Report,
    document,
    entries,
    judge,
    share_votes,
)
from ecinn.studies.paper.columns import NO_FACES, Column
from ecinn.studies.paper.measuring import Bench, Sizes
from helpers.builders import random_images, randomise, small_model

PAPER, PLAIN, TUNED = (column["title"] for column in document()["column"])
FACES = "celeba/Smiling"


def test_the_worst_group_of_votes_decides() -> None:
    def of_share(k: int, n: int) -> str:
        return judge([share_votes(proportion(torch.arange(n) < k), 0.99)])

    assert [of_share(*counts) for counts in ((1000, 1000), (95, 100), (30, 100))] == [
        "supported", "partly", "refuted",
    ]  # fmt: skip
    groups = ([True, True], [True, False], [False, False])
    assert [judge([group]) for group in groups] == ["supported", "partly", "refuted"]
    assert judge([[True], [True, False], [True]]) == "partly"
    assert judge([[True, False], [False]]) == "refuted"


def test_intervals_are_shown_in_order() -> None:
    share = proportion(torch.arange(200) < 30)
    low, high = scipy.stats.binomtest(30, 200).proportion_ci(0.95, method="wilson")
    assert show(share, ".2%") == f"15.00 % [{100 * low:.2f}, {100 * high:.2f}]"
    assert show(Interval(0.5, 0.25, 0.875, 8), ".2f") == "0.50 [0.25, 0.88]"


def test_every_claim_has_a_figure_and_every_threshold_a_reason() -> None:
    artefacts = {artefact.name for artefact in ARTEFACTS}
    for entry in entries().values():
        assert entry.sentence.endswith(".")
        assert not entry.figure or entry.figure in artefacts
        for limit in entry.thresholds.values():
            assert {"value", "reason", "set"} == set(limit)
            assert limit["reason"].endswith((".", ","))
            datetime.date.fromisoformat(limit["set"])


def test_every_claim_can_be_judged_in_some_column() -> None:
    tables = [column["models"] for column in document()["column"]]
    for entry in entries().values():
        assert not entry.models or any({*entry.models} <= {*table} for table in tables)


def given_model(name: str, dataset: str = "mnist") -> Model:
    model = small_model(dataset=dataset)
    recipe = dataclasses.replace(model.recipe, name=name)
    return Model(dataclasses.replace(model.checkpoint, recipe=recipe, metrics={"error": 0.1}))


@pytest.fixture
def context(monkeypatch) -> Context:
    """Ships `mnist` and two models of faces; knows two files."""
    shipped = {
        "mnist": given_model("mnist"),
        "celeba-smile": given_model("celeba-smile", FACES),
        "celeba-makeup": given_model("celeba-makeup", "celeba/Heavy_Makeup"),
    }
    files = {
        "own.safetensors": given_model("mnist-paper"),
        "dots.safetensors": given_model("dots", "fakemnist"),
        "other.safetensors": given_model("other", "shapes"),
        "untested.safetensors": small_model(dataset="mnist"),
    }
    monkeypatch.setattr(columns, "shipped_models", lambda: list(shipped))
    context = Context(celeba=Path("faces"))
    vars(context)["model"] = lambda name: {**shipped, **files}[name]
    return context


def with_files(context: Context, *names: str) -> Context:
    changed = dataclasses.replace(context, paper_models=tuple(map(Path, names)))
    vars(changed)["model"] = context.model
    return changed


def names(column: Column) -> dict[str, str]:
    return {dataset: model.name for dataset, model in column.models.items()}


def test_columns_have_the_models_that_ship_or_are_given(context) -> None:
    paper, plain, tuned = columns.columns(context)
    assert (paper.title, plain.title, tuned.title) == (PAPER, PLAIN, TUNED)
    assert not paper.models
    assert paper.absent == {"mnist": "no model given (`--paper-model FILE`)"}
    assert names(plain) == {"mnist": "mnist"}
    assert plain.absent["fakemnist"] == "no model `fakemnist`"
    assert names(tuned) == {FACES: "celeba-smile", "celeba/Heavy_Makeup": "celeba-makeup"}
    assert tuned.absent["mnist"] == "no model `mnist-finetuned`"
    given = columns.columns(with_files(context, "own.safetensors", "dots.safetensors"))
    assert names(given[0]) == {"mnist": "mnist-paper", "fakemnist": "dots"}
    assert not given[0].absent
    assert [names(column) for column in given[1:]] == [names(plain), names(tuned)]


def test_columns_without_pictures_of_faces_say_so(context) -> None:
    without = dataclasses.replace(context, celeba=None)
    vars(without)["model"] = context.model
    tuned = columns.columns(without)[2]
    assert not tuned.models
    assert tuned.absent[FACES] == NO_FACES


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("other.safetensors",), "is a model of 'shapes': give a model of .*fakemnist, mnist"),
        (("own.safetensors", "own.safetensors"), "two models of 'mnist' were given"),
        (("untested.safetensors",), "untested.safetensors has no test error"),
    ],
)
def test_given_models_are_of_the_paper_and_differ(context, files, message) -> None:
    with pytest.raises(InputError, match=message):
        columns.columns(with_files(context, *files))


def test_every_shipped_model_stands_in_a_column() -> None:
    listed = {name for column in document()["column"] for name in column["models"].values()}
    assert set(shipped_models()) <= listed


def test_a_claim_is_judged_where_all_its_models_are(context) -> None:
    """One is measured, one lacks its model, one column never has such models."""
    found = columns.columns(with_files(context, "own.safetensors"))
    claim = Claim("a", "1", "It is so.", "", ("mnist",))
    judged = {PAPER: {"a": Judgement("partly", "Some.")}, PLAIN: {"a": Judgement("vague", "")}}
    report = claims.report(claim, found, judged, {})
    assert [j.column for j in report.judgements] == [PAPER, PLAIN, TUNED]
    assert [j.verdict for j in report.judgements] == ["partly", "vague", "untested"]
    assert [j.models for j in report.judgements] == [("mnist-paper",), ("mnist",), ()]
    assert report.judgements[2].measured == "no model `mnist-finetuned`"
    assert not report.lacking
    both = dataclasses.replace(claim, models=("mnist", "fakemnist"))
    dots = claims.report(both, found, judged, {})
    assert dots.lacking == {PAPER: ["fakemnist"], TUNED: ["fakemnist"]}
    assert [j.measured for j in dots.judgements] == ["no model `fakemnist`"]
    silent = dataclasses.replace(claim, untested="No judge.")
    nothing = claims.report(silent, found[:1], {PAPER: {}}, {}).judgements
    assert [(j.verdict, j.measured, j.models) for j in nothing] == [
        ("untested", "No judge.", ("mnist-paper",))
    ]
    free = dataclasses.replace(claim, models=())
    assert claims.report(
        free, found, judged, {"a": Judgement("supported", "Yes.")}
    ).judgements == (Judgement("supported", "Yes."),)


def lines(text: str, sentence: str) -> str:
    """The entry of a claim."""
    return text.rpartition(f"**{sentence}**")[2].partition("\n\n**")[0]


def test_the_page_shows_a_verdict_of_every_column(context) -> None:
    found = columns.columns(with_files(context, "own.safetensors"))
    table = Table("", ("n", "k"), (("1", "2"),))
    limit = {"most_of": {"value": 0.5, "set": "2026-01-02", "reason": "It is half."}}
    first = Report(
        Claim(
            "a",
            "4.2",
            "It is so.",
            models=("mnist",),
            about="For all.",
            command="more",
            thresholds=limit,
        ),
        (
            Judgement("supported", "Yes.", table=table, column=PAPER, models=("mnist-paper",)),
            Judgement("refuted", "No.", table=table, column=PLAIN, models=("mnist",)),
            Judgement("untested", "no model `b`", column=TUNED),
        ),
    )
    second = Report(Claim("b", "C", "It is always so."), (Judgement("supported", "Sure."),))
    third = Report(
        Claim("c", "4.1", "Dots move.", models=("fakemnist",), command=CLAIMS_COMMAND),
        (Judgement("untested", "no model given (`--this`)", column=PLAIN),),
        {PAPER: ["fakemnist"], TUNED: ["fakemnist"]},
    )
    text = claims.page([first, second, third], found)
    head = f"| claim (section) | {claims.FREE} | {PAPER} | {PLAIN} | {TUNED} |"
    assert head in text
    assert "| It is so. (4.2) | – | **supported** | **refuted** | no model |" in text
    assert "| It is always so. (C) | **supported** | – | – | – |" in text
    assert "| Dots move. (4.1) | – | – | no model given | – |" in text
    assert (
        f"3 claims: *{claims.FREE}* 1 supported; *{PAPER}* 1 supported; *{PLAIN}* 1 refuted, "
        f"1 untested; *{TUNED}* 1 untested." in text
    )
    entry = lines(text, "It is so.")
    assert f"- *{PAPER}*, `mnist-paper`: **supported**. Yes.\n" in entry
    assert f"- *{TUNED}*: **untested**, no model `b`.\n" in entry
    assert "For all. Limits: *most of* 0.5, set 2026-01-02 (It is half). Measured by" in entry
    assert "Measured by `ecinn paper claims`; in more detail: `more`." in entry
    rows = "| mnist-paper | 1 | 2 |\n| mnist | 1 | 2 |"
    assert f"| model | n | k |\n|---|---|---:|\n{rows}" in entry
    always = lines(text, "It is always so.")
    assert "*Supported.* Sure.\n\nThis does not depend on the models of the columns." in always
    dots = lines(text, "Dots move.")
    assert f"Not judged in *{PAPER}* or *{TUNED}*, without a model of fakemnist." in dots
    assert "Measured by" not in dots
    assert "--limit 30" in claims.page([], found, 30)
    assert "--limit" not in text
    assert "`mnist-paper`" in text.partition("3 claims")[0]
    assert "no model `mnist-finetuned`" in text.partition("3 claims")[0]


def test_models_that_stand_in_several_columns_are_explained_once(sample, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(
        "ecinn.studies.paper.measuring.explained_sample", lambda *a: calls.append(a) or sample
    )
    context, images = Context(seed=5), random_images(9, 1, 3, 0)
    vars(context)["data"] = lambda *name, known={("tiny", "test"): images}: known[name]
    bench, model, other = Bench(context, Sizes(digits=7)), small_model(), small_model()
    assert all(bench.sample(m) is sample for m in (model, other, model))
    assert [call[0] for call in calls] == [model, other]
    assert calls[0][:4] == (model, images, 7, 5)

    def shared(given: Bench) -> int:
        calls.append(given)
        return 9

    assert bench.once(shared) == bench.once(shared) == 9
    assert calls[2:] == [bench]


def measured_in(monkeypatch, context: Context) -> list[tuple[str, ...]]:
    """Names of the models with which every module was called."""
    asked = []

    def stub(name: str):
        def measure(bench: Bench, *models) -> list[Measurement]:
            given = models[0] if isinstance(models[0], Mapping) else dict(enumerate(models))
            asked.append((name, *(model.name for model in given.values())))
            return []

        return types.SimpleNamespace(measure=measure)

    for name in ("method", "digits", "heatmaps", "faces"):
        monkeypatch.setattr(claims, f"claims_{name}", stub(name))
    planted = stub("planted")
    planted.averages_cancel = stub("cancel").measure
    monkeypatch.setattr(claims, "claims_planted", planted)
    for column in columns.columns(context):
        list(claims.measure_models(Bench(context, Sizes()), column.models))
    return asked


def test_every_column_is_measured_with_its_own_models(context, monkeypatch) -> None:
    files = with_files(context, "own.safetensors", "dots.safetensors")
    asked = measured_in(monkeypatch, files)
    of_digits = ("method", "digits", "heatmaps")
    assert asked == [
        *((name, "mnist-paper") for name in of_digits),
        ("planted", "dots"), ("cancel", "dots", "mnist-paper"), ("faces", "mnist-paper", "dots"),
        *((name, "mnist") for name in of_digits), ("faces", "mnist"),
        ("faces", "celeba-smile", "celeba-makeup"),
    ]  # fmt: skip


def nearest_mean_model(name: str, data: Dataset) -> Model:
    """A small random flow with the mean latents of real classes, which is often right."""
    architecture = dataclasses.replace(
        MNIST.architecture, stages=(Stage(1, 4), Stage(1, 4)), dense_width=8
    )
    classifier = GenerativeClassifier(architecture).eval().requires_grad_(requires_grad=False)
    z = randomise(classifier).encode(to_pixels(data.images))
    means = torch.stack([z[data.labels == label].mean(0) for label in range(10)])
    classifier.mu.copy_(means)
    recipe = dataclasses.replace(RECIPES[name], architecture=architecture)
    detector, metrics = OODDetector((0.0, 1.0)), {"error": 0.3, "n": 1_000}
    return Model(Checkpoint(recipe, classifier, means, detector, data.class_names, metrics))


@pytest.mark.slow
def test_all_claims_are_on_the_page() -> None:
    """Small flows of digits stand in two columns; the paper's models and faces are absent."""
    sizes = dataclasses.replace(Sizes().limited(20), twins=1, twin_images=192, averaged=12)
    context, whole = Context(), Context()
    vars(context)["data"] = lambda *of: whole.data(*of).first(400)
    vars(context)["model"] = functools.cache(
        lambda name: nearest_mean_model(name, context.data(RECIPES[name].dataset, "test"))
    )
    found = columns.columns(context)
    reports = claims.measure_claims(context, found, sizes)
    shipped = {PLAIN: {"mnist", "fakemnist"}, TUNED: {"mnist"}}
    assert [report.claim.name for report in reports] == list(entries())
    text = claims.page(reports, found)
    for report in reports:
        assert text.count(report.claim.sentence) == 2  # in the overview and with the measurement
        for judged in report.judgements:
            assert judged.measured in text
            assert "nan %" not in judged.measured
            at_hand = {*report.claim.models} <= shipped.get(judged.column, set())
            if report.claim.models:
                assert (judged.verdict != "untested") == at_hand
    assert "--celeba" in text  # faces are absent, and the page says so
    assert "--paper-model FILE" in text


def test_networks_without_relu_explain_test_digits_by_their_labels(monkeypatch) -> None:
    context = Context(seed=2)
    sets = {"test": random_images(50, 1, 3, 1), "train": random_images(400, 1, 3, 2)}
    vars(context)["data"] = lambda dataset, split: sets[split]
    given = {}
    monkeypatch.setattr(
        claims_heatmaps, "relu_twins", lambda *a, **more: given.update(a=a, **more) or {"ReLU": []}
    )
    bench = Bench(context, Sizes(maps=12, twins=4, twin_images=100))
    assert claims_heatmaps.twins_of_digits(bench) == {"ReLU": []}
    digits, training, test = given["a"]
    index = torch.randperm(50, generator=torch.Generator().manual_seed(2))[:12]
    assert torch.equal(digits.x, (sets["test"].images[index] + 0.5) / 256)
    assert torch.equal(digits.p, sets["test"].labels[index])
    assert bool((digits.q != digits.p).all())
    assert set(digits.q.tolist()) <= {0, 1, 2}
    assert torch.equal(training.images, sets["train"].images[:100])
    assert torch.equal(test.images, sets["test"].images)
    assert given["networks"] == 4


def test_artefact_is_a_page_and_json(context, monkeypatch) -> None:
    share = bootstrap_interval(torch.rand(9).double(), generator=torch.Generator().manual_seed(0))
    claim = Claim("a", "1", "It is so.", models=("mnist",))
    judged = Judgement("supported", "Yes.", {"share": share}, None, PLAIN, ("mnist",))
    given = {}

    def measured(context, columns, sizes) -> list[Report]:
        given.update(sizes=sizes, columns=columns)
        return [Report(claim, (judged,))]

    monkeypatch.setattr(claims, "measure_claims", measured)
    limited = dataclasses.replace(context, limit=30)
    vars(limited)["model"] = context.model
    made = claims.make(limited)
    assert given["sizes"] == Sizes().limited(30)
    assert "`mnist`: **supported**. Yes." in made.pages["claims"]
    data = json.loads(json.dumps(made.data["claims"]))
    assert data["claims"][0]["judgements"][0]["numbers"]["share"]["n"] == 9
    plain = data["columns"][1]
    assert plain["title"] == PLAIN
    assert plain["models"]["mnist"]["name"] == "mnist"
    assert plain["absent"]["fakemnist"] == "no model `fakemnist`"
    claims.make(context)
    assert given["sizes"] == Sizes()


def test_the_command_names_its_limit_and_given_models() -> None:
    context = Context(seed=4, paper_models=(Path("a"), Path("b")), limit=60)
    expected = (
        "ecinn paper claims --out OUT --paper-model FILE --paper-model FILE --limit 60 --seed 4"
    )
    assert command("claims", context) == expected
