"""Your own pictures as three datasets: split, framed, decoded once into a cache."""

import dataclasses
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from ecinn.data import inspection
from ecinn.data.dataset import Dataset, Split, Splits
from ecinn.data.decoded_images import cache_folder, in_threads, read_array, write_array
from ecinn.data.dicom import is_dicom, require_pydicom
from ecinn.data.framing import Framing, Intensity
from ecinn.data.own_record import RECORD_FILE, DataRecord, OwnDataOptions, read_record
from ecinn.data.photographs import read_photograph
from ecinn.data.sources import Pictures, open_pictures
from ecinn.data.splits import (
    LEFT_OUT,
    Sides,
    find_groups,
    given_split,
    split_by_class,
    without_shared_copies,
)
from ecinn.errors import EcinnError, InputError
from ecinn.files import atomic_write
from ecinn.progress import Observer, counter, ignore

DATASET = "own"
"""The name of these datasets in recipes."""
CLASSES = (2, 100)
FEWEST = 3
"""Pictures of a class in an automatic split: one for each side."""
LISTED = 10
"""Damaged pictures that are named."""
_FORMAT = "ecinn-own-1"


@dataclass(frozen=True)
class OwnData(Splits):
    """The three splits, how pictures are framed, and what a person should know about them."""

    framing: Framing
    notes: tuple[str, ...]
    record: DataRecord


def load_recorded(
    folder: Path, split: Split, source: Path | None = None, observe: Observer = ignore
) -> tuple[Dataset, tuple[str, ...]]:
    """Load a split of the pictures of a training run, and cautions about it.

    Args:
        folder: of the run, with its `RECORD_FILE`.
        source: where the pictures are now, or other ones, which are for testing.
    """
    record = read_record(folder / RECORD_FILE)
    if record is None:
        raise InputError(
            f"{folder} has no {RECORD_FILE}, which names the pictures of this model: give the "
            "folder of its training run"
        )
    source = source or Path(record.source)
    if not source.exists():
        raise InputError(f"{source} is gone: say with --data where the pictures of the model are")
    own = load_own_data(source, record.options, observe, record)
    data: Dataset = getattr(own, split)
    if not len(data):
        raise InputError(f"{source} has no {split} pictures of this model: choose another split")
    return data, tuple(note for note in own.notes if note.startswith("caution"))


def load_own_data(
    source: Path,
    options: OwnDataOptions | None = None,
    observe: Observer = ignore,
    record: DataRecord | None = None,
) -> OwnData:
    """Split and decode labelled pictures into a cache that is mapped into memory.

    Args:
        source: class folders, an archive of them, a table, arrays or a Hugging Face dataset.
        record: of an earlier run, whose framing and split hold. Pictures that it does not know
            are left out, or are for testing if the source is another one.
    """
    options = options or OwnDataOptions()
    with open_pictures(source, options.columns) as pictures:
        if unlabelled := pictures.labels.count(""):
            raise InputError(
                f"{source}: {unlabelled:,} labels are missing: add them, or remove the pictures"
            )
        names = _class_names(pictures, source) if record is None else record.class_names
        if unknown := sorted({*pictures.labels} - {*names}):
            raise InputError(f"the model was not trained on the class {unknown[0]}: remove it")
        key = _key(pictures, options)
        if record is not None and key == record.key:
            record = None  # nothing changed since
        if record is not None:
            key = hashlib.sha256(f"{key} {record.key}".encode()).hexdigest()[:24]
        path = cache_folder() / f"own-{key}.npy"
        found = _cached_record(path.with_suffix(".json"))
        if found is None or _read_images(path, found) is None:
            found = _Decoding(source, pictures, names, options, key, observe, record).write(path)
    _stop_if_damaged(found.damaged, len(pictures.names), options)
    images = _read_images(path, found)
    if images is None:
        raise EcinnError(f"{path} was removed or changed while it was used: start again")
    number = {name: number for number, name in enumerate(names)}
    everything = Dataset(
        torch.from_numpy(images),
        torch.tensor([number[pictures.labels[row]] for row in found.order]),
        names,
        columns={
            column: tuple(values[row] for row in found.order)
            for column, values in pictures.columns.items()
        },
    )
    train, validation = found.counts[0], found.counts[0] + found.counts[1]
    return OwnData(
        everything.select(slice(train)),
        everything.select(slice(train, validation)),
        everything.select(slice(validation, None)),
        found.framing,
        (*pictures.notes, *found.notes),
        # The cache may have been made elsewhere.
        replace(found, source=str(source.absolute()), options=options),
    )


