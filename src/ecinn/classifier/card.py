"""Write a model's card, with its data, settings, results and limits, from `cards.toml`."""

import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.recipes import RECIPES
from ecinn.data.augmentation import Augmentation
from ecinn.data.own import DATASET
from ecinn.drawing.table import Table
from ecinn.metrics.statistics import wilson

TEXTS = tomllib.loads(Path(__file__).with_name("cards.toml").read_text(encoding="utf-8"))
_HALF_A_STEP = 0.5 / 256
"""Larger changes of a pixel alter the 8-bit image."""


@dataclass(frozen=True)
class Section:
    """A title, sentences, and commands to type."""

    title: str
    sentences: tuple[str, ...]
    code: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Format the section with a second-level heading."""
        lines = [f"## {self.title}", "", *(f"- {sentence}" for sentence in self.sentences)]
        return "\n".join([*lines, *(["", "```sh", *self.code, "```"] if self.code else [])])


@dataclass(frozen=True)
class ModelCard:
    """Everything to know before using a model."""

    name: str
    size_in_bytes: int
    summary: str
    data: Section
    settings: Table
    training: Section
    metrics: Table
    failures: Section
    unfit: Section
    usage: Section
    measured: Mapping[str, Any]
    """The figures behind `metrics`, as stored in the checkpoint."""

    @property
    def sections(self) -> tuple[Section | Table, ...]:
        """All sections, in reading order."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value for value in values if isinstance(value, Section | Table))

    def markdown(self) -> str:
        """Format the whole card."""
        parts = [f"# {self.name}", self.summary, *(part.markdown() for part in self.sections)]
        return "\n\n".join(part.strip() for part in parts) + "\n"


def card(checkpoint: Checkpoint, size_in_bytes: int, model: str | None = None) -> ModelCard:
    """Write the card of a model.

    Args:
        model: the name or path it was loaded by; by default the name of its recipe.
    """
    recipe, metrics, general = checkpoint.recipe, checkpoint.metrics, TEXTS["general"]
    kind, _, attribute = recipe.dataset.partition("/")
    texts = TEXTS["datasets"].get(kind, TEXTS["datasets"]["unknown"])
    correlated = [TEXTS["correlated"][attribute]] if attribute in TEXTS["correlated"] else []
    failures = [*_counted_failures(metrics), *texts["failures"], *correlated, general["failure"]]
    measures = tuple(
        (text["name"], _shown(metrics.get(key), text["format"]), text["meaning"])
        for key, text in TEXTS["measures"].items()
        if key in metrics or not metrics
    )
    return ModelCard(
        name=recipe.name,
        size_in_bytes=size_in_bytes,
        summary=_summary(checkpoint, texts["images"]),
        data=Section("Data", tuple(_data(checkpoint, texts))),
        settings=_settings(checkpoint, size_in_bytes),
        training=Section("Training", tuple(_training(checkpoint.training))),
        metrics=Table(
            "Measured on test images", ("measure", "value", "meaning"), measures, align="lrl"
        ),
        failures=Section("Known failures", tuple(failures)),
        unfit=Section("What not to use it for", (*texts["unfit"], general["unfit"])),
        usage=_usage(checkpoint, texts.get("option", ""), model or recipe.name),
        measured=dict(metrics),
    )


def _summary(checkpoint: Checkpoint, images: str) -> str:
    net, names = checkpoint.recipe.architecture, checkpoint.class_names
    classes = " and ".join(f"“{name}”" for name in names)
    if len(names) > 3:
        classes = f"{len(names)} classes (“{names[0]}” to “{names[-1]}”)"
    channels = {1: "grey", 3: "colour"}.get(net.channels, f"{net.channels}-channel")
    return str(TEXTS["general"]["summary"]).format(
        classes=classes, channels=channels, net=net, images=images
    )


def _data(checkpoint: Checkpoint, texts: Mapping[str, Any]) -> list[str]:
    key = "training_images"
    trained = [stage[key] for _, stage in _stages(checkpoint.training) if key in stage]
    tested = [checkpoint.metrics["n"]] if "n" in checkpoint.metrics else []
    counts = [f"{n:,} for training" for n in trained[:1]] + [f"{n:,} for testing" for n in tested]
    return [
        f"Dataset `{checkpoint.recipe.dataset}`.",
        *texts["origin"],
        *([f"Images: {', '.join(counts)}."] if counts else []),
        f"Licence: {texts['licence']}",
    ]


