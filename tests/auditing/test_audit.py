"""Audits against loops written out, and the page as a browser and a reader would take it."""

import json
import math
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from ecinn import cli
from ecinn.auditing.cautions import find_cautions
from ecinn.auditing.measurement import GRID, SUBGROUPS, Audit, Group, audit, rate, similarity
from ecinn.auditing.page import cell_name, report
from ecinn.classifier.checkpoint import Checkpoint, save_checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector, band_energies, fit_texture
from ecinn.classifier.recipes import MNIST
from ecinn.cli.audit import numbers
from ecinn.data.celeba import ATTRIBUTES
from ecinn.data.dataset import Dataset
from ecinn.data.face_regions import region_mask
from ecinn.errors import InputError
from ecinn.flow.network import Architecture
from ecinn.metrics.statistics import Interval
from ecinn.model import Model
from helpers.builders import randomise


def small_model(architecture: Architecture, dataset: str, names: tuple[str, ...]) -> Model:
    classifier = GenerativeClassifier(replace(architecture, classes=len(names))).eval()
    randomise(classifier, seed=4)
    generator = torch.Generator().manual_seed(5)
    # Means around the latents of random images, so that every class is predicted.
    x = torch.rand((40, *classifier.image_shape), generator=generator)
    z = classifier.encode(x).detach()
    with torch.no_grad():
        offsets = torch.randn(classifier.mu.shape, generator=generator)
        classifier.mu.copy_(z.mean(0) + 0.5 * offsets)
    return Model(
        Checkpoint(
            recipe=replace(
                MNIST, name="small", dataset=dataset, architecture=classifier.architecture
            ),
            classifier=classifier.requires_grad_(requires_grad=False),
            mu_bar=classifier.mu + 0.1 * torch.randn(classifier.mu.shape, generator=generator),
            ood=OODDetector((float(classifier.log_marginal(x).median()), math.inf)),
            class_names=names,
        )
    )


@pytest.fixture
def model(small_architecture: Architecture) -> Model:
    return small_model(small_architecture, "mnist", ("a", "b", "c"))


@pytest.fixture
def faces(small_architecture: Architecture) -> Model:
    return small_model(small_architecture, "celeba/Smiling", ("not smiling", "smiling"))


@pytest.fixture
def data(generator: torch.Generator) -> Dataset:
    images = torch.randint(0, 256, (60, 1, 8, 8), generator=generator, dtype=torch.uint8)
    known = torch.randint(0, 2, (60, 40), generator=generator, dtype=torch.uint8)
    return Dataset(images, known[:, ATTRIBUTES.index("Smiling")].long(), ("0", "1"), known)


@pytest.fixture
def done(faces: Model, data: Dataset) -> Audit:
    return audit(faces, data, n=50, seed=2)


def test_mean_maps_are_the_means_of_explanations_one_by_one(model: Model, data: Dataset) -> None:
    result = audit(model, data, n=30, seed=1)
    maps: dict[tuple[int, int], list[torch.Tensor]] = {}
    before: dict[tuple[int, int], list[torch.Tensor]] = {}
    reached = 0
    for row, index in enumerate(result.index.tolist()):
        e = model.explain(data.images[index][None], int(result.flips.q[row]))
        pair = int(e.p), int(e.q)
        maps.setdefault(pair, []).append(e.heatmap[0, 0])
        before.setdefault(pair, []).append(e.x[0])
        reached += int(e.convincing_certificate.reached)
        assert torch.equal(e.stored_convincing[0, 0], result.flips.counterfactuals[row])
    assert {(pair.p, pair.q): pair.n for pair in result.pairs} == {
        pair: len(some) for pair, some in maps.items()
    }
    assert len(maps) > 3
    assert result.overall.reached.count == reached
    for pair in result.pairs:
        some, images = (torch.stack(each[pair.p, pair.q]) for each in (maps, before))
        for ours, expected in (
            (pair.change, some.mean(0)),
            (pair.absolute, some.abs().mean(0)),
            (pair.image, images.mean(0)),
            (pair.counterfactual, (images + some).mean(0)),
        ):
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_images_read_alike_go_to_all_other_classes_in_turn(model: Model, data: Dataset) -> None:
    result = audit(model, data, n=45)
    assert len(result.index.unique()) == 45
    assert sum(pair.n for pair in result.pairs) == 45
    for p in range(3):
        counts = [pair.n for pair in result.pairs if pair.p == p]
        assert max(counts) - min(counts) <= 1
    assert bool((result.flips.p != result.flips.q).all())
    assert bool((result.flips.turn == 1).all())


