"""Check audits against explicit loops, and the page as a browser would read it."""

import html
import json
import math
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from ecinn.auditing import Audit, audit
from ecinn.auditing.measurement import GRID, SUBGROUPS, similarity
from ecinn.auditing.page import ranked_cells
from ecinn.auditing.result import Group, count
from ecinn.classifier.checkpoint import Checkpoint, save_checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector, band_energies, fit_texture
from ecinn.classifier.recipes import MNIST
from ecinn.data.celeba import ATTRIBUTES
from ecinn.data.dataset import Dataset
from ecinn.data.face_regions import region_mask
from ecinn.errors import InputError
from ecinn.flow.network import Architecture
from ecinn.metrics.statistics import Interval, wilson
from ecinn.model import Model
from ecinn.progress import Progress
from helpers.builders import randomise, with_default
from helpers.command_line import fails, run


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


@pytest.fixture(scope="module")
def model(small_architecture: Architecture) -> Model:
    return small_model(small_architecture, "mnist", ("a", "b", "c"))


@pytest.fixture(scope="module")
def faces(small_architecture: Architecture) -> Model:
    return small_model(small_architecture, "celeba/Smiling", ("not smiling", "smiling"))


@pytest.fixture(scope="module")
def data() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 1, 8, 8), generator=generator, dtype=torch.uint8)
    known = torch.randint(0, 2, (60, 40), generator=generator, dtype=torch.uint8)
    return Dataset(images, known[:, ATTRIBUTES.index("Smiling")].long(), ("0", "1"), known)


@pytest.fixture(scope="module")
def finished(faces: Model, data: Dataset) -> Audit:
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
        pair: len(heatmaps) for pair, heatmaps in maps.items()
    }
    assert len(maps) > 3
    assert count(result.overall.reached) == reached
    for pair in result.pairs:
        heatmaps, images = (torch.stack(table[pair.p, pair.q]) for table in (maps, before))
        for ours, expected in (
            (pair.change, heatmaps.mean(0)),
            (pair.absolute, heatmaps.abs().mean(0)),
            (pair.image, images.mean(0)),
            (pair.counterfactual, (images + heatmaps).mean(0)),
        ):
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_an_audit_uses_the_default_of_each_model_unless_told(faces: Model, data: Dataset) -> None:
    sure, surer = with_default(faces, 0.7), with_default(faces, 0.8)
    own = "{} % requested (this model's default)"
    for request, words, their_words in (
        (None, own.format(70), own.format(80)),
        (0.6, "60 % requested", "60 % requested"),
        ("alpha_1", "α₁ (the paper's)", "α₁ (the paper's)"),
    ):
        result = audit(sure, data, n=5, confidence=request, others={"surer": surer})
        for row, index in enumerate(result.index.tolist()):
            e = sure.explain(data.images[index][None], confidence=request)
            assert torch.equal(e.stored_convincing[0, 0], result.flips.counterfactuals[row])
        (comparison,) = result.comparisons
        assert (result.to_dict()["requested"], comparison.requested) == (words, their_words)
        theirs = surer.explain(data.images[result.index], confidence=request).heatmap[:, 0]
        torch.testing.assert_close(comparison.absolute, theirs.abs().mean(0), atol=1e-5, rtol=1e-3)
        page = html.unescape(result.html())
        assert f"Changed images: {words}; surer: {their_words}." in page


def test_images_of_one_predicted_class_get_all_targets_in_turn(
    model: Model, data: Dataset
) -> None:
    result = audit(model, data, n=45)
    assert len(result.index.unique()) == 45
    assert sum(pair.n for pair in result.pairs) == 45
    for p in range(3):
        counts = [pair.n for pair in result.pairs if pair.p == p]
        assert max(counts) - min(counts) <= 1
    assert bool((result.flips.p != result.flips.q).all())
    assert bool((result.flips.sign == 1).all())


