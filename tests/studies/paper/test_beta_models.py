"""Models at increasing β: their results, the command, the claim, Figure 10."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from ecinn.classifier.checkpoint import Checkpoint, load_checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.classifier.recipes import MNIST_BETA, Recipe
from ecinn.classifier.tensor_files import write_tensors
from ecinn.data.dataset import Dataset
from ecinn.data.mnist import load_mnist
from ecinn.errors import InputError
from ecinn.flow.network import Architecture, Stage
from ecinn.model import Model, load
from ecinn.pixels import to_pixels
from ecinn.studies.benchmark.quality import Panel
from ecinn.studies.judges import Judges, load_judges, scaled
from ecinn.studies.paper import beta_models, claims_beta, style
from ecinn.studies.paper import figures_beta as trade_off
from ecinn.studies.paper.artefact import Context
from ecinn.studies.paper.beta_models import Jury, TradeOff
from ecinn.studies.paper.claim import Judgement, entries, judgement
from ecinn.studies.paper.claims import report
from ecinn.studies.paper.claims_beta import falling
from ecinn.training import loop as training
from helpers.builders import randomise
from helpers.command_line import run

CPU = torch.device("cpu")


@pytest.fixture
def tiny(monkeypatch) -> Recipe:
    """The recipe on a network that trains in a second."""
    architecture = Architecture(1, 28, 28, 10, (Stage(1, 4), Stage(1, 4)), dense_width=8)
    recipe = dataclasses.replace(MNIST_BETA, architecture=architecture, batch_size=32)
    monkeypatch.setattr(beta_models, "MNIST_BETA", recipe)
    return recipe


@pytest.fixture
def test_digits() -> Dataset:
    return load_mnist("test").first(200)


def model(tiny: Recipe, beta: float, seed: int) -> Checkpoint:
    """Random weights, and means as far apart as those of a trained model."""
    recipe = dataclasses.replace(tiny, beta=beta)
    classifier = randomise(GenerativeClassifier(recipe.architecture), seed).eval()
    mu_bar = classifier.mu.detach() * 1.1
    metrics = {"n": 200, "error": 0.1 / beta, "bits_per_dim": beta, "reached_q": 0.5}
    metrics |= {"judged": 100 + seed, "convinced": seed, "frechet": 3 * beta}
    return Checkpoint(
        recipe,
        classifier.requires_grad_(requires_grad=False),
        mu_bar,
        OODDetector((-1e9, 1e9)),
        tuple("0123456789"),
        metrics,
        {"training_images": 100},
    )


def result(betas: int = 8) -> TradeOff:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (18, 1, 28, 28), generator=generator, dtype=torch.uint8)
    return TradeOff(
        beta=beta_models.BETAS[:betas],
        error=tuple(0.05 / (k + 1) for k in range(betas)),
        bits_per_dim=tuple(3.0 + 0.1 * k for k in range(betas)),
        reached_q=(1.0,) * betas,
        judged=tuple(1900 + k for k in range(betas)),
        convinced=tuple(1800 - 50 * k for k in range(betas)),
        frechet=tuple(5.0 + k for k in range(betas)),
        target=3,
        places=tuple(range(18)),
        training={"epochs": 12, "training_images": 60000, "test_images": 10000},
        images=images,
        counterfactuals=torch.stack([images.flip(0)] * betas),
        already=torch.zeros((betas, 18), dtype=torch.bool),
        reached=torch.ones((betas, 18), dtype=torch.bool),
    )


def judged(trade_off: TradeOff) -> Judgement:
    return judgement(claims_beta.trade_off(trade_off))


def test_digits_are_of_every_other_class_and_drawn_by_the_seed(test_digits: Dataset) -> None:
    places = beta_models.draw_digits(test_digits, 0)
    assert test_digits.labels[places].tolist() == 2 * [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert len(places.unique()) == len(places)
    assert torch.equal(places, beta_models.draw_digits(test_digits, 0))
    assert not torch.equal(places, beta_models.draw_digits(test_digits, 1))
    with pytest.raises(InputError, match="--limit 200"):
        beta_models.draw_digits(test_digits.first(10), 0)


def test_counterfactuals_follow_the_papers_formulas(tiny: Recipe, test_digits: Dataset) -> None:
    """By hand, one by one: equally far from both means at α₀, stored at 4/5 + α₀/2."""
    models = [model(tiny, 4.0, 1), model(tiny, 0.1, 2)]
    places = torch.arange(60)
    compared = beta_models.compare(models, test_digits, places, CPU)
    assert compared.beta == (0.1, 4.0)
    assert compared.error == (1.0, 0.025)
    assert compared.training["training_images"] == 100
    assert (compared.judged, compared.convinced) == ((102, 101), (2, 1))
    assert compared.frechet == pytest.approx((0.3, 12.0))
    kinds = set()
    for row, checkpoint in enumerate((models[1], models[0])):
        classifier, mu = checkpoint.classifier, checkpoint.classifier.mu
        z = classifier.encode(to_pixels(test_digits.images[places]))
        predicted = torch.cdist(z, mu).argmin(1)
        for index, p in enumerate(predicted.tolist()):
            obtained = compared.counterfactuals[row, index]
            if p == 3:
                kinds.add("read as the target")
                assert compared.already[row, index]
                assert not compared.reached[row, index]
                assert not obtained.any()
                continue
            assert not compared.already[row, index]
            delta = checkpoint.mu_bar[3] - checkpoint.mu_bar[p]
            # ‖z + αΔ − μ_p‖² − ‖z + αΔ − μ_q‖² is linear in α: two values give its zero.
            at = [
                float((z[index] + a * delta - mu[p]).square().sum())
                - float((z[index] + a * delta - mu[3]).square().sum())
                for a in (0.0, 1.0)
            ]
            alpha = 0.8 + 0.5 * at[0] / (at[0] - at[1])
            x = classifier.decode((z[index] + alpha * delta)[None])[0]
            expected = (256 * x).floor().clamp(0, 255)
            assert (obtained.float() - expected).abs().max() <= 1
            read = torch.cdist(classifier.encode(to_pixels(obtained[None])), mu).argmin(1)
            assert bool(compared.reached[row, index]) == (int(read) == 3)
            kinds.add("reached" if compared.reached[row, index] else "not reached")
    assert "read as the target" in kinds
    assert len(kinds) > 1


@pytest.fixture(scope="module")
def judges() -> Judges:
    return load_judges("mnist")


@pytest.mark.slow
def test_a_jury_draws_the_same_pairs_for_every_model(judges: Judges, test_digits: Dataset) -> None:
    """Random digits, each once, and targets that are any class but the label's."""
    jury = Jury.assemble(judges, test_digits)
    assert sorted(map(bytes, jury.images.flatten(1).numpy())) == sorted(
        map(bytes, test_digits.images.flatten(1).numpy())
    )
    place = {
        bytes(image): index for index, image in enumerate(test_digits.images.flatten(1).numpy())
    }
    labels = [
        int(test_digits.labels[place[bytes(image)]]) for image in jury.images.flatten(1).numpy()
    ]
    offsets = (jury.q - torch.tensor(labels)) % 10
    assert sorted(offsets.unique().tolist()) == list(range(1, 10))
    more = load_mnist("test").first(beta_models.PAIRS + 200)
    many = Jury.assemble(judges, more)
    assert len(many.q) == beta_models.PAIRS >= 1000
    assert not torch.equal(many.images, more.images[: len(many.q)])
    assert not torch.equal(many.images, Jury.assemble(judges, more, 1).images)
    assert torch.equal(many.q, Jury.assemble(judges, more).q)


