"""The verdict: its measures by independent routes, and its answer for good and bad models."""

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from ecinn.auditing import verdict as v
from ecinn.auditing.page import render_verdict
from ecinn.data.dataset import Dataset, load_dataset
from ecinn.explanation.result import Explanation
from ecinn.metrics.statistics import mean_difference, normal_interval
from ecinn.model import Model
from ecinn.studies.judges import load_judges, scaled
from ecinn.training.evaluation import evaluate


class Judge(nn.Module):
    """The shipped convolutional oracle, for pixels in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.network = load_judges("mnist").convolutional

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x * 256 / 255 - 0.5)


class Contrary(Judge):
    """Reads every image as the next class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).roll(1, dims=1)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset("mnist", "validation").first(30)


@pytest.fixture(scope="module")
def verdict(mnist: Model, digits: Dataset) -> v.Verdict:
    return v.assess(mnist, load_dataset("mnist", "train"), digits, judge=Judge(), n=30)


def test_the_shipped_digits_are_good_enough(verdict, mnist, digits) -> None:
    assert verdict.grade == "good"
    assert verdict.answer.startswith("Yes")
    expected = evaluate(mnist, digits)
    assert verdict.error.mean == expected.error
    assert verdict.evaluation == expected
    assert verdict.judge_reads_q.mean > 0.9
    assert abs(verdict.overfitting.mean) < 0.1
    assert abs(verdict.test_bits.mean - expected.bits_per_dim) < 0.02
    assert 0.26 < verdict.focus.mean < 0.6
    assert len(verdict.random) == len(verdict.worst) == 10


def test_the_worst_examples_are_those_the_judge_believes_least(verdict) -> None:
    oracle = load_judges("mnist").convolutional

    def believed(explanation: Explanation) -> torch.Tensor:
        stored = explanation.convincing[:, 0].mul(256).floor().clamp(0, 255).to(torch.uint8)
        p_q = oracle(scaled(stored)).softmax(1)
        return p_q.gather(1, explanation.q).squeeze(1)

    worst, random = believed(verdict.worst), believed(verdict.random)
    assert float(worst.diff().min()) > -1e-3
    chosen = set(verdict.worst.indices.tolist())
    rows = verdict.random.indices.tolist()
    others = [p for p, row in zip(random, rows, strict=True) if row not in chosen]
    assert len(others) >= 5
    assert min(others) >= worst.max() - 1e-3


def test_counterfactuals_that_nobody_else_believes_are_refused(verdict, mnist, digits) -> None:
    refused = v.assess(mnist, digits.first(20), digits, judge=Contrary(), n=30)
    # It disagrees about the originals, too: those counterfactuals do not count.
    assert refused.judge_error.mean > 0.95
    assert refused.judge_reads_q.n < 3
    low = dataclasses.replace(verdict.judge_reads_q, mean=0.5)
    measures = {
        name: getattr(verdict, name)
        for name in ("error", "judge_error", "training_bits", "test_bits", "overfitting", "focus")
    }
    graded = {
        finding.name: finding
        for finding in v.findings(mnist, verdict.evaluation, judge_reads_q=low, **measures)
    }
    assert graded["the other network reads q"].grade == "bad"
    assert dataclasses.replace(verdict, findings=tuple(graded.values())).grade == "bad"


def test_overfitting_is_the_difference_of_bits(generator) -> None:
    a, b = torch.randn(400, generator=generator) + 0.5, torch.randn(300, generator=generator)
    interval = mean_difference(a, b)
    error = math.sqrt(float(a.var(correction=0)) / 400 + float(b.var(correction=0)) / 300)
    assert interval.mean == pytest.approx(float(a.mean() - b.mean()), abs=1e-6)
    assert interval.half_width == pytest.approx(1.96 * error, rel=1e-6)
    assert normal_interval(a).half_width < interval.half_width


def test_the_most_sensitive_fifth(generator) -> None:
    maps = torch.rand(3, 10, 10, generator=generator)
    mask = v.most_sensitive(maps)
    assert mask.flatten(1).sum(1).tolist() == [20] * 3
    for each, chosen in zip(maps, mask, strict=True):
        assert each[chosen].min() >= each[~chosen].max()


def test_sensitivity_is_the_gradient(generator) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    x, q = torch.rand(2, 3, 4, 4, generator=generator), torch.tensor([0, 2])
    step, expected = 1e-3, torch.zeros(2, 3, 4, 4)
    with torch.no_grad():
        for place in range(48):
            shift = torch.zeros(48).scatter(0, torch.tensor(place), step).reshape(3, 4, 4)
            up, down = (network.double()(x.double() + s).log_softmax(1) for s in (shift, -shift))
            slope = (up - down)[torch.arange(2), q] / (2 * step)
            expected.flatten(1)[:, place] = slope.float()
    pixels = expected.abs().sum(1)
    corner = pixels[:, :2, :2].mean((1, 2))
    measured = v.sensitivity(network.float(), x, q)
    assert torch.allclose(measured[:, 0, 0], corner, rtol=1e-3)
    assert torch.allclose(measured[:, 1, 2], pixels[:, :3, 1:].mean((1, 2)), rtol=1e-3)


def test_confusions_are_counted_by_class(digits) -> None:
    labels = torch.tensor([0] * 8 + [1] * 4 + [2] * 3)
    predicted = torch.tensor([0] * 5 + [1] * 3 + [1] * 2 + [2] * 2 + [2] * 3)
    data = Dataset(digits.images[:15], labels, ("a", "b", "c"))
    first, second = v.confusions(predicted, data)
    assert (first.label, first.predicted, first.share.mean) == ("a", "b", 3 / 8)
    assert (second.label, second.predicted, second.share.n) == ("b", "c", 4)


@pytest.mark.parametrize(("value", "grade"), [(1.0, "good"), (0.95, "weak"), (0.5, "bad")])
def test_grades(value: float, grade: str) -> None:
    assert v.grade(value, 0.98, 0.9) == grade


def test_page_and_json(verdict) -> None:
    page = render_verdict(verdict, "ecinn train <folder>")
    assert verdict.answer in page
    assert "ecinn train &lt;folder&gt;" in page
    assert page.count("<figure>") == 20
    values = json.loads(verdict.to_json())
    assert values["judge_reads_q"]["mean"] == verdict.judge_reads_q.mean
    assert [each["grade"] for each in values["findings"]] == ["good"] * 6


def test_the_judge_learns_the_classes(mnist, digits, monkeypatch) -> None:
    monkeypatch.setattr(v, "JUDGE_STEPS", 100)
    judge = v.train_judge(mnist, load_dataset("mnist", "train").first(400))
    _, read = v.classify(mnist, judge, digits.images)
    assert float((read == digits.labels).float().mean()) > 0.7
