"""The page of a distillation: every number with its interval, and twenty examples."""

import re
from dataclasses import replace

import pytest
import torch

from ecinn.auditing.page import render_distillation
from ecinn.blackbox.classifier import BlackBox
from ecinn.metrics.statistics import Interval
from ecinn.training.agreement import ClassifierAccuracy, measure_agreement
from ecinn.training.distillation import Distilled
from helpers.builders import random_images, small_model, with_default


@pytest.fixture(scope="module")
def distilled() -> Distilled:
    """Report on a classifier that answers like its student, but is never sure of class c."""
    student = with_default(small_model(), 0.9)
    images = random_images(60, 1, 3, 4).images

    def predict(x: torch.Tensor) -> torch.Tensor:
        own = student.predict(x)
        return torch.where(own[:, 2:] > 0.7, torch.tensor([[0.2, 0.2, 0.6]]), own)

    box = BlackBox(predict, student.class_names, name="a<b>.onnx")
    agreement = measure_agreement(student, box, images, box.predict(images), n=30)
    accuracy = ClassifierAccuracy(Interval(0.912, 0.875, 0.951, 60), 0.3456, None, 0.0)
    return Distilled(student, accuracy, agreement, 123_456)


def test_the_page_shows_all_numbers_and_twenty_examples(distilled: Distilled) -> None:
    page = render_distillation(distilled, "ecinn distill <file>")
    a = distilled.agreement
    assert "a&lt;b&gt;.onnx" in page
    assert "a<b>" not in page
    assert "ecinn distill &lt;file&gt;" in page
    rows = dict(re.findall(r'<td>([^<]*)</td><td(?: class="whole")?>([^<]*)</td>', page))
    shares = {
        "the classifier&#39;s accuracy": distilled.accuracy.accuracy,
        "agreement": a.agreement,
        "flipped, before correction": a.flipped,
        "flipped, corrected": a.flipped_after,
        "not explained": a.not_explained,
        "unchanged images predicted as confidently": a.sure,
        "… within 0.05": a.within_after,
        **a.by_class,
    }
    for name, share in shares.items():
        mean, low, high = (f"{100 * value:.1f}" for value in (share.mean, share.low, share.high))
        assert rows[name] == f"{mean} % [{low}, {high}]"
    numbers = {
        "difference of probabilities": (a.difference, 4),
        "… along paths": (a.path_difference, 4),
        "requested confidence, r": (a.correlation, 3),
        "… corrected": (a.correlation_after, 3),
        "queries": (a.queries_per_counterfactual, 1),
    }
    for name, (value, digits) in numbers.items():
        mean, low, high = (f"{v:.{digits}f}" for v in (value.mean, value.low, value.high))
        assert rows[name] == f"{mean} [{low}, {high}]"
    assert "by chance 34.6 %" in page
    assert "123,456 pictures" in page
    assert page.count("<figure>") == 20


def test_examples_are_the_classifiers_answers(distilled: Distilled) -> None:
    page = render_distillation(distilled, "")
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page, re.DOTALL)
    shown = [*distilled.agreement.random, *distilled.agreement.worst]
    for caption, one in zip(captions, shown, strict=True):
        answer = float(one.convincing_certificate.answer[0, 0, one.q[0, 0]])
        assert f"{one.class_names[int(one.q)]} {100 * answer:.1f} %" in caption or answer > 0.999
        assert f"{int(one.verification.queries)} queries" in caption
        assert ("not explained" in caption) == (not bool(one.explained))
    assert 0 < sum("not explained" in caption for caption in captions) < 20


@pytest.mark.parametrize(("missed", "cautious"), [(0.02, False), (0.3, True)])
def test_a_large_share_not_explained_is_a_caution(
    distilled: Distilled, missed: float, *, cautious: bool
) -> None:
    share = Interval(missed, 0.0, 1.0, 30)
    agreement = replace(distilled.agreement, not_explained=share)
    page = render_distillation(replace(distilled, agreement=agreement), "")
    assert ('<section class="cautions">' in page) == cautious
    assert f"{100 * (1 - missed):.1f} %</b>" in page


@pytest.mark.parametrize(("share", "doubtful"), [(0.56, True), (0.79, True), (0.8, False)])
def test_a_student_that_disagrees_too_often_is_told(
    distilled: Distilled, share: float, *, doubtful: bool
) -> None:
    agreement = replace(distilled.agreement, agreement=Interval(share, 0.5, 0.9, 100))
    assert bool(agreement.caution) == doubtful
    assert agreement.sentences()[-1].startswith("Take care") == doubtful
    page = render_distillation(replace(distilled, agreement=agreement), "")
    assert ("too rarely" in page) == doubtful
