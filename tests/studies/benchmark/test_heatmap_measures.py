"""The heatmap benchmark where the truth is known: who wins, and that losses are reported."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ecinn.attribution.heatmaps import Heatmaps
from ecinn.data.face_regions import region_mask
from ecinn.metrics.statistics import Interval
from ecinn.studies.benchmark import heatmap_tables, heatmaps
from ecinn.studies.benchmark.heatmap_measures import Reader, evidence_for_p, verdict
from ecinn.studies.benchmark.heatmap_tables import lost
from helpers.builders import small_model
from helpers.heatmap_benchmark import CUE, measure, row_of


def test_evidence_for_p_deletes_p_fastest_and_magnitude_does_not() -> None:
    """log-odds of q are w·x, so h = w·x pixel by pixel, and a black replacement takes it away."""
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(5, 1, 8, 8, generator=generator)
    w = torch.randn(64, generator=generator) / 4
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2, bias=False)).requires_grad_(False)  # noqa: FBT003
    network[1].weight.copy_(torch.stack([0 * w, w]))
    p = torch.zeros(5, dtype=torch.long)
    made = Heatmaps("deep_lift", x * w.reshape(8, 8), torch.zeros(5), 1)
    black = {"blur": torch.zeros_like(x)}

    def predict(images):
        return network(images).softmax(1)

    reader = Reader("replacement", predict, x, p, black, 7, 0)
    by_magnitude = Reader("magnitude", predict, x, p, black, 7, 0)
    areas = {
        each.name: area
        for each, area in (reader.of_maps(made) | by_magnitude.of_maps(made)).items()
    }
    for kind, sign in (("deletion", 1), ("insertion", -1)):
        own, magnitude = (areas[f"{kind} AUC, blur{end}"] for end in ("", ", by |h|"))
        for order in (-evidence_for_p(made), torch.rand(5, 8, 8, generator=generator)):
            other = {each.name: area for each, area in reader.areas(order).items()}
            assert (sign * (other[f"{kind} AUC, blur"] - own) > 0).all()
        assert (sign * (magnitude - own) > 0).all()


def perfect_for(winner: str):
    """One method marks exactly what tells p from q, all others everything but that."""

    def maps(explained, x, p, q, method, **options) -> Heatmaps:
        marks = CUE.stencils
        inside = (marks[p] | marks[q])[:, None].to(x)
        change = None if method == "ecinn" else torch.ones(len(x))
        return Heatmaps(method, inside if method == winner else 1.1 - inside, change, 2)

    return maps


@pytest.mark.slow
@pytest.mark.parametrize("winner", ["ecinn", "deep_lift"])
def test_a_perfect_map_wins_localisation_and_losses_are_reported(monkeypatch, winner) -> None:
    monkeypatch.setattr(heatmaps, "heatmaps", perfect_for(winner))
    result, _ = measure(small_model(), methods=("deep_lift",))
    block = result.blocks[0]
    names = ("share in the marks of p and q", "pointing game", "localisation AUC")
    for name in names:
        figure = row_of(block, winner).figures[name]
        assert (figure.mean, figure.low, figure.high) == pytest.approx((1, 1, 1))
        comparison = row_of(block, "deep_lift").against[name]
        assert comparison.verdict == ("better" if winner == "ecinn" else "worse")
    table = next(t for t in heatmap_tables.heatmap_tables(result) if "minus" in t.title)
    cells = dict(row[:2] for row in table.rows)
    if winner == "ecinn":
        assert not set(names) & set(lost(block))
        assert cells["pointing game ↑"].startswith("better +1.000 [+1.000")
        of_place = tuple(each for each in block.measures if each.section == "localisation")
        alone = replace(block, measures=of_place)
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
    assert verdict(Interval((low + high) / 2, low, high, 9), better) == word


@pytest.mark.slow
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
    # A density follows from the share, and the background's share from the face's.
    roles = {each.name: each.role for each in block.measures if each.section == "localisation"}
    counted = {name for name, role in roles.items() if role == "counted"}
    assert counted == {f"share, {region}" for region in ("mouth", "eyes", "cheeks", "face")}
    assert {role for name, role in roles.items() if name not in counted} == {"compared"}


def test_digits_without_a_cue_have_no_localisation() -> None:
    result, _ = measure(small_model(dataset="mnist"), n=2, methods=())
    assert "localisation" not in {m.section for m in result.blocks[0].measures}
    assert result.density == ()