@pytest.mark.slow
def test_a_jury_counts_convincing_counterfactuals(judges: Judges, test_digits: Dataset) -> None:
    """One by one: what the model reads as q is left out, the rest is shown to the oracle."""
    trained = load("mnist")
    read = trained.predict(test_digits.images[:12]).argmax(1)
    q = (read + torch.arange(12) % 3) % 10  # every third is read as its target already
    panel = Panel.of(judges, test_digits.images, "mnist")
    verdict = Jury(panel, test_digits.images[:12], q).judge(trained)
    stored = [
        trained.explain(test_digits.images[k], int(q[k])).stored_convincing[0, 0]
        for k in range(12)
        if k % 3
    ]
    oracle = judges.convolutional
    targets = [int(q[k]) for k in range(12) if k % 3]
    answers = [int(oracle(scaled(image[None])).argmax()) for image in stored]
    assert verdict["judged"] == 8
    assert verdict["convinced"] == sum(a == b for a, b in zip(answers, targets, strict=True))
    # Of two Gaussians, by the square root of a matrix.
    ours, real = (
        judges.features(x).double().numpy() for x in (torch.stack(stored), test_digits.images)
    )
    mean = ((ours.mean(0) - real.mean(0)) ** 2).sum()
    a, b = np.cov(ours.T), np.cov(real.T)
    root = np.sqrt(np.linalg.eigvals(a @ b).astype(complex)).real.sum()
    assert verdict["frechet"] == pytest.approx(
        mean + np.trace(a) + np.trace(b) - 2 * root, rel=1e-3
    )


