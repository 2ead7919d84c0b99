"""Explain a whole dataset into numbered parts; a stopped run continues where it stopped."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Literal

import torch

from ecinn.blackbox.files import FILE as CLASSIFIER_FILE
from ecinn.blackbox.files import file_hash
from ecinn.bulk.parts import Format, open_run, part_path, write_part
from ecinn.bulk.rows import Explainer, Request
from ecinn.classifier.checkpoint import MODEL_FILE, SHIPPED, shipped_models
from ecinn.classifier.tensor_files import find_file
from ecinn.data.streams import COLUMN, Block, Blocks, Kind, open_stream
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import checked_confidence
from ecinn.explanation.result import Confidence
from ecinn.explanation.targets import given_targets
from ecinn.model import Model, load
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
    """Counts of a run; `parts` includes the `continued` parts that an earlier run wrote."""

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


def explain_dataset(
    source: str | Path,
    out: str | Path,
    *,
    model: str | Path,
    target: str | int | Sequence[int | str] = "all",
    column: str = COLUMN,
    confidence: Confidence | None = None,
    check: bool = True,
    correct: bool = False,
    classifier: bool = True,
    tipping_point: bool = False,
    format: Format = "parquet",
    part_size: int | None = None,
    engine: Engine = "local",
    address: str | None = None,
    workers: int | None = None,
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
        column: the column of Parquet files that holds pictures.
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
    source, out = Path(source), Path(out)
    if confidence is not None:
        confidence = checked_confidence(confidence)
    if part_size is not None and part_size < 1:
        raise InputError(f"a part holds one picture or more, not {part_size}")
    if out.absolute() == source.absolute() or source.absolute() in out.absolute().parents:
        raise InputError(f"{out} lies inside the input: choose another folder with --out")
    if format == "parquet":
        import pyarrow  # noqa: F401  before any work is done
    if engine == "ray":
        from ecinn.bulk.many_machines import explain_blocks
    where = str(model) if str(model) in shipped_models() else str(Path(model).absolute())
    job = Job(where, str(out.absolute()), format, column, device, classifier=classifier)
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
        todo = [b for b in blocks if not part_path(out, b.number, format).exists()]
        done = len(stream) - sum(block.count for block in todo)

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
        total, said = Counter(pictures=0, rows=0, errors=0), set[str]()
        for counts, notes in every:
            total.update(counts)
            for sentence in {*notes} - said:
                note(sentence)
            said |= {*notes}
    return Summary(**total, parts=len(blocks), continued=len(blocks) - len(todo))


def _targets(
    model: Model, target: str | int | Sequence[int | str]
) -> tuple[int, ...] | Literal["all"]:
    """Return class numbers, each once; text may name several classes, with commas."""
    if isinstance(target, str) and target not in ("all", *model.class_names):
        target = target.split(",")
    numbers = model.targets(target)
    if numbers == "all":
        return "all"
    asked = [numbers] if isinstance(numbers, int) else [*numbers]
    given_targets(asked, torch.zeros(1, dtype=torch.long), len(model.class_names))
    return tuple(dict.fromkeys(asked))


def _model_hash(model: str | Path, *, classifier: bool) -> str:
    """Identify the weights, and the classifier that they explain."""
    path = find_file(model, SHIPPED, "model", MODEL_FILE)
    files = [path, path.parent / CLASSIFIER_FILE]
    return " ".join(file_hash(file) for file in files[: 1 + classifier] if file.is_file())