@dataclass(frozen=True)
class _Decoding:
    """Everything between the list of pictures and the cache."""

    source: Path
    pictures: Pictures
    names: tuple[str, ...]
    options: OwnDataOptions
    key: str
    observe: Observer
    earlier: DataRecord | None

    def write(self, path: Path) -> DataRecord:
        """Split, frame and decode all pictures, and write the cache and its record."""
        if any(is_dicom(name) for name in self.pictures.names):
            require_pydicom()
        total, notes = len(self.pictures.names), list[str]()
        split = self._split(notes)
        shape, framing = self._frame(split, notes)
        # Shuffled, so that the first pictures of a split are a fair sample.
        order = np.random.default_rng(self.options.seed).permutation(total)
        order = order[np.argsort(split[order], kind="stable")]
        content, damaged = [""] * total, dict[int, str]()

        def fill(images: NDArray[np.uint8]) -> None:
            self._decode(images, order, framing, content, damaged, notes)
            _stop_if_damaged(self._damage(damaged), total, self.options)
            if damaged:
                notes.append(f"caution: {_listed(self._damage(damaged), total)} and were left out")
            split[:] = self._final_split(split, content, notes)

        write_array(path, (total, *shape), fill)
        kept = np.flatnonzero(split[order] >= 0)
        kept = kept[np.argsort(split[order[kept]], kind="stable")]
        counts = tuple(int((split == side).sum()) for side in range(3))
        record = DataRecord(
            source=str(self.source.absolute()),
            options=self.options,
            key=self.key,
            class_names=self.names,
            shape=shape,
            framing=framing,
            counts=counts,
            order=tuple(order[kept].tolist()),
            hashes=tuple(content[row] for row in order[kept]),
            damaged=self._damage(damaged),
            notes=(_summary(counts, self.names, shape), *notes),
        )
        if not np.array_equal(kept, np.arange(total)):
            _rewrite(path, (total, *shape), kept)
        stored = json.dumps({"data": dataclasses.asdict(record)})
        atomic_write(path.with_suffix(".json"), stored.encode())
        return record

    def _decode(
        self,
        images: NDArray[np.uint8],
        order: NDArray[np.int64],
        framing: Framing,
        content: list[str],
        damaged: dict[int, str],
        notes: list[str],
    ) -> None:
        """Decode pictures in an order; hash them, and count what was done to how many."""
        channels, height, width = images.shape[1:]
        counts, examples = Counter[str](), dict[str, tuple[int, str]]()
        lock = threading.Lock()

        def decode(position: int) -> None:
            row = int(order[position])
            try:
                given, shape = self.pictures.read(row), (channels, height, width)
                read = read_photograph(given, shape, digit=False, framing=framing)
            except Exception as error:  # a decoder given garbage may raise anything
                damaged[row] = " ".join(str(error).split())
                return
            images[position] = read.image.numpy()
            digest = hashlib.blake2b(images[position].tobytes(), digest_size=8)
            content[row] = digest.hexdigest()
            with lock:
                for note in read.notes:
                    kind = re.sub(r"[\d.]+", "#", note)
                    counts[kind] += 1
                    examples[kind] = min(examples.get(kind, (row, note)), (row, note))

        total = len(order)
        in_threads(decode, total, counter(self.observe, "decoding images", total))
        for kind, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            many = "all pictures" if count == total else f"{count:,} of {total:,} pictures"
            end = ", for example" if count > 1 else ""
            notes.append(f"{many}: {examples[kind][1]}{end}")

    def _damage(self, damaged: Mapping[int, str]) -> tuple[str, ...]:
        names = {row: self.pictures.names[row] for row in sorted(damaged)}
        reasons = {row: damaged[row].replace(f"{self.source}/", "") for row in names}
        return tuple(
            reasons[row] if name in reasons[row] else f"{name}: {reasons[row]}"
            for row, name in names.items()
        )

    def _split(self, notes: list[str]) -> Sides:
        """Return the side of every picture, before copies are known."""
        pictures, seed = self.pictures, self.options.seed
        if self.earlier is not None:
            return np.zeros(len(pictures.names), np.int64)
        number = {name: number for number, name in enumerate(self.names)}
        labels = np.array([number[label] for label in pictures.labels])
        groups = find_groups(pictures.names, pictures.columns, self.options.group, notes)
        if pictures.splits is not None:
            return given_split(pictures.splits, labels, groups, seed, notes)
        numbers = np.bincount(labels)
        if few := [self.names[y] for y in np.flatnonzero(numbers < FEWEST)]:
            raise InputError(
                f"{len(few)} of {len(self.names)} classes of {self.source} have fewer than "
                f"{FEWEST} pictures ({', '.join(few[:5])}): add some, to train, validate and test"
            )
        how = "class" if self.options.group is None else "class and group"
        notes.append(f"split at random by {how}: 80 % to train, 10 % to validate, 10 % to test")
        return split_by_class(labels, groups, seed=seed)

    def _final_split(self, split: Sides, content: Sequence[str], notes: list[str]) -> Sides:
        """Return the side of every picture, with copies on one side and damaged ones left out."""
        if self.earlier is not None:
            sides = self.earlier.sides()
            other = self.earlier.source != str(self.source.absolute())
            if new := sum(value not in sides for value in content):
                action = "are for testing" if other else "were left out"
                notes.append(f"caution: {new:,} pictures are new to the model and {action}")
            split = np.array([sides.get(value, 2 if other else LEFT_OUT) for value in content])
        else:
            split = without_shared_copies(
                split,
                content,
                self.pictures.labels,
                self.pictures.names,
                given=self.pictures.splits is not None,
                grouped=self.options.group is not None,
                notes=notes,
            ).copy()
        split[[not value for value in content]] = LEFT_OUT
        trained = {
            label for label, side in zip(self.pictures.labels, split, strict=True) if side == 0
        }
        missing = [f"training {name}" for name in self.names if name not in trained]
        missing += [side for n, side in enumerate(get_args(Split)) if not (split == n).any()]
        if missing and self.earlier is None:
            raise InputError(
                f"{self.source} has no pictures left for {', '.join(missing[:5])}: add some, or "
                "check --group, --window, the given split and copies"
            )
        return split

    def _frame(self, split: Sides, notes: list[str]) -> tuple[tuple[int, int, int], Framing]:
        """Choose size, channels and range of values from the pictures."""
        if self.earlier is not None:
            return self.earlier.shape, self.earlier.framing
        pictures, options = self.pictures, self.options
        rows = inspection.sample(pictures.labels, options.seed)
        looks = inspection.look_at(pictures, rows, "looking at pictures", self.observe)
        if not looks:
            raise InputError(
                f"none of {len(rows)} files of {self.source} is a picture that can be read: "
                + inspection.problem(pictures, rows[0])
            )
        size, channels, intensity = options.size, options.channels, None
        if size is None:
            size, median = inspection.fitting_size(looks)
            notes.append(f"size {size}, because the median short side is {median} pixels")
        if channels is None:
            coloured = sum(look.coloured for look in looks)
            channels = 3 if coloured else 1
            if coloured:
                notes.append(f"colour, as {coloured} of {len(looks)} pictures looked at")
        if options.window is not None:
            if not any(look.values for look in looks):
                raise InputError(
                    f"--window is for pictures with more than 8 bits, and those of {self.source} "
                    "have 8: leave it out"
                )
            intensity = Intensity(*options.window, "given")
        elif any(look.values for look in looks):
            training = np.flatnonzero(split == 0).tolist()
            task = "finding the range of values"
            looks = inspection.look_at(pictures, training, task, self.observe)
            intensity = inspection.value_range(looks, notes)
        return (channels, size, size), Framing(options.fit, intensity)


