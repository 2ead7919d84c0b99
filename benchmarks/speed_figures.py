"""Figures of `speed.py`: cost and conviction, growth, memory, and the digits themselves."""

import importlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ecinn.drawing import grid
from ecinn.drawing.pictures import image_array, png_bytes
from ecinn.files import atomic_write
from ecinn.pixels import Labels, StoredImages
from ecinn.studies.benchmark.side_by_side import Pairs

# Okabe & Ito's colours, distinct under every common colour blindness, and distinct markers.
STYLES = {
    "ecinn": ("#D55E00", "*"), "Model.explain": ("#E69F00", "D"),
    "latent gradient": ("#CC79A7", "^"), "pixel gradient": ("#0072B2", "o"),
    "forward": ("#777777", "s"), "alibi prototypes": ("#009E73", ""),
    "alibi Wachter": ("#56B4E9", ""), "peak_mib": ("#000000", "o"),
}  # fmt: skip
LAYOUT = [["methods"] * 3 + ["table"] * 3, ["batch"] * 3 + ["targets"] * 3,
          ["resolution"] * 2 + ["depth"] * 2 + ["memory"] * 2]  # fmt: skip
GROWTH = {
    "batch": ("Batch", "digits in a batch", "ms for each digit"),
    "targets": ("Targets", "targets of one digit", "ms for all targets"),
    "resolution": ("Resolution (untrained networks)", "height and width in pixels", "ms"),
    "depth": ("Depth (untrained networks)", "couplings", "ms"),
}
"""Title and both axes of a panel."""


def draw_costs(result: Mapping[str, Any], path: Path) -> None:
    """Draw what was measured; a part that was not leaves its panels empty."""
    try:
        figures, ticks = (importlib.import_module(f"matplotlib.{n}") for n in ("figure", "ticker"))
    except ImportError:
        print("the figure needs matplotlib: pip install 'ecinn[benchmark]' (numbers are written)")
        return
    figure = figures.Figure(figsize=(13, 12), dpi=110, layout="constrained")
    machine = result["machine"]
    title = f"CPU time of one thread, {machine['cpu']} with {machine['cores']} cores"
    figure.suptitle(title, fontsize=15)
    axes = figure.subplot_mosaic(LAYOUT, height_ratios=(1.0, 1.15, 1.0))
    for axis in axes.values():
        axis.spines[["top", "right"]].set_visible(False)
    if "methods" in result:
        _draw_methods(axes["methods"], axes["table"], result["methods"])
    for panel, (title, across, up) in GROWTH.items():
        rows = result.get("growth", {}).get(panel, ())
        if panel == "batch":
            rows = [
                {k: v / row["batch"] if k in STYLES else v for k, v in row.items()} for row in rows
            ]
        _draw_lines(axes[panel], rows, title, across, f"{up} (log scale)")
        axes[panel].set_yscale("log", subs=[])
        axes[panel].yaxis.set_major_locator(ticks.LogLocator(subs=(1, 2, 5)))
        axes[panel].yaxis.set_major_formatter("{x:,g}")
        if panel != "targets":
            axes[panel].set_xscale("log", base=2)
            axes[panel].minorticks_off()
        axes[panel].set_xticks([next(iter(row.values())) for row in rows])
        axes[panel].xaxis.set_major_formatter("{x:g}")
    memory = result.get("memory", ())
    _draw_lines(
        axes["memory"], memory, "Memory of ecinn bulk", "pictures (log scale)", "peak, MiB"
    )
    axes["memory"].set_xscale("log")
    axes["memory"].xaxis.set_major_formatter("{x:,g}")
    axes["memory"].set_ylim(0, 1.3 * max((row["peak_mib"] for row in memory), default=1))
    handles, labels = axes["batch"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    atomic_write(path, buffer.getvalue())


def _draw_methods(axis: Any, table: Any, measured: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Draw a bar for every method, and beside it the numbers, with whom it convinces."""
    rows = measured["rows"][::-1]
    names, costs = ([row[key] for row in rows] for key in ("method", "times_forward"))
    axis.barh(names, costs, color=[STYLES[name][0] for name in names], height=0.62)
    axis.set_xscale("log")
    axis.set_xlim(1, 2 * max(costs))
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.set_xlabel("times one forward pass (log scale)")
    axis.set_title("One counterfactual by every method", loc="left", fontsize=12)
    forward = 1000 * measured["forward_seconds"]
    table.set_title(
        f"The same digits for all; one forward pass takes {forward:.1f} ms",
        loc="left",
        fontsize=12,
    )
    table.axis("off")
    for each in (axis, table):
        each.set_ylim(-0.6, len(rows))
    heads = (
        "digits",
        "seconds",
        "passes",
        "× forward",
        "read as q by the model",
        "by two oracles",
    )
    lines = {len(rows) - 0.35: heads}
    for place, row in enumerate(rows):
        model, *oracles = (
            f"{100 * row[name][0]:.0f} %" for name in ("model", "convolutional", "fully connected")
        )
        numbers = (row["seconds"], row["forward"] + row["backward"], row["times_forward"])
        written = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in numbers]
        lines[place] = (str(row["digits"]), *written, model, " and ".join(oracles))
    for place, words in lines.items():
        for across, word in zip((0.05, 0.17, 0.29, 0.43, 0.75, 1.0), words, strict=True):
            table.text(
                across, place, word, transform=table.get_yaxis_transform(), ha="right",
                va="center", fontsize=10,
            )  # fmt: skip


def _draw_lines(
    axis: Any,  # noqa: ANN401
    rows: Sequence[Mapping[str, float]],
    title: str,
    across: str,
    up: str,
) -> None:
    """Draw a line for every column against the first."""
    axis.set(xlabel=across, ylabel=up)
    axis.set_title(title, loc="left", fontsize=12)
    axis.grid(visible=True, color="#e4e4e4", linewidth=0.8)
    for name in (name for name in rows[0] if name in STYLES) if rows else ():
        (colour, marker), x = STYLES[name], [next(iter(row.values())) for row in rows]
        label = "one forward pass" if name == "forward" else name
        axis.plot(x, [row[name] for row in rows], color=colour, marker=marker, label=label)


def draw_digits(
    pairs: Pairs,
    images: Mapping[str, StoredImages],
    read: Mapping[str, Labels],
    rows: Sequence[Mapping[str, Any]],
    path: Path,
) -> None:
    """Draw every digit by every method, with the class that the convolutional oracle reads."""
    targets = [f"{p} to {q}" for p, q in zip(pairs.p.tolist(), pairs.q.tolist(), strict=True)]
    panels = [tuple(map(grid.Panel, map(image_array, pairs.images), targets))]
    names = [("original", "class, and target")]
    for row in rows:
        name = row["method"]
        if name != "Model.explain":  # its pictures are those of ecinn
            captions = [f"oracle: {label}" for label in read[name].tolist()]
            wrong = (read[name] != pairs.q[: len(read[name])]).tolist()
            panels.append(tuple(map(grid.Panel, map(image_array, images[name]), captions, wrong)))
            names.append((name, f"{row['seconds']:.3g} s each"))
    title = f"The same {len(targets)} digits by every method"
    caution = "Orange: the convolutional oracle does not read the target."
    sheet = grid.draw(grid.Grid(tuple(panels), title, caution, tuple(names)))
    atomic_write(path, png_bytes(sheet))