def test_the_grid_is_the_mean_change_of_cells_over_that_of_the_picture(done: Audit) -> None:
    amount = done.flips.change.abs().sum(1).mean(0).numpy()
    for row, strip in enumerate(np.array_split(amount, GRID[0], 0)):
        for column, cell in enumerate(np.array_split(strip, GRID[1], 1)):
            expected = cell.mean() / amount.mean()
            assert float(done.grid[row, column]) == pytest.approx(expected, rel=1e-5)
    assert cell_name(5, 2, (8, 5)) == "row 6 of 8, centre"
    assert cell_name(0, 1, (2, 3)) == "row 1 of 2, column 2"


def test_regions_of_faces_are_means_over_images(done: Audit) -> None:
    assert {r.name for r in done.regions} == {"mouth", "eyes", "cheeks", "face", "background"}
    for region in done.regions:
        mask = region_mask(region.name, 8, 8).numpy()
        shares = [
            np.abs(change[0])[mask].sum() / np.abs(change).sum()
            for change in done.flips.change.numpy()
        ]
        assert region.share == pytest.approx(np.mean(shares), rel=1e-5)
        assert region.density.mean == pytest.approx(np.mean(shares) / mask.mean(), rel=1e-5)
        assert region.density.low < region.density.mean < region.density.high
    densities = [region.density.mean for region in done.regions]
    assert densities == sorted(densities, reverse=True)


