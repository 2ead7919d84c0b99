"""The benchmarks: every figure by another route, failures counted, files whole."""

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import torch
from PIL import Image
from torch import nn

from ecinn.attribution.search import Counterfactuals
from ecinn.auditing.verdict import bits_per_dim
from ecinn.cli import benchmark as command
from ecinn.data.dataset import Dataset
from ecinn.data.mnist import load_mnist
from ecinn.data.planted import FAKE_MNIST_CUE, load_fake_mnist
from ecinn.drawing.table import Table
from ecinn.errors import InputError
from ecinn.metrics.counterfactuals import elastic_net
from ecinn.metrics.statistics import Interval
from ecinn.model import Model, load
from ecinn.pixels import to_pixels, to_uint8
from ecinn.studies.benchmark import authors, authors_files, consistency, record, side_by_side
from ecinn.studies.benchmark.authors import (
    authors_tables,
    confidence_curve,
    control_line,
    our_counterfactuals,
    score_authors,
)
from ecinn.studies.benchmark.authors_files import (
    AuthorsBenchmark,
    ClassAutoencoders,
    StoredCounterfactuals,
    load_authors,
    load_autoencoders,
)
from ecinn.studies.benchmark.authors_scores import score as score_as_published
from ecinn.studies.benchmark.quality import (
    Panel,
    find_judges,
    predicted_classes,
    random_of_class,
    real_at_distance,
    second_opinion,
)
from ecinn.studies.benchmark.side_by_side import (
    METHODS,
    Bench,
    ImageScores,
    Made,
    Pairs,
    compare_methods,
    draw_pairs,
    make,
    score,
)
from ecinn.studies.benchmark.side_by_side_report import cost_figure, side_by_side_tables
from ecinn.studies.judges import Judges, load_judges
from helpers.authors import PUBLISHED, needs_the_authors, write_folder
from helpers.command_line import fails, run

pytestmark = pytest.mark.slow

N = 6


@pytest.fixture(scope="module")
def judges() -> Judges:
    return load_judges("mnist")


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_mnist("test").first(80)


@pytest.fixture(scope="module")
def compared(mnist: Model, digits: Dataset, judges: Judges):
    """Two methods, one of which raises, and all that was kept on the way."""
    kept: list[tuple[side_by_side.SideBySide, Pairs, dict[str, Made]]] = []

    def broken(model, load_training, observe):
        def run(images, q):
            raise RuntimeError("out of\nluck")

        return run

    compare_methods(
        mnist, digits, judges, ["ecinn", "model-means", "nearest-image"],
        lambda: load_mnist("train").first(100), n=N, seed=3, batch_size=4,
        known={**METHODS, "model-means": broken},
        keep=lambda result, pairs, made: kept.append((result, pairs, dict(made))),
    )  # fmt: skip
    return kept