def _class_names(pictures: Pictures, source: Path) -> tuple[str, ...]:
    """Return the classes in order; numbers count."""
    found = {*pictures.labels}
    low, high = CLASSES
    if not low <= len(found) <= high:
        raise InputError(
            f"{source} has {len(found)} {'class' if len(found) == 1 else 'classes'} "
            f"({', '.join(sorted(found)[:5])}): give {low} to {high}"
        )
    if pictures.class_names is not None and {*pictures.class_names} == found:
        return pictures.class_names
    if all(name.isdecimal() for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def _stop_if_damaged(damaged: Sequence[str], total: int, options: OwnDataOptions) -> None:
    if damaged and not options.skip_damaged:
        raise InputError(
            f"{_listed(damaged, total)}: repair or remove them, or leave them out with "
            "--skip-damaged"
        )


def _listed(damaged: Sequence[str], total: int) -> str:
    more = f"; and {len(damaged) - LISTED:,} more" if len(damaged) > LISTED else ""
    return (
        f"{len(damaged):,} of {total:,} pictures cannot be read "
        f"({'; '.join(damaged[:LISTED])}{more})"
    )


def _cached_record(path: Path) -> DataRecord | None:
    """Read the record of a cache; None if there is none, or a damaged one."""
    try:
        return read_record(path)
    except InputError:
        return None


def _read_images(path: Path, record: DataRecord) -> NDArray[np.uint8] | None:
    return read_array(path, (len(record.order), *record.shape))


def _rewrite(path: Path, shape: tuple[int, ...], kept: NDArray[np.int64]) -> None:
    """Put the pictures of a cache into another order."""
    old = read_array(path, shape)
    assert old is not None

    def fill(images: NDArray[np.uint8]) -> None:
        for start in range(0, len(kept), 1000):
            images[start : start + 1000] = old[kept[start : start + 1000]]

    write_array(path, (len(kept), *shape[1:]), fill)


def _key(pictures: Pictures, options: OwnDataOptions) -> str:
    """Identify pictures, labels, columns and options."""
    text = repr((_FORMAT, pictures.version, replace(options, skip_damaged=False)))
    content = json.dumps([pictures.labels, pictures.splits, pictures.columns])
    return hashlib.sha256(f"{text}{content}".encode()).hexdigest()[:24]


def _summary(counts: Sequence[int], names: Sequence[str], shape: tuple[int, int, int]) -> str:
    train, validation, test = (f"{count:,}" for count in counts)
    kind = "grey" if shape[0] == 1 else "colour"
    return (
        f"{sum(counts):,} {kind} pictures of {len(names)} classes at {shape[2]}×{shape[1]}: "
        f"{train} for training, {validation} for validation, {test} for testing"
    )
