"""Controls for distillation: find a planted shortcut, and leave shuffled labels unexplained."""

import importlib
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from ecinn.auditing.measurement import audit
from ecinn.auditing.page import ranked_cells
from ecinn.auditing.result import Audit
from ecinn.blackbox.classifier import BlackBox
from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset, Splits
from ecinn.data.planted import Cue
from ecinn.drawing.pictures import figure_png
from ecinn.drawing.table import Table
from ecinn.errors import InputError
from ecinn.metrics.heatmaps import importance, relative_density
from ecinn.metrics.statistics import Interval, bootstrap_interval, proportion
from ecinn.model import Model
from ecinn.pixels import Labels
from ecinn.progress import Observer, ignore
from ecinn.studies.benchmark.record import table
from ecinn.training.augmented import TeacherSettings, train_cnn
from ecinn.training.distillation import Distilled, distill_classifier
from ecinn.training.loop import train
from ecinn.training.networks import ConvolutionalNetwork
from ecinn.training.plan import plan_recipe
from ecinn.training.student import student_recipe

SIDE = 14
"""Digits are halved to 14×14 pixels, so that the study takes minutes."""
DIGITS = (3, 8)
CUE = Cue(marks=(((0, 0), (1, 0)), ((0, 1), (0, 2))), height=SIDE, width=SIDE)
"""An upright stroke of two pixels for the first class, a level one for the second, in the upper
left corner, where no digit is."""
EVIDENCE = 0.65
"""Share of the labels that match the digit; the others are flipped. If the digit always gave away
the label, a network would have no reason to look at a cue that agrees with 75 % of the labels."""
DOSES = (0.5, 0.75, 1.0)
"""Shares of the classifier's training pictures whose cue is that of the label; with two classes,
one half says nothing."""
NOT_EXPLAINED = 0.9
"""Smallest share of pictures that must not be explained after training on shuffled labels."""


@dataclass(frozen=True)
class Size:
    """Sizes of the study; a classifier and its student never see the same digits."""

    images: int = 3000
    """Pictures that every student learns from."""
    held_out: int = 500
    epochs: int = 10
    path_epochs: int = 2
    taught: int = 4000
    """Training pictures of the classifiers with a cue."""
    taught_epochs: int = 6
    """Few, so that wrong labels are not memorised."""
    memorised: int = 1000
    """Training pictures of the classifiers with true and with shuffled labels."""
    memorising_epochs: int = 60
    width: int = 32
    """Channels of these classifiers' first convolution, wide enough to memorise."""


@dataclass(frozen=True)
class Shortcut:
    """A classifier that was trained with a cue, and what the audit of its student finds."""

    dose: float
    cue_changes: Interval
    """Share of held-out pictures whose answer changes with the cue alone, by the classifier."""
    digit_changes: Interval
    """Share of the same whose answer changes with another digit and the same cue."""
    agreement: Interval
    rank: int
    """Place of the cue among all cells of the audit's grid, 1 for the most changed."""
    cells: int
    density: Interval
    """Change at the cue relative to an average place: 1 is chance."""
    started: bool = False
    """The student starts from a model that learned the digit and not the cue."""

    @property
    def expected(self) -> bool:
        """True if the cue says more about the labels than the digit does."""
        return self.dose > EVIDENCE

    @property
    def holds(self) -> bool:
        """True if the cue comes first exactly where it should."""
        return (self.rank == 1) == self.expected


@dataclass(frozen=True)
class Reasons:
    """A classifier of true or shuffled labels, and how well its student explains it."""

    labels: str
    learned: Interval
    """Share of the training pictures that it classifies as it was taught."""
    accuracy: Interval
    """On held-out pictures and true labels."""
    agreement: Interval
    flipped: Interval
    not_explained: Interval
    started: bool = False
    """The student starts from a model that learned the true labels."""


@dataclass(frozen=True)
class Controls:
    """Both controls."""

    size: Size
    seed: int
    shortcuts: tuple[Shortcut, ...]
    reasons: tuple[Reasons, ...]

    @property
    def holds(self) -> bool:
        """True if every control ends as it should."""
        shuffled = [each for each in self.reasons if each.labels == "shuffled"]
        unexplained = all(each.not_explained.mean >= NOT_EXPLAINED for each in shuffled)
        return unexplained and all(each.holds for each in self.shortcuts)


def run_controls(
    digits: Dataset, study: "Study", doses: Sequence[float] = DOSES
) -> tuple[Controls, list[Model]]:
    """Run both controls on digits of 28×28 pixels; return also all students.

    Each runs twice: with students that start from random weights, and from another model.
    """
    pair, every = halved(digits, DIGITS), halved(digits)
    both = [replace(study, started=started) for started in (False, True)]
    cues = [each.find_shortcut(pair, dose) for each in both for dose in doses]
    kinds = [each.explain_reasons(every, kind) for each in both for kind in ("true", "shuffled")]
    (shortcuts, students), (reasons, others) = zip(*cues, strict=True), zip(*kinds, strict=True)
    return Controls(study.size, study.seed, shortcuts, reasons), [*students, *others]