@pytest.fixture
def few_real_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with features of 500 real images instead of 10,000, where no distance is checked."""
    usual = Judges.features
    monkeypatch.setattr(Judges, "features", lambda self, images: usual(self, images[:500]))


def about(model: Model, judges: Judges | None = None) -> dict:
    return record.provenance("ecinn something", model, judges)


def page_of(tables, model: Model) -> str:
    return record.Results("x", tables, {}, [about(model)]).markdown()


def test_pairs_are_random_test_images_with_another_class_as_target(mnist, digits) -> None:
    pairs = draw_pairs(mnist, digits, 40, seed=1)
    assert len(set(pairs.index.tolist())) == 40
    assert torch.equal(pairs.images, digits.images[pairs.index])
    assert torch.equal(pairs.p, mnist.predict(pairs.images).argmax(1))
    assert bool((pairs.q != pairs.p).all())
    assert len(set(((pairs.q - pairs.p) % 10).tolist())) > 5
    assert torch.equal(pairs.q, draw_pairs(mnist, digits, 40, seed=1).q)
    assert not torch.equal(pairs.index, draw_pairs(mnist, digits, 40, seed=2).index)
    for n in (1, 81):
        with pytest.raises(InputError, match="from 2 to 80"):
            draw_pairs(mnist, digits, n, seed=1)


def test_figures_of_ecinn_are_those_of_its_explanations(mnist, digits, judges, compared) -> None:
    result, pairs, made = compared[-1]
    row = result.methods[0]
    explanation = mnist.explain(pairs.images, pairs.q[:, None])
    images = made["ecinn"].images
    # Other batches round differently, by a last bit before the rounding to 8 bits.
    assert (images.int() - explanation.stored_convincing[:, 0].int()).abs().max() <= 1
    change = (images.numpy().astype(float) - pairs.images.numpy()).reshape(N, -1) / 255
    l1, l2 = np.abs(change).sum(1), np.sqrt((change**2).sum(1))
    scores = row.images
    assert isinstance(scores, ImageScores)
    assert scores.l1.mean == pytest.approx(l1.mean())
    assert scores.l2.mean == pytest.approx(l2.mean())
    assert scores.elastic_net.mean == pytest.approx((l1 + l2).mean())
    assert row.reached.mean == float(explanation.convincing_certificate.reached.float().mean())
    assert row.passes is not None
    assert (row.passes.mean, row.failed, row.raised, row.errors) == (2, 0, 0, ())
    for family, verdict in judges.verdicts(images).items():
        assert scores.verdict.oracles[family].mean == pytest.approx(
            float((verdict == pairs.q).float().mean())
        )
    assert scores.verdict.truth is scores.verdict.inside is scores.verdict.kept is None

    c = images.numpy() / 255 - 0.5
    by_q = judges.reconstruct(images, pairs.q).numpy()
    by_p = judges.reconstruct(images, pairs.p).numpy()
    im1 = ((c - by_q) ** 2).sum((1, 2, 3)) / (((c - by_p) ** 2).sum((1, 2, 3)) + 1e-5)
    assert scores.im1.mean == pytest.approx(im1.mean(), rel=1e-5)
    by_all = judges.reconstruct(images).numpy()
    im2 = ((by_q - by_all) ** 2).sum((1, 2, 3)) / (np.abs(c).sum((1, 2, 3)) + 1e-5)
    assert scores.im2.mean == pytest.approx(im2.mean(), rel=1e-4)


def test_realism_is_the_code_length_of_the_stored_image(mnist, compared) -> None:
    _, pairs, made = compared[-1]
    images = made["ecinn"].images
    bits = bits_per_dim(mnist, images, torch.Generator().manual_seed(3))
    assert compared[-1][0].methods[0].images.bits_per_dim.mean == pytest.approx(float(bits.mean()))
    white = torch.full_like(pairs.images, 255)
    assert bool((bits_per_dim(mnist, white, torch.Generator().manual_seed(3)) > bits).all())
    assert 1.5 < float(bits.mean()) < 4


def test_method_that_raises_is_counted_and_the_others_go_on(mnist, judges, compared) -> None:
    assert [len(result.methods) for result, _, _ in compared] == [1, 2, 3]
    broken = compared[-1][0].methods[1]
    assert (broken.raised, broken.failed, broken.reached.mean) == (N, 0, 0)
    assert (broken.images, broken.seconds) == (None, None)
    assert broken.errors == ("RuntimeError: out of luck",) * 2
    tables = side_by_side_tables(compared[-1][0], about(mnist, judges))
    page = page_of(tables, mnist)
    assert "RuntimeError: out of luck" in page
    assert page.count("| model-means | 0.0 [0.0, 39.0] | 0.0 [0.0, 39.0] | – |") == 1
    text = json.dumps(record.jsonable(compared[-1][0]), allow_nan=False)
    assert "out of luck" in text


def test_an_error_in_one_batch_leaves_the_others(mnist, digits, judges) -> None:
    pairs = draw_pairs(mnist, digits, 10, seed=0)

    def run(images, q):
        if len(seen := calls) == 1:
            seen.append(0)
            raise MemoryError
        calls.append(0)
        return Counterfactuals(
            x=to_pixels(images), p=q[:, 0], q=q, images=to_pixels(images)[:, None],
            passes=torch.full_like(q, 7), failed=q % 2 == 0,
        )  # fmt: skip

    calls: list[int] = []
    done: list[int] = []
    made = make(lambda: run, pairs, mnist.device, done.append, batch_size=4)
    assert done == [4, 8, 10]
    assert made.exists.tolist() == [True] * 4 + [False] * 4 + [True] * 2
    assert made.errors == ("MemoryError: ",)
    assert not made.images[4:8].any()
    bench = Bench(mnist, digits, Panel.of(judges, digits.images, "mnist"))
    row = score(bench, "x", pairs, made)
    assert row.raised == 4
    assert row.failed == int(((pairs.q % 2 == 0) & made.exists).sum())
    assert (row.reached.n, row.reached.mean, row.class_changed.mean) == (10, 0, 0)
    assert (row.images.elastic_net.n, row.images.elastic_net.mean) == (6, 0)
    assert row.passes.mean == 7


def test_method_that_cannot_be_prepared_is_counted(mnist, digits) -> None:
    def prepare():
        raise InputError("no training images")

    made = make(prepare, draw_pairs(mnist, digits, 3, seed=0), mnist.device)
    assert made.errors == ("InputError: no training images",)
    assert not made.exists.any()


def test_nearest_image_chooses_among_what_the_classifier_reads_as_q(mnist, compared) -> None:
    _, pairs, made = compared[-1]
    candidates = load_mnist("train").first(100).images
    predicted = mnist.predict(candidates).argmax(1)
    for image, q, answer in zip(pairs.images, pairs.q, made["nearest-image"].images, strict=True):
        of_q = candidates[predicted == q]
        distance = (of_q.double() - image.double()).square().flatten(1).sum(1)
        assert torch.equal(answer, of_q[distance.argmin()])


def test_real_images_are_of_the_class_they_stand_for(digits, generator) -> None:
    q = torch.tensor([3, 1, 3, 0, 9, 1])
    drawn = random_of_class(digits, q, generator)
    for image, label in zip(drawn, q, strict=True):
        where = (digits.images == image).flatten(1).all(1)
        assert digits.labels[where].tolist() == [int(label)]
    none = random_of_class(digits.first(4), q, generator)  # they are 7, 2, 1 and 0
    assert none.flatten(1).any(1).tolist() == [False, True, False, True, False, True]


def test_planted_cue_is_judged_by_the_cue(judges) -> None:
    data = load_fake_mnist("test").first(30)
    q = (data.labels + 1) % 10
    panel = Panel.of(judges, data.images, "fakemnist")
    perfect, _ = panel.judge(data.images, FAKE_MNIST_CUE.paint(data.images, q), q)
    assert (perfect.truth.mean, perfect.inside.mean, perfect.oracles) == (1, 1, None)
    assert min(share.mean for share in perfect.kept.values()) > 0.9
    assert perfect.label_variation.mean < 0.02
    moved = data.images.flip(0)
    elsewhere, _ = panel.judge(data.images, moved, q)
    assert elsewhere.truth.mean == float((data.labels.flip(0) == q).double().mean())
    squared = (moved.double() - data.images.double()).square()
    inside = squared[:, 0, :10, 0].sum(1) / squared.sum((1, 2, 3))
    assert elsewhere.inside.mean == pytest.approx(float(inside.mean()))
    assert elsewhere.label_variation.mean > 0.3
    assert elsewhere.frechet.mean == pytest.approx(0, abs=1e-6)


def share(happened: list[bool]) -> float:
    return sum(happened) / len(happened)


def test_tipping_points_and_samples_are_read_by_each_oracle(
    mnist, digits, judges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tipping points found by the plane between both means; samples replaced by real digits."""
    pairs = draw_pairs(mnist, digits, 12, seed=8)
    drawn = digits.images[:12]
    asked: list[torch.Tensor] = []

    def sample(label, generator, temperature=1.0):
        assert temperature == 1
        asked.append(label)
        return to_pixels(drawn)

    monkeypatch.setattr(mnist.classifier, "sample", sample)
    opinion = second_opinion(mnist, judges, pairs.images, pairs.q)
    y = [n % 10 for n in range(12)]
    assert [label.tolist() for label in asked] == [y]

    mu, rows = mnist.mu.detach(), []
    for image, p, q in zip(pairs.images, pairs.p.tolist(), pairs.q.tolist(), strict=True):
        z, delta = mnist.encode(image)[0], mnist.mu_bar[q] - mnist.mu_bar[p]
        normal, middle = mu[q] - mu[p], (mu[p] + mu[q]) / 2
        alpha = (middle - z) @ normal / (delta @ normal)
        with torch.inference_mode():
            rows.append(to_uint8(mnist.decode((z + alpha * delta)[None]))[0])
    triples = list(zip(range(12), pairs.p.tolist(), pairs.q.tolist(), strict=True))
    for family, said in judges.verdicts(torch.stack(rows)).items():
        decided = [(int(said[i]), q) for i, p, q in triples if int(said[i]) in (p, q)]
        chosen = opinion.tipping_points[family]
        assert (chosen.n, chosen.mean) == (len(decided), share([a == b for a, b in decided]))
        assert opinion.third_class[family].mean == pytest.approx(1 - len(decided) / 12)
    for family, said in judges.verdicts(drawn).items():
        assert opinion.samples[family].mean == share(
            [a == b for a, b in zip(said.tolist(), y, strict=True)]
        )


