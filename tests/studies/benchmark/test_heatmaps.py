"""The heatmap benchmark: figures by another route, what decides them, words."""

from dataclasses import astuple, replace

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from torch import Tensor, nn

from ecinn.attribution.heatmaps import METHODS, Heatmaps, ecinn_heatmaps
from ecinn.attribution.heatmaps import heatmaps as make_heatmaps
from ecinn.attribution.scores import ExplainedINN
from ecinn.errors import InputError
from ecinn.metrics.statistics import bootstrap_interval
from ecinn.model import Model
from ecinn.pixels import to_pixels, to_uint8
from ecinn.studies.benchmark import heatmap_measures, heatmap_tables, heatmaps
from ecinn.studies.benchmark.heatmap_tables import column
from ecinn.studies.benchmark.record import WORDS
from ecinn.studies.benchmark.side_by_side import draw_pairs
from helpers.builders import random_images, small_cnn, small_model
from helpers.heatmap_benchmark import CUE, FIRST, SEED, SMALL, N, measure, row_of

pytestmark = pytest.mark.slow
NOISE = ("total variation", "spatial coherence", "high-frequency share")


@pytest.fixture(scope="module")
def subject() -> tuple[Model, nn.Module]:
    return small_model(), small_cnn()


@pytest.fixture(scope="module")
def measured(subject):
    """Both networks, once for several tests."""
    return measure(subject[0], cnn=subject[1])


@pytest.fixture
def pairs(subject):
    return draw_pairs(subject[0], random_images(12, 1, 3, 1), N, SEED)


