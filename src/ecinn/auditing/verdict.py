"""Is a model good enough to explain with? A second network, of the same images, helps to judge."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ecinn import equations
from ecinn.data.dataset import Dataset
from ecinn.drawing.words import fill, read_toml
from ecinn.explanation.result import Explanation, join
from ecinn.metrics.heatmaps import importance, share_inside
from ecinn.metrics.statistics import (
    Interval,
    mean_difference,
    normal_interval,
    proportion,
    wilson,
)
from ecinn.model import Model
from ecinn.pixels import Images, Labels, StoredImages, dequantise, to_pixels, to_uint8
from ecinn.progress import Observer, counter, ignore
from ecinn.training.augmented import TeacherSettings, train_cnn
from ecinn.training.evaluation import Evaluation, evaluate, random_offsets

Grade = Literal["good", "weak", "bad"]
ANSWERS: dict[Grade, str] = {
    "good": "Yes: its counterfactuals can be used as explanations.",
    "weak": "With care: read what is weak below before you rely on its counterfactuals.",
    "bad": "No: do not use its counterfactuals as explanations.",
}
WORDS = read_toml(Path(__file__).with_name("words.toml"))
IMAGES = 500
"""Test images that are explained, and images on which bits/dim are compared."""
EXAMPLES = 10
BATCH_SIZE = 50
JUDGE_STEPS = 1_500
"""Steps of the judge's training, in batches of 64, unless that is too few or many epochs."""
JUDGE_WIDTH = 16
"""Channels of the judge's first convolution."""
FOCUS = 0.2
"""Share of the pixels that count as where the judge looks."""


@dataclass(frozen=True)
class Finding:
    """One measure, its grade, and what to do about it."""

    name: str
    value: str
    grade: Grade
    meaning: str
    advice: str = ""
    """Recommended change; empty if nothing needs to change."""


@dataclass(frozen=True)
class Confusion:
    """Test images of one class that are predicted as another."""

    label: str
    predicted: str
    share: Interval
    """Share of the images of the class."""


@dataclass(frozen=True)
class Verdict:
    """The answer with its measures and examples."""

    model: str
    evaluation: Evaluation
    error: Interval
    judge_error: Interval
    """Error of the second network on the same test images."""
    training_bits: Interval
    test_bits: Interval
    overfitting: Interval
    """Bits/dim of test images minus bits/dim of training images."""
    judge_reads_q: Interval
    """Share of counterfactuals that the judge classifies as q, where it agreed on p."""
    focus: Interval
    """Share of the change in the fifth of the pixels that affects the judge most."""
    confusions: tuple[Confusion, ...]
    findings: tuple[Finding, ...]
    random: Explanation
    worst: Explanation
    """Counterfactuals to which the judge gives the lowest p(q)."""

    @property
    def grade(self) -> Grade:
        """The worst grade of all findings."""
        grades = {finding.grade for finding in self.findings}
        return "bad" if "bad" in grades else "weak" if "weak" in grades else "good"

    @property
    def answer(self) -> str:
        """The verdict in words."""
        return ANSWERS[self.grade]

    def to_json(self) -> str:
        """Everything but the pictures."""
        values: dict[str, Any] = {
            "model": self.model,
            "verdict": self.grade,
            "answer": self.answer,
            "findings": [asdict(finding) for finding in self.findings],
            "confusions": [asdict(confusion) for confusion in self.confusions],
        }
        names = ("error", "judge_error", "training_bits", "test_bits", "overfitting")
        for name in (*names, "judge_reads_q", "focus", "evaluation"):
            values[name] = asdict(getattr(self, name))
        return json.dumps(values, indent=1)