def _settings(checkpoint: Checkpoint, size_in_bytes: int) -> Table:
    recipe, net = checkpoint.recipe, checkpoint.recipe.architecture
    stages = [
        f"{stage.couplings} couplings of width {stage.width} "
        f"at {net.height >> level}×{net.width >> level}"
        for level, stage in enumerate(net.stages, 1)
    ]
    if net.dense_width:
        stages.append(f"{net.dense_couplings} fully connected of width {net.dense_width}")
    values = {
        "recipe": recipe,
        "net": net,
        "network": "; ".join(stages),
        "parameters": sum(weights.numel() for weights in checkpoint.classifier.parameters()),
        "mebibytes": size_in_bytes / 2**20,
        "augmentation": _augmentation(recipe.augmentation),
        "tau": float(checkpoint.classifier.tau),
        "shift": _shift(checkpoint),
        "teacher_percent": 100 * recipe.distillation_weight,
        "default": _default_counterfactual(recipe.default_confidence),
    }
    rows = {name: text.format(**values) for name, text in TEXTS["settings"].items()}
    if recipe.finetuning:
        rows["epochs"] += f", then {recipe.finetuning.epochs}"
        rows["learning rate"] += f", then {recipe.finetuning.learning_rate:g}"
    for field, (name, text) in TEXTS["optional_settings"].items():
        if getattr(recipe, field):
            rows[name] = text.format(**values)
    return Table("Settings", ("setting", "value"), tuple(rows.items()), align="ll")


def _shift(checkpoint: Checkpoint) -> str:
    """Say how far calibration moved two tied means together."""
    mu, mu_bar = checkpoint.classifier.mu.detach(), checkpoint.mu_bar
    if len(mu) > 2 or torch.equal(mu, mu_bar):
        return ""
    percent = 100 * float((mu[0] - mu_bar[0]).norm() / (mu_bar[1] - mu_bar[0]).norm())
    return f"; both shifted by {percent:.0f} % of their distance, to where the classes meet"


def _default_counterfactual(confidence: float | None) -> str:
    if confidence is None:
        return "at α₁ (the paper's)"
    return f"{100 * confidence:g} % requested (`--confidence alpha_1` for the paper's α₁)"


def _augmentation(settings: Augmentation) -> str:
    amounts = {text: getattr(settings, name) for name, text in TEXTS["augmentation"].items()}
    changed = ", ".join(
        text.format(100 * amount if text.endswith("%") else amount)
        for text, amount in amounts.items()
        if amount
    )
    parts = [f"{100 * settings.share:g} % of the images {changed}"] if changed else []
    return "; ".join([*parts, *(["half of them mirrored"] if settings.flip else [])]) or "none"


def _training(record: Mapping[str, Any]) -> list[str]:
    """Describe one stage or two."""
    sentences = []
    for title, stage in _stages(record):
        if "init_from" in stage:
            sentences.append(f"Initialised from the layers of {stage['init_from']}.")
        texts = TEXTS["training"].items()
        if facts := [text.format(stage[key]) for key, text in texts if key in stage]:
            sentences.append(f"{title}: {', '.join(facts)}.")
    return sentences or ["Not recorded."]


def _stages(record: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    first = record.get("first_stage")
    if first is None:
        return [("One stage", record)]
    return [("First stage", first), ("Fine-tuning for counterfactuals", record)]


def _counted_failures(metrics: Mapping[str, Any]) -> list[str]:
    """Report proportions as numbers of test images."""
    if "n" not in metrics or "error" not in metrics:
        return ["Its error is unknown: it was not measured."]
    n = int(metrics["n"])
    error = wilson(round(metrics["error"] * n), n)
    sentences = [
        f"It misclassifies {round(error.mean * n):,} of {n:,} test images. The 95 % confidence "
        f"interval of the error (Wilson) is {_shown(error.low)} to {_shown(error.high)}, "
        f"±{100 * error.half_width:.2g} points."
    ]
    for key, text in TEXTS["measures"].items():
        if "best" in text and key in metrics:
            bad = round(abs(text["best"] - metrics[key]) * n)
            sentences += [f"{bad:,} of {n:,} {text['failure']}"] if bad else []
    if metrics.get("round_trip_error", 0.0) > _HALF_A_STEP:
        sentences.append("Its inverse is inexact: f⁻¹(f(x)) changes the stored image.")
    return sentences


def _usage(checkpoint: Checkpoint, option: str, model: str) -> Section:
    recipe, quoted = checkpoint.recipe, shlex.quote(model)
    sentences = [f"In Python: `ecinn.load({model!r})`."]
    code = [f"ecinn explain IMAGE --model {quoted}", f"ecinn evaluate {quoted}{option}"]
    current = RECIPES.get(recipe.name)
    if recipe.dataset == DATASET:
        code.append("ecinn train SOURCE --out DIR")
    elif current is None:
        sentences.append("This version has no recipe of that name and cannot train it again.")
    else:
        options = "".join(
            f" --{name.replace('_', '-')} {value:g}"
            for name in ("epochs", "learning_rate", "batch_size", "beta", "distillation_weight")
            if (value := getattr(recipe, name)) != getattr(current, name)
        )
        options += " --finetune-epochs 0" if current.finetuning and not recipe.finetuning else ""
        code.append(f"ecinn train {recipe.name} --out DIR{options}{option}")
        if changed := [n for n in vars(current) if getattr(current, n) != getattr(recipe, n)]:
            sentences.append(f"This version would train it with another {', '.join(changed)}.")
    return Section("Loading, evaluating and training it", tuple(sentences), tuple(code))


def _shown(value: float | None, form: str = ".2%") -> str:
    return "not measured" if value is None else format(value, form).replace("%", " %")
