"""What a counterfactual costs beside other methods, and how the cost grows: `make bench`.

Seconds are CPU time of one thread, because machines are shared, of one digit unless a batch is
named. Writes speed.json, speed.png and speed-digits.png; `--parts` measures only some parts again.
"""

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from speed_figures import draw_costs, draw_digits
from torch import Tensor

import ecinn
from bulk import peak_memory, write_pictures
from ecinn.attribution import search
from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.classifier.recipes import MNIST
from ecinn.data.mnist import load_mnist
from ecinn.drawing.table import Table
from ecinn.metrics.statistics import proportion
from ecinn.pixels import StoredImages, to_pixels, to_uint8
from ecinn.studies.benchmark.quality import find_judges
from ecinn.studies.benchmark.record import fingerprint, write_json
from ecinn.studies.benchmark.side_by_side import Pairs, draw_pairs

OUT = Path(__file__).parent.parent / "docs" / "results"
NO_ALIBI = "alibi is not installed, its rows are missing: make bench VENV=.venv-alibi ALIBI=1"
Row = dict[str, Any]
Batched = Callable[[ecinn.Model, Tensor, Tensor], Tensor]
"""From a model, pixels and "batch targets" to the pixels of all counterfactuals."""
METHODS: Mapping[str, Batched] = {
    "ecinn": lambda m, x, q: search.ecinn(m, m.mu_bar, x, q).images,
    "Model.explain": lambda m, x, q: m.explain(x, q, confidence="alpha_1").convincing,
    "latent gradient": lambda m, x, q: search.latent_gradient(m, m.mu_bar, x, q).images,
    "pixel gradient": lambda m, x, q: search.pixel_gradient(m, m.mu_bar, x, q).images,
}


class Counted(ecinn.Model):
    """A model that counts images through f or f⁻¹ and gradients back through either.

    `predict` is not counted, so that results can be read without counting.
    """

    forward = 0
    backward = 0

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z = f(x) and log |det J|, counted."""
        z, log_det = super().encode_with_log_det(x)
        return self._count(z), log_det

    def decode(self, z: Tensor) -> Tensor:
        """x = f⁻¹(z), counted."""
        return self._count(super().decode(z))

    def _count(self, output: Tensor) -> Tensor:
        self.forward += len(output)
        if output.requires_grad:
            output.register_hook(self._count_gradient)
        return output

    def _count_gradient(self, gradient: Tensor) -> None:
        self.backward += len(gradient)


def cpu_seconds(*calls: Callable[[], object], repeats: int) -> list[float]:
    """Median CPU seconds of each call, the calls taking turns so that drift hits all alike.

    The first of several repeats is a warm-up and does not count.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, kept in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            kept.append(time.process_time() - start)
    return [statistics.median(kept[1:] or kept) for kept in times]


def main() -> None:
    """Measure, print, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--digits", type=int, default=4, help="of the comparison")
    parser.add_argument("--sizes", default="200,2000,20000", help="of datasets for `ecinn bulk`")
    parser.add_argument("--parts", default="methods,growth,memory")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    path, model = given.out / "speed.json", Counted(ecinn.load("mnist", "cpu").checkpoint, "cpu")
    result = json.loads(path.read_text()) if path.exists() else {}
    result |= {"command": "make bench", "machine": machine()}
    result |= {"model": model.name, "model_sha256": fingerprint(model)}
    measurements: dict[str, Callable[[], object]] = {
        "methods": lambda: side_by_side(model, given.digits, given.out / "speed-digits.png"),
        "growth": lambda: growth(model),
        "memory": lambda: memory([int(size) for size in given.sizes.split(",")]),
    }
    for part in given.parts.split(","):
        result[part] = measurements[part]()
        write_json(path, result)
    draw_costs(result, given.out / "speed.png")


def machine() -> Row:
    """Name the processor and its cores."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else os.uname().machine
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": 1, "torch": torch.__version__}


def side_by_side(model: Counted, digits: int, picture: Path) -> Row:
    """Run every method on the same digits and targets, one digit at a time."""
    judges, pairs = find_judges(None, "mnist"), draw_pairs(model, load_mnist("test"), digits, 0)
    first, forwards = to_pixels(pairs.images[:1]), []
    methods: dict[str, Callable[[], Callable[[int], Batched]]] = {
        name: lambda method=method: lambda target: method for name, method in METHODS.items()
    }
    versions = {}
    if importlib.util.find_spec("alibi") is None:
        print(NO_ALIBI)
    else:
        import alibi_methods

        versions = {name: version(name) for name in ("alibi", "tensorflow")}
        methods["alibi prototypes"] = lambda: alibi_methods.prototypes(model)
        methods["alibi Wachter"] = lambda: alibi_methods.wachter(model)
    rows, images, read = [], {}, {}
    for name, prepare in methods.items():
        with torch.inference_mode():
            forwards += cpu_seconds(lambda: model.encode_with_log_det(first), repeats=20)
        repeats = 10 if name in METHODS else 1
        images[name], row = run_method(model, prepare(), pairs, repeats)
        verdicts = {"model": model.predict(images[name]).argmax(1)}
        verdicts |= judges.verdicts(images[name])
        read[name] = verdicts["convolutional"]
        for reader, said in verdicts.items():
            share = proportion(said == pairs.q[: len(said)])
            row[reader] = [round(value, 4) for value in (share.mean, share.low, share.high)]
        rows.append({"method": name, **row})
    forward = statistics.median(forwards)
    rows = [{**row, "times_forward": round(row["seconds"] / forward, 2)} for row in rows]
    print_table(f"{digits} digits; one forward pass takes {1000 * forward:.1f} ms", rows)
    draw_digits(pairs, images, read, rows, picture)
    return {"digits": digits, "forward_seconds": round(forward, 6), **versions, "rows": rows}