def test_samples_are_of_the_model_itself_and_depend_on_the_seed(
    mnist, digits, judges, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, sample = draw_pairs(mnist, digits, 4, seed=8), mnist.classifier.sample
    drawn: list[torch.Tensor] = []

    def recorded(*given, **options):
        drawn.append(sample(*given, **options))
        return drawn[-1]

    monkeypatch.setattr(mnist.classifier, "sample", recorded)
    opinions = [
        second_opinion(mnist, judges, pairs.images, pairs.q, seed=seed) for seed in (0, 0, 1)
    ]
    assert opinions[0] == opinions[1]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_a_planted_cue_reads_tipping_points_itself(judges) -> None:
    model, data = load("fakemnist"), load_fake_mnist("test").first(8)
    q = (model.predict(data.images).argmax(1) + 3) % 10
    opinion = second_opinion(model, judges, data.images, q, cue=FAKE_MNIST_CUE)
    explained = model.explain(data.images, q[:, None])
    dots = explained.stored_tipping_point[:, 0, 0, :10, 0].argmax(1)
    neither = share([d not in (a, b) for d, a, b in zip(dots, explained.p, q, strict=True)])
    assert set(opinion.tipping_points) == set(opinion.samples) == {"cue"}
    assert opinion.third_class["cue"].mean == neither
    assert opinion.tipping_points["cue"].mean == share(
        [bool(d == b) for d, a, b in zip(dots, explained.p, q, strict=True) if d in (a, b)]
    )


@pytest.mark.parametrize("name", [None, "mnist"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_shipped_judges_score_test_images_only(name: str | None, split: str, tmp_path) -> None:
    with pytest.raises(InputError, match="ecinn judges fakemnist --seed 200 --out FILE"):
        find_judges(name, "fakemnist", split)
    others = tmp_path / "others.safetensors"
    load_judges("mnist").save(others)
    assert find_judges(str(others), "mnist", split).record["seed"] == 100


@pytest.mark.usefixtures("few_real_images")
def test_commands_measure_on_the_asked_split(tmp_path, judges, monkeypatch) -> None:
    judges.save(tmp_path / "choosing.safetensors")
    options = ("--n", 2, "--split", "validation", "--out", tmp_path, "--json")
    code, stdout, stderr = run(
        "benchmark", "counterfactuals", "--methods", "ecinn", *options,
        "--judges", tmp_path / "choosing.safetensors",
    )  # fmt: skip
    assert code == 0, stderr
    result = json.loads(stdout)
    pairs = draw_pairs(load("mnist"), load_mnist("validation"), 2, seed=0)
    made = load("mnist").explain(pairs.images, pairs.q[:, None]).stored_convincing[:, 0]
    en = float(elastic_net(pairs.images, made).mean())
    assert result["split"] == "validation"
    assert result["methods"][0]["images"]["elastic_net"]["mean"] == pytest.approx(en, abs=0.1)
    assert set(result["opinion"]["samples"]) == set(judges.verdicts(pairs.images))
    page = (tmp_path / "counterfactuals-mnist-validation.md").read_text()
    assert "2 random validation images" in page
    assert "all validation images" in page
    assert page.count("| convolutional oracle |") == 1

    few = functools.partial(consistency.measure_consistency, asked=(0.2,))
    monkeypatch.setattr(consistency, "measure_consistency", few)
    code, stdout, stderr = run("benchmark", "consistency", *options)
    assert code == 0, stderr
    expected = few(load("mnist"), load_mnist("validation"), (0, 1), n=2)
    (obtained,) = json.loads(stdout)["plain"]["obtained"]
    assert obtained["mean"] == pytest.approx(expected.plain.obtained[0].mean)
    assert "2 validation images" in (tmp_path / "consistency-mnist-validation.md").read_text()


def test_error_for_missing_judges_names_the_command() -> None:
    assert (
        find_judges(None, "fakemnist").record["seed"] == find_judges("mnist", "x").record["seed"]
    )
    with pytest.raises(InputError, match="ecinn judges faces --out FILE"):
        find_judges(None, "faces")


@pytest.mark.usefixtures("few_real_images")
def test_command_writes_tables_and_pictures(tmp_path) -> None:
    code, stdout, stderr = run(
        "benchmark", "counterfactuals", "--methods", "ecinn, model-means", "--n", N,
        "--seed", 1, "--out", tmp_path,
    )  # fmt: skip
    assert code == 0, stderr
    assert "(accuracy" in stdout
    page = (tmp_path / "counterfactuals-mnist.md").read_text()
    written = json.loads((tmp_path / "counterfactuals-mnist.json").read_text())
    for method in ("ecinn", "model-means", "real image of q"):
        assert page.count(f"| {method} |") >= 2
    assert [row["method"] for row in written["methods"]] == ["ecinn", "model-means"]
    assert written["record"]["command"] in page
    assert len(written["record"]["model_sha256"]) == 16
    en = written["methods"][0]["images"]["elastic_net"]
    assert f"| ecinn | {en['mean']:.2f} ± {en['high'] - en['mean']:.2f} |" in page
    for picture in ("counterfactuals-mnist.png", "counterfactuals-mnist-images.png"):
        with Image.open(tmp_path / picture) as opened:
            assert min(opened.size) > 300
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--methods", "ecinn,magic"),
            "no method is called 'magic'; choose from: ecinn, model",
        ),
        (("--methods", ","), "name at least one method of: ecinn, model-means"),
        (("--methods", "ecinn,ecinn"), "ecinn is named twice"),
        (("--n", "1"), "from 2 to 10000"),
        (("--n", "10001"), "not 10001"),
        (("--judges", "nobody"), "no judges 'nobody'"),
        (("--model", "nothing"), "nothing"),
    ],
)
def test_wrong_requests_are_refused_and_write_nothing(tmp_path, options, says) -> None:
    folder = tmp_path / "new"
    assert says in fails("benchmark", "counterfactuals", *options, "--out", folder)
    assert not folder.exists()


