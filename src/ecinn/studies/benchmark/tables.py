"""Results laid out as tables, for Markdown and for a terminal; nothing is computed here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecinn.metrics.counterfactuals import MeanWithInterval
from ecinn.studies.benchmark.authors import AuthorsResult, Scored
from ecinn.studies.benchmark.consistency import Consistency, Variant
from ecinn.studies.benchmark.methods import ABOUT
from ecinn.studies.benchmark.quality import Verdict
from ecinn.studies.benchmark.side_by_side import ImageScores, Scores, SideBySide

NONE = "–"


@dataclass(frozen=True)
class Table:
    """A head and rows of the same length, under a title; notes stand below."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """GitHub's flavour."""
        lines = [
            "| " + " | ".join(self.head) + " |",
            "|" + "|".join(["---"] + ["---:"] * (len(self.head) - 1)) + "|",
            *("| " + " | ".join(row) + " |" for row in self.rows),
        ]
        return "\n".join([f"## {self.title}", "", *lines, "", *_paragraphs(self.notes)])


def _paragraphs(notes: Sequence[str]) -> list[str]:
    return [line for note in notes for line in (note, "")]


def document(title: str, tables: Sequence[Table], record: Mapping[str, Any]) -> str:
    """A Markdown file: the tables, then how they were made."""
    made = [
        f"Made with `{record['command']}`: model {record['model']} "
        f"(SHA-256 of its weights {record['model_sha256']}…), torch {record['torch']}, "
        f"{record['device']}, {record['threads']} thread(s).",
    ]
    return "\n".join([f"# {title}", "", *(table.markdown() for table in tables), *made, ""])


def percent(share: MeanWithInterval | float | None, digits: int = 2) -> str:
    """A share for people."""
    value = share.mean if isinstance(share, MeanWithInterval) else share
    return NONE if value is None or math.isnan(value) else f"{100 * value:.{digits}f}"


def number(figure: MeanWithInterval | float | None, digits: int = 2, factor: float = 1.0) -> str:
    """A mean for people."""
    value = figure.mean if isinstance(figure, MeanWithInterval) else figure
    return NONE if value is None or math.isnan(value) else f"{factor * value:.{digits}f}"