def test_the_grid_is_the_mean_change_of_cells_relative_to_the_image(finished: Audit) -> None:
    amount = finished.flips.change.abs().sum(1).mean(0).numpy()
    for row, strip in enumerate(np.array_split(amount, GRID[0], 0)):
        for column, cell in enumerate(np.array_split(strip, GRID[1], 1)):
            expected = cell.mean() / amount.mean()
            assert float(finished.grid[row, column]) == pytest.approx(expected, rel=1e-5)
    cells = ranked_cells(finished)
    assert [cell.change for cell in cells] == sorted(finished.grid.flatten().tolist())[::-1]
    assert {cell.name for cell in cells} >= {"row 6 of 8, centre", "row 1 of 8, far left"}
    assert sum(
        (cell.box.right - cell.box.left) * (cell.box.bottom - cell.box.top) for cell in cells
    ) == pytest.approx(1)
    other_grid = replace(finished, grid=finished.grid[:2, :3])
    assert "row 1 of 2, column 2" in {cell.name for cell in ranked_cells(other_grid)}


def test_regions_of_faces_are_means_over_images(finished: Audit) -> None:
    assert {r.name for r in finished.regions} == {"mouth", "eyes", "cheeks", "face", "background"}
    for region in finished.regions:
        mask = region_mask(region.name, 8, 8).numpy()
        shares = [
            np.abs(change[0])[mask].sum() / np.abs(change).sum()
            for change in finished.flips.change.numpy()
        ]
        assert region.share == pytest.approx(np.mean(shares), rel=1e-5)
        assert region.density.mean == pytest.approx(np.mean(shares) / mask.mean(), rel=1e-5)
        assert region.density.low < region.density.mean < region.density.high
    densities = [region.density.mean for region in finished.regions]
    assert densities == sorted(densities, reverse=True)