@dataclass(frozen=True)
class Study:
    """Train classifiers, distil them, and audit or explain their students."""

    size: Size
    seed: int
    device: torch.device
    observe: Observer = ignore
    started: bool = False
    """Students start from a model that learned the pictures' own labels, as with `--init-from`;
    otherwise from random weights."""

    def find_shortcut(self, digits: Dataset, dose: float) -> tuple[Shortcut, Model]:
        """Train a classifier with a cue, distil it on random cues, and audit the student.

        All students learn from the same pictures, whose cues say nothing about the digit: only the
        classifier's answers tell a student that the cue matters.
        """
        generator = torch.Generator().manual_seed(self.seed)
        taught, rest = _parts(digits, generator, self.size.taught)
        taught = plant_shortcut(taught, dose, EVIDENCE, generator)
        network = self.train(taught, self.size.taught_epochs, 8)
        neutral = torch.Generator().manual_seed(self.seed + 1)
        data = self.splits(plant_shortcut(rest, 0.5, 1.0, neutral))
        distilled, black_box = self.distill(network, data, f"cue-{100 * dose:.0f}")
        images = data.test.images
        own, partner = CUE.read(images), _other_digit(data.test.labels, neutral)
        said, other_cue, other_digit = (
            black_box.predict(each).argmax(1)
            for each in (images, CUE.paint(images, 1 - own), CUE.paint(images[partner], own))
        )
        found = audit(
            distilled.model.student,
            data.test,
            n=self.size.held_out,
            confidence=distilled.model.default_confidence,
            seed=self.seed,
            observe=self.observe,
        )
        change = relative_density(importance(found.flips.change), CUE.mask)
        result = Shortcut(
            dose=dose,
            cue_changes=proportion(said != other_cue),
            digit_changes=proportion(said != other_digit),
            agreement=distilled.agreement.agreement,
            rank=cue_rank(found, CUE.mask),
            cells=found.grid.numel(),
            density=bootstrap_interval(change, generator=generator),
            started=self.started,
        )
        return result, distilled.model

    def explain_reasons(self, digits: Dataset, labels: str) -> tuple[Reasons, Model]:
        """Let a classifier memorise pictures with true or shuffled labels, and explain it."""
        generator = torch.Generator().manual_seed(self.seed)
        taught, rest = _parts(digits, generator, self.size.memorised)
        if labels == "shuffled":
            order = torch.randperm(len(taught), generator=generator)
            taught = replace(taught, labels=taught.labels[order])
        network = self.train(taught, self.size.memorising_epochs, self.size.width)
        data = self.splits(rest)
        distilled, black_box = self.distill(network, data, f"labels-{labels}")
        learned, accuracy = (
            proportion(black_box.predict(part.images).argmax(1) == part.labels)
            for part in (taught, data.test)
        )
        found = distilled.agreement
        shares = (found.agreement, found.flipped_after, found.not_explained)
        return Reasons(labels, learned, accuracy, *shares, self.started), distilled.model

    def train(self, data: Dataset, epochs: int, width: int) -> ConvolutionalNetwork:
        """Train a small convolutional network without augmentation."""
        settings = TeacherSettings(
            width=width,
            epochs=epochs,
            batch_size=min(64, len(data)),
            learning_rate=4e-3,
            weight_decay=0.02,
            label_smoothing=0.0,
            ema_decay=0.98,
            augmentation=Augmentation(),
            cut_out_share=0.0,
            jitter=0.0,
            mixup_share=0.0,
            seed=self.seed,
        )
        return train_cnn(
            data, settings, task="classifier", device=self.device, observe=self.observe
        )

    def distill(
        self, network: ConvolutionalNetwork, data: Splits, name: str
    ) -> tuple[Distilled, BlackBox]:
        """Distil a classifier as `ecinn distill` does, with fewer epochs."""
        names, device, observe = data.train.class_names, self.device, self.observe
        name += self.started * "-started"
        black_box = BlackBox(lambda x: network(x.to(device)), names, name=name)
        recipe = plan_recipe(data.train, device, name=name, observe=observe).recipe
        recipe = replace(recipe, epochs=self.size.epochs, seed=self.seed)
        start = None
        with tempfile.TemporaryDirectory() as folder:
            if self.started:
                first, held_out = Path(folder) / "start", data.validation
                start = train(
                    recipe, data.train, first, held_out=held_out, device=device, observe=observe
                )
                recipe = student_recipe(data.train, device, init_from=start)
            else:
                recipe = student_recipe(data.train, device, recipe=recipe)
                assert recipe.finetuning is not None
                path = replace(recipe.finetuning, epochs=self.size.path_epochs)
                recipe = replace(recipe, finetuning=path)
            distilled = distill_classifier(
                black_box,
                data,
                replace(recipe, name=name),
                Path(folder) / "student",
                init_from=start,
                labelled=False,  # they are not needed, and shuffled ones would be refused
                device=device,
                observe=observe,
            )
        return distilled, black_box

    def splits(self, digits: Dataset) -> Splits:
        """Take the pictures that a student learns from, is chosen by and is tested on."""
        learned, held_out = self.size.images, self.size.held_out
        needed = learned + 2 * held_out
        if len(digits) < needed:
            raise InputError(f"the control needs {needed:,} more digits, not {len(digits):,}")
        ends = (0, learned, learned + held_out, needed)
        return Splits(*(digits.select(slice(*pair)) for pair in itertools.pairwise(ends)))


