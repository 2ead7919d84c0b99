"""The heatmap benchmark: figures by another route, who wins where the truth is known, words."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import randomise
from ecinn.benchmark import heatmap_tables, heatmaps
from ecinn.benchmark.heatmap_tables import column, lost, verdict
from ecinn.benchmark.heatmaps import measure_heatmaps
from ecinn.benchmark.side_by_side import draw_pairs
from ecinn.checkpoints import Checkpoint
from ecinn.cli import benchmark_heatmaps as command
from ecinn.data.dataset import Dataset
from ecinn.data.face_regions import region_mask
from ecinn.data.planted import Cue
from ecinn.errors import InputError
from ecinn.experiments import MNIST
from ecinn.heatmaps import METHODS, ExplainedINN, Heatmaps, ecinn_heatmaps
from ecinn.heatmaps import heatmaps as make_heatmaps
from ecinn.metrics.intervals import Interval
from ecinn.model.classifier import GenerativeClassifier
from ecinn.model.inn import Architecture, Stage
from ecinn.pixels import to_pixels, to_uint8
from ecinn.pretrained import Model
from ecinn.typicality import Typicality
from test_cli import fails, run

N, FIRST, SEED = 6, 4, 5
CUE = Cue(marks=(((0, 0), (0, 1)), ((3, 3),), ((7, 7), (7, 6), (6, 7))), height=8, width=8)


def random_images(n: int, channels: int, classes: int, seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (n, channels, 8, 8), generator=generator).byte()
    labels = torch.randint(classes, (n,), generator=generator)
    return Dataset(images, labels, tuple("abc"[:classes]))


def small_model(channels: int = 1, classes: int = 3, dataset: str = "tiny") -> Model:
    stages = (Stage(2, 4), Stage(1, 4))
    architecture = Architecture(channels, 8, 8, classes, stages, dense_width=8, seed=3)
    classifier = GenerativeClassifier(architecture).eval().requires_grad_(requires_grad=False)
    randomise(classifier)
    z = classifier.encode(to_pixels(random_images(60, channels, classes, 9).images))
    classifier.mu += z.mean(0) - classifier.mu.mean(0)  # so that all classes are predicted
    noise = torch.randn(classifier.mu.shape, generator=torch.Generator().manual_seed(1))
    experiment = replace(MNIST, name="tiny", dataset=dataset, architecture=architecture)
    mu_bar, names = classifier.mu + 0.02 * noise, tuple("abc"[:classes])
    return Model(Checkpoint(experiment, classifier, mu_bar, Typicality((0.0, 1.0)), names))


def small_cnn() -> nn.Module:
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(256, 3),
    )  # fmt: skip
    for parameter in network.parameters():
        nn.init.zeros_(parameter)  # they start from the global generator
    return randomise(network, scale=3.0).eval().requires_grad_(requires_grad=False)


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    for name, value in {"CHECKED": FIRST, "SAMPLE": 30, "RESAMPLES": 50}.items():
        monkeypatch.setattr(heatmaps, name, value)
    for module in (heatmaps, heatmap_tables):
        monkeypatch.setattr(module, "CUES", {"tiny": CUE})


def measure(model: Model, n: int = N, **more):
    shape = model.classifier.image_shape[0], len(model.class_names)
    data, training = random_images(12, *shape, 1), random_images(40, *shape, 2)
    return measure_heatmaps(model, data, training, n=n, seed=SEED, **more)


@pytest.fixture(scope="module")
def subject() -> tuple[Model, nn.Module]:
    return small_model(), small_cnn()


@pytest.fixture(scope="module")
def measured(subject):
    """Both networks, once for several tests."""
    with pytest.MonkeyPatch.context() as patch:
        small.__wrapped__(patch)
        return measure(subject[0], cnn=subject[1])


@pytest.fixture
def pairs(subject):
    return draw_pairs(subject[0], random_images(12, 1, 3, 1), N, SEED)


def row_of(block, method: str):
    return next(row for row in block.rows if row.method == method)


def deletion_and_insertion(score, x: Tensor, other: Tensor, maps: Tensor) -> list[float]:
    """Image by image and pixel by pixel; `score` gives p(p) of images that come from number i."""
    means = []
    for start, end in ((x, other), (other, x)):
        areas = []
        for i, heat in enumerate(maps.abs().sum(1).flatten(1).numpy()):
            order = np.argsort(-heat, kind="stable")
            images = start[i].repeat(21, 1, 1, 1).flatten(2)
            for step in range(21):
                changed = order[: step * 64 // 20]
                images[step][:, changed] = end[i].flatten(1)[:, changed]
            curve = score(images.reshape(21, *x.shape[1:]), i)
            areas.append(float(curve.sum() - (curve[0] + curve[-1]) / 2) / 20)
        means.append(float(np.mean(areas)))
    return means


@pytest.mark.parametrize("method", ["ecinn", "integrated_gradients"])
def test_curves_of_the_inn_read_by_itself_and_by_the_cnn(subject, measured, pairs, method) -> None:
    model, cnn = subject
    x, p, q = to_pixels(pairs.images), pairs.p, pairs.q
    maps = make_heatmaps(ExplainedINN(model.classifier, model.mu_bar), x, p, q, method).maps
    stored = to_pixels(model.explain(pairs.images, q[:, None]).stored_convincing[:, 0])
    figures = row_of(measured[0].blocks[0], method).figures
    for by, network in (("", model.predict), (", by the CNN", lambda x: cnn(x).softmax(1))):
        expected = deletion_and_insertion(
            lambda images, i, network=network: network(images)[:, p[i]], x, stored, maps
        )
        for name, value in zip(("deletion", "insertion"), expected, strict=True):
            found = figures[f"{name} AUC, counterfactual{by}"].mean
            assert found == pytest.approx(value, rel=1e-4)


def test_the_cnn_is_explained_for_what_it_reads_itself(subject, measured, pairs) -> None:
    model, cnn = subject
    x, p = to_pixels(pairs.images), cnn(to_pixels(pairs.images)).argmax(1)
    q = (p + (pairs.q - pairs.p)) % 3
    block = measured[0].blocks[1]
    assert block.same_prediction == pytest.approx(float((p == pairs.p).float().mean()))
    assert 0 < block.same_prediction < 1
    inn = ecinn_heatmaps(model.classifier, model.mu_bar, x, p, q).maps
    deep_lift = make_heatmaps(cnn, x, p, q, "deep_lift").maps
    for method, maps in (("ecinn", inn), ("deep_lift", deep_lift)):
        figures = row_of(block, method).figures
        stored = to_pixels(to_uint8(x + inn))
        read = lambda images, i: cnn(images).softmax(1)[:, p[i]]  # noqa: E731
        deletion, _ = deletion_and_insertion(read, x, stored, maps)
        assert figures["deletion AUC, counterfactual"].mean == pytest.approx(deletion, 1e-4)
        steps = sum(maps.diff(dim=dim).abs().sum((1, 2, 3)) for dim in (2, 3))
        variation = (steps / maps.abs().sum((1, 2, 3))).mean()
        assert figures["total variation"].mean == pytest.approx(float(variation), 1e-4)
    assert column(block, "ecinn") == "ECINNh of the INN (cross-check)"
    assert not any(measure.section == "cross-check" for measure in block.measures)


def test_localisation_counts_the_marks_of_p_and_q(subject, measured, pairs) -> None:
    model, x = subject[0], to_pixels(pairs.images)
    maps = ecinn_heatmaps(model.classifier, model.mu_bar, x, pairs.p, pairs.q).maps
    shares, densities, hits = [], [], []
    for heat, p, q in zip(maps[:, 0].abs(), pairs.p.tolist(), pairs.q.tolist(), strict=True):
        inside = [heat[pixel] for pixel in (*CUE.marks[p], *CUE.marks[q])]
        shares.append(float(sum(inside) / heat.sum()))
        densities.append(shares[-1] * 64 / len(inside))
        hits.append(bool(max(inside) == heat.max()))
    figures = row_of(measured[0].blocks[0], "ecinn").figures
    assert figures["share in the marks of p and q"].mean == pytest.approx(np.mean(shares), 1e-4)
    assert figures["relative density in them"].mean == pytest.approx(np.mean(densities), 1e-4)
    assert figures["pointing game"].mean == pytest.approx(np.mean(hits))


def test_convergence_is_the_medians_of_the_deltas(subject, measured, pairs) -> None:
    model, x = subject[0], to_pixels(pairs.images)
    for logit, rows in (("linear", measured[0].blocks[0].rows), ("density", measured[0].density)):
        n = N if logit == "linear" else FIRST
        inn = ExplainedINN(model.classifier, model.mu_bar, logit)
        made = make_heatmaps(inn, x[:n], pairs.p[:n], pairs.q[:n], "deep_lift")
        delta = made.maps.sum((1, 2, 3)) - made.output_change
        found = next(row for row in rows if row.method == "deep_lift").convergence
        assert found.delta == pytest.approx(float(delta.abs().median()), 1e-3)
        relative = (delta / made.output_change).abs().median()
        assert found.relative == pytest.approx(float(relative), 1e-3)
    assert row_of(measured[0].blocks[0], "ecinn").convergence is None
    assert [row.method for row in measured[0].density] == list(METHODS[1:])


def test_intervals_differences_and_cost(measured) -> None:
    for block in measured[0].blocks:
        ecinn = row_of(block, "ecinn")
        assert not ecinn.against
        assert [row.method for row in block.rows] == [*METHODS, "random order"]
        for row in block.rows:
            for name, figure in row.figures.items():
                assert figure.low - 1e-9 <= figure.mean <= figure.high + 1e-9
                if row is not ecinn:
                    difference = row.against[name].difference
                    expected = ecinn.figures[name].mean - figure.mean
                    assert difference.mean == pytest.approx(expected, abs=1e-6)
        assert all("AUC, " in name for name in row_of(block, "random order").figures)
        less = ("deletion", "total", "high", "|cosine|", "rank correlation, random")
        for each in block.measures:
            assert each.better == ("less" if each.name.startswith(less) else "more")
        assert [row.cost.passes for row in block.rows[:-1]] == [2, 100, 4, 80, 40]
        for row in block.rows[:-1]:
            assert row.cost.times_ecinn == pytest.approx(row.cost.seconds / ecinn.cost.seconds)


def test_without_noise_maps_are_the_same_and_with_it_they_are_not(
    subject, measured, monkeypatch
) -> None:
    monkeypatch.setattr(heatmaps, "NOISE", 0.0)
    still = measure(subject[0], n=3, methods=METHODS[-1:])[0].blocks[0]
    for row in still.rows[:-1]:
        assert row.figures["cosine, noisy image"].mean == pytest.approx(1, abs=1e-5)
        assert row.figures["rank correlation, noisy image"].mean == pytest.approx(1, abs=1e-2)
        moved = row_of(measured[0].blocks[0], row.method).figures["cosine, noisy image"]
        assert -1 <= moved.mean < 0.99999


def test_a_map_that_is_the_same_with_random_weights_is_found_out(
    subject, measured, monkeypatch
) -> None:
    model, _ = subject
    same = ExplainedINN(model.classifier, model.mu_bar)
    monkeypatch.setattr(heatmaps, "randomised_inn", lambda *_: same)
    block = measure(model, methods=("deep_lift",))[0].blocks[0]
    for row in block.rows[:-1]:
        assert row.figures["|cosine|, random weights"].mean == pytest.approx(1, abs=1e-4)
        honest = row_of(measured[0].blocks[0], row.method).figures["|cosine|, random weights"]
        assert 0 <= honest.mean < 0.9


def test_seed_decides_and_batch_size_does_not(subject) -> None:
    seen = {}
    more = {"methods": ("deep_lift",), "observe": lambda what, *n: seen.update({what: n})}
    runs = [measure(subject[0], 5, batch_size=size, **more)[0] for size in (32, 32, 3)]
    one, again, other = (result.blocks[0] for result in runs)
    assert seen["INN, ECINNh"] == (5, 5)
    assert all(done == total for done, total in seen.values())
    assert [row.method for row in one.rows] == ["ecinn", "deep_lift", "random order"]
    for row, same in zip(one.rows, again.rows, strict=True):
        assert row.figures == same.figures
    for name, figure in one.rows[0].figures.items():
        assert figure.mean == pytest.approx(other.rows[0].figures[name].mean, rel=1e-2, abs=1e-3)


def perfect_for(winner: str):
    """One method marks exactly what tells p from q, all others everything but that."""

    def maps(explained, x, p, q, method, **options) -> Heatmaps:
        marks = CUE.stencils
        inside = (marks[p] | marks[q])[:, None].to(x)
        change = None if method == "ecinn" else torch.ones(len(x))
        return Heatmaps(method, inside if method == winner else 1.1 - inside, change, 2)

    return maps


@pytest.mark.parametrize("winner", ["ecinn", "deep_lift"])
def test_a_perfect_map_wins_localisation_and_who_loses_is_told(
    subject, monkeypatch, winner
) -> None:
    monkeypatch.setattr(heatmaps, "heatmaps", perfect_for(winner))
    result, _ = measure(subject[0], methods=("deep_lift",))
    block = result.blocks[0]
    names = ("share in the marks of p and q", "pointing game", "localisation AUC")
    for name in names:
        assert row_of(block, winner).figures[name] == pytest.approx((1, 1, 1))
        comparison = row_of(block, "deep_lift").against[name]
        assert comparison.verdict == ("better" if winner == "ecinn" else "worse")
    table = next(t for t in heatmap_tables.heatmap_tables(result) if "minus" in t.title)
    cells = dict(row[:2] for row in table.rows)
    if winner == "ecinn":
        assert not set(names) & set(lost(block))
        assert cells["pointing game ↑"].startswith("better +1.000 [+1.000")
        alone = replace(block, measures=block.measures[6:11])
        table = heatmap_tables.heatmap_tables(replace(result, blocks=(alone,)))[2]
        assert table.notes[0] == "ECINNh loses on nothing here."
        return
    assert table.notes[0].startswith("**ECINNh loses on: ")
    assert all(f"{name} (against DeepLift)" in table.notes[0] for name in names)
    assert cells["pointing game ↑"].startswith("**worse** -1.000 [-1.000")


@pytest.mark.parametrize(
    ("low", "high", "better", "word"),
    [
        (0.1, 0.2, "more", "better"), (0.1, 0.2, "less", "worse"), (0.1, 0.2, None, "more"),
        (-0.2, -0.1, "more", "worse"), (-0.2, -0.1, "less", "better"), (-0.2, -0.1, None, "less"),
        (-0.1, 0.1, "more", "no difference"), (0.0, 0.1, "less", "no difference"),
        (-0.1, 0.1, None, "no difference"),
    ],
)  # fmt: skip
def test_words_follow_the_interval(low, high, better, word) -> None:
    assert verdict(Interval((low + high) / 2, low, high), better) == word


def test_faces_are_measured_by_regions() -> None:
    model = small_model(3, 2, "celeba/Smiling")
    result, shown = measure(model, n=3, methods=("gradient_shap",))
    block = result.blocks[0]
    maps = shown.maps["INN", "gradient_shap"].abs().sum(1)
    better = {measure.name: measure.better for measure in block.measures}
    for region in ("mouth", "eyes", "cheeks", "face", "background"):
        mask = region_mask(region, 8, 8)
        share = float((maps[:, mask].sum(1) / maps.sum((1, 2))).mean())
        figures = row_of(block, "gradient_shap").figures
        assert figures[f"share, {region}"].mean == pytest.approx(share, 1e-4)
        density = share / float(mask.double().mean())
        assert figures[f"density, {region}"].mean == pytest.approx(density, 1e-4)
        wanted = {"mouth": "more", "face": "more", "background": "less"}.get(region)
        assert better[f"share, {region}"] == better[f"density, {region}"] == wanted
    assert torch.equal(shown.pairs.q, 1 - shown.pairs.p)


def test_digits_without_a_cue_have_no_localisation() -> None:
    result, _ = measure(small_model(dataset="mnist"), n=2, methods=())
    assert "localisation" not in {m.section for m in result.blocks[0].measures}
    assert result.density == ()


def test_captions_say_what_favours_whom(measured) -> None:
    tables = heatmap_tables.heatmap_tables(measured[0])
    for table in tables:
        words = " ".join(table.notes)
        assert all(len(row) == len(table.head) for row in table.rows), table.title
        if "Pixels replaced (" in table.title:
            assert "favours ECINNh, which made that counterfactual" in words
        if "minus" in table.title:
            assert "favour ECINNh" in words
        if table.title.startswith("CNN:") and "cost" not in table.title:
            assert "only a cross-check" in words
    titles = " ".join(table.title for table in tables)
    for section in heatmap_tables.TITLES.values():
        assert f"INN: {section}" in titles


def test_sheet_shows_every_method_of_both_networks(measured, pairs) -> None:
    result, shown = measured
    assert torch.equal(shown.pairs.images, pairs.images[:4])
    alone = {key: maps for key, maps in shown.maps.items() if key[0] == "INN"}
    wide, narrow = (
        heatmap_tables.sheet(result, replace(shown, maps=maps), tuple("abc")).width
        for maps in (shown.maps, alone)
    )
    assert wide > narrow + 4 * 100
    assert (any(shown.other_pair["INN"]), any(shown.other_pair["CNN"])) == (False, True)


def test_wrong_input_is_refused_in_words(subject) -> None:
    with pytest.raises(InputError, match="between 2 and the 12"):
        measure(subject[0], n=1)
    with pytest.raises(InputError, match="named twice"):
        measure(subject[0], methods=("ecinn", "ecinn"))


def test_missing_captum_is_one_line_before_anything_is_read(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    assert "pip install 'ecinn[heatmaps]'" in fails("benchmark", "heatmaps", "--model", "none")


@pytest.fixture
def small_command(subject, monkeypatch):
    monkeypatch.setattr(command, "load", lambda name, device: subject[0])
    data = {"test": random_images(12, 1, 3, 1), "train": random_images(40, 1, 3, 2)}
    monkeypatch.setattr(command, "load_images", lambda name, split, folder: data[split])
    return ("benchmark", "heatmaps", "--model", "some", "--seed", SEED)


def test_command_writes_tables_figures_and_a_sheet(small_command, tmp_path) -> None:
    code, stdout, stderr = run(
        *small_command, "--n", 2, "--out", tmp_path, "--methods", "deep_lift"
    )
    assert code == 0, stderr
    assert "**" not in stdout
    page = (tmp_path / "heatmaps-tiny.md").read_text()
    assert "--model some --methods ecinn,deep_lift --n 2 --seed 5" in page
    assert (tmp_path / "heatmaps-tiny.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "heatmaps-tiny.json").read_text())
    assert written["n"] == 2
    mean, low, high = written["blocks"][0]["rows"][1]["figures"]["total variation"]
    assert f"{mean:.3f} [{low:.3f}, {high:.3f}]" in page
    _, stdout, _ = run(*small_command, "--n", 2, "--out", tmp_path, "--methods", "", "--json")
    assert json.loads(stdout)["dataset"] == "tiny"


def test_command_refuses_in_one_line(small_command, monkeypatch, tmp_path) -> None:
    here = ("--out", tmp_path / "new")
    assert "--n lies between 2 and the 12" in fails(*small_command, "--n", 13, *here)
    assert "no method is called 'lime'" in fails(*small_command, "--methods", "lime", *here)
    assert "cannot read" in fails(*small_command, "--cnn", tmp_path / "none", *here)
    other = SimpleNamespace(class_names=("x", "y"))
    monkeypatch.setattr(command, "load_inception", lambda path, device: other)
    monkeypatch.setattr(command, "_network", command._network.__wrapped__)
    assert "x from y, the model a from b from c" in fails(*small_command, "--cnn", "f", *here)
    assert not (tmp_path / "new").exists()