@pytest.mark.slow
def test_a_worse_model_convinces_less(tiny: Recipe, judges: Judges, test_digits: Dataset) -> None:
    jury = Jury.assemble(judges, test_digits.first(60))
    trained, random = jury.judge(load("mnist")), jury.judge(Model(model(tiny, 1.0, 0)))
    assert trained["convinced"] / trained["judged"] > 0.9
    assert random["convinced"] / random["judged"] < 0.5
    assert trained["frechet"] < random["frechet"]


def test_results_are_saved_in_a_small_file(tmp_path: Path) -> None:
    written = result()
    beta_models.save(written, tmp_path / "t.safetensors")
    assert (tmp_path / "t.safetensors").stat().st_size < 150_000
    read = beta_models.read(tmp_path / "t.safetensors")
    for field in dataclasses.fields(TradeOff):
        before, after = getattr(written, field.name), getattr(read, field.name)
        same = torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after
        assert same, field.name


def test_missing_or_foreign_result_files_are_errors(tmp_path: Path) -> None:
    path = tmp_path / beta_models.FILE
    for read in (beta_models.find, lambda folder: beta_models.read(folder / beta_models.FILE)):
        with pytest.raises(InputError, match="ecinn beta") as error:
            read(tmp_path)
        assert "\n" not in str(error.value)
        write_tensors(path, {"images": torch.zeros(2)}, {"beta": [1.0]})
    assert beta_models.find(tmp_path) == path


def test_the_claim_lists_the_parts_that_hold_and_fail() -> None:
    """Errors and quality fall with β, and the paper's β is nearly the best in both."""
    n = len(beta_models.BETAS)
    near = beta_models.BETAS.index(1.4265)
    errors = (0.03, 0.02, 0.012, *(0.0085 - 0.0001 * k for k in range(n - near)))
    convinced = (
        *(1805 - k for k in range(near + 1)),
        *(1500 - 9 * k for k in range(n - near - 1)),
    )
    balanced = dataclasses.replace(result(), error=errors, convinced=convinced, judged=(1900,) * n)
    claim = judged(balanced)
    assert claim.verdict == "supported"
    assert claim.measured.startswith(
        f"{n} models were trained for 12 epoch(s) on 60,000 digits each and judged on 10,000. "
        "What holds: errors decrease"
    )
    assert claim.measured.endswith("What does not hold: nothing.")
    assert f"for the best model ({100 * 1802 / 1900:.1f} %" in claim.measured
    assert "at β = 1.4265 the error" in claim.measured
    assert len(claim.table.rows) == n
    worse = dataclasses.replace(balanced, frechet=balanced.frechet[::-1])
    assert judged(worse).verdict == "partly"
    held, failed = judged(worse).measured.split("What does not hold: ")
    assert "Fréchet" in failed
    assert "errors" not in failed
    assert held.count(";") == 3
    backwards = dataclasses.replace(
        balanced,
        error=(0.01, 0.011, 0.02, 0.09, 0.1, 0.11, 0.12, 0.13),
        convinced=(1000, 1010, 1020, 1030, 1400, 1500, 1600, 1700),
        frechet=balanced.frechet[::-1],
    )
    assert judged(backwards).verdict == "refuted"