def run_method(
    model: Counted, prepare: Callable[[int], Batched], pairs: Pairs, repeats: int
) -> tuple[StoredImages, Row]:
    """Return the stored counterfactuals, and means of CPU seconds and passes.

    Where nothing is found (nan), the digit stays as it is. Ctrl-C ends a method: the digits that
    it has finished count.
    """
    stored, found, seconds, passes = [], 0, [], torch.zeros(2)
    try:
        for digit, target in zip(pairs.images.split(1), pairs.q.tolist(), strict=True):
            method, x, answers = prepare(target), to_pixels(digit), []

            def call(method=method, x=x, q=torch.tensor([[target]]), answers=answers) -> None:  # noqa: ANN001, B008
                answers.append(method(model, x, q)[0])

            before = torch.tensor([model.forward, model.backward])
            seconds += cpu_seconds(call, repeats=repeats)
            passes += (torch.tensor([model.forward, model.backward]) - before) / repeats
            exists = bool(answers[-1].isfinite().all())
            stored.append(to_uint8(answers[-1].detach()) if exists else digit)
            found += exists
    except KeyboardInterrupt:
        if not stored:
            raise
    forward, backward = (round(float(count) / len(stored), 1) for count in passes)
    mean = round(statistics.mean(seconds), 6)
    costs = {"seconds": mean, "forward": forward, "backward": backward}
    return torch.cat(stored), {"digits": len(stored), **costs, "found": found}


def growth(model: Counted) -> dict[str, list[Row]]:
    """CPU milliseconds against batch, also of faces, number of targets, resolution and depth."""
    images, base = to_pixels(load_mnist("test").images[:64]), MNIST.architecture
    p = model.predict(images).argmax(1)
    others = (p[:, None] + torch.arange(1, 10)) % 10
    face_model = ecinn.load("celeba-smile", "cpu")
    faces = to_pixels(face_model.sample([0] * 16, temperature=0.7))  # real ones cannot be shipped
    other = 1 - face_model.predict(faces).argmax(1, keepdim=True)
    two_passes = ["ecinn", "Model.explain"]

    def deeper(couplings: int) -> ecinn.Architecture:
        return replace(base, stages=tuple(replace(s, couplings=couplings) for s in base.stages))

    grown = {
        "batch": [
            {"batch": n, **milliseconds(model, images[:n], others[:n, :1])} for n in (1, 8, 64)
        ],
        "faces": [
            {"batch": n, **milliseconds(face_model, faces[:n], other[:n], two_passes)}
            for n in (1, 4, 16)
        ],
        "targets": [
            {"targets": n, **milliseconds(model, images[:1], others[:1, :n])} for n in range(1, 10)
        ],
        "resolution": [
            {"side": side, **untrained(replace(base, height=side, width=side))}
            for side in (28, 48, 64, 96, 128)
        ],
        # Two more couplings: one between the stages, one at the end.
        "depth": [{"couplings": 2 * n + 2, **untrained(deeper(n))} for n in (6, 12, 24, 48)],
    }
    for name, rows in grown.items():
        print_table(f"CPU milliseconds against {name}", rows)
    return {name: [with_ratios(row) for row in rows] for name, rows in grown.items()}


def with_ratios(row: Row) -> Row:
    """Add how many forward passes of the same batch every method costs."""
    ratios = {n: round(row[n] / row["forward"], 2) for n in METHODS if n in row}
    return {**row, "times_forward": ratios}


def milliseconds(
    model: ecinn.Model, x: Tensor, q: Tensor, methods: Sequence[str] = tuple(METHODS)
) -> dict[str, float]:
    """CPU milliseconds of a forward pass and of every method, of the whole batch."""

    def forward() -> None:
        with torch.inference_mode():
            model.encode_with_log_det(x)

    calls = [forward, *(lambda m=METHODS[name]: m(model, x, q) for name in methods)]
    times = cpu_seconds(*calls, repeats=6 if q.numel() < 10 else 4)
    return {n: round(1000 * t, 2) for n, t in zip(("forward", *methods), times, strict=True)}


def untrained(architecture: ecinn.Architecture) -> dict[str, float]:
    """Measure ECINN on an untrained network: its cost is real, its pictures mean nothing."""
    classifier = GenerativeClassifier(architecture).eval().requires_grad_(requires_grad=False)
    recipe, names = replace(MNIST, architecture=architecture), tuple("0123456789")
    checkpoint = Checkpoint(recipe, classifier, classifier.mu, OODDetector((0.0, 1.0)), names)
    model, x = ecinn.Model(checkpoint, "cpu"), torch.rand((1, *classifier.image_shape))
    q = (model.predict(x).argmax(1)[:, None] + 1) % len(names)
    return milliseconds(model, x, q, ["ecinn"])


def memory(sizes: Sequence[int]) -> list[Row]:
    """Peak memory of `ecinn bulk`, in a process of its own, against the size of its input."""
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder) / "digits.zip", Path(folder) / "out"
            write_pictures(load_mnist("test").images, size, source)
            rows.append({"pictures": size, "peak_mib": round(peak_memory(source, "8", out))})
    print_table("Peak memory of ecinn bulk", rows)
    return rows


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print a Markdown table; of a share with its interval the share."""
    cells = [
        {k: f"{v[0]:.0%}" if isinstance(v, list) else str(v) for k, v in row.items()}
        for row in rows
    ]
    print(Table.of(title, cells).markdown(), flush=True)


if __name__ == "__main__":
    main()