def assess(
    model: Model,
    train: Dataset,
    test: Dataset,
    *,
    judge: nn.Module | None = None,
    evaluation: Evaluation | None = None,
    n: int = IMAGES,
    seed: int = 0,
    observe: Observer = ignore,
) -> Verdict:
    """Measure a model on its test images, beside a judge that is trained on the same images.

    Args:
        judge: a network from pixels in [0, 1] to logits; trained here if none is given.
        evaluation: of the model on these test images; measured here if none is given.
    """
    generator = torch.Generator().manual_seed(seed)
    judge = judge or train_judge(model, train, seed=seed, observe=observe)
    evaluation = evaluation or evaluate(model, test, seed=seed, observe=observe)
    predicted, read = classify(model, judge, test.images)
    chosen = torch.randperm(len(test), generator=generator)[:n]
    seen = torch.randperm(len(train), generator=generator)[:n]
    before = bits_per_dim(model, train.images[seen], generator)
    after = bits_per_dim(model, test.images[chosen], generator)
    explanation, said, focus = ask_judge(model, judge, test.images[chosen], seed, observe)
    q = explanation.q[:, 0].cpu()
    agreed = read[chosen[explanation.indices.cpu()]] == explanation.p.cpu()
    p_q = said.gather(1, q[:, None])[:, 0]
    worst = p_q.argsort(stable=True)[:EXAMPLES]
    wrong = predicted != test.labels.cpu()
    measured = {
        "error": proportion(wrong),
        "judge_error": proportion(read != test.labels.cpu()),
        "training_bits": normal_interval(before),
        "test_bits": normal_interval(after),
        "overfitting": mean_difference(after, before),
        "judge_reads_q": proportion((said.argmax(1) == q)[agreed]),
        "focus": normal_interval(focus),
    }
    return Verdict(
        model=model.name,
        evaluation=evaluation,
        **measured,
        confusions=tuple(confusions(predicted, test)),
        findings=tuple(findings(model, evaluation, **measured)),
        random=explanation[:EXAMPLES],
        worst=join([explanation[row] for row in worst.tolist()]),
    )


def train_judge(
    model: Model, train: Dataset, *, seed: int = 0, observe: Observer = ignore
) -> nn.Module:
    """Train a small convolutional network on the images that the model was trained on.

    Images are augmented as for the model: both know the same about what leaves a class unchanged.
    """
    batch, side = min(64, len(train)), min(model.image_shape[1:])
    pools = 2 if side < 48 else 3 if side < 96 else 4
    settings = TeacherSettings(
        width=JUDGE_WIDTH,
        epochs=min(max(4, round(JUDGE_STEPS * batch / len(train))), 60),
        batch_size=batch,
        learning_rate=4e-3,
        weight_decay=0.02,
        label_smoothing=0.02,
        ema_decay=0.99,
        augmentation=model.recipe.augmentation,
        cut_out_share=0.0,
        jitter=0.0,
        mixup_share=0.0,
        seed=1000 + seed,
    )
    return train_cnn(
        train, settings, pools=pools, task="judge", device=model.device, observe=observe
    )


@torch.no_grad()
def classify(model: Model, judge: nn.Module, images: StoredImages) -> tuple[Labels, Labels]:
    """Return the classes that the model and the judge predict."""
    ours, theirs = [], []
    for part in images.split(BATCH_SIZE):
        x = to_pixels(part.to(model.device))
        ours.append(model.predict(x).argmax(1).cpu())
        theirs.append(judge(x).argmax(1).cpu())
    return torch.cat(ours), torch.cat(theirs)


@torch.inference_mode()
def bits_per_dim(
    model: Model, images: StoredImages, generator: torch.Generator
) -> Float[Tensor, " images"]:
    """Exact bits/dim of every image, with one draw of uniform dequantisation noise."""
    values = []
    for part in images.split(BATCH_SIZE):
        z, log_det = model.encode_with_log_det(dequantise(part.cpu(), generator).to(model.device))
        log_p = equations.log_marginal(equations.log_likelihood(z, log_det, model.mu))
        values.append(equations.bits_per_dim(log_p, z.shape[1]).cpu())
    return torch.cat(values)