def plant_shortcut(
    digits: Dataset, dose: float, evidence: float, generator: torch.Generator
) -> Dataset:
    """Give digits of two classes labels and cues.

    Labels are those of the digit with probability `evidence`, cues those of the label with
    probability `dose`.
    """
    labels = _flipped(digits.labels, 1 - evidence, generator)
    cues = _flipped(labels, 1 - dose, generator)
    return replace(digits, images=CUE.paint(digits.images, cues), labels=labels)


def _flipped(labels: Labels, share: float, generator: torch.Generator) -> Labels:
    return torch.where(torch.rand(len(labels), generator=generator) < share, 1 - labels, labels)


def halved(digits: Dataset, classes: Sequence[int] | None = None) -> Dataset:
    """Return digits of 14×14 pixels, of some classes or all, which are then numbered from 0."""
    if classes is not None:
        own, names = torch.tensor(classes), tuple(digits.class_names[label] for label in classes)
        digits = digits.select(torch.isin(digits.labels, own).nonzero()[:, 0])
        labels = torch.searchsorted(own, digits.labels)
        digits = replace(digits, labels=labels, class_names=names)
    return replace(digits, images=F.avg_pool2d(digits.images.float(), 2).round().to(torch.uint8))


def cue_rank(found: Audit, mask: Bool[Tensor, "height width"]) -> int:
    """Return the place of the first cell of the audit's ranking that holds pixels of the cue."""
    height, width = mask.shape
    for rank, cell in enumerate(ranked_cells(found), 1):
        box = cell.box
        rows = slice(round(box.top * height), round(box.bottom * height))
        if bool(mask[rows, round(box.left * width) : round(box.right * width)].any()):
            return rank
    raise InputError("the cue lies outside of the picture")


def _parts(digits: Dataset, generator: torch.Generator, first: int) -> tuple[Dataset, Dataset]:
    """Shuffle digits and return the first ones and the others."""
    order = torch.randperm(len(digits), generator=generator)
    return digits.select(order[:first]), digits.select(order[first:])


def _other_digit(labels: Labels, generator: torch.Generator) -> Int[Tensor, " images"]:
    """For every picture, draw one of the other class."""
    partner = torch.empty_like(labels)
    for label in (0, 1):
        rows, others = (labels == label).nonzero()[:, 0], (labels != label).nonzero()[:, 0]
        partner[rows] = others[torch.randint(len(others), (len(rows),), generator=generator)]
    return partner


def control_tables(result: Controls) -> tuple[Table, ...]:
    """Lay out both controls."""
    layers = {True: "another model", False: "random weights"}
    words = {True: "yes", False: "no"}
    reasons = [{**vars(each), "layers": layers[each.started]} for each in result.reasons]
    shortcuts = [
        {**vars(each), "layers": layers[each.started]}
        | {"first": words[each.rank == 1], "right": words[each.holds]}
        for each in result.shortcuts
    ]
    return (
        table("controls", "shortcut", shortcuts, evidence=EVIDENCE),
        table("controls", "reasons", reasons, limit=NOT_EXPLAINED),
    )


def dose_figure(shortcuts: Sequence[Shortcut]) -> bytes:
    """Draw a PNG of the change at the cue, and of changed answers, against the dose."""
    random, started = ([s for s in shortcuts if s.started == kind] for kind in (False, True))
    figures = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(8, 3.4), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    doses = [100 * each.dose for each in random]
    series = (
        (left, [each.cue_changes for each in random], "the other cue", 100),
        (left, [each.digit_changes for each in random], "another digit", 100),
        (right, [each.density for each in random], "at the cue", 1),
        (right, [each.density for each in started], "at the cue, from another model", 1),
    )
    for axes, values, name, factor in series:
        middle = [factor * value.mean for value in values]
        ends = [
            [factor * abs(getattr(value, end) - value.mean) for value in values]
            for end in ("low", "high")
        ]
        axes.errorbar(doses[: len(middle)], middle, ends, fmt="o-", capsize=3, label=name)
    left.set(ylabel="answers changed by …, %", title="What the classifier uses", ylim=(-3, 103))
    right.set(
        ylabel="change ÷ that of an average place", title="What the audit of the student finds"
    )
    right.set_ylim(top=1.5 * right.get_ylim()[1])  # room for the legend
    right.axhline(1, color="#777777", linestyle="--", linewidth=1, label="average place")
    for axes in (left, right):
        axes.set_xlabel("dose: training cues that agree with the label, %")
        axes.set_xticks(doses)
        axes.legend(frameon=False)
    return figure_png(figure)
