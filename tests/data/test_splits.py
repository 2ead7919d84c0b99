"""Splits: shares of every class, whole groups, copies on one side."""

from collections import Counter

import numpy as np
import pytest

from ecinn.data.splits import find_groups, given_split, split_by_class, without_shared_copies
from ecinn.errors import InputError


@pytest.mark.parametrize("seed", range(8))
def test_every_class_is_split_in_its_shares(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(3, 200, 5)
    labels = random.permutation(np.repeat(np.arange(5), counts))
    split = split_by_class(labels, range(len(labels)), seed=seed)
    for label, count in enumerate(counts):
        for side, share in enumerate((0.8, 0.1, 0.1)):
            found = int((split[labels == label] == side).sum())
            assert found >= 1
            assert abs(found - share * count) < 2
    assert np.array_equal(split, split_by_class(labels, range(len(labels)), seed=seed))
    assert not np.array_equal(split, split_by_class(labels, range(len(labels)), seed=seed + 1))


@pytest.mark.parametrize("seed", range(8))
def test_groups_stay_together_and_sides_keep_their_size(seed: int) -> None:
    random = np.random.default_rng(seed)
    groups = random.integers(0, 100, 1000).tolist()
    labels = random.integers(0, 3, 1000)
    split = split_by_class(labels, groups, seed=seed)
    assert all(len({s for g, s in zip(groups, split, strict=True) if g == group}) == 1
               for group in set(groups))  # fmt: skip
    for side, share in enumerate((0.8, 0.1, 0.1)):
        assert abs((split == side).mean() - share) < 0.03


@pytest.mark.parametrize("missing", [("validation",), ("test",), ("validation", "test")])
def test_a_missing_side_is_taken_from_training(missing: tuple[str, ...]) -> None:
    words = [word for word in ("train", "validation", "test") if word not in missing]
    names = [words[i % len(words)] for i in range(300)]
    notes: list[str] = []
    labels = np.arange(300) % 2
    split = given_split(names, labels, range(300), 0, notes)
    training = names.count("train")
    for side, word in enumerate(("train", "validation", "test")):
        if word in missing:
            rows = np.flatnonzero(split == side)
            assert len(rows) == pytest.approx(0.1 * training, abs=2)
            assert {names[row] for row in rows} == {"train"}
        elif side:
            assert all((split == side) == [name == word for name in names])
    assert len(notes) == 1


def test_groups_that_a_given_split_tears_apart_are_counted() -> None:
    names = ["train", "validation", "test"] * 4
    patients = ["a", "b", "c", "a", "a", "c", "a", "b", "b", "a", "b", "c"]
    torn, whole = list[str](), list[str]()
    given_split(names, np.zeros(12, np.int64), patients, 0, torn)
    assert "2 groups" in torn[0].replace("caution: ", "")
    given_split(names, np.zeros(12, np.int64), [*"abc"] * 4, 0, whole)
    assert not whole


def test_groups_are_columns_or_parts_of_paths() -> None:
    names = ["a/p1-x.png", "b/p1-y.png", "a/p22-z.png", "a/other.png"]
    notes: list[str] = []
    groups = find_groups(names, {}, r"(p\d+)-", notes)
    assert groups[0] == groups[1] == "p1"
    assert groups[2] == "p22"
    assert len(set(groups)) == 3
    assert "1 paths (a/other.png)" in notes[0]
    assert find_groups(names, {"who": ("1", "2", "1", "2")}, "who", []) == ("1", "2", "1", "2")
    for wrong in ("p1", "(", r"(q\d+)"):
        with pytest.raises(InputError, match="--group"):
            find_groups(names, {}, wrong, [])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("grouped", [False, True])
def test_copies_are_on_one_side(grouped: bool, seed: int) -> None:  # noqa: FBT001
    random = np.random.default_rng(seed)
    content = [str(value) for value in random.integers(0, 60, 100)]
    split = random.integers(0, 3, 100)
    names, notes = [f"{row}.png" for row in range(100)], list[str]()
    options = {"labels": ["a"] * 100, "names": names, "notes": notes}
    final = without_shared_copies(split, content, given=False, grouped=grouped, **options)
    first = {c: min(s for d, s in zip(content, split, strict=True) if c == d) for c in content}
    for row, value in enumerate(content):
        moved = first[value] if not grouped or split[row] == first[value] else -1
        assert final[row] == moved
    shared = sum(
        len({s for d, s in zip(content, split, strict=True) if c == d}) > 1 for c in set(content)
    )
    assert notes[0].startswith(f"{shared} pictures")
    same = without_shared_copies(split, content, given=True, grouped=grouped, **options)
    assert np.array_equal(same, split)
    assert notes[1].startswith(f"caution: {shared} pictures")


def test_damaged_pictures_are_not_copies_and_labels_may_differ() -> None:
    notes: list[str] = []
    split, content = np.array([0, 1, 2, 2]), ["", "", "x", "x"]
    final = without_shared_copies(
        split, content, list("aabc"), list("1234"), given=False, grouped=False, notes=notes
    )
    assert np.array_equal(final, split)
    assert Counter(notes) == {"caution: 1 pictures occur with different labels": 1}
