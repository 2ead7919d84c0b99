"""A model card, written from a checkpoint alone: what a model is, how well it does, where not."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ecinn.classifier.card_data import CORRELATED, DATA, NO_CAUSE, NO_PROOF, UNKNOWN_DATA, CardData
from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.recipes import RECIPES
from ecinn.data.augmentation import Augmentation
from ecinn.metrics.statistics import wilson_interval

IMAGES = "training_images"
"""What a record calls the number of images."""
_HALF_A_STEP = 0.5 / 256
"""A larger change of a pixel shows in an 8-bit image."""


@dataclass(frozen=True)
class Section:
    """Sentences, then a table whose first row is its header, then lines to type."""

    title: str
    sentences: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    code: tuple[str, ...] = ()

    def markdown(self) -> str:
        """With its title one level below the card's."""
        parts = [f"## {self.title}"]
        if self.sentences:
            parts.append("\n".join(f"- {sentence}" for sentence in self.sentences))
        if self.table:
            header, *rows = ([_cell(text) for text in row] for row in self.table)
            ruled = [header, ["---"] * len(header), *rows]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in ruled))
        if self.code:
            parts.append("\n".join(["```sh", *self.code, "```"]))
        return "\n\n".join(parts)


@dataclass(frozen=True)
class ModelCard:
    """What one should know before using a model."""

    name: str
    size_in_bytes: int
    summary: str
    data: Section
    settings: Section
    training: Section
    metrics: Section
    failures: Section
    unfit: Section
    usage: Section
    measured: Mapping[str, Any]
    """The figures behind `metrics`, as the checkpoint has them."""

    @property
    def sections(self) -> tuple[Section, ...]:
        """In reading order."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value for value in values if isinstance(value, Section))

    def markdown(self) -> str:
        """The whole card."""
        parts = [f"# {self.name}", self.summary, *(part.markdown() for part in self.sections)]
        return "\n\n".join(parts) + "\n"


MEASURES: Mapping[str, tuple[str, str, str]] = {
    "error": ("test error", ".2%", "test images that are not read as their label"),
    "bits_per_dim": ("bits/dim, exact", ".3f", "to store one value of a pixel; less is better"),
    "bits_per_dim_paper": ("bits/dim, paper's convention", ".3f", "without a constant"),
    "reached_q": (
        "reached q",
        ".2%",
        "counterfactuals at the paper's α₁ whose stored 8-bit image is read as the class asked "
        "for; one random class per image",
    ),
    "reached_q_corrected": ("reached q, verified", ".2%", "the same, α corrected where need be"),
    "passes_corrected": ("evaluations, verified", ".5g", "of the network, per counterfactual"),
    "tipping_third_class": ("third class", ".2%", "ties of two classes at which another one wins"),
    "round_trip_error": ("round trip", ".1e", "largest change of a pixel of [0, 1] by f⁻¹(f(x))"),
    "typical": ("typical", ".2%", "test images that nothing calls unlike the training images"),
}
"""Name, format and meaning of what an evaluation measures, by its key."""


def card(checkpoint: Checkpoint, size_in_bytes: int, model: str | None = None) -> ModelCard:
    """What the checkpoint says of itself, and what is known of its data.

    Args:
        model: the name or path it was loaded by; by default the name of its recipe.
    """
    recipe = checkpoint.recipe
    kind, _, attribute = recipe.dataset.partition("/")
    data = DATA.get(kind, UNKNOWN_DATA)
    also = [CORRELATED[attribute]] if attribute in CORRELATED else []
    return ModelCard(
        name=recipe.name,
        size_in_bytes=size_in_bytes,
        summary=_summary(checkpoint, data),
        data=_data(checkpoint, data),
        settings=_settings(checkpoint, size_in_bytes),
        training=Section("How it was trained", tuple(_training(checkpoint.training))),
        metrics=_metrics(checkpoint.metrics),
        failures=Section(
            "Known failures",
            (*_counted_failures(checkpoint.metrics), *data.failures, *also, NO_PROOF),
        ),
        unfit=Section("What not to use it for", (*data.unfit, NO_CAUSE)),
        usage=_usage(checkpoint, data, model or recipe.name),
        measured=dict(checkpoint.metrics),
    )


def _summary(checkpoint: Checkpoint, data: CardData) -> str:
    a = checkpoint.recipe.architecture
    names = checkpoint.class_names
    classes = " and ".join(f"“{name}”" for name in names)
    if len(names) > 3:
        classes = f"{len(names)} classes (“{names[0]}” to “{names[-1]}”)"
    colour = {1: "grey", 3: "colour"}.get(a.channels, f"{a.channels}-channel")
    return (
        f"It tells {classes} apart in {colour} pictures of {a.height}×{a.width} pixels "
        f"({data.pictures}), and shows why: it changes a picture until it is convinced "
        "of another class. It can because its network runs both ways (a normalising flow): from a "
        "picture to numbers that say the class, and from changed numbers back to a picture."
    )


def _data(checkpoint: Checkpoint, data: CardData) -> Section:
    stages = _stages(checkpoint.training)
    trained = next((stage[IMAGES] for _, stage in stages if IMAGES in stage), None)
    counts = {"train": trained, "test": checkpoint.metrics.get("n")}
    images = [f"{count:,} to {use}" for use, count in counts.items() if count is not None]
    return Section(
        "Data",
        (
            f"Data set `{checkpoint.recipe.dataset}`.",
            *data.origin,
            *([f"Images: {', '.join(images)}."] if images else []),
            f"Licence: {data.licence}",
        ),
    )


def _settings(checkpoint: Checkpoint, size_in_bytes: int) -> Section:
    e = checkpoint.recipe
    a, r = e.architecture, e.finetuning
    sides = [f"{a.height >> n}×{a.width >> n}" for n in range(1, len(a.stages) + 1)]
    stages = [
        f"{stage.couplings} couplings of width {stage.width} at {side}"
        for stage, side in zip(a.stages, sides, strict=True)
    ]
    if a.dense_width:
        stages.append(f"{a.dense_couplings} fully connected of width {a.dense_width}")
    smoothing = f"{e.label_smoothing:g}"
    if e.refit_label_smoothing is not None:
        smoothing += f"; {e.refit_label_smoothing:g} while class means are fitted at the end"
    weights = sum(parameter.numel() for parameter in checkpoint.classifier.parameters())
    rows = {
        "network": "; ".join(stages),
        "parameters": f"{weights:,}",
        "file": f"{size_in_bytes / 2**20:.1f} MiB, {e.stored_bits} bits a weight of a subnet",
        "clamp": f"{a.clamp:g}: log-scales of a coupling stay within ±{a.clamp:g}",
        "norm, dropout": f"{a.norm}, {a.dropout:g}",
        "β": f"{e.beta:g}: weight of telling classes apart against likelihood (Eq. 9)",
        "epochs": f"{e.epochs}" + (f", then {r.epochs}" if r else ""),
        "learning rate": f"{e.learning_rate:g}" + (f", then {r.learning_rate:g}" if r else ""),
        "batch size": e.batch_size,
        "augmentation": _augmentation(e.augmentation),
        "noise": f"{e.noise:g} (standard deviation, pixels of [0, 1])",
        "label smoothing": smoothing,
        "seed": e.seed,
    }
    if r:
        rows["second stage"] = (
            f"proximity {r.proximity:g}, faithfulness {r.faithfulness:g}, realism {r.realism:g}"
        )
    if e.attribute_weight:
        rows["other attributes"] = f"learned beside the class with weight {e.attribute_weight:g}"
    if e.distillation_weight:
        rows["teacher"] = (
            f"its answer is {100 * e.distillation_weight:g} % of what is learned, labels the rest"
        )
    table = tuple((name, str(value)) for name, value in rows.items())
    return Section("Settings", table=(("setting", "value"), *table))


def _augmentation(settings: Augmentation) -> str:
    moves = {
        f"shifted by up to {settings.shift:g} pixels": settings.shift,
        f"turned by up to {settings.rotate:g}°": settings.rotate,
        f"scaled by up to {100 * settings.scale:g} %": settings.scale,
        f"sheared by up to {100 * settings.shear:g} %": settings.shear,
    }
    moved = ", ".join(words for words, amount in moves.items() if amount)
    parts = [f"{100 * settings.share:g} % of the images {moved}"] if moved else []
    return "; ".join([*parts, *(["half of them mirrored"] if settings.flip else [])]) or "none"


def _training(record: Mapping[str, Any]) -> list[str]:
    """Of one stage or two, or of a mixture of two models."""
    if "mixed" in record:
        share = 100 * record["mixed"]["share"]
        return [
            "Its weights are a mixture of two models', without further training.",
            *(
                f"{part:g} % {which} model: {sentence}"
                for which, part in {"first": 100 - share, "second": share}.items()
                for sentence in _training(record.get(which, {}))
            ),
        ]
    sentences = []
    for title, stage in _stages(record):
        if "init_from" in stage:
            sentences.append(f"Begun with the layers of {stage['init_from']}.")
        if made := _made(stage):
            sentences.append(f"{title}: {made}.")
    return sentences or ["Not recorded."]


def _stages(record: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    first = record.get("first_stage")
    if first is None:
        return [("One stage", record)]
    second = ("Second stage, which looks at counterfactuals", record)
    # A mixture's second model may only say in words where its first stage was.
    known = isinstance(first, Mapping)
    return [*([("First stage", first)] if known else []), second]


def _made(stage: Mapping[str, Any]) -> str:
    words = {
        "device": "on {}",
        "seconds": "{:,.0f} s",
        "images_per_second": "{:,} images/s",
        "torch": "torch {}",
    }
    return ", ".join(words[key].format(stage[key]) for key in words if key in stage)


def _metrics(metrics: Mapping[str, Any]) -> Section:
    rows = (
        (name, _shown(metrics[key], form) if key in metrics else "not measured", meaning)
        for key, (name, form, meaning) in MEASURES.items()
    )
    return Section("Measured on test images", table=(("measure", "value", "meaning"), *rows))


def _counted_failures(metrics: Mapping[str, Any]) -> list[str]:
    """Shares as numbers of images, which is what they were."""
    if "n" not in metrics or "error" not in metrics:
        return ["How often it errs is not known: it was not measured."]
    n = int(metrics["n"])
    wrong = round(metrics["error"] * n)
    low, high = wilson_interval(wrong, n)
    sentences = [
        f"It misreads {wrong:,} of {n:,} test images. From so many the error is known to "
        f"±{50 * (high - low):.2g} points: {_shown(low)} to {_shown(high)} (95 %, Wilson)."
    ]
    for key, (best, what) in {
        "reached_q": (1, "counterfactuals at α₁ are not read as the class asked for"),
        "reached_q_corrected": (1, "verified counterfactuals are not read as the class asked for"),
        "tipping_third_class": (0, "tipping points belong to a third class"),
        "typical": (1, "test images count as unlike the training images"),
    }.items():
        if key in metrics and (bad := round(abs(best - metrics[key]) * n)):
            sentences.append(f"{bad:,} of {n:,} {what}.")
    if metrics.get("round_trip_error", 0.0) > _HALF_A_STEP:
        sentences.append("Its inverse is inexact: network and back change the stored image.")
    return sentences


def _usage(checkpoint: Checkpoint, data: CardData, model: str) -> Section:
    recipe, record, quoted = checkpoint.recipe, checkpoint.training, shlex.quote(model)
    sentences = [f"In Python: `ecinn.load({model!r})`."]
    code = [f"ecinn explain PICTURE --model {quoted}", f"ecinn evaluate {quoted}{data.option}"]
    if recipe.name in RECIPES:
        start = next(
            (stage["init_from"] for _, stage in _stages(record) if "init_from" in stage), None
        )
        given = " --init-from START" if start else ""
        if recipe.distillation_weight:
            code.append(f"ecinn teacher --out TEACHER{data.option}")
            given += " --teacher TEACHER"
            sentences.append("What START begins with itself is said in docs/faces.md.")
        elif start:
            code.append(f"ecinn train {start} --out START{data.option}")
        now = RECIPES[recipe.name]
        given += "".join(
            f" --{name.replace('_', '-')} {value:g}"
            for name in ("epochs", "learning_rate", "batch_size", "beta", "distillation_weight")
            if (value := getattr(recipe, name)) != getattr(now, name)
        )
        given += " --finetune-epochs 0" if now.finetuning and not recipe.finetuning else ""
        code.append(f"ecinn train {recipe.name} --out DIR{given}{data.option}")
        if changed := [n for n in vars(now) if getattr(now, n) != getattr(recipe, n)]:
            sentences.append(f"Trained now, its settings would differ: {', '.join(changed)}.")
    else:
        sentences.append("This version has no recipe of that name: it cannot train it again.")
    if "mixed" in record:
        code.append(f"ecinn mix DIR OTHER --share {record['mixed']['share']} --out FILE")
        sentences.append("OTHER was refined further from DIR: see docs/finetuning.md.")
    return Section("How to load, measure and train it", tuple(sentences), code=tuple(code))


def _shown(value: float, form: str = ".2%") -> str:
    return format(value, form).replace("%", " %")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