def oracle_head(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Both oracles with how often they are right on test images."""
    accuracy = record["judges"]["accuracy"]
    return tuple(
        f"{family} oracle % (right {100 * accuracy[family]:.2f})"
        for family in ("convolutional", "fully connected")
    )


def _by_family(verdict: Verdict | None, *, kept: bool) -> tuple[str, ...]:
    shares = None if verdict is None else verdict.kept if kept else verdict.oracles
    return tuple(
        NONE if shares is None else percent(shares[family])
        for family in ("convolutional", "fully connected")
    )


def side_by_side_tables(result: SideBySide, record: Mapping[str, Any]) -> tuple[Table, ...]:
    """Who is convinced; how near and how real; at what cost."""
    planted = any(row.images and row.images.verdict.truth for row in result.references)
    rows = (*result.methods, *result.references)
    oracles = oracle_head(record)
    if planted:
        head = ("cue says q %", "change inside the cue %", *(f"digit kept, {o}" for o in oracles))
    else:
        head = (*oracles, f"COUT ({result.cout_images} images)")
    return (
        Table(
            f"Who is convinced ({result.dataset}, {result.n} random test images)",
            ("method", "reached q %", "class changed %", *head, "label variation"),
            tuple(_convinced(row, planted=planted) for row in rows),
            (
                "Every method has the same images and the same random targets (seed "
                f"{result.seed}). Reached q and class changed: what the explained classifier says "
                "of the stored 8-bit image, over all images. Oracles took no part; COUT and label "
                "variation are the convolutional one's. A real image of q is a random one."
                + (
                    " Label variation should be near 0: the digit is not what the class is."
                    if planted
                    else ""
                ),
            ),
        ),
        Table(
            "How near, how real",
            (
                "method", "EN", "L1", "L2", "IM1", "IM2 ×100", "Fréchet",
                "bits/dim", "diversity",
            ),
            tuple((row.method, *_nearness(row.images)) for row in rows),
            (
                "IM1 and IM2 by our judges' autoencoders; Fréchet distance on their feature "
                "network to all test images, "
                f"{number(result.originals_frechet)} for the originals themselves; bits/dim is "
                "−log₂ p of the model itself, "
                f"{number(result.originals_bits_per_dim, 3)} for the originals; diversity 1 is "
                "that of real images.",
            ),
        ),
        Table(
            "At what cost",
            ("method", "passes", "seconds each", "gave up", "raised an error"),
            tuple(_cost(row) for row in result.methods),
            (
                f"Seconds are wall-clock, in batches of {result.batch_size}. A search gives up "
                "when its steps end before it is as sure as it wants to be; a method without a "
                "search has nothing to give up. The best image that it had is scored then. Where "
                "a method raised an error, the image counts as not reached and is in no other "
                "mean.",
                *(f"{row.method}: {ABOUT[row.method]}." for row in result.methods),
                *(
                    f"{row.method} raised an error in {len(row.errors)} batch(es), first: "
                    f"{row.errors[0]}"
                    for row in result.methods
                    if row.errors
                ),
            ),
        ),
    )  # fmt: skip


def _convinced(row: Scores, *, planted: bool) -> tuple[str, ...]:
    head = (row.method, percent(row.reached), percent(row.class_changed))
    if row.images is None:
        return (*head, *[NONE] * (5 if planted else 4))
    verdict = row.images.verdict
    middle = _planted(verdict) if planted else _by_family(verdict, kept=False)
    if not planted:
        middle = (*middle, number(row.images.cout, 3))
    return (*head, *middle, number(verdict.label_variation, 4))


def _planted(verdict: Verdict | None) -> tuple[str, ...]:
    """What the cue says, where the change is, and whether the rest is as it was."""
    if verdict is None:
        return (NONE,) * 4
    return (
        percent(verdict.truth),
        percent(verdict.inside, 1),
        *_by_family(verdict, kept=True),
    )


def _nearness(images: ImageScores | None) -> tuple[str, ...]:
    if images is None:
        return (NONE,) * 8
    return (
        number(images.elastic_net),
        number(images.l1),
        number(images.l2),
        number(images.im1, 3),
        number(images.im2, 3, 100.0),
        number(images.verdict.frechet),
        number(images.bits_per_dim, 3),
        number(images.diversity),
    )


def _cost(row: Scores) -> tuple[str, ...]:
    seconds = NONE if row.seconds is None else f"{row.seconds:.4f}"
    return (row.method, number(row.passes, 1), seconds, str(row.failed), str(row.raised))


def control_line(result: AuthorsResult) -> str:
    """Whether the authors' own figures came out again."""
    if result.reproduced is None:
        return "CONTROL: not checked (limited)"
    least = min((figure.digits for figure in result.control), default=-math.inf)
    if result.reproduced:
        return f"CONTROL: reproduced ({len(result.control)} figures, {_digits(least)} or more)"
    worst = min(result.control, key=lambda figure: figure.digits, default=None)
    return f"CONTROL: NOT reproduced ({worst or 'nothing published could be compared'})"


def _digits(digits: float) -> str:
    if digits == -math.inf:
        return "other images"
    return "all digits" if digits == math.inf else f"{int(digits)} digits"


def authors_tables(result: AuthorsResult, record: Mapping[str, Any]) -> tuple[Table, ...]:
    """The control, everybody's rows, and ours over asked confidences."""
    name = {"mnist": "MNIST", "fake_mnist": "FakeMNIST"}[result.name]
    counts = result.reproduced is not False
    ours = result.ours.row.method if counts else "ours (does not count: the control failed)"
    rows = [(method.row.method, method) for method in result.theirs]
    rows += [(ours, result.ours), *((row.row.method, row) for row in result.references)]
    planted = result.name == "fake_mnist"
    oracles = oracle_head(record)
    extra = (
        ("dot says q %", "change inside the dots %", *(f"digit kept, {o}" for o in oracles))
        if planted
        else oracles
    )
    tables = [
        Table(
            f"{name}: published and scored again ({result.n} images)",
            ("figure", "method", "published", "here", "agree to"),
            tuple(_control_row(figure) for figure in result.control),
            (
                f"**{control_line(result)}**",
                "FID and Oracle as published, which cannot be computed again: "
                + "; ".join(_published(result, metric) for metric in ("FID", "Oracle"))
                + ".",
            ),
        ),
        Table(
            f"{name}: the same images, the same targets ({result.n} images)",
            ("method", "TCV %", "reached q %", "EN", "IM1", "IM2 ×100", *extra,
             "Fréchet", "failed", "black"),
            tuple(_authors_row(label, row, planted=planted) for label, row in rows),
            (
                "Ours: plain α₁, stored as 8 bits, for GEN's targets (GB and GL have targets of "
                "their own). Images that our model reads as another class than GEN's: "
                f"{result.other_prediction}; already as the target: "
                f"{result.target_is_prediction}, which are failures of ours in TCV and reached q "
                "and in no other mean. Both are read by each method's own classifier, and by ours "
                "of real images of q and of the perfect answer. As near as ours: of the training "
                "images of q the one whose EN is nearest to ours, so what reality has at that "
                "distance. Failed and black images count against TCV and reached q and are left "
                "out of the rest, as by the authors.",
            ),
        ),
    ]  # fmt: skip
    if result.curve:
        tables.append(_curve_table(result, name, planted=planted))
    return tuple(tables)


def _control_row(figure: Any) -> tuple[str, ...]:  # noqa: ANN401
    factor, digits = {
        "TargetClassValidity": (100.0, 2),
        "ElasticNet": (1.0, 4),
        "IM1": (1.0, 5),
        "IM2": (100.0, 5),
    }[figure.metric]
    label = {"TargetClassValidity": "TCV %", "ElasticNet": "EN", "IM2": "IM2 ×100"}
    return (
        label.get(figure.metric, figure.metric),
        figure.method,
        number(figure.published, digits, factor),
        number(figure.here, digits, factor),
        _digits(figure.digits),
    )


def _published(result: AuthorsResult, metric: str) -> str:
    figures = result.published.get(metric, {})
    factor = 100.0 if metric == "Oracle" else 1.0
    values = ", ".join(f"{method} {factor * mean:.2f}" for method, mean in figures.items())
    return f"{metric}{' %' if metric == 'Oracle' else ''} {values or NONE}"


def _authors_row(label: str, scored: Scored, *, planted: bool) -> tuple[str, ...]:
    row, verdict = scored.row, scored.verdict
    extra = _planted(verdict) if planted else _by_family(verdict, kept=False)
    return (
        label,
        percent(row.class_changed),
        percent(row.reached),
        number(row.elastic_net),
        number(row.im1, 3),
        number(row.im2, 3, 100.0),
        *extra,
        number(None if verdict is None else verdict.frechet),
        str(row.failed),
        str(row.black),
    )


def _curve_table(result: AuthorsResult, name: str, *, planted: bool) -> Table:
    last = ("dot says q %",) if planted else ("convolutional oracle %", "fully connected oracle %")
    return Table(
        f"{name}: ours over the confidence asked for (the first {result.curve[0].n} images)",
        ("asked p(q) %", "can be had %", "obtained, stored %", "reached q %", "EN", "IM1",
         "IM2 ×100", *last, "Fréchet"),
        tuple(
            (
                percent(point.asked, 0),
                percent(point.reachable),
                percent(point.obtained),
                percent(point.reached),
                number(point.elastic_net),
                number(point.im1, 3),
                number(point.im2, 3, 100.0),
                *(
                    _planted(point.verdict)[:1]
                    if planted
                    else _by_family(point.verdict, kept=False)
                ),
                number(None if point.verdict is None else point.verdict.frechet),
            )
            for point in result.curve
        ),
        ("Pairs for which the asked confidence cannot be had on their line are in the second "
         "column and in no other.",),
    )  # fmt: skip


def consistency_tables(result: Consistency) -> tuple[Table, ...]:
    """Both variants, and what every asked level became."""
    one, other = result.classes

    def row(name: str, variant: Variant) -> tuple[str, ...]:
        figures = variant.consistency
        return (
            name,
            number(figures.correlation, 4),
            percent(figures.within),
            number(figures.mean_squared_error, 3, 100.0),
            number(variant.passes, 1),
        )

    return (
        Table(
            f"Confidence asked and obtained between {one} and {other} ({result.n} test images)",
            ("variant", "Pearson's r", "within ±.05 %", "MSE ×100", "passes"),
            (row("plain", result.plain), row("corrected", result.corrected)),
            (
                "Random test images that the model reads as their label. "
                "Asked: the posterior of the class that the image starts in is .05, .10, … .95; "
                "obtained: what the classifier says of the stored 8-bit image. Pooled over "
                f"{result.n * len(result.asked) - result.unreachable} pairs; {result.unreachable} "
                "more that no point of the line gives are left out. The corrected variant reads "
                "the stored image and corrects α.",
            ),
        ),
        Table(
            "Mean obtained at every asked level",
            ("asked", "plain", "corrected"),
            tuple(
                (f"{asked:.2f}", number(plain, 4), number(corrected, 4))
                for asked, plain, corrected in zip(
                    result.asked, result.plain.obtained, result.corrected.obtained, strict=True
                )
            ),
        ),
    )