def test_rates_of_subgroups_are_counted_one_by_one(finished: Audit, data: Dataset, faces) -> None:
    assert len(finished.subgroups) == 2 * len(SUBGROUPS)
    indices = finished.index.tolist()
    predicted = [int(faces.predict(data.images[index]).argmax()) for index in indices]
    is_typical = [
        bool(faces.explain(data.images[index], 1 - p, check=False).typical)
        for index, p in zip(indices, predicted, strict=True)
    ]
    stays_typical = [
        bool(faces.explain(image, "all", check=False).typical)
        for image in finished.flips.counterfactuals
    ]
    for number, group in enumerate(finished.subgroups):
        attribute, value = ATTRIBUTES.index(SUBGROUPS[number // 2]), number % 2
        n = wrong = yes = no = false_yes = false_no = typical = still_typical = 0
        changes = []
        for row, index in enumerate(indices):
            if int(data.attributes[index, attribute]) != value:
                continue
            label, p = int(data.labels[index]), predicted[row]
            n += 1
            wrong += p != label
            yes, no = yes + (label == 1), no + (label == 0)
            false_yes += label == 0 and p == 1
            false_no += label == 1 and p == 0
            typical += is_typical[row]
            changes.append(float(finished.flips.change[row].abs().mean()))
            still_typical += stays_typical[row]
        assert (group.n, group.error) == (n, wilson(wrong, n))
        assert group.false_positive == wilson(false_yes, no)
        assert group.false_negative == wilson(false_no, yes)
        assert group.typical == wilson(typical, n)
        assert 0 < typical < n
        assert group.typical_counterfactual == wilson(still_typical, n)
        assert group.change.mean == pytest.approx(np.mean(changes), rel=1e-5)
        # The lower of the two middle values if their number is even.
        assert group.median_change == pytest.approx(sorted(changes)[(n - 1) // 2], rel=1e-5)
    assert [group.name for group in finished.subgroups[:2]] == ["not male", "male"]
    assert sum(group.n for group in finished.classes) == 50


def test_columns_of_a_table_are_subgroups(model: Model, data: Dataset) -> None:
    camera = tuple("AB"[row % 3 == 0] for row in range(len(data)))
    columns = {
        "camera": camera,
        "number": tuple(map(str, range(len(data)))),
        "same": ("x",) * len(data),
    }
    n = min(30, len(data))
    finished = audit(model, replace(data, columns=columns), n=n)
    assert [group.name for group in finished.subgroups] == ["camera: A", "camera: B"]
    for group, value in zip(finished.subgroups, "AB", strict=True):
        rows = [i for i, row in enumerate(finished.index.tolist()) if camera[row] == value]
        wrong = sum(int(finished.flips.p[i] != finished.labels[i]) for i in rows)
        assert group.n == len(rows)
        assert group.error.mean == pytest.approx(wrong / len(rows))
    assert "By the other columns of the table" in finished.html("ecinn audit")


def test_texture_decides_what_is_typical(faces: Model, data: Dataset) -> None:
    """With a texture limit at the median, half of the images are out of distribution."""
    frequency = torch.arange(64) % 3
    z = faces.classifier.encode(faces.pixels(data.images))
    residual = z - faces.mu_bar[faces.predict(data.images).argmax(1)]
    texture = fit_texture(band_energies(residual, frequency), frequency)
    middle = 1.001 * float(texture.distance(residual).median())  # between two images
    ood = OODDetector((-math.inf, math.inf), texture._replace(limit=middle))
    model = Model(replace(faces.checkpoint, ood=ood))
    result = audit(model, data, n=60, seed=1)
    for prediction, images in (
        (result.flips.before, result.images),
        (result.after, result.flips.counterfactuals),
    ):
        expected = model.explain(images, "all", check=False).typical.tolist()
        assert prediction.typical.tolist() == expected
        assert 4 < sum(expected) < 56


@pytest.mark.slow
def test_the_seed_draws_the_images_and_the_split_is_reported(faces: Model, data: Dataset) -> None:
    one, again, other = (audit(faces, data, n=30, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(one.index, again.index)
    assert not torch.equal(one.index, other.index)
    assert torch.equal(one.images, data.images[one.index])
    assert torch.equal(one.labels, data.labels[one.index])
    assert (other.seed, other.split) == (5, "test")
    assert audit(faces, data, n=2, split="validation").split == "validation"


def test_maps_are_similar_to_themselves_and_opposite_to_their_negatives(generator) -> None:
    maps = torch.randn((6, 3, 5, 5), generator=generator)
    sign = torch.tensor([1.0, -1, 1, -1, 1, -1])
    same = similarity(maps, 2 * maps, sign, generator)
    assert [value.mean for value in (same.signed, same.absolute, same.rank)] == pytest.approx(
        [1, 1, 1]
    )
    assert same.turned.mean == pytest.approx(0, abs=1e-6)
    negated = similarity(maps, -maps, -torch.ones(6), generator)
    assert negated.signed.mean == pytest.approx(-1)
    assert negated.turned.mean == pytest.approx(1)
    assert (negated.absolute.mean, negated.rank.mean) == pytest.approx((1, 1))


def test_a_model_compared_with_itself_and_the_shuffled_control(
    model: Model, data: Dataset
) -> None:
    (compared,) = audit(model, data, n=40, others={"itself": model}).comparisons
    assert (compared.n, compared.agreement.mean, compared.correlation) == (40, 1, None)
    for name in ("signed", "turned", "absolute", "rank"):
        assert getattr(compared.same, name).mean == pytest.approx(1)
        assert getattr(compared.shuffled, name).high < 0.9
    assert compared.mean_maps == pytest.approx(1)


@pytest.mark.slow
def test_the_control_pairs_no_image_with_itself(faces: Model, data: Dataset) -> None:
    """With two images, both cosines are the one between the two maps."""
    for seed in range(5):
        result = audit(faces, data, n=2, seed=seed, others={"itself": faces})
        a, b = result.flips.change.double().flatten(1)
        cosine = float(a @ b / a.norm() / b.norm())
        shuffled = result.comparisons[0].shuffled
        assert shuffled.signed.mean == pytest.approx(cosine, abs=1e-5)
        assert shuffled.absolute.mean == pytest.approx(abs(cosine), abs=1e-5)
        opposite = bool(result.flips.q[0] != result.flips.q[1])
        assert shuffled.turned.mean == pytest.approx(-cosine if opposite else cosine, abs=1e-5)


def test_swapping_the_classes_of_a_model_changes_only_the_sign(faces, data) -> None:
    """The swapped model makes the same change, but towards the other class number."""
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
    (compared,) = result.comparisons
    assert result.flips.sign.tolist() == [1 if q == 1 else -1 for q in result.flips.q]
    assert compared.same.signed.mean == pytest.approx(1, abs=1e-5)
    assert compared.same.turned.mean == pytest.approx(-1, abs=1e-5)
    assert compared.mean_maps == pytest.approx(-1, abs=1e-5)
    assert compared.correlation == pytest.approx(-1)
    assert compared.agreement.mean == 0


def test_the_other_models_change_and_agreement_are_reported(faces: Model, data: Dataset) -> None:
    architecture = replace(faces.classifier.architecture, seed=9)
    other = small_model(architecture, "celeba/Young", ("old", "young"))
    result = audit(faces, data, n=30, others={"other": other})
    (compared,) = result.comparisons
    theirs = other.explain(result.images, check=False)
    expected = theirs.heatmap[:, 0].abs().mean(0)
    torch.testing.assert_close(compared.absolute, expected, atol=1e-4, rtol=1e-3)
    same = faces.predict(result.images).argmax(1) == theirs.p
    assert compared.agreement == wilson(int(same.sum()), 30)


@pytest.mark.slow
def test_mean_maps_are_compared_target_by_target(model: Model, data: Dataset) -> None:
    other = small_model(replace(model.classifier.architecture, seed=9), "mnist", ("a", "b", "c"))
    mine = audit(model, data, n=60, others={"other": other})
    (compared,) = mine.comparisons
    sums: dict[int, list[torch.Tensor]] = {}
    counts: dict[int, int] = {}
    for row, index in enumerate(mine.index.tolist()):
        q, image = int(mine.flips.q[row]), data.images[index]
        if int(other.predict(image).argmax()) != q:
            pair = [m.explain(image, q, check=False).heatmap.flatten() for m in (model, other)]
            sums[q] = [a + b for a, b in zip(sums.get(q, [0, 0]), pair, strict=True)]
            counts[q] = counts.get(q, 0) + 1
    assert compared.n == sum(counts.values()) < 60
    both = [m.predict(data.images[mine.index]).argmax(1) for m in (model, other)]
    # Agreement counts all images, also those changed into different classes.
    assert compared.agreement == wilson(int((both[0] == both[1]).sum()), 60)
    expected = sum(
        counts[q] * float(torch.cosine_similarity(a, b, dim=0)) for q, (a, b) in sums.items()
    )
    assert compared.mean_maps == pytest.approx(expected / compared.n, abs=1e-4)


def test_the_examples(finished: Audit) -> None:
    lowest = sorted(range(50), key=lambda row: float(finished.after.log_p[row]))[:6]
    assert list(finished.unlikely) == lowest
    confidence = finished.flips.before.posterior.amax(1)
    assert all(
        int(finished.flips.p[row]) != int(finished.labels[row]) for row in finished.misclassified
    )
    sure = [float(confidence[row]) for row in finished.misclassified]
    assert sure == sorted(sure, reverse=True)
    wrong = (finished.flips.p != finished.labels).nonzero()[:, 0]
    assert sure[0] == float(confidence[wrong].max())


class Page(HTMLParser):
    """Parses a page, checks that every tag is closed in order, and keeps tags and text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("kind", ["faces", "four"])
def test_the_page_is_self_contained_and_escaped(kind, faces, small_architecture, data) -> None:
    names = ("<script>alert(1)</script>", 'b"&', "c", "d")
    model = faces if kind == "faces" else small_model(small_architecture, "mnist", names)
    result = audit(model, data, n=30, others={"<i>me</i>": model})
    source = result.html("ecinn audit <me>")
    page = Page(source)
    assert page.tags[0] == ("html", {"lang": "en"})
    assert source.startswith("<!DOCTYPE html>")
    assert "http" not in source
    assert "script" not in {tag for tag, _ in page.tags}
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) > 30
    assert all(i["src"].startswith("data:image/png;base64,") and i["alt"] for i in images)
    assert not {"link", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert "Comparison with <i>me</i>" in page.text
    assert "What does small look at?" in page.text
    assert "ecinn audit <me>" in page.text
    if kind == "four":
        assert "→ <script>alert(1)</script>" in page.text
    else:
        assert "By subgroup" in page.text
        assert "that needs another classifier" in page.text
        assert "mouth" in page.text


def test_cautions_follow_the_figures(finished: Audit) -> None:
    def cautions(**changes: object) -> str:
        return " ".join(replace(finished, **changes).cautions)

    def background(density: float) -> tuple:
        spot = next(region for region in finished.regions if region.name == "background")
        return (replace(spot, density=Interval(density, density - 0.1, density + 0.1, 9)),)

    assert "Only 50 images" in cautions()
    assert "background changes 1.2 times" in cautions(regions=background(1.2))
    assert "background" not in cautions(regions=background(0.9))
    few, every = wilson(2, 50), wilson(50, 50)
    overall = replace(finished.overall, reached=every)
    assert "misclassified" not in cautions(overall=overall, classes=(), subgroups=(overall,))
    assert "48 of 50 changed images are not classified as their target" in cautions(
        overall=replace(overall, reached=few)
    )
    assert "as their target" not in cautions(overall=overall)


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
    finished: Audit, own: tuple[int, int], others: tuple[int, int], *, warned: bool
) -> None:
    def group(wrong: int, n: int) -> Group:
        return replace(finished.overall, name="male", error=wilson(wrong, n), n=n)

    overall = group(own[0] + others[0], own[1] + others[1])
    changed = replace(finished, overall=overall, classes=(), subgroups=(group(*own),))
    text = " ".join(changed.cautions)
    figures = f"{own[0]} of {own[1]}, against {others[0]} of {others[1]}"
    assert (
        f"“male” is misclassified more often than the other images: {figures}" in text
    ) == warned
    assert ("misclassified" in text) == warned


def test_models_with_similar_maps_are_pointed_out(faces: Model, data: Dataset) -> None:
    result = audit(faces, data, n=20, others={"twin": faces})
    assert "maps of twin are similar to these" in " ".join(result.cautions)


def test_to_dict_is_json_without_images(finished: Audit) -> None:
    back = json.loads(json.dumps(finished.to_dict(), allow_nan=False))
    assert back["n"] == 50
    assert back["overall"]["error"] == asdict(finished.overall.error)
    assert back["regions"][0]["density"]["mean"] == finished.regions[0].density.mean
    assert back["pairs"][0].keys() == {"p", "q", "n"}
    assert math.isclose(back["grid"][2][3], float(finished.grid[2, 3]))
    assert not {"images", "flips", "after"} & back.keys()


def test_progress_counts_up_to_all_images_of_every_task(faces: Model, data: Dataset) -> None:
    reports: list[Progress] = []
    audit(faces, data, n=55, others=[faces], observe=reports.append)
    tasks = list(dict.fromkeys(report.task for report in reports))
    assert len(tasks) == 3
    for task in tasks:
        counts = [report.done for report in reports if report.task == task]
        assert counts == sorted(counts)
        assert (counts[-1], {report.total for report in reports}) == (55, {55})


def test_unusable_input_is_refused(model: Model, faces: Model, data: Dataset) -> None:
    with pytest.raises(InputError, match="at least 2 images"):
        audit(model, data, n=1)
    with pytest.raises(InputError, match=r"other classifies .* 2 classes.* compare models of"):
        audit(model, data, others={"other": faces})
    with pytest.raises(InputError, match=r"needs images of \(1, 8, 8\)"):
        audit(model, replace(data, images=data.images[..., :4]))


@pytest.mark.slow
def test_the_command_writes_the_page_and_prints_json(tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    arguments = ("audit", "fakemnist", "--n", 4, "--out", page)
    code, stdout, stderr = run(*arguments)
    assert (code, f"wrote {page}" in stdout.replace("\n", "")) == (0, True), stderr
    assert "What does fakemnist look at?" in Page(page.read_text()).text
    code, stdout, _ = run(*arguments, "--json", "--with", "mnist")
    result = json.loads(stdout)
    assert (code, result["n"], result["file"]) == (0, 4, str(page))
    assert result["comparisons"][0]["other"] == "mnist"
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_the_command_refuses_in_one_line(monkeypatch, tmp_path: Path, model: Model) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(model.checkpoint, tmp_path / "small.safetensors")
    line = fails("audit", "mnist", "--with", "small.safetensors")
    assert "small classifies images of (1, 8, 8)" in line
    assert "'moon'" in fails("audit", "mnist", "--split", "moon")
    assert "is a folder" in fails("audit", "mnist", "--out", tmp_path)
    assert "same name" in fails("audit", "mnist", "--with", "mnist", "--with", "mnist")
    assert "no model 'resnet'" in fails("audit", "mnist", "--with", "resnet")
    assert not list(tmp_path.glob("*.html"))