def mean_image() -> Tensor:
    """Of the sample, which is the baseline."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(SEED))
    return to_pixels(random_images(40, 1, 3, 2).images)[order[:30]].mean(0)


def own_order(method: str, maps: Tensor) -> Tensor:
    """What goes first: gradient maps are positive where a pixel speaks against p."""
    return maps.abs().sum(1) if method == "ecinn" else -maps.sum(1)


def deletion_and_insertion(score, x: Tensor, other: Tensor, order: Tensor) -> list[float]:
    """Image by image and pixel by pixel; `score` gives p(p) of images that come from number i."""
    means = []
    for start, end in ((x, other), (other, x)):
        areas = []
        for i in range(len(x)):
            pixels = np.argsort(-order[i].flatten().numpy(), kind="stable")
            images = start[i].repeat(11, 1, 1, 1).flatten(2)
            for step in range(11):
                changed = pixels[: step * 64 // 10]
                images[step][:, changed] = end[i].flatten(1)[:, changed]
            curve = score(images.reshape(11, *x.shape[1:]), i)
            areas.append(float(curve.sum() - (curve[0] + curve[-1]) / 2) / 10)
        means.append(float(np.mean(areas)))
    return means


@pytest.mark.parametrize("method", ["ecinn", "integrated_gradients", "random order"])
def test_curves_of_the_inn_read_by_itself_and_by_the_cnn(subject, measured, pairs, method) -> None:
    model, cnn = subject
    x, p, q = to_pixels(pairs.images), pairs.p, pairs.q
    generator = torch.Generator().manual_seed(SEED)
    noise, _ = torch.rand(x.shape, generator=generator), torch.randn(4, 64, generator=generator)
    orders = {"": torch.rand(N, 8, 8, generator=generator)}
    if method != "random order":
        inn = ExplainedINN(model.classifier, model.mu_bar)
        maps = make_heatmaps(inn, x, p, q, method, baseline=mean_image()).maps
        orders = {"": own_order(method, maps), ", by |h|": maps.abs().sum(1)}
    stored = to_pixels(model.explain(pairs.images, q[:, None]).stored_convincing[:, 0])
    blur = scipy.ndimage.gaussian_filter(x.numpy(), 0.8, mode="reflect", radius=4, axes=(2, 3))
    replacements = {"counterfactual": stored, "blur": torch.from_numpy(blur), "noise": noise}
    figures = row_of(measured[0].blocks[0], method).figures
    for end, by, n, network in (
        ("", "", N, model.predict),
        (", by |h|", ", by |h|", FIRST, model.predict),
        (", by the CNN", "", FIRST, lambda x: cnn(x).softmax(1)),
    ):
        if by not in orders:
            assert not any(name.endswith(end) for name in figures)
            continue
        for what, other in replacements.items():
            expected = deletion_and_insertion(
                lambda images, i, network=network: network(images)[:, p[i]],
                x[:n], other, orders[by],
            )  # fmt: skip
            for name, value in zip(("deletion", "insertion"), expected, strict=True):
                mean = figures[f"{name} AUC, {what}{end}"].mean
                assert mean == pytest.approx(value, rel=1e-4)


def test_the_cnn_is_explained_for_what_it_reads_itself(subject, measured, pairs) -> None:
    model, cnn = subject
    x, p = to_pixels(pairs.images), cnn(to_pixels(pairs.images)).argmax(1)
    q = (p + (pairs.q - pairs.p)) % 3
    block = measured[0].blocks[1]
    assert block.same_prediction == pytest.approx(float((p == pairs.p).float().mean()))
    assert 0 < block.same_prediction < 1
    inn = ecinn_heatmaps(model.classifier, model.mu_bar, x, p, q).maps
    deep_lift = make_heatmaps(cnn, x, p, q, "deep_lift", baseline=mean_image()).maps
    for method, maps in (("ecinn", inn), ("deep_lift", deep_lift)):
        figures = row_of(block, method).figures
        stored = to_pixels(to_uint8(x + inn))
        read = lambda images, i: cnn(images).softmax(1)[:, p[i]]  # noqa: E731
        deletion, _ = deletion_and_insertion(read, x, stored, own_order(method, maps))
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
    result = measured[0]
    blocks, density, linear = result.blocks[0].rows, result.density, result.linear
    for logit, n, rows in (
        ("linear", N, blocks), ("linear", FIRST, linear), ("density", FIRST, density),
    ):  # fmt: skip
        inn = ExplainedINN(model.classifier, model.mu_bar, logit)
        some = x[:n], pairs.p[:n], pairs.q[:n]
        made = make_heatmaps(inn, *some, "deep_lift", baseline=mean_image())
        delta = made.maps.sum((1, 2, 3)) - made.output_change
        row = next(row for row in rows if row.method == "deep_lift")
        assert row.convergence.delta == pytest.approx(float(delta.abs().median()), 1e-3)
        relative = (delta / made.output_change).abs().median()
        assert row.convergence.relative == pytest.approx(float(relative), 1e-3)
        variation = float(variations(made.maps).mean())
        assert row.figures["total variation"].mean == pytest.approx(variation, 1e-4)
    assert row_of(result.blocks[0], "ecinn").convergence is None
    assert [row.method for row in density] == [row.method for row in linear] == list(METHODS[1:])


def variations(maps: Tensor) -> Tensor:
    steps = sum(maps.diff(dim=dim).abs().sum((1, 2, 3)) for dim in (2, 3))
    return steps / maps.abs().sum((1, 2, 3))


def test_table_names_the_baseline_used(subject, measured, pairs) -> None:
    model, x = subject[0], to_pixels(pairs.images)
    inn = ExplainedINN(model.classifier, model.mu_bar)
    black = measure(model, methods=("deep_lift",), baseline="black")
    for name, image, (result, shown) in (
        ("black", torch.zeros(1, 8, 8), black),
        ("mean", mean_image(), measured),
    ):
        expected = make_heatmaps(inn, x, pairs.p, pairs.q, "deep_lift", baseline=image).maps[:4]
        torch.testing.assert_close(shown.maps["INN", "deep_lift"], expected, rtol=1e-3, atol=1e-4)
        words = " ".join(heatmap_tables.heatmap_tables(result)[0].notes)
        assert f"DeepLift: {'the mean' if name == 'mean' else 'black'}" in words


def test_interval_of_a_difference_is_that_of_pairs(subject, measured, pairs) -> None:
    model, x = subject[0], to_pixels(pairs.images)
    inn = ExplainedINN(model.classifier, model.mu_bar)
    ecinn, other = (
        variations(make_heatmaps(inn, x, pairs.p, pairs.q, method, baseline=mean_image()).maps)
        for method in ("ecinn", "integrated_gradients")
    )
    generator = torch.Generator().manual_seed(SEED)
    block = measured[0].blocks[0]
    noise = row_of(block, "white noise").figures["total variation"].mean
    pairwise = (ecinn.double() - other.double()) / noise
    expected = bootstrap_interval(pairwise, resamples=50, generator=generator)
    against = row_of(block, "integrated_gradients").against["relative total variation"]
    difference = astuple(against.difference)
    assert difference == pytest.approx(astuple(expected), rel=1e-3, abs=1e-4)
    assert expected.low < expected.mean < expected.high


def test_intervals_differences_and_cost(measured) -> None:
    for block in measured[0].blocks:
        ecinn = row_of(block, "ecinn")
        assert not ecinn.against
        assert [row.method for row in block.rows] == [*METHODS, "random order", "white noise"]
        for row in block.rows:
            for name, figure in row.figures.items():
                assert figure.low - 1e-9 <= figure.mean <= figure.high + 1e-9
                shown = name.endswith("by |h|") or name in NOISE
                assert (name in row.against) == (row is not ecinn and not shown)
                if name in row.against:
                    difference = row.against[name].difference
                    expected = ecinn.figures[name].mean - figure.mean
                    assert difference.mean == pytest.approx(expected, abs=1e-6)
        assert all("AUC, " in name for name in row_of(block, "random order").figures)
        less = (
            "deletion",
            "total",
            "high",
            "relative total",
            "relative spatial",
            "relative high",
            "|cosine|",
            "|rank correlation|",
        )
        for each in block.measures:
            assert each.better == ("less" if each.name.startswith(less) else "more")
        assert [row.cost.passes for row in block.rows[:-2]] == [2, 100, 4, 80, 40]
        for row in block.rows[:-2]:
            assert row.cost.times_ecinn == pytest.approx(row.cost.seconds / ecinn.cost.seconds)


def test_without_noise_maps_are_the_same_and_with_it_they_are_not(subject, measured) -> None:
    quiet = replace(SMALL, noise=0.0)
    still = measure(subject[0], n=3, methods=METHODS[-1:], settings=quiet)[0].blocks[0]
    for row in still.rows[:-2]:
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
    for row in block.rows[:-2]:
        assert row.figures["|cosine|, random weights"].mean == pytest.approx(1, abs=1e-4)
        honest = row_of(measured[0].blocks[0], row.method).figures["|cosine|, random weights"]
        assert 0 <= honest.mean < 0.9


def test_seed_decides_and_batch_size_does_not(subject) -> None:
    seen = {}
    methods = ("gradient_shap",)
    more = {"methods": methods, "observe": lambda p: seen.update({p.task: (p.done, p.total)})}
    runs = [measure(subject[0], 3, batch_size=size, **more)[0] for size in (32, 32, 2)]
    one, again, other = (result.blocks[0] for result in runs)
    assert seen["INN, ECINNh"] == (3, 3)
    assert all(done == total for done, total in seen.values())
    assert [row.method for row in one.rows] == ["ecinn", *methods, "random order", "white noise"]
    for row, same in zip(one.rows, again.rows, strict=True):
        assert row.figures == same.figures
    for row, same in zip(one.rows, other.rows, strict=True):
        for name, figure in row.figures.items():
            assert figure.mean == pytest.approx(same.figures[name].mean, rel=1e-2, abs=1e-3)


def test_tally_counts_new_and_fair_comparisons(measured) -> None:
    tables = {t.title: " ".join(t.notes) for t in heatmap_tables.heatmap_tables(measured[0])}
    inn, cnn = (words for title, words in tables.items() if "minus" in title)
    assert "It is better in" not in cnn
    left_out = ("density", "counterfactual", "random weights")
    verdicts = [
        comparison.verdict
        for row in measured[0].blocks[0].rows[:-2]
        for name, comparison in row.against.items()
        if not any(word in name for word in left_out)
    ]
    # Blur and noise, by two networks; four of marks; three of noise; two of stability.
    assert len(verdicts) == 4 * (8 + 4 + 3 + 2)
    better, worse = verdicts.count("better"), verdicts.count("worse")
    assert f"It is better in {better} and worse in {worse} of {len(verdicts)}," in inn


def test_captions_say_what_favours_whom(measured) -> None:
    tables = heatmap_tables.heatmap_tables(measured[0])
    for table in tables:
        words = " ".join(table.notes)
        assert all(len(row) == len(table.head) for row in table.rows), table.title
        if "Replaced pixels (" in table.title or "minus" in table.title:
            assert "counterfactual favours ECINNh" in words
        if table.title.startswith("CNN:") and "cost" not in table.title:
            assert "only a cross-check" in words
    titles = " ".join(table.title for table in tables)
    for section in WORDS["heatmap_titles"].values():
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


def test_tables_say_of_how_many_images_and_whose_figures(measured) -> None:
    result = measured[0]
    tables = {table.title: table for table in heatmap_tables.heatmap_tables(result)}
    of_all = ("replacement", "localisation", "noise")
    for block in result.blocks:
        for section in {each.section for each in block.measures}:
            n = N if section in of_all else FIRST
            named = f"{block.network}: {WORDS['heatmap_titles'][section]} (tiny, {n} random test"
            assert any(title.startswith(named) for title in tables)
    same = 100 * result.blocks[1].same_prediction
    cnn = next(table for title, table in tables.items() if title.startswith("CNN: Localisation"))
    assert f"the INN's in {same:.1f} % of the images" in " ".join(cnn.notes)
    logits = tables[f"INN, density and linear logit ({FIRST} images)"]
    for row in logits.rows:
        cells = dict(zip(logits.head, row, strict=True))
        for logit, rows in (("density", result.density), ("linear", result.linear)):
            (own,) = (each for each in rows if heatmap_measures.LABELS[each.method] == row[0])
            assert cells[f"median |δ|, {logit}"] == f"{own.convergence.delta:.3g}"
            assert cells[f"of output change, {logit}"] == f"{own.convergence.relative:.2%}"
            for name in ("total variation", "spatial coherence"):
                figure = own.figures[name]
                expected = f"{figure.mean:.3f} [{figure.low:.3f}, {figure.high:.3f}]"
                assert cells[f"{name}, {logit}"] == expected


def test_the_sheet_shows_the_explained_images(subject, measured, pairs) -> None:
    (model, cnn), (_, shown) = subject, measured
    stored = model.explain(pairs.images[:4], pairs.q[:4, None]).stored_convincing[:, 0]
    assert (shown.counterfactuals.int() - stored.int()).abs().max() <= 1
    read = cnn(to_pixels(pairs.images[:4])).argmax(1)
    # Targets are as far from what is read for both: where that differs, so do p and q.
    assert shown.other_pair["CNN"] == tuple((read != pairs.p[:4]).tolist())
    assert torch.equal(shown.pairs.p, pairs.p[:4])
    assert torch.equal(shown.pairs.q, pairs.q[:4])
    signs = {column.name: column.signs for column in heatmap_tables.heatmap_columns(shown)}
    # x̂ − x is positive where light is added; the others' F is the log-odds of q.
    assert signs.pop("ECINNh") == ("darker", "lighter")
    assert set(signs.values()) == {("for p", "for q")}
    assert len(signs) == 2 * 4


def test_cost_is_of_one_map(subject, monkeypatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(heatmaps, "_seconds", lambda device: float(next(ticks) ** 2))
    rows = measure(subject[0], methods=("gradient_shap",))[0].blocks[0].rows[:-2]
    # The clock is read twice for each of three rounds of maps, of which the first counts.
    taken = [(6 * k + 1) ** 2 - (6 * k) ** 2 for k in range(2)]
    for row, seconds in zip(rows, taken, strict=True):
        assert row.cost.seconds == pytest.approx(seconds / N)
        assert row.cost.times_ecinn == pytest.approx(seconds / taken[0])


def test_noisy_images_are_images(subject, monkeypatch) -> None:
    seen = []

    def maps(explained, x, p, q, method, **options) -> Heatmaps:
        seen.append(x)
        return Heatmaps(method, x - 0.4, None, 2)

    monkeypatch.setattr(heatmaps, "heatmaps", maps)
    measure(subject[0], methods=(), settings=replace(SMALL, noise=0.5))
    whole = torch.cat(seen)
    assert (float(whole.min()), float(whole.max())) == (0.0, 1.0)  # pixels of images are inside


def test_similarity_has_a_sign_but_for_random_weights(generator) -> None:
    maps = torch.randn((5, 2, 6, 6), generator=generator)
    other = -maps + 0.3 * torch.randn(maps.shape, generator=generator)
    other = torch.where(maps.abs() > maps.abs().median(), 0.1 * other, 10 * other)
    noisy = heatmap_measures.similarity("stability", maps, other)
    random = heatmap_measures.similarity("random weights", maps, other)
    for signed, absolute in zip(noisy.values(), random.values(), strict=True):
        assert (signed < 0).all()
        torch.testing.assert_close(absolute, -signed)
    a, b = (each.abs().sum(1).flatten(1).numpy() for each in (maps, other))
    ranks = [scipy.stats.spearmanr(x, y).statistic for x, y in zip(a, b, strict=True)]
    assert list(noisy.values())[1].tolist() == pytest.approx(ranks)


def test_wrong_input_is_refused(subject) -> None:
    with pytest.raises(InputError, match="from 2 to 12"):
        measure(subject[0], n=1)
    with pytest.raises(InputError, match="named twice"):
        measure(subject[0], methods=("ecinn", "ecinn"))
