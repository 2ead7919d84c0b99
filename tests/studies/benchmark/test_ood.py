"""The measurement of out-of-distribution detection."""

import dataclasses

import pytest
import torch
from scipy.stats import mannwhitneyu

from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.data.dataset import Dataset
from ecinn.data.pen import page_pens, redraw
from ecinn.errors import InputError
from ecinn.model import Model
from ecinn.studies.benchmark import ood
from helpers.builders import small_model


def test_auroc_is_mann_whitneys_u(generator: torch.Generator) -> None:
    usual = torch.randint(9, (70,), generator=generator).double()
    unusual = torch.randint(12, (50,), generator=generator).double()
    expected = mannwhitneyu(unusual, usual).statistic / (70 * 50)
    assert ood.auroc(usual, unusual) == pytest.approx(expected)


@pytest.fixture(autouse=True)
def few_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pictures of every letter."""
    monkeypatch.setattr(ood, "_DRAWS", 1)
    monkeypatch.setattr(ood, "FONTS", {split: fonts[::6] for split, fonts in ood.FONTS.items()})


def test_letters_are_framed_as_digits_and_differ_between_splits() -> None:
    pytest.importorskip("matplotlib")
    one, other = (ood.draw_letters(ood.FONTS[split], 3) for split in ("test", "validation"))
    assert one.shape == (26, 2, 1, 28, 28)
    assert not torch.equal(one, other)
    assert not set(ood.FONTS["test"]) & set(ood.FONTS["validation"])
    rows, columns = (one.amax((1, 2, 3 + axis)) > 0 for axis in (1, 0))
    longest = torch.maximum(rows.sum(1), columns.sum(1))
    assert (longest >= 20).all()
    assert (longest <= 24).all()


def test_the_measurement_counts_flags_and_ranks_scores(mnist: Model) -> None:
    """With a limit that half of the digits exceed, against the scores of another route."""
    pytest.importorskip("matplotlib")
    digits = mnist.recipe.load("test").first(60)
    z = mnist.encode(digits.images)
    far = torch.cdist(z, mnist.mu_bar).min(1).values.square()
    checkpoint = dataclasses.replace(
        mnist.checkpoint,
        ood=OODDetector(
            (-1e9, 1e9),
            distance=float(far.quantile(0.5)),
            shape=mnist.ood.shape._replace(limit=1e9),
        ),
    )
    clothes = digits.images.flip(3).transpose(2, 3)[:20]
    result = ood.measure_detection(Model(checkpoint), digits, clothes)
    assert result.digits.mean == 0.5
    assert (result.digits.n, result.kinds["Fashion-MNIST"].flagged.n) == (60, 20)
    assert result.kinds["noise"].flagged.mean == 1
    letters, plain = (result.kinds[n] for n in ("letters", "letters without B I O S Z"))
    assert (letters.flagged.n, plain.flagged.n) == (26 * 2, 21 * 2)
    for kind in ("letters", "drawn letters"):
        shares = result.by_letter[kind]
        assert result.kinds[kind].flagged.mean == pytest.approx(sum(shares.values()) / 26)
        kept = [value for letter, value in shares.items() if letter not in "BIOSZ"]
        plain = result.kinds[f"{kind} without B I O S Z"]
        assert plain.flagged.mean == pytest.approx(sum(kept) / 21)
    other = torch.cdist(mnist.encode(clothes), mnist.mu_bar).min(1).values.square()
    found = result.kinds["Fashion-MNIST"].auroc["distance"]
    assert found == pytest.approx(ood.auroc(far, other), abs=1e-3)
    # The shape, by the route of the fitted weights; drawn letters against drawn digits.
    shape = mnist.ood.shape
    drawn = ood.draw_letters(ood.FONTS["test"], 0).flatten(0, 1)
    again, drawn = (redraw(images, page_pens(len(images))) for images in (digits.images, drawn))
    assert result.redrawn.n == 60
    scores = (shape.score(mnist.encode(images)) for images in (again, drawn))
    found = result.kinds["drawn letters"].auroc["shape"]
    assert found == pytest.approx(ood.auroc(*scores), abs=1e-3)
    assert len(ood.detection_table(result).rows) == 8


def test_other_images_are_refused() -> None:
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    with pytest.raises(InputError, match="28×28"):
        ood.measure_detection(small_model(classes=2), Dataset(images, torch.arange(2), ("a", "b")))