def test_rates_of_subgroups_are_counted_one_by_one(done: Audit, data: Dataset, faces) -> None:
    assert len(done.subgroups) == 2 * len(SUBGROUPS)
    for number, group in enumerate(done.subgroups):
        attribute, value = ATTRIBUTES.index(SUBGROUPS[number // 2]), number % 2
        n = wrong = yes = no = false_yes = false_no = typical = still_typical = 0
        changes = []
        for row, index in enumerate(done.index.tolist()):
            if int(data.attributes[index, attribute]) != value:
                continue
            label, p = int(data.labels[index]), int(faces.predict(data.images[index]).argmax())
            n += 1
            wrong += p != label
            yes, no = yes + (label == 1), no + (label == 0)
            false_yes += label == 0 and p == 1
            false_no += label == 1 and p == 0
            typical += bool(faces.explain(data.images[index], 1 - p, check=False).typical)
            changes.append(float(done.flips.change[row].abs().mean()))
            stored = faces.explain(done.flips.counterfactuals[row], "all", check=False)
            still_typical += bool(stored.typical)
        assert (group.n, group.error.count, group.error.n) == (n, wrong, n)
        assert (group.false_positive.count, group.false_positive.n) == (false_yes, no)
        assert (group.false_negative.count, group.false_negative.n) == (false_no, yes)
        assert group.typical.count == typical
        assert 0 < typical < n
        assert group.typical_counterfactual.count == still_typical
        assert group.change.mean == pytest.approx(np.mean(changes), rel=1e-5)
        # Of an even number the lower of the two in the middle.
        assert group.median_change == pytest.approx(sorted(changes)[(n - 1) // 2], rel=1e-5)
    assert [group.name for group in done.subgroups[:2]] == ["not male", "male"]
    assert sum(group.n for group in done.classes) == 50


def test_texture_counts_in_what_is_typical(faces: Model, data: Dataset) -> None:
    """As the explanation of an image says, where half of the images are too rough or smooth."""
    frequency = torch.arange(64) % 3
    z = faces.classifier.encode(faces.pixels(data.images))
    residual = z - faces.mu_bar[faces.predict(data.images).argmax(1)]
    texture = fit_texture(band_energies(residual, frequency), frequency)
    middle = float(texture.distance(residual).median())
    ood = OODDetector((-math.inf, math.inf), texture._replace(limit=middle))
    model = Model(replace(faces.checkpoint, ood=ood))
    result = audit(model, data, n=60, seed=1)
    for reading, images in (
        (result.flips.before, result.images),
        (result.after, result.flips.counterfactuals),
    ):
        expected = [bool(model.explain(one, "all", check=False).typical) for one in images]
        assert reading.typical.tolist() == expected
        assert 4 < sum(expected) < 56


def test_the_seed_draws_and_the_split_is_told(faces: Model, data: Dataset) -> None:
    one, again, other = (audit(faces, data, n=30, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(one.index, again.index)
    assert not torch.equal(one.index, other.index)
    assert torch.equal(one.images, data.images[one.index])
    assert torch.equal(one.labels, data.labels[one.index])
    assert (other.seed, other.split) == (5, "test")
    assert audit(faces, data, n=2, split="validation").split == "validation"


@pytest.mark.parametrize(("k", "n"), [(0, 7), (3, 7), (7, 7), (40, 900)])
def test_rate_has_wilsons_interval(k: int, n: int) -> None:
    ours = rate(torch.arange(n) < k)
    theirs = scipy.stats.binomtest(k, n).proportion_ci(method="wilson")
    assert (ours.count, ours.n, ours.share) == (k, n, k / n)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-6)


def test_maps_are_like_themselves_and_unlike_their_negatives(generator) -> None:
    maps = torch.randn((6, 3, 5, 5), generator=generator)
    turn = torch.tensor([1.0, -1, 1, -1, 1, -1])
    same = similarity(maps, 2 * maps, turn, generator)
    assert [value.mean for value in (same.signed, same.absolute, same.rank)] == pytest.approx(
        [1, 1, 1]
    )
    assert same.turned.mean == pytest.approx(0, abs=1e-6)
    against = similarity(maps, -maps, -torch.ones(6), generator)
    assert against.signed.mean == pytest.approx(-1)
    assert against.turned.mean == pytest.approx(1)
    assert (against.absolute.mean, against.rank.mean) == pytest.approx((1, 1))


def test_a_model_beside_itself_and_the_shuffled_control(model: Model, data: Dataset) -> None:
    (beside,) = audit(model, data, n=40, others={"itself": model}).comparisons
    assert (beside.n, beside.agreement.share, beside.correlation) == (40, 1, None)
    for name in ("signed", "turned", "absolute", "rank"):
        assert getattr(beside.same, name).mean == pytest.approx(1)
        assert getattr(beside.shuffled, name).high < 0.9
    assert beside.mean_maps == pytest.approx(1)


def test_the_control_pairs_no_image_with_itself(faces: Model, data: Dataset) -> None:
    """Of two images each meets the other: both cosines are the one between their maps."""
    for seed in range(5):
        result = audit(faces, data, n=2, seed=seed, others={"itself": faces})
        a, b = result.flips.change.double().flatten(1)
        cosine = float(a @ b / a.norm() / b.norm())
        shuffled = result.comparisons[0].shuffled
        assert shuffled.signed.mean == pytest.approx(cosine, abs=1e-5)
        assert shuffled.absolute.mean == pytest.approx(abs(cosine), abs=1e-5)
        other_way = bool(result.flips.q[0] != result.flips.q[1])
        assert shuffled.turned.mean == pytest.approx(-cosine if other_way else cosine, abs=1e-5)


def test_a_model_whose_classes_are_swapped_looks_at_the_same_up_to_a_sign(faces, data) -> None:
    """It flips every image the same way, but calls that the way to the other class."""
    classifier = GenerativeClassifier(faces.classifier.architecture).eval()
    classifier.load_state_dict(faces.classifier.state_dict())
    with torch.no_grad():
        classifier.mu.copy_(faces.classifier.mu.flip(0))
    swapped = Model(
        replace(
            faces.checkpoint,
            classifier=classifier.requires_grad_(requires_grad=False),
            mu_bar=faces.mu_bar.flip(0),
        )
    )
    result = audit(faces, data, n=40, others={"swapped": swapped})
    (beside,) = result.comparisons
    assert result.flips.turn.tolist() == [1 if q == 1 else -1 for q in result.flips.q]
    assert beside.same.signed.mean == pytest.approx(1, abs=1e-5)
    assert beside.same.turned.mean == pytest.approx(-1, abs=1e-5)
    assert beside.mean_maps == pytest.approx(-1, abs=1e-5)
    assert beside.correlation == pytest.approx(-1)
    assert beside.agreement.count == 0


def test_the_other_models_own_change_and_answers_are_told(faces: Model, data: Dataset) -> None:
    architecture = replace(faces.classifier.architecture, seed=9)
    other = small_model(architecture, "celeba/Young", ("old", "young"))
    result = audit(faces, data, n=30, others={"other": other})
    (beside,) = result.comparisons
    theirs = other.explain(result.images, check=False)
    expected = theirs.heatmap[:, 0].abs().mean(0)
    torch.testing.assert_close(beside.absolute, expected, atol=1e-4, rtol=1e-3)
    same = faces.predict(result.images).argmax(1) == theirs.p
    assert (beside.agreement.count, beside.agreement.n) == (int(same.sum()), 30)


def test_mean_maps_are_compared_target_by_target(model: Model, data: Dataset) -> None:
    other = small_model(replace(model.classifier.architecture, seed=9), "mnist", ("a", "b", "c"))
    mine = audit(model, data, n=60, others={"other": other})
    (beside,) = mine.comparisons
    sums: dict[int, list[torch.Tensor]] = {}
    counts: dict[int, int] = {}
    for row, index in enumerate(mine.index.tolist()):
        q, image = int(mine.flips.q[row]), data.images[index]
        if int(other.predict(image).argmax()) != q:
            pair = [m.explain(image, q, check=False).heatmap.flatten() for m in (model, other)]
            sums[q] = [a + b for a, b in zip(sums.get(q, [0, 0]), pair, strict=True)]
            counts[q] = counts.get(q, 0) + 1
    assert beside.n == sum(counts.values()) < 60
    both = [m.predict(data.images[mine.index]).argmax(1) for m in (model, other)]
    # Also of images that they turn into different classes.
    assert (beside.agreement.n, beside.agreement.count) == (60, int((both[0] == both[1]).sum()))
    expected = sum(
        counts[q] * float(torch.cosine_similarity(a, b, dim=0)) for q, (a, b) in sums.items()
    )
    assert beside.mean_maps == pytest.approx(expected / beside.n, abs=1e-4)


def test_the_pictures_to_look_at(done: Audit) -> None:
    lowest = sorted(range(50), key=lambda row: float(done.after.log_p[row]))[:6]
    assert list(done.unlikely) == lowest
    confidence = done.flips.before.posterior.amax(1)
    assert all(int(done.flips.p[row]) != int(done.labels[row]) for row in done.misread)
    sure = [float(confidence[row]) for row in done.misread]
    assert sure == sorted(sure, reverse=True)
    wrong = (done.flips.p != done.labels).nonzero()[:, 0]
    assert sure[0] == float(confidence[wrong].max())


class Page(HTMLParser):
    """Every tag is closed in order; keeps what was opened and said."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.said = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said += data


@pytest.mark.parametrize("kind", ["faces", "four"])
def test_the_page_is_whole_and_carries_all_it_needs(kind, faces, small_architecture, data) -> None:
    names = ("<script>alert(1)</script>", 'b"&', "c", "d")
    model = faces if kind == "faces" else small_model(small_architecture, "mnist", names)
    result = audit(model, data, n=30, others={"<i>me</i>": model})
    text = report(result, "ecinn audit <me>")
    page = Page(text)
    assert page.tags[0] == ("html", {"lang": "en"})
    assert "http" not in text
    assert "script" not in {tag for tag, _ in page.tags}
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) > 30
    assert all(p["src"].startswith("data:image/png;base64,") and p["alt"] for p in pictures)
    assert not {"link", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert "Beside <i>me</i>" in page.said
    assert "What does small look at?" in page.said
    assert "ecinn audit <me>" in page.said
    if kind == "four":
        assert "→ <script>alert(1)</script>" in page.said
    else:
        assert "By subgroup" in page.said
        assert "it takes another classifier" in page.said
        assert "mouth" in page.said


def test_cautions_follow_the_figures(done: Audit) -> None:
    def said(**changes: object) -> str:
        return " ".join(find_cautions(replace(done, **changes)))

    def background(density: float) -> tuple:
        spot = next(region for region in done.regions if region.name == "background")
        return (replace(spot, density=Interval(density, density - 0.1, density + 0.1, 9)),)

    assert "Only 50 pictures" in said()
    assert "background changes 1.2 times" in said(regions=background(1.2))
    assert "background" not in said(regions=background(0.9))
    few_wrong, all_wrong = rate(torch.arange(50) < 2), rate(torch.arange(50) < 50)
    overall = replace(done.overall, reached=all_wrong)
    assert "misread" not in said(overall=overall, classes=(), subgroups=(overall,))
    assert "not read as was asked" in said(overall=replace(overall, reached=few_wrong))
    assert "not read as was asked" not in said(overall=overall)


@pytest.mark.parametrize(
    ("own", "others", "warned"),
    [
        ((9, 20), (1, 30), True),
        ((34, 310), (1, 190), True),
        ((1, 190), (34, 310), False),
        ((0, 3), (0, 27), False),
        ((1, 12), (0, 88), False),
        ((5, 50), (5, 50), False),
        ((3, 30), (0, 0), False),
    ],
)
def test_a_group_is_compared_with_all_others(
    done: Audit, own: tuple[int, int], others: tuple[int, int], *, warned: bool
) -> None:
    def group(wrong: int, n: int) -> Group:
        return replace(done.overall, name="male", error=rate(torch.arange(n) < wrong), n=n)

    overall = group(own[0] + others[0], own[1] + others[1])
    said = " ".join(
        find_cautions(replace(done, overall=overall, classes=(), subgroups=(group(*own),)))
    )
    words = f"“male” is misread more often than others: {own[0]} of {own[1]}, against {others[0]}"
    assert (words in said) == warned
    assert ("misread" in said) == warned


def test_models_that_look_at_the_same_are_said_to(faces: Model, data: Dataset) -> None:
    result = audit(faces, data, n=20, others={"twin": faces})
    assert "maps of twin are much like these" in " ".join(find_cautions(result))


def test_numbers_are_json_without_pictures(done: Audit) -> None:
    back = json.loads(json.dumps(numbers(done), allow_nan=False))
    assert back["n"] == 50
    assert back["overall"]["error"]["count"] == done.overall.error.count
    assert back["regions"][0]["density"]["mean"] == done.regions[0].density.mean
    assert math.isclose(back["grid"][2][3], float(done.grid[2, 3]))
    assert "images" not in back


def test_what_cannot_be_audited_is_refused(model: Model, faces: Model, data: Dataset) -> None:
    with pytest.raises(InputError, match="at least 2 images"):
        audit(model, data, n=1)
    with pytest.raises(InputError, match=r"other reads .* 2 classes.* compare models of one kind"):
        audit(model, data, others={"other": faces})
    with pytest.raises(InputError, match=r"images are of shape \(1, 8, 8\)"):
        audit(model, replace(data, images=data.images[..., :4]))


def run(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["ecinn", *map(str, arguments)])
    monkeypatch.setattr(cli.app.out, "width", 200)
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, *capsys.readouterr()


def test_the_command_writes_the_page_and_prints_numbers(monkeypatch, capsys, tmp_path) -> None:
    page = tmp_path / "new" / "page.html"
    arguments = ("audit", "fakemnist", "--n", 4, "--out", page)
    code, stdout, stderr = run(monkeypatch, capsys, *arguments)
    assert (code, f"wrote {page}" in stdout.replace("\n", "")) == (0, True), stderr
    assert "What does fakemnist look at?" in Page(page.read_text()).said
    code, stdout, _ = run(monkeypatch, capsys, *arguments, "--json", "--with", "mnist")
    result = json.loads(stdout)
    assert (code, result["n"], result["file"]) == (0, 4, str(page))
    assert result["comparisons"][0]["other"] == "mnist"
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_the_command_refuses_in_one_line(monkeypatch, capsys, tmp_path: Path, model) -> None:
    def fails(*arguments: object) -> str:
        code, stdout, stderr = run(monkeypatch, capsys, "audit", "mnist", *arguments)
        assert (code, stdout) == (2, "")
        return stderr

    monkeypatch.chdir(tmp_path)
    save_checkpoint(model.checkpoint, tmp_path / "small.safetensors")
    assert "small reads images of shape (1, 8, 8)" in fails("--with", "small.safetensors")
    assert "'moon'" in fails("--split", "moon")
    assert "no validation images" in fails("--split", "validation")
    assert "is a folder" in fails("--out", tmp_path)
    assert "called the same" in fails("--with", "mnist", "--with", "mnist")
    assert "no model 'resnet'" in fails("--with", "resnet")
    assert not list(tmp_path.glob("*.html"))