def test_the_beta_nearest_to_one_is_chosen_by_ratio() -> None:
    """1.6 is nearer to one than a half is; its difference is not."""
    two = dataclasses.replace(result(2), beta=(0.5, 1.6), reached_q=(0.971, 0.5))
    claim = judged(two)
    assert "at β = 1.6 the" in claim.measured
    assert "at β = 0.5 the" not in claim.measured
    assert "| 0.5 |" in claim.table.markdown()
    assert "| 97.10 % |" in claim.table.markdown()


@pytest.mark.parametrize(("epochs", "trained"), [(None, MNIST_BETA.epochs), (3, 3)])
def test_settings_override_beta_and_epochs_of_the_recipe(epochs, trained) -> None:
    settings = beta_models.settings(0.7, epochs)
    assert settings == dataclasses.replace(MNIST_BETA, beta=0.7, epochs=trained)


def test_the_claim_is_untested_without_models(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(beta_models, "SHIPPED", tmp_path / "none")
    assert not list(claims_beta.measure(Context()))
    (claim,) = report(entries()["beta"], [], {}, {}).judgements
    assert claim.verdict == "untested"
    assert "--beta DIR" in claim.measured
    beta_models.save(result(), tmp_path / beta_models.FILE)
    (measured,) = claims_beta.measure(Context(beta=tmp_path))
    assert judgement(measured).verdict != "untested"


def test_falling_counts_pairs() -> None:
    assert falling([3.0, 2.0, 1.0]) == 1
    assert falling([1.0, 1.0]) == 0
    assert falling([2.0, 3.0, 1.0]) == pytest.approx(2 / 3)


@pytest.mark.slow
def test_command_trains_each_beta_once(tiny: Recipe, tmp_path: Path, monkeypatch) -> None:
    given = ("beta", "--out", tmp_path, "--epochs", 1, "--limit", 200, "--device", "cpu")
    code, out, err = run(*given, "--beta", 2)
    assert code == 0, err
    assert "β = 2" in out
    one = load_checkpoint(tmp_path / "beta-2")
    assert one.recipe.beta == 2
    assert float(one.classifier.tau) != pytest.approx(one.recipe.tau)
    assert one.metrics["n"] == 200
    assert 100 < one.metrics["judged"] <= 200
    assert 0 <= one.metrics["convinced"] <= one.metrics["judged"]
    assert not (tmp_path / "beta-2" / training.STATE_FILES[0]).exists()
    # Another β joins; the first is not trained again.
    original, trained = training.train, []

    def watched(settings: Recipe, *arguments: object, **named: object) -> Checkpoint:
        trained.append(settings.beta)
        return original(settings, *arguments, **named)

    monkeypatch.setattr(training, "train", watched)
    code, _, err = run(*given, "--beta", 2, "--beta", 0.5)
    assert code == 0, err
    assert trained == [0.5]
    results = beta_models.read(tmp_path / beta_models.FILE)
    assert results.beta == (0.5, 2.0)
    assert results.error[1] == one.metrics["error"]
    assert results.convinced[1] == one.metrics["convinced"]
    assert results.frechet[1] == one.metrics["frechet"]
    assert results.bits_per_dim[0] != results.bits_per_dim[1]
    assert results.training == {"epochs": 1, "training_images": 200, "test_images": 200}
    # Asked for alone, a β does not drop the other.
    assert run(*given, "--beta", 2)[0] == 0
    assert beta_models.read(tmp_path / beta_models.FILE).beta == (0.5, 2.0)
    code, _, err = run(*given[:-3], 150, "--device", "cpu", "--beta", 2)
    assert code == 2
    assert "other settings" in err
    code, _, err = run(*given, "--beta", -1)
    assert code == 2
    assert err.count("\n") == 1


@pytest.mark.parametrize("part", [0, 1])
def test_figure_shows_every_model_and_marks_failures(part: int) -> None:
    shown = result()
    shown.reached[2, 9 * part + 4] = False
    shown.reached[5, 9 * (1 - part) + 1] = False  # not on this page
    shown.reached[6, 9 * part + 2], shown.already[6, 9 * part + 2] = False, True
    figure = trade_off.draw(shown, part)
    axes, error, bits = figure.axes
    words = [text.get_text() for text in axes.texts]
    assert all(rf"$\beta$ = {beta:g}" in words for beta in beta_models.BETAS)
    assert "95.00 % right" in words
    pictures = [image.get_array() for image in axes.get_images()]
    assert len(pictures) == 9
    fourth = shown.images[9 * part + 3, 0].numpy()
    assert (pictures[0][28:56, :28, 0] == fourth).all()
    eighth = shown.counterfactuals[0, 9 * part + 7, 0].numpy()
    assert (pictures[1][56:, 28:56, 0] == eighth).all()
    frames = [
        patch
        for patch in axes.patches
        if isinstance(patch, Rectangle) and patch.get_linewidth() == 0.8
    ]
    frame, empty = frames
    assert to_rgba(style.WARNING) == frame.get_edgecolor() != empty.get_edgecolor()
    left, right, bottom, top = axes.get_images()[3].get_extent()
    middle = (frame.get_x() + frame.get_width() / 2, frame.get_y() + frame.get_height() / 2)
    assert middle == pytest.approx(((left + right) / 2, (bottom + top) / 2), abs=0.01)
    assert error.lines[0].get_ydata()[0] == pytest.approx(5.0)
    assert bits.lines[0].get_ydata().tolist() == pytest.approx(list(shown.bits_per_dim))
    assert figure.get_size_inches()[0] <= style.TEXT


def test_figure_10_shows_the_saved_results(tmp_path: Path, monkeypatch) -> None:
    beta_models.save(result(), tmp_path / beta_models.FILE)
    context = Context(beta=tmp_path)
    made = trade_off.figure_10(context)
    assert set(made.figures) == {"figure-10"}
    numbers = made.data["figure-10"]["models"]
    assert [row["beta"] for row in numbers] == list(beta_models.BETAS)
    assert numbers[0]["error"] == 0.05
    assert (numbers[1]["judged"], numbers[1]["convinced"]) == (1901, 1750)
    assert (
        "test error from 0.62 % to 5.00 % and exact bits/dim from 3.00 to 3.70"
        in (made.captions["figure-10"])
    )
    assert "(training epochs: 12;" in made.captions["figure-10"]
    more = trade_off.supplement_10(context)
    (page,) = more.books["supplement-10"]
    assert made.data["figure-10"]["test_images_shown"] == list(range(9))
    assert more.data["supplement-10"]["test_images_shown"] == list(range(9, 18))
    assert numbers[0]["shown"] == more.data["supplement-10"]["models"][0]["shown"] == 9
    first = [image.get_array() for image in made.figures["figure-10"].axes[0].get_images()]
    further = [image.get_array() for image in page.axes[0].get_images()]
    assert not any((a == b).all() for a, b in zip(first, further, strict=True))
    monkeypatch.setattr(beta_models, "SHIPPED", tmp_path / "none")
    with pytest.raises(InputError, match="ecinn beta"):
        trade_off.figure_10(Context())


def test_reached_targets_are_counted_per_page() -> None:
    shown = result()
    shown.reached[2, :4], shown.reached[2, 9:11] = False, False
    shown.already[2, 0], shown.already[2, 17] = True, True
    for part, counts in ((slice(9), (8, 5)), (slice(9, None), (8, 7))):
        row = trade_off.numbers(shown, part)["models"][2]
        assert (row["shown"], row["reached_of_shown"]) == counts


def test_shipped_results_cover_all_models_and_test_digits() -> None:
    shipped = beta_models.read(beta_models.SHIPPED)
    assert shipped.beta == beta_models.BETAS
    assert dict(shipped.training) == {
        "epochs": MNIST_BETA.epochs,
        "training_images": 60_000,
        "test_images": 10_000,
    }
    test = load_mnist("test")
    assert torch.equal(shipped.images, test.images[list(shipped.places)])
    # What the shipped judges, who took no part, say of the digits that are shown.
    oracle = load_judges("mnist").convolutional
    read = [
        int((oracle(scaled(images)).argmax(1) == shipped.target).sum())
        for images in shipped.counterfactuals
    ]
    assert sum(read[:4]) > sum(read[4:]) + 8, read
