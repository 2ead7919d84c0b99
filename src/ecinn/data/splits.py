"""Training, validation and test pictures: by class, by group, and without shared copies."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np
from jaxtyping import Int

from ecinn.data.dataset import Split
from ecinn.errors import InputError

SHARES = (0.8, 0.1, 0.1)
"""Training, validation and test pictures of an automatic split."""
LEFT_OUT = -1
Sides = Int[np.ndarray, " pictures"]
"""0 training, 1 validation, 2 test, −1 left out."""


def split_by_class(
    labels: Int[np.ndarray, " pictures"],
    groups: Sequence[object],
    shares: Sequence[float] = SHARES,
    seed: int = 0,
) -> Sides:
    """Give every group to the side that lacks most of its classes, large groups first.

    Groups of one picture give all sides their share of every class, to within two pictures.
    """
    members: dict[object, list[int]] = defaultdict(list)
    for row in np.random.default_rng(seed).permutation(len(labels)).tolist():
        members[groups[row]].append(row)
    sides = [side for side, share in enumerate(shares) if share > 0]
    wanted = np.outer(shares, np.bincount(labels)).tolist()
    have = [Counter[int]() for _ in shares]
    split, known = np.zeros(len(labels), np.int64), labels.tolist()
    for rows in sorted(members.values(), key=len, reverse=True):
        counts = Counter(known[row] for row in rows)
        lacking = [
            sum(n * (1 - have[side][y] / wanted[side][y]) for y, n in counts.items())
            for side in sides
        ]
        side = sides[lacking.index(max(lacking))]
        split[rows] = side
        have[side].update(counts)
    return split


def given_split(
    names: Sequence[Split], labels: Sides, groups: Sequence[object], seed: int, notes: list[str]
) -> Sides:
    """Return a given split; a missing side is taken from the training pictures."""
    split = np.array([get_args(Split).index(name) for name in names])
    missing = [side for side in (1, 2) if not (split == side).any()]
    if missing:
        taken = [share * (side in missing) for side, share in enumerate(SHARES)]
        rows = np.flatnonzero(split == 0)
        shares = [1 - sum(taken), *taken[1:]]
        split[rows] = split_by_class(labels[rows], [groups[int(r)] for r in rows], shares, seed)
        words = " and ".join(get_args(Split)[side] for side in missing)
        notes.append(f"no {words} pictures are given: a tenth of the training pictures is used")
    sides: dict[object, set[int]] = defaultdict(set)
    for group, side in zip(groups, split.tolist(), strict=True):
        sides[group].add(side)
    if torn := [group for group, found in sides.items() if len(found) > 1]:
        notes.append(
            f"caution: {len(torn):,} groups are on several sides of the given split, such as "
            f"{torn[0]}: the test error will be too low"
        )
    return split


def find_groups(
    names: Sequence[str],
    columns: Mapping[str, Sequence[str]],
    group: str | None,
    notes: list[str],
) -> Sequence[object]:
    """Return every picture's group: a column, or the first group of a regular expression."""
    if group is None:
        return range(len(names))
    if group in columns:
        return columns[group]
    try:
        pattern = re.compile(group)
    except re.error as error:
        raise InputError(f"--group {group!r} is not a regular expression ({error})") from None
    matches = [pattern.search(name) for name in names]
    unmatched = [name for name, match in zip(names, matches, strict=True) if match is None]
    if not pattern.groups or len(unmatched) == len(names):
        raise InputError(
            f"--group {group!r} has no group in parentheses or matches no path like {names[0]}: "
            "write one, such as '(patient[0-9]+)', or name a column of the table"
        )
    if unmatched:
        notes.append(f"caution: --group does not match {len(unmatched):,} paths ({unmatched[0]})")
    return [row if match is None else match[1] for row, match in enumerate(matches)]


def without_shared_copies(
    split: Sides,
    content: Sequence[str],
    labels: Sequence[str],
    names: Sequence[str],
    *,
    given: bool,
    grouped: bool,
    notes: list[str],
) -> Sides:
    """Move copies of a picture to one side, unless the split was given; then only warn.

    Copies in groups, which stay together, are left out of the later sides instead.
    """
    copies: dict[str, list[int]] = defaultdict(list)
    for row, value in enumerate(content):
        if value:
            copies[value].append(row)
    several = [rows for rows in copies.values() if len(rows) > 1]
    if torn := sum(len({labels[row] for row in rows}) > 1 for rows in several):
        notes.append(f"caution: {torn:,} pictures occur with different labels")
    shared = [rows for rows in several if len({*split[rows].tolist()}) > 1]
    if not shared:
        return split
    example = " and ".join(names[row] for row in shared[0][:2])
    text = f"{len(shared):,} pictures are on several sides of the split, such as {example}"
    if given:
        notes.append(f"caution: {text}: the test error will be too low; remove the copies")
        return split
    final = split.copy()
    for rows in shared:
        first = int(split[rows].min())
        final[rows] = np.where(split[rows] == first, first, LEFT_OUT if grouped else first)
    notes.append(f"{text}: {'left out of the later sides' if grouped else 'moved to one side'}")
    return final
