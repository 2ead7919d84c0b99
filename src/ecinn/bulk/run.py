"""Explain a whole dataset into numbered parts; a stopped run continues where it stopped."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import prod
from operator import index
from pathlib import Path
from typing import Any, Literal, SupportsIndex, get_args

import torch

from ecinn.blackbox.files import FILE as CLASSIFIER_FILE
from ecinn.blackbox.files import file_hash
from ecinn.bulk.parts import Format, count_rows, open_run, part_path, write_part
from ecinn.bulk.rows import Explainer, Request
from ecinn.classifier.checkpoint import MODEL_FILE, SHIPPED, shipped_models
from ecinn.classifier.tensor_files import find_file
from ecinn.data.streams import COLUMN, Block, Blocks, Kind, open_stream
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import checked_confidence
from ecinn.explanation.result import Confidence
from ecinn.explanation.targets import given_targets
from ecinn.model import Model, Number, TargetsLike, load
from ecinn.progress import Observer, Progress, ignore

PART_BYTES = 16 * 2**20
"""Uncompressed pictures of a part, which is held in memory until it is written."""
PART_PICTURES = 1024
Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class Job:
    """All that a worker needs to explain a block, on this machine or another one."""

    model: str
    out: str
    format: Format
    column: str
    device: str
    classifier: bool
    kind: Kind = "folder"
    request: Request = field(default_factory=Request)


@dataclass(frozen=True)
class Summary:
    """Counts of all parts, also of the `continued` ones, which an earlier run wrote."""

    pictures: int
    rows: int
    errors: int
    """Rows without a counterfactual; their column `error` says why."""
    parts: int
    continued: int


Done = tuple[Counter[str], tuple[str, ...]]
"""Counts of pictures, rows and errors of a block, and notes."""


class Worker:
    """Explains blocks into parts: the same function for every engine."""

    def __init__(self, job: Job, model: Model | None = None) -> None:
        self._job = job
        self._explainer = Explainer(model or load_model(job), job.request)
        self._blocks = Blocks(job.kind, job.column)

    def explain(self, block: Block, report: Callable[[int], object] = lambda _: None) -> Done:
        """Read, explain and write a block."""
        job, model = self._job, self._explainer.model
        rows = self._explainer.rows(self._blocks.read(block), report)
        path = part_path(Path(job.out), block.number, job.format)
        write_part(path, rows, model.class_names, job.format)
        errors = sum("counterfactual" not in row for row in rows)
        counts = Counter(pictures=block.count, rows=len(rows), errors=errors)
        return counts, self._explainer.notes


def load_model(job: Job) -> Model:
    """Load the model of a job, with the classifier that it explains if that is to be asked."""
    model = load(job.model, job.device)
    model = model if job.classifier else model.student
    assert model.reader is None or job.classifier  # loads it, so that it fails here
    return model


@contextmanager
def _with_permission() -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        place = error.filename or error
        raise InputError(f"no access to {place}: change its permissions") from error


@_with_permission()
def explain_dataset(
    source: str | Path,
    out: str | Path,
    *,
    model: str | Path,
    target: TargetsLike = "all",
    column: str | None = None,
    confidence: Confidence | Number | None = None,
    check: bool = True,
    correct: bool = False,
    classifier: bool = True,
    tipping_point: bool = False,
    format: Format = "parquet",
    part_size: SupportsIndex | None = None,
    engine: Engine = "local",
    address: str | None = None,
    workers: SupportsIndex | None = None,
    device: str = "auto",
    observe: Observer = ignore,
    note: Callable[[str], object] = lambda _: None,
) -> Summary:
    """Explain every picture of a dataset and write a row for each picture and target.

    Pictures are read, explained and written block by block, so that memory does not grow with
    the dataset. A run that was stopped continues if it is started again with the same arguments.

    Args:
        source: a folder of pictures, of WebDataset shards or of Parquet files; one such file; a
            zip archive; or a NumPy array of images in a .npy file.
        out: a new folder, or that of the run to continue.
        model: a model's name or path.
        target: a class by name or number, several, or "all" for all but the prediction.
        column: the column of Parquet files that holds pictures; None for "image".
        correct: as for `Model.explain`; it needs `check`.
        classifier: verify a distilled model on the classifier that it explains.
        tipping_point: also store tipping points as pictures.
        format: "parquet" or "webdataset".
        part_size: pictures of each part; None chooses.
        engine: "local" for this process, "ray" for the workers of a Ray cluster.
        address: of the Ray cluster; None starts one on this machine.
        workers: number of Ray workers; None for one per GPU or CPU of the cluster.
        observe: is told how many pictures are done.
        note: is told what a person should know, such as files that were ignored.
    """
    source = _path("the path of the input, such as a .npy file of an array", source)
    out = _path("the path of a folder for the parts", out)
    if not isinstance(model, str):
        model = _path("a model's name, or the path that it was saved to", model)
    if confidence is not None:
        confidence = checked_confidence(confidence)
    part_size = _count("the number of pictures of a part", part_size)
    workers = _count("the number of workers", workers)
    if format not in get_args(Format):
        raise InputError(f"the format is one of {', '.join(get_args(Format))}, not {format!r}")
    if engine not in get_args(Engine):
        raise InputError(f"the engine is one of {', '.join(get_args(Engine))}, not {engine!r}")
    if engine == "local" and (address is not None or workers is not None):
        raise InputError("--address and --workers are for --engine ray: add it")
    if correct and not check:
        raise InputError("--correct needs the check: leave out --no-check (check=False)")
    if out.absolute() == source.absolute() or source.absolute() in out.absolute().parents:
        raise InputError(f"{out} lies inside the input: choose another folder with --out")
    if format == "parquet":
        import pyarrow  # noqa: F401  before any work is done
    if engine == "ray":
        from ecinn.bulk.many_machines import explain_blocks
    where = str(model) if str(model) in shipped_models() else str(Path(model).absolute())
    named = COLUMN if column is None else column
    job = Job(where, str(out.absolute()), format, named, device, classifier=classifier)
    explained = load_model(job if engine == "local" else replace(job, device="cpu"))
    names = explained.class_names
    request = Request(_targets(explained, target), confidence, check, correct, tipping_point)
    stream = open_stream(source, column, observe)
    job = replace(job, kind=stream.kind, request=request)
    if stream.kind == "npy":  # all images have one shape
        explained.pixels(next(Blocks("npy").read(next(stream.blocks(1))))[1]())
    pixels = request.count(len(names)) * (1 + tipping_point) * prod(explained.image_shape)
    size = part_size or max(1, min(PART_PICTURES, PART_BYTES // pixels))
    about = {
        "model": _model_hash(model, classifier=classifier),
        "input": stream.version,
        **asdict(request),
        "classifier": classifier,
        "format": format,
        "part_size": size,
        "class_names": list(names),
    }
    with open_run(out, about):
        for sentence in stream.notes:
            note(sentence)
        if not classifier and " " in _model_hash(model, classifier=True):
            note("explaining the student only; its classifier is not queried")
        blocks = list(stream.blocks(size))
        finished = {b.number: count_rows(part_path(out, b.number, format), format) for b in blocks}
        todo = [block for block in blocks if finished[block.number] is None]
        if damaged := sum(part_path(out, b.number, format).exists() for b in todo):
            note(f"damaged parts are computed again: {damaged:,}")
        done = len(stream) - sum(block.count for block in todo)
        total = Counter(pictures=done, rows=0, errors=0)
        for counts in filter(None, finished.values()):
            total.update(counts)

        def report(count: int) -> None:
            nonlocal done
            done += count
            observe(Progress("explaining", done, len(stream)))

        every: Iterator[Done] = iter(())
        if todo:
            report(0)
        if todo and engine == "ray":
            every = explain_blocks(job, todo, address, workers, report)
        elif todo:
            worker = Worker(job, explained)
            every = (worker.explain(block, report) for block in todo)
        said = set[str]()
        for counts, notes in every:
            total.update(counts)
            for sentence in {*notes} - said:
                note(sentence)
            said |= {*notes}
    return Summary(**total, parts=len(blocks), continued=len(blocks) - len(todo))


def _path(what: str, value: Any) -> Path:  # noqa: ANN401
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"give {what}, not an object of type {type(value).__name__}")
    return Path(value)


def _count(what: str, value: Any) -> int | None:  # noqa: ANN401
    try:
        count = None if value is None else index(value)
    except TypeError:
        count = 0
    if count is not None and count < 1:
        raise InputError(f"{what} is a whole number of 1 or more, not {value!r}")
    return count


def _targets(model: Model, target: TargetsLike) -> tuple[int, ...] | Literal["all"]:
    """Return class numbers, each once; text may name several classes, with commas."""
    if isinstance(target, str) and target not in model.class_names:
        names = [name.strip() for name in target.split(",")]
        target = names if len(names) > 1 else names[0]
    numbers = model.targets(target)
    if isinstance(numbers, str):
        return "all"
    q = given_targets(numbers, torch.zeros(1, dtype=torch.long), len(model.class_names))
    return tuple(dict.fromkeys(q[0].tolist()))


def _model_hash(model: str | Path, *, classifier: bool) -> str:
    """Identify the weights, and the classifier that they explain."""
    path = find_file(model, SHIPPED, "model", MODEL_FILE)
    files = [path, path.parent / CLASSIFIER_FILE]
    return " ".join(file_hash(file) for file in files[: 1 + classifier] if file.is_file())