def ask_judge(
    model: Model, judge: nn.Module, images: StoredImages, seed: int, observe: Observer = ignore
) -> tuple[Explanation, Float[Tensor, "batch classes"], Float[Tensor, " batch"]]:
    """Explain each image for one random target, and show the counterfactuals to the judge.

    Returns the explanation, the judge's posterior of every counterfactual, and the share of its
    change where the judge looks.
    """
    report = counter(observe, "asking the judge", len(images))
    classes = len(model.class_names)
    p = classify(model, judge, images)[0]
    targets = (p + random_offsets(len(p), classes, seed)) % classes
    explanation = model.explain(images, targets[:, None])
    said, focus = [], []
    for rows in torch.arange(len(explanation)).split(BATCH_SIZE):
        x = explanation.x[rows].to(model.device)
        stored = to_pixels(to_uint8(explanation.convincing[rows, 0])).to(model.device)
        q = explanation.q[rows, 0].to(model.device)
        sensitive = sensitivity(judge, x, q) + sensitivity(judge, stored, q)
        focus.append(share_inside(importance(stored - x), most_sensitive(sensitive)).cpu())
        with torch.no_grad():
            said.append(judge(stored).softmax(1).cpu())
        report(int(rows[-1]) + 1)
    return explanation, torch.cat(said), torch.cat(focus)


@torch.enable_grad()
def sensitivity(judge: nn.Module, x: Images, q: Labels) -> Float[Tensor, "batch height width"]:
    """|∂ log p(q) / ∂x| of the judge, summed over channels and averaged over 3×3 pixels."""
    x = x.clone().requires_grad_()
    log_p = judge(x).log_softmax(1)
    (gradient,) = torch.autograd.grad(log_p.gather(1, q[:, None]).sum(), x)
    return F.avg_pool2d(gradient.abs().sum(1, keepdim=True), 3, 1, 1, count_include_pad=False)[
        :, 0
    ]


def most_sensitive(
    sensitive: Float[Tensor, "batch height width"],
) -> Bool[Tensor, "batch height width"]:
    """Select the fifth of the pixels with the highest values in each map."""
    flat = sensitive.flatten(1)
    count = max(1, round(FOCUS * flat.shape[1]))
    mask = torch.zeros_like(flat, dtype=torch.bool)
    return mask.scatter_(1, flat.topk(count, 1).indices, value=True).reshape(sensitive.shape)


def confusions(predicted: Labels, test: Dataset, most: int = 5) -> Iterator[Confusion]:
    """Yield the pairs of classes that are confused most often."""
    classes = len(test.class_names)
    pairs = torch.bincount(test.labels.cpu() * classes + predicted, minlength=classes**2)
    table = pairs.reshape(classes, classes)
    totals = table.sum(1)
    table = table - table.diag().diag()
    for pair in table.flatten().argsort(descending=True, stable=True)[:most].tolist():
        label, other = divmod(pair, classes)
        if table[label, other]:
            share = wilson(int(table[label, other]), int(totals[label]))
            yield Confusion(test.class_names[label], test.class_names[other], share)


def findings(model: Model, evaluation: Evaluation, **measured: Interval) -> Iterator[Finding]:
    """Yield every measure with its grade, by the limits of `words.toml`."""
    excess = measured["error"].mean - measured["judge_error"].mean
    calibration = evaluation.calibration_error - evaluation.calibration_error_by_chance
    scores = {
        "error": -excess,
        "calibration": -calibration,
        "overfitting": -measured["overfitting"].mean,
        "reached_q": evaluation.reached_q,
        "judge_reads_q": measured["judge_reads_q"].mean,
        "focus": measured["focus"].mean,
    }
    chance = 1 - 1 / len(model.class_names)
    for about in WORDS["finding"]:
        value = fill(about["value"], {"evaluation": evaluation, **measured})
        graded, advice = grade(scores[about["score"]], *about["limits"]), about["advice"]
        if about["score"] == "error":
            graded = graded if measured["error"].high < 0.9 * chance else "bad"
            if excess <= 0.03:
                advice = "the classes cannot be told apart: look at the labels"
        yield Finding(about["name"], value, graded, about["meaning"], advice)


def grade(value: float, good: float, weak: float) -> Grade:
    """Grade a value that should be large."""
    return "good" if value >= good else "weak" if value >= weak else "bad"