@pytest.mark.usefixtures("few_real_images")
def test_without_matplotlib_only_the_figure_is_missing(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, stderr = run(
        "benchmark", "counterfactuals", "--methods", "ecinn", "--n", 2, "--out", tmp_path
    )
    assert code == 2
    assert "pip install 'ecinn[benchmark]'" in stderr
    there = sorted(path.name for path in tmp_path.iterdir())
    assert there == [f"counterfactuals-mnist{end}" for end in ("-images.png", ".json", ".md")]


def test_cost_figure_raises_if_nothing_can_be_drawn(compared) -> None:
    result = compared[-1][0]
    with pytest.raises(InputError, match="nothing to draw"):
        cost_figure(replace(result, methods=result.methods[1:2]))


def blurring() -> ClassAutoencoders:
    """Different ones for different classes, without weights."""
    kinds = [nn.AvgPool2d(k, 1, k // 2) for k in (3, 5, 7) * 4]
    return ClassAutoencoders(kinds[:10], kinds[11])


def authors_folder(folder: Path, digits: Dataset, mnist: Model) -> AuthorsBenchmark:
    """Digits whose second target is what our model reads already, scores as they come out."""
    write_folder(folder)
    benchmark = load_authors(folder, "mnist")
    p = mnist.predict(digits.images[:N]).argmax(1)
    q = (p + torch.tensor([1, 0, 2, 3, 4, 5])) % 10
    gen = benchmark.counterfactuals["GEN"]
    made = {**benchmark.counterfactuals, "GEN": StoredCounterfactuals("GEN", gen.images, p, q, q)}
    benchmark = replace(benchmark, originals=digits.first(N), counterfactuals=made)
    published: dict = {"TargetClassValidity": {}, "ElasticNet": {}, "IM1": {}, "IM2": {}}
    for name, stored in made.items():
        row = score_as_published(benchmark.originals.images, stored, blurring()).row
        for metric, figure in row.as_published.items():
            published[metric][name] = figure
    return replace(benchmark, published=published)


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory, digits, mnist) -> AuthorsBenchmark:
    return authors_folder(tmp_path_factory.mktemp("authors"), digits, mnist)


@pytest.fixture(scope="module")
def scored(benchmark, mnist, judges) -> authors.AuthorsResult:
    return score_authors(benchmark, mnist, blurring(), judges, with_curve=False)


def test_control_tells_reproduced_from_not_and_from_not_checked(
    benchmark, scored, mnist, judges
) -> None:
    result = scored
    assert result.reproduced is True
    assert control_line(result).startswith("CONTROL: reproduced (12 figures, ")
    off = replace(result, control=tuple(
        replace(c, here=replace(c.here, mean=c.here.mean * 1.00001))
        if (c.metric, c.method) == ("IM1", "GL")
        else c
        for c in result.control
    ))  # fmt: skip
    assert off.reproduced is False
    assert control_line(off).startswith("CONTROL: NOT reproduced (IM1 of GL: here ")
    page = page_of(authors_tables(off, about(mnist, judges)), mnist)
    assert "| ours (does not count: the control failed) |" in page
    assert replace(result, control=result.control[1:]).reproduced is False
    limited = score_authors(benchmark, mnist, blurring(), judges, limit=5, with_curve=False)
    assert (limited.reproduced, limited.n) == (None, 5)
    assert control_line(limited) == "CONTROL: not checked (limited)"


def test_our_row_is_alpha_1_for_their_targets(benchmark, scored, mnist, digits, judges) -> None:
    ours = our_counterfactuals(mnist, benchmark)
    rest = torch.tensor([0, 2, 3, 4, 5])
    explanation = mnist.explain(digits.images[rest], ours.q[rest, None])
    assert torch.equal(ours.images[rest], explanation.stored_convincing[:, 0])
    assert torch.equal(ours.predicted[rest], explanation.convincing_certificate.winner[:, 0])
    assert ours.failed.tolist() == [False, True, False, False, False, False]
    assert not ours.images[1].any()

    result = scored
    assert (result.target_is_prediction, result.other_prediction) == (1, 0)
    row = result.ours
    assert (row.elastic_net.n, row.reached.n, row.failed) == (5, 6, 1)
    assert row.reached.mean == pytest.approx(int((ours.predicted == ours.q).sum()) / 6)
    change = (ours.images[rest].double() - digits.images[rest].double()).flatten(1) / 255
    en = change.abs().sum(1) + change.square().sum(1).sqrt()
    assert row.elastic_net.mean == pytest.approx(float(en.mean()))
    verdicts = judges.verdicts(ours.images[rest])
    share = float((verdicts["fully connected"] == ours.q[rest]).double().mean())
    assert result.ours.verdict.oracles["fully connected"].mean == pytest.approx(share)
    references = ["nearest real image of q", "real image of q, as near as ours"]
    assert [row.method for row in result.references] == ["real image of q", *references]
    assert [each.other for each in result.differences] == ["GEN", *references]


def test_differences_are_between_images_of_the_same_original(
    benchmark, scored, mnist, digits, judges
) -> None:
    """One image at a time; the second of ours failed, the fifth of GEN's is black."""
    result = scored
    ours, gen = our_counterfactuals(mnist, benchmark), benchmark.counterfactuals["GEN"]
    difference = result.differences[0]
    scores: dict[str, list[float]] = {"elastic_net": [], "im1": [], "im2": []}
    for row in (0, 2, 3, 5):
        both = []
        for made in (ours, gen):
            one = StoredCounterfactuals("x", *(getattr(made, name)[row : row + 1] for name in (
                "images", "p", "q", "predicted")))  # fmt: skip
            both.append(score_as_published(digits.images[row : row + 1], one, blurring()).row)
        for name, values in scores.items():
            values.append(getattr(both[0], name).mean - getattr(both[1], name).mean)
    assert difference.n == 4
    for name, values in scores.items():
        found = difference.values[name]
        assert found.mean == pytest.approx(np.mean(values), rel=1e-5)
        assert found.half_width == pytest.approx(1.96 * np.std(values) / 2, rel=1e-4)
    rows = torch.tensor([0, 2, 3, 5])
    theirs = judges.verdicts(gen.images[rows])
    for family, said in judges.verdicts(ours.images[rows]).items():
        points = (said == ours.q[rows]).double() - (theirs[family] == gen.q[rows]).double()
        assert (difference.values[family].mean, difference.values[family].n) == (points.mean(), 4)
    reached = (ours.predicted == ours.q).double() - 1  # GEN's are all said to reach q
    assert difference.values["reached"].mean == pytest.approx(float(reached.mean()))
    assert difference.values["reached"].n == N
    table = authors_tables(result, about(mnist, judges))[3]
    cells = {row[0]: row[1] for row in table.rows}
    en, fully = difference.values["elastic_net"], difference.values["fully connected"]
    assert (table.head[1], cells["pairs without failed and black"]) == ("GEN", "4")
    assert cells["EN"] == f"{en.mean:+.2f} ± {en.half_width:.2f}"
    assert cells["fully connected oracle, points"] == (
        f"{100 * fully.mean:+.2f} [{100 * fully.low:+.2f}, {100 * fully.high:+.2f}]"
    )


def test_asked_confidence_is_followed_along_the_curve(benchmark, mnist, digits, judges) -> None:
    ours = our_counterfactuals(mnist, benchmark)
    done: list[tuple[int, int]] = []
    originals = benchmark.originals.images
    panel = Panel.of(judges, originals, "mnist")
    low, high = confidence_curve(
        mnist, originals, ours, blurring(), panel, asked=(0.3, 0.99), limit=4,
        observe=lambda progress: done.append((progress.done, progress.total)),
    )  # fmt: skip
    assert done == [(1, 2), (2, 2)]
    assert (low.asked, low.n, high.asked, high.n) == (0.3, 4, 0.99, 4)
    assert low.row.elastic_net.mean < high.row.elastic_net.mean
    assert low.obtained.mean < high.obtained.mean
    rows = torch.tensor([0, 2, 3, 4])
    explanation = mnist.explain(digits.images[rows], ours.q[rows, None], confidence=0.99)
    stored = mnist.predict(explanation.stored_convincing[:, 0])
    obtained = stored[torch.arange(4), ours.q[rows]][explanation.reachable[:, 0]]
    assert high.obtained.mean == pytest.approx(float(obtained.mean()), abs=1e-4)


@needs_the_authors
@pytest.mark.parametrize("name", ["mnist", "fake_mnist"])
def test_authors_own_images_are_judged(name, mnist, judges) -> None:
    pytest.importorskip("h5py")
    benchmark = load_authors(PUBLISHED, name)
    autoencoders = load_autoencoders(benchmark.autoencoders)
    result = score_authors(benchmark, mnist, autoencoders, judges, limit=40, with_curve=False)
    page = page_of(authors_tables(result, about(mnist, judges)), mnist)
    for method in ("GB", "GL", "GEN", "ours", "real image of q"):
        assert f"| {method} |" in page
    assert "CONTROL: not checked (limited)" in page
    assert "GEN 90.73" in page or name == "fake_mnist"
    by_name = {row.method: row for row in (*result.theirs, *result.references)}
    if name == "fake_mnist":
        assert by_name["GEN"].verdict.truth.mean == 1
        assert by_name["GEN"].verdict.inside.mean > 0.8
        assert by_name["perfect answer"].elastic_net.mean == pytest.approx(3.41, abs=0.02)
    else:
        assert by_name["GEN"].verdict.oracles["convolutional"].mean > 0.7


def test_missing_or_wrong_input_of_the_authors_command_writes_nothing(tmp_path) -> None:
    folder = tmp_path / "new"
    line = fails("benchmark", "authors", "--data", tmp_path / "nowhere", "--out", folder)
    assert "EvaluatingCounterfactuals" in line
    write_folder(tmp_path / "data")
    options = ("benchmark", "authors", "--data", tmp_path / "data", "--out", folder)
    assert "mnist is not a model of fakemnist" in fails(*options, "--fake-model", "mnist")
    assert not folder.exists()


def test_authors_command_writes_after_every_dataset(
    tmp_path, mnist, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "data")
    recipe = replace(mnist.checkpoint.recipe, dataset="fakemnist")
    fake = tmp_path / "fake.safetensors"
    Model(replace(mnist.checkpoint, recipe=recipe)).save(fake)
    monkeypatch.setattr(authors_files, "load_autoencoders", lambda folder: blurring())
    options = (
        "benchmark", "authors", "--data", tmp_path / "data", "--fake-model", fake, "--no-curve",
    )  # fmt: skip
    code, stdout, stderr = run(*options, "--out", tmp_path / "a")
    assert code == 0, stderr
    assert stdout.count("CONTROL: NOT reproduced") == 2
    whole = json.loads((tmp_path / "a" / "authors.json").read_text())
    assert list(whole) == ["mnist", "fake_mnist"]
    assert whole["mnist"]["reproduced"] is False

    real = score_authors

    def stumbling(benchmark, *rest, **options):
        if benchmark.name == "fake_mnist":
            raise RuntimeError("the light went out")
        return real(benchmark, *rest, **options)

    monkeypatch.setattr(authors, "score_authors", stumbling)
    code, _, stderr = run(*options, "--json", "--out", tmp_path / "b")
    assert (code, "the light went out" in stderr) == (1, True)
    assert json.loads((tmp_path / "b" / "authors.json").read_text())["mnist"] == whole["mnist"]
    assert "MNIST: published" in (tmp_path / "b" / "authors.md").read_text()


def test_images_for_consistency_are_of_both_classes_and_read_right(mnist) -> None:
    data = load_mnist("test").first(300)
    images, p = consistency.draw_of_classes(mnist, data, (4, 9), 20, seed=0)
    assert set(p.tolist()) == {4, 9}
    assert torch.equal(predicted_classes(mnist, images), p)
    for image, label in zip(images, p, strict=True):
        where = (data.images == image).flatten(1).all(1)
        assert data.labels[where].tolist() == [int(label)]
    for classes, n, says in (((4, 4), 5, "two different"), ((4, 10), 5, "two different"),
                             ((4, 9), 299, "at most the"), ((4, 9), 0, "at least 1")):  # fmt: skip
        with pytest.raises(InputError, match=says):
            consistency.draw_of_classes(mnist, data, classes, n, seed=0)


def test_obtained_confidence_is_that_of_the_stored_image(mnist) -> None:
    """α found anew by a root search on Bayes' rule written out."""
    levels = (0.1, 0.5, 0.9)
    data = load_mnist("test").first(60)
    result = consistency.measure_consistency(mnist, data, (0, 1), n=3, seed=5, asked=levels)
    images, p = consistency.draw_of_classes(mnist, data, (0, 1), 3, seed=5)
    mu, tau = mnist.classifier.mu.detach().double(), float(mnist.tau)
    obtained = np.zeros((3, 3))
    for row in range(3):
        with torch.inference_mode():
            z = mnist.classifier.encode(to_pixels(images[row : row + 1]))[0]
        start, other = int(p[row]), 1 - int(p[row])
        delta = mnist.mu_bar[other] - mnist.mu_bar[start]

        def surplus(alpha, level, z=z, delta=delta, start=start):
            point = (z + alpha * delta).double()
            distances = (point - mu).square().sum(1)
            return float((-0.5 * tau * distances).softmax(0)[start]) - level

        for column, level in enumerate(levels):
            alpha = scipy.optimize.brentq(surplus, -0.2, 1.5, args=(level,), xtol=1e-9)
            with torch.inference_mode():
                stored = to_uint8(mnist.classifier.decode((z + alpha * delta)[None]))
            obtained[row, column] = float(mnist.predict(stored)[0, start])
    assert result.unreachable == 0
    means = [level.mean for level in result.plain.obtained]
    assert means == pytest.approx(obtained.mean(0), abs=0.02)
    half_widths = [level.half_width for level in result.plain.obtained]
    assert half_widths == pytest.approx(1.96 * obtained.std(0) / 3**0.5, abs=0.02)
    error = obtained - np.array(levels)
    assert result.plain.consistency.mean_squared_error.mean == pytest.approx(
        (error**2).mean(), abs=0.01
    )
    assert result.plain.consistency.correlation.mean == pytest.approx(
        np.corrcoef(np.tile(levels, 3), obtained.flatten())[0, 1], abs=0.05
    )
    assert result.corrected.consistency.within.mean >= result.plain.consistency.within.mean
    assert result.corrected.consistency.within.mean > 0.8
    assert result.plain.passes == Interval(2.0, 2.0, 2.0, 3)
    assert result.corrected.passes.low >= 3


def test_consistency_command(tmp_path, monkeypatch) -> None:
    few = functools.partial(consistency.measure_consistency, asked=(0.2, 0.8))
    monkeypatch.setattr(consistency, "measure_consistency", few)
    options = ("benchmark", "consistency", "--n", 2, "--out", tmp_path)
    code, stdout, stderr = run(*options, "--classes", "3,8", "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["classes"] == ["3", "8"]
    assert stdout == (tmp_path / "consistency-mnist.json").read_text()
    assert "| corrected |" in (tmp_path / "consistency-mnist.md").read_text()
    for wrong in ("3", "3,8,9", "3,x", ""):
        assert "two of 0, 1, 2" in fails(*options, "--classes", wrong)


@pytest.mark.parametrize("width", [30, 60, 80])
def test_narrow_terminals_cut_no_figures(width: int, capsys, monkeypatch) -> None:
    monkeypatch.setattr(command.out, "width", width)
    intervals = (f"{value:.2f} [-{value}, {value + 50}]" for value in range(1000, 1006))
    row = ("the method of a name", "300", *intervals, "-2.21 ± 0.69", "+0.019 ± 0.028")
    head = ("method", *(f"a long head {number}" for number in range(9)))
    command.print_tables([Table("title", head, (row,))])
    printed = capsys.readouterr().out
    assert all(word in printed for cell in row for word in cell.split())
    assert "…" not in printed


def test_fingerprint_is_of_the_weights(mnist) -> None:
    again = load("mnist")
    assert record.fingerprint(again) == record.fingerprint(mnist)
    again.mu_bar = again.mu_bar.clone()
    again.mu_bar[3, 5] += 1e-3
    assert record.fingerprint(again) != record.fingerprint(mnist)


def test_values_that_json_lacks_are_null() -> None:
    value = {"a": float("nan"), "b": [float("inf"), 1.5], "c": (True, None)}
    assert record.jsonable(value) == {"a": None, "b": [None, 1.5], "c": [True, None]}


def test_real_images_are_those_at_the_wanted_distances(digits, uniform) -> None:
    """By brute force over every image of the label; at distance 0 it is the nearest."""
    originals, q = digits.images[:6], digits.labels[20:26]
    wanted = torch.stack([torch.zeros(6), 150 * uniform(6)], 1)
    chosen = real_at_distance(digits, originals, q, wanted)
    for index in range(6):
        pool = digits.images[digits.labels == q[index]]
        distance = elastic_net(originals[index : index + 1].expand_as(pool), pool)
        assert torch.equal(chosen[index, 0], pool[distance.argmin()])
        assert torch.equal(chosen[index, 1], pool[(distance - wanted[index, 1]).abs().argmin()])
