"""An audit as one page of HTML that needs nothing else."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import version

import torch
from jaxtyping import Float
from torch import Tensor

from ecinn.auditing.cautions import find_cautions
from ecinn.auditing.measurement import EXAMPLES, Audit, Comparison, Group, Rate
from ecinn.data.face_regions import FACE, FACE_REGIONS, Box
from ecinn.drawing import pictures
from ecinn.drawing.heatmaps import overlay_array
from ecinn.drawing.pictures import Array, image_array, percent
from ecinn.metrics.statistics import Interval
from ecinn.pixels import to_uint8

COLUMNS = ("far left", "left", "centre", "right", "far right")
APART = 0.1
"""Likeness of maps up to which two models are said to look at different things."""
PERCENTILE = 99.9
"""Of a map gets full colour: a single dot that says the class must not drown in what is left."""

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2026;--soft:#5a636e;--paper:#fff;--panel:#f5f6f8;
--line:#d9dde2;--mark:#a84200;--markpanel:#fdf3ec}*{box-sizing:border-box}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#a3acb7;--paper:#15181c;
--panel:#1f2329;--line:#363c45;--mark:#ffb27a;--markpanel:#2c221a}img{filter:brightness(.9)}}
body{margin:0 auto;padding:2rem 1.25rem 4rem;max-width:64rem;background:var(--paper);
color:var(--ink);font:1rem/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .6rem}h2{font-size:1.3rem;margin:3rem 0 .6rem}
h3{font-size:1.05rem;margin:1.6rem 0 .5rem}p{margin:.5rem 0;max-width:42rem}
.lede{font-size:1.12rem;color:var(--soft)}summary,figcaption,small{color:var(--soft)}
small{font-size:.8rem;white-space:nowrap}figcaption{font-size:.85rem;line-height:1.35}
.hero{display:grid;grid-template-columns:minmax(0,20rem) 1fr;gap:1.75rem;align-items:center;
background:var(--panel);border-radius:.8rem;padding:1.5rem;margin:1.5rem 0}
.hero p:first-child{font-size:1.2rem;line-height:1.45;margin-top:0}figure{margin:0}
img{display:block;width:100%;height:auto;border:1px solid var(--line);border-radius:.3rem;
background:#fff}img.grain{image-rendering:pixelated}
.map{position:relative;margin-bottom:.5rem}
.map i{position:absolute;border:2px solid #1c2026;border-radius:.2rem;font:600 .72rem/1 system-ui;
color:#1c2026;padding:.15rem .2rem;text-shadow:0 0 3px #fff,0 0 3px #fff,0 0 3px #fff}
.map i.oval{border-radius:50%;border-style:dashed;border-width:1px}.row,.three{display:grid}
.row{grid-template-columns:repeat(auto-fit,minmax(7.5rem,1fr));gap:.8rem}
.three{grid-template-columns:repeat(3,1fr);gap:.3rem;margin-bottom:.3rem}
.wide{grid-template-columns:repeat(auto-fill,minmax(15rem,1fr));gap:1.2rem}
.two{grid-template-columns:repeat(2,minmax(0,13rem))}
.scroll{overflow-x:auto;margin:.8rem 0}table{border-collapse:collapse;font-size:.92rem}
th,td{padding:.35rem .8rem .35rem 0;text-align:right;vertical-align:top;
border-bottom:1px solid var(--line)}th:first-child,td:first-child{text-align:left;min-width:6rem}
thead th{font-weight:600;vertical-align:bottom}td small{display:block}
.grid{width:100%}.grid td,.grid th{padding:.12rem;border:0;text-align:center;vertical-align:middle}
.grid tr>*{min-width:3.1rem}.grid small{line-height:1.2;font-size:.68rem}
.cautions{background:var(--markpanel);border-left:4px solid var(--mark);
border-radius:.3rem;padding:.9rem 1.2rem;margin:1.5rem 0}.cautions h2{margin:0 0 .3rem;
font-size:1.05rem;color:var(--mark)}ul{padding-left:1.2rem;margin:.4rem 0}li{margin:.35rem 0}
@media(max-width:40rem){.hero{grid-template-columns:1fr;padding:1rem}h1{font-size:1.55rem}}
@media print{body{max-width:none;padding:0;font-size:10pt}figure,.hero,.cautions,tr{
break-inside:avoid}h2,h3{break-after:avoid}.scroll{overflow:visible}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


def report(audit: Audit, command: str) -> str:
    """The page: what this is, what the model looks at, then the details.

    Args:
        command: what makes it again.
    """
    name = escape(audit.model)
    lede = (
        f"This page shows what the classifier <b>{name}</b> looks at, over {len(audit.images)} "
        f"random pictures of its {escape(audit.split)} set. Each was changed until the classifier "
        "should be convinced of something else. Where they change shows what it would have to see "
        "instead; that is not always what it reacts to most."
    )
    cautions = "".join(f"<li>{escape(caution)}</li>" for caution in find_cautions(audit))
    if cautions:
        cautions = f'<section class="cautions"><h2>Take care</h2><ul>{cautions}</ul></section>'
    sections = [_headline(audit), cautions, _pairs(audit), _places(audit)]
    sections += [_comparison(audit, comparison) for comparison in audit.comparisons]
    sections += [_groups(audit), _examples(audit), _LIMITS, _method(audit, command)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>What does {name} look at?</title>\n<style>{_STYLE}</style>\n</head>\n"
        f'<body>\n<main>\n<h1>What does {name} look at?</h1>\n<p class="lede">{lede}</p>\n'
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def cell_name(row: int, column: int, grid: Sequence[int]) -> str:
    """A cell of the coarse grid in words."""
    across = COLUMNS[column] if grid[1] == len(COLUMNS) else f"column {column + 1}"
    return f"row {row + 1} of {grid[0]}, {across}"


def _headline(audit: Audit) -> str:
    image, amount = to_uint8(audit.images.float().mean(0) / 256), audit.flips.change.abs().mean(0)
    shape, ranked, overall, marks = audit.grid.shape, _ranked(audit.grid), audit.overall, ""
    for number, cell in enumerate(ranked[: 1 if audit.regions else 3], 1):
        marks += _mark(_cell_box(cell, shape, image.shape[1:]), str(number))
    most = f"{cell_name(*ranked[0], shape)}, marked 1: {audit.grid[ranked[0]]:.1f} times"
    if audit.regions:
        for name, boxes in FACE_REGIONS.items():
            marks += "".join(_mark(box, name if box is boxes[0] else "") for box in boxes)
        marks += _mark(FACE, "", "oval")
        first, second, *_ = (region for region in audit.regions if region.name in FACE_REGIONS)
        words = (
            f"Of mouth, eyes and cheeks, most changes in the <b>{first.name}</b>: "
            f"{first.density.mean:.1f} times the change of an average place. Next: the "
            f"{second.name} ({second.density.mean:.1f} times). The most changed place is {most}."
        )
    else:
        least = cell_name(*ranked[-1], shape)
        words = f"Most changes in <b>{most}</b> an average place; least in {least}."
    picture = _img(overlay_array(image, amount), "Mean picture, redder where more changes")
    return (
        f'<section class="hero"><figure><div class="map">{picture}{marks}</div><figcaption>The '
        "mean picture, red where pictures change most.</figcaption></figure>"
        f"<div><p>{words}</p><p>It misreads {_share(overall.error.share)} of these pictures. Of "
        f"the changed ones, {_share(overall.reached.share)} are read as was asked and "
        f"{_share(overall.typical_counterfactual.share)} are like the pictures it learned from, "
        "as far as it can tell.</p>"
        "</div></section>"
    )


def _pairs(audit: Audit) -> str:
    names = [escape(name) for name in audit.class_names]
    legend = "Red: places become lighter. Blue: darker. White: nothing changes on average."
    head = f"<h2>What changes from class to class</h2><p>{legend}"
    if len(names) > 3:
        head += (
            " A row is what pictures were read as, a column what they were turned into; below "
            "each map stands the number of pictures. The diagonal is the mean picture.</p>"
        )
        head += _matrix(audit, "change")
        for kind, words in (("counterfactual", "changed pictures"), ("absolute", "amounts")):
            head += f"<details><summary>Mean {words}</summary>{_matrix(audit, kind)}</details>"
        return f"<section>{head}</section>"
    cards = ""
    for pair in audit.pairs:
        way = f"{names[pair.p]} → {names[pair.q]}"
        shown = [
            (image_array(to_uint8(pair.image)), "mean picture"),
            (image_array(to_uint8(pair.counterfactual)), "mean changed picture"),
            (_map(pair.change), "lighter (red), darker (blue)"),
            (_map(pair.absolute), "amount of change"),
        ]
        if len(pair.change) == 3:
            strength = float(pair.change.abs().quantile(0.995)) or 1.0
            colour = 0.5 + 0.5 * pair.change / strength
            shown.insert(3, (image_array(to_uint8(colour)), "change of colour; grey is none"))
        figures = "".join(_figure(_img(a, f"{words}, {way}"), words) for a, words in shown)
        cards += f'<h3>{way} <small>{pair.n} pictures</small></h3><div class="row">{figures}</div>'
    return f"<section>{head}</p>{cards}</section>"


def _matrix(audit: Audit, kind: str) -> str:
    names, values = [escape(name) for name in audit.class_names], {}
    for p in audit.flips.p.unique().tolist():
        own = audit.images[audit.flips.p == p]
        values[p, p] = len(own), image_array(to_uint8(own.float().mean(0) / 256))
    # One scale for all, so that pairs can be compared.
    every = torch.cat([getattr(pair, kind) for pair in audit.pairs], 1)
    limit = pictures.robust_limit(every, PERCENTILE)
    for pair in audit.pairs:
        mean = getattr(pair, kind)
        still = kind == "counterfactual"
        array = image_array(to_uint8(mean)) if still else pictures.heatmap_array(mean, limit)
        values[pair.p, pair.q] = pair.n, array

    def cell(p: int, q: int) -> str:
        if (p, q) not in values:
            return "–"
        n, array = values[p, q]
        return f"{_img(array, f'{kind}, {names[p]} to {names[q]}')}<small>{n}</small>"

    classes = range(len(names))
    rows = [[f"<b>{names[p]}</b>", *(cell(p, q) for q in classes)] for p in classes]
    return _table(["", *(f"→ {name}" for name in names)], rows, "grid")


def _places(audit: Audit) -> str:
    shape, ranked = audit.grid.shape, _ranked(audit.grid)

    def listed(cells: Sequence[tuple[int, int]]) -> str:
        return "; ".join(f"{cell_name(*cell, shape)} ({audit.grid[cell]:.2f})" for cell in cells)

    parts = [(r.name, _interval(r.density), _share(r.share)) for r in audit.regions]
    table = _table(("part of the face", "density", "share of all change"), parts) if parts else ""
    return (
        "<section><h2>Where pictures change</h2><p>Density compares a place with the whole "
        "picture: 1 is as much change as its area would get if change were spread evenly.</p>"
        f"{table}<p><b>Most changed:</b> {listed(ranked[:3])}.<br><b>Least changed:</b> "
        f"{listed(ranked[:-4:-1])}. Rows count from the top.</p></section>"
    )


def _comparison(audit: Audit, c: Comparison) -> str:
    other, same, control = escape(c.other), c.same, c.shuffled
    lines = [
        ("up to a sign", same.absolute, control.absolute),
        ("with sign, each to its own other class", same.signed, control.signed),
        ("which pixels matter (rank correlation)", same.rank, control.rank),
    ]
    sign = ""
    if c.correlation is not None:
        lines.insert(2, ("with sign, both towards yes", same.turned, control.turned))
        sign = (
            f" Their predictions correlate by {c.correlation:.2f}: where one says yes and the "
            "other no, one adds what the other takes away; that is where the sign comes from."
        )
    rows = [(words, _interval(a), _interval(b)) for words, a, b in lines]
    verdict = "hardly more alike than"
    if same.absolute.low > control.absolute.high:
        verdict = "more alike than" if same.absolute.mean > APART else "nearly as different as"
    own = (audit.flips.change.abs().mean(0), escape(audit.model))
    figures = "".join(
        _figure(_img(_map(amount), f"mean amount of change, {name}"), name)
        for amount, name in (own, (c.absolute, other))
    )
    return (
        f"<section><h2>Beside {other}</h2><p>Both models changed the same {c.n} pictures. Their "
        f"maps of one picture are <b>{verdict}</b> maps of different pictures, which are the "
        f"control: {same.absolute.mean:.2f} against {control.absolute.mean:.2f}, where 1 is the "
        f"same and 0 is nothing in common. Their mean maps: {c.mean_maps:.2f}.</p>"
        + _table(("likeness of maps", "same picture", "different pictures"), rows)
        + f"<p>Both give the same class number to {_share(c.agreement.share)} of the pictures."
        f'{sign}</p><div class="row two">{figures}</div></section>'
    )


def _groups(audit: Audit) -> str:
    two = len(audit.class_names) == 2
    head = ["", "misread", *["false yes", "false no"] * two, "read as asked", "change", "typical"]

    def cells(group: Group) -> list[str]:
        sides = [_rate(group.false_positive), _rate(group.false_negative)] * two
        change = (
            f"{255 * group.change.mean:.1f}<small>median {255 * group.median_change:.1f}</small>"
        )
        after = f"<small>changed: {_share(group.typical_counterfactual.share)}</small>"
        rates = [_rate(group.error), *sides, _rate(group.reached)]
        return [escape(group.name), *rates, change, _share(group.typical.share) + after]

    yes = f" A false yes reads “{escape(audit.class_names[1])}” where the label denies it." * two
    text = (
        "<section><h2>Which pictures it treats how</h2><p>By label. Small print: how many, and "
        f"where the true share lies with 95 % certainty.{yes} Change is the mean |x̂ − x| of a "
        "pixel, of 255. Typical: like the pictures that the model learned from, to the model.</p>"
        + _table(head, [cells(group) for group in (audit.overall, *audit.classes)])
    )
    if audit.subgroups:
        text += (
            "<h3>By subgroup</h3><p>As the annotators of CelebA saw people, not as people are. "
            "Whether a change also touches other attributes cannot be told from this model alone: "
            "it takes another classifier, trained apart.</p>"
            + _table(head, [cells(group) for group in audit.subgroups])
        )
    return text + "</section>"


def _examples(audit: Audit) -> str:
    kinds = (
        ("At random", range(min(EXAMPLES, len(audit.images)))),
        ("Changed pictures that the model finds least likely", audit.unlikely),
        ("Misread: the label says something else; surest first", audit.misread),
    )
    text = "<section><h2>Pictures to look at</h2><p>Each: the picture, changed, what changed.</p>"
    for title, rows in kinds:
        cards = "".join(_example(audit, row) for row in rows) or "<p>None.</p>"
        text += f'<h3>{title}</h3><div class="row wide">{cards}</div>'
    return text + "</section>"


def _example(audit: Audit, row: int) -> str:
    names, flips, number = audit.class_names, audit.flips, int(audit.index[row])
    p, q, label = (escape(names[int(y[row])]) for y in (flips.p, flips.q, audit.labels))
    before = percent(float(flips.before.posterior[row].max()))
    after = percent(float(audit.after.posterior[row, flips.q[row]]))
    three = (
        _img(image_array(audit.images[row]), f"picture {number}, read as {p}"),
        _img(image_array(flips.counterfactuals[row]), f"picture {number} turned into {q}"),
        _img(_map(flips.change[row]), f"what changed in picture {number}"),
    )
    remark = f"; the label is <b>{label}</b>" * bool(flips.p[row] != audit.labels[row])
    caption = f"{p} {before} → {q} {after}{remark} <small>no. {number}</small>"
    return _figure(f'<div class="three">{"".join(three)}</div>', caption)


_LIMITS = """<section><h2>What this page cannot tell</h2><ul>
<li>A changed picture shows what <em>this classifier</em> reads as something else. It says nothing
about what causes anything in people or in the world.</li>
<li>It is no advice: nobody should change their face, or judge one, because of a classifier.</li>
<li>What goes together in the training pictures goes together here. If people who smile more often
wear lipstick there, a change of smile may bring lipstick with it.</li>
<li>The labels are opinions of annotators, and the pictures are those that somebody collected.
What is rare or missing among them, the model knows badly, and this page cannot show it.</li>
<li>A map shows what changes in one direction, the one that this method takes. The model may also
react to things that no map here shows, and an average hides what differs between pictures.</li>
</ul></section>"""


def _method(audit: Audit, command: str) -> str:
    each = "; each goes to one other class, in turn" if len(audit.class_names) > 2 else ""
    return (
        "<section><h2>How it was made</h2><p>The classifier is an invertible network. A picture x "
        "becomes a point z; z is moved from the mean point of the class that is read towards that "
        "of another one, and turned back into a picture x̂ (ECINN, at α₁). Maps are x̂ − x. "
        f"{len(audit.images)} of {audit.available} pictures of {escape(audit.dataset)}, "
        f"drawn with seed {audit.seed}{each}. ecinn {version('ecinn')}, "
        f"<code>{escape(command)}</code></p></section>"
    )


def _map(values: Float[Tensor, "channels height width"]) -> Array:
    return pictures.heatmap_array(values, pictures.robust_limit(values, PERCENTILE))


def _img(array: Array, alt: str) -> str:
    """A picture as part of the page; `alt` is escaped already."""
    data = base64.b64encode(pictures.png_bytes(pictures.to_image(array))).decode()
    height, width = array.shape[:2]
    kind = f'class="{"grain" if height < 48 else ""}" width="{width}" height="{height}"'
    return f'<img src="data:image/png;base64,{data}" alt="{alt}" {kind}>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    top = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "".join(f"<tr><td>{'</td><td>'.join(cells)}</td></tr>" for cells in rows)
    inside = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="{kind}">{inside}</table></div>'


def _figure(inside: str, caption: str) -> str:
    return f"<figure>{inside}<figcaption>{caption}</figcaption></figure>"


def _mark(box: Box, words: str, kind: str = "") -> str:
    """An outline over a picture."""
    sides = (box.left, box.top, box.right - box.left, box.bottom - box.top)
    names = ("left", "top", "width", "height")
    style = ";".join(f"{name}:{100 * side:.2f}%" for name, side in zip(names, sides, strict=True))
    return f'<i class="{kind}" style="{style}">{words}</i>'


def _ranked(grid: Tensor) -> list[tuple[int, int]]:
    """Cells of the grid, most changed first."""
    return [divmod(cell, grid.shape[1]) for cell in grid.flatten().argsort().tolist()[::-1]]


def _cell_box(cell: tuple[int, int], grid: Sequence[int], size: Sequence[int]) -> Box:
    """As `regions_by_change` divides the picture."""
    strips = (torch.arange(size[i]).tensor_split(grid[i])[cell[i]] for i in (0, 1))
    ends = [(int(s[0]) / n, (int(s[-1]) + 1) / n) for s, n in zip(strips, size, strict=True)]
    return Box(ends[0][0], ends[1][0], ends[0][1], ends[1][1])


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _rate(rate: Rate | None) -> str:
    if rate is None or not rate.n:
        return "–"
    ends = f"{100 * rate.low:.1f}–{100 * rate.high:.1f} %"
    return f"{_share(rate.share)}<small>{rate.count} of {rate.n}; {ends}</small>"


def _interval(value: Interval) -> str:
    return f"{value.mean:.2f}<small>{value.low:.2f} to {value.high:.2f}</small>"
